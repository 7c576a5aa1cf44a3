"""MLflow, all of it: which runs there were, how they went, which model is candidate and which is champion.

One SQLite database and one artifact folder stand beside the sites' assets; both are named explicitly in every call, so
that no environment variable decides where a run ends up. `pf dev` serves the same database. Only the Dagster process
writes to it: the ranks report through Pipes, and no training step waits for a database. MLflow is imported when it is
first used, because that takes seconds and the asset graph is drawn without it.

A model of our own format (safetensors and JSON) is a run's artifact and a registry version. `candidate` is the newest
model whose loss fell, `champion` the one that serves; the first model ever trained is both.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pf_core.atomic import read_json, write_json
from pf_core.contracts import PipelineError
from pf_core.site import Site

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

Status = Literal["FINISHED", "FAILED", "KILLED"]
Alias = Literal["candidate", "champion"]

RUN_FILE = "mlflow.json"
"""In a model's folder: the MLflow run that belongs to it, and its registry version once it has one."""
MAX_PARAM_CHARS = 500
MAX_METRICS_PER_CALL = 1000


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    experiment_id: str
    run_id: str
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class RegisteredModel:
    """A registry version; `path` holds model.safetensors and model.json."""

    version: int
    model_version: str
    run_id: str
    path: Path


class Tracking:
    """The MLflow store of a site's data directory, with the site's experiment and registered model."""

    def __init__(self, site: Site) -> None:
        self.root = Path(site.data_dir).resolve() / "mlflow"
        self.name = f"pinnerformer-{site.name}"
        """Of the experiment and of the registered model."""

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    def find(self, run_dir: Path) -> TrackedRun | None:
        """The run of a model's folder; None, too, after somebody removed the database, on which no model depends."""
        path = run_dir / RUN_FILE
        if not path.exists():
            return None
        run = TrackedRun(**read_json(path))
        known = self._client.search_runs([run.experiment_id], f"attributes.run_id = '{run.run_id}'")
        return run if known else None

    def start(self, run_dir: Path, *, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> TrackedRun:
        """The run of this folder: a training that goes on after a crash goes on in MLflow, too."""
        from mlflow.entities import Param, RunTag

        run = self.find(run_dir)
        if run is None:
            experiment_id = self._experiment_id()
            made = self._client.create_run(experiment_id, run_name=name)
            run = TrackedRun(experiment_id=experiment_id, run_id=made.info.run_id)
            write_json(run_dir / RUN_FILE, asdict(run))
        self._client.update_run(run.run_id, status="RUNNING")
        self._client.log_batch(
            run.run_id,
            params=[Param(key, value[:MAX_PARAM_CHARS]) for key, value in flatten(params).items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        return run

    def measure(self, run: TrackedRun, measurements: Sequence[Mapping[str, float]]) -> None:
        """Each measurement is {"step": …, name: value, …}."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now_ms, int(measurement["step"]))
            for measurement in measurements
            for name, value in measurement.items()
            if name != "step"
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self._client.log_batch(run.run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])

    def measure_live(self, run: TrackedRun, measurements: Sequence[Mapping[str, float]]) -> str | None:
        """`measure` while training runs, which a locked database must not end: what went wrong, if anything did."""
        from mlflow.exceptions import MlflowException

        try:
            self.measure(run, measurements)
        except MlflowException as error:
            return f"MLflow refused {len(measurements)} measurements, which are added when training ends: {error}"
        return None

    def measure_missing(self, run: TrackedRun, history: Sequence[Mapping[str, float]]) -> None:
        """Of a whole history, what is not there yet: an interrupted run was not told everything."""
        names = {name for measurement in history for name in measurement} - {"step"}
        known = {name: {metric.step for metric in self._client.get_metric_history(run.run_id, name)} for name in names}
        missing = [
            {"step": measurement["step"]}
            | {name: measurement[name] for name in measurement.keys() & names if measurement["step"] not in known[name]}
            for measurement in history
        ]
        self.measure(run, missing)

    def keep(self, run: TrackedRun, files: Iterable[Path]) -> None:
        """Copy files and folders into the run's artifacts, under their own names."""
        for path in files:
            if path.is_dir():
                self._client.log_artifacts(run.run_id, str(path), path.name)
            else:
                self._client.log_artifact(run.run_id, str(path))

    @contextlib.contextmanager
    def watching(self, run: TrackedRun) -> Iterator[None]:
        """Whatever happens to the training is the run's status."""
        status: Status = "KILLED"  # by Ctrl-C or Dagster's interrupt, which are no ordinary errors
        try:
            yield
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            self._client.set_terminated(run.run_id, status)

    def register(self, run: TrackedRun, run_dir: Path, *, model_version: str) -> TrackedRun:
        """Make the run's model the candidate, and the champion if there is none.

        A run's model has one registry version, however often it is registered.
        """
        client = self._client
        if not client.search_registered_models(f"name = '{self.name}'"):
            client.create_registered_model(self.name, description="User and pin towers; see the version's run.")
        known = client.search_model_versions(f"name = '{self.name}' and tags.model_version = '{model_version}'")
        of_this_run = [found for found in known if found.run_id == run.run_id]
        if of_this_run:
            version = int(of_this_run[0].version)
        else:
            source = f"{client.get_run(run.run_id).info.artifact_uri}/model"
            version = int(
                client.create_model_version(
                    self.name, source=source, run_id=run.run_id, tags={"model_version": model_version}
                ).version
            )
        client.set_registered_model_alias(self.name, "candidate", str(version))
        if self.champion() is None:
            self.promote(version, because="first model")
        registered = TrackedRun(experiment_id=run.experiment_id, run_id=run.run_id, version=version)
        write_json(run_dir / RUN_FILE, asdict(registered))
        return registered

    def champion(self) -> RegisteredModel | None:
        return self._by_alias("champion")

    def candidate(self) -> RegisteredModel | None:
        return self._by_alias("candidate")

    def promote(self, version: int, *, because: str) -> None:
        """Make this version the champion; the reason stays with the version."""
        if str(version) not in {str(known.version) for known in self._versions()}:
            raise PipelineError(f"{self.name} has no version {version}; see the registered models in the MLflow UI")
        self._client.set_model_version_tag(self.name, str(version), "promoted_because", because)
        self._client.set_registered_model_alias(self.name, "champion", str(version))

    def _by_alias(self, alias: Alias) -> RegisteredModel | None:
        for model in self._client.search_registered_models(f"name = '{self.name}'"):
            if alias in model.aliases:
                found = self._client.get_model_version(self.name, str(model.aliases[alias]))
                return RegisteredModel(
                    version=int(found.version),
                    model_version=found.tags["model_version"],
                    run_id=str(found.run_id),
                    path=Path(urllib.parse.unquote(urllib.parse.urlparse(found.source or "").path)),
                )
        return None

    def _versions(self) -> "Sequence[ModelVersion]":
        return self._client.search_model_versions(f"name = '{self.name}'")

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(self.name, (self.artifacts / self.name).as_uri()))

    @functools.cached_property
    def _client(self) -> "MlflowClient":
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        from mlflow import MlflowClient

        self.root.mkdir(parents=True, exist_ok=True)
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)


def run_url(run: TrackedRun, server: str) -> str:
    """The run's page, in the half of MLflow's UI that is about training models."""
    return f"{server}/#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"model": {"num_layers": 2}}` as `{"model.num_layers": "2"}`."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def git_commit(repository: Path) -> str:
    """The checked-out commit; "unknown" if the code was installed otherwise."""
    git = shutil.which("git")
    if git is None or not (repository / ".git").exists():
        return "unknown"
    result = subprocess.run([git, "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
