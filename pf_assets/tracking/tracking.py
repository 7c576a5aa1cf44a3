"""MLflow, all of it: which runs there were, how they went, which model is candidate and which is champion.

One SQLite database, or the one that PF_MLFLOW_URI names, and one artifact folder beside the sites' assets; both are
named explicitly in every call, so that no variable of MLflow's own decides where a run ends up. `pf dev` serves the
same database. Only the Dagster process writes to it: the ranks report through Pipes, and no training step waits for a
database. MLflow is imported when it is first used: that takes seconds, and the asset graph is drawn without it.

A model of our own format (safetensors and JSON) is a run's artifact and a registry version. `candidate` is the newest
model whose loss fell, `champion` the one that serves; the first model ever trained is both. Who was champion when, and
why, stands in tags of the registered model, so that a promotion can be undone; the alias has the last word.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pf_assets.tracking.database import database_uri, refuse_if_unreachable
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.storage.cache import fetched
from pf_core.storage.files import SCHEME, path_of, read_json, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.entities.model_registry import RegisteredModel as RegistryEntry


Status = Literal["FINISHED", "FAILED", "KILLED"]

Alias = Literal["candidate", "champion"]

RUN_FILE = "mlflow.json"
"""In a model's folder: the MLflow run that belongs to it, and its registry version once it has one."""

PROMOTION_TAG = "promotion-"
"""Tags of the registered model: promotion-0000, promotion-0001, …"""

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
    tags: Mapping[str, str] = field(compare=False)

    @property
    def served_version(self) -> str:
        """Its name where vectors are kept: one that was trained anew has the same model_version and other weights."""
        return f"{self.model_version}-{self.version}"


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """How a version became champion; one that was undone no longer counts."""

    version: int
    because: str
    promoted_at: str | None
    """UTC; None if the alias was set by other means."""
    undone_at: str | None = None
    undone_because: str | None = None


class Tracking:
    """The MLflow store of a site's data directory, with the site's experiment and registered model."""

    def __init__(self, site: Site) -> None:
        self.root = site.workspace.parent / "mlflow"
        self.artifacts = site.directory.parent / "mlflow" / "artifacts"
        self.name = f"pinnerformer-{site.name}"
        """Of the experiment and of the registered model."""

    @property
    def uri(self) -> str:
        return database_uri(self.root)

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
            local = fetched(path)
            if local.is_dir():
                self._client.log_artifacts(run.run_id, str(local), path.name)
            else:
                self._client.log_artifact(run.run_id, str(local))

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
        if self._entry() is None:
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

    def versions(self) -> list[RegisteredModel]:
        """All that are registered, newest first."""
        return sorted(map(self._model_of, self._versions()), key=lambda model: -model.version)

    def find_served(self, served_version: str) -> RegisteredModel | None:
        return next((model for model in self.versions() if model.served_version == served_version), None)

    def run_of(self, model: RegisteredModel) -> TrackedRun:
        return TrackedRun(experiment_id=self._experiment_id(), run_id=model.run_id, version=model.version)

    def note(self, model: RegisteredModel, *, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """What was found out after training: numbers on the run, words on the run and on the registry version."""
        self.measure(self.run_of(model), [{"step": 0, **metrics}])
        for key, value in tags.items():
            self._client.set_tag(model.run_id, key, value)
            self._client.set_model_version_tag(self.name, str(model.version), key, value)

    def promote(self, version: int, *, because: str) -> None:
        """Make this version the champion; the reason stays with the version, the champion before it in the history."""
        if version not in {known.version for known in self.versions()}:
            raise PipelineError(f"{self.name} has no version {version}; see the registered models in the MLflow UI")
        history, champion = self.promotions(), self.champion()
        self._client.set_model_version_tag(self.name, str(version), "promoted_because", because)
        if champion is None or champion.version != version:
            self._client.set_registered_model_alias(self.name, "champion", str(version))
            self._write([*history, Promotion(version=version, because=because, promoted_at=_now())])

    def undo_promotion(self, *, because: str | None = None) -> RegisteredModel:
        """Go back to the champion before this one, and return it; called again, to the one before that."""
        history = self.promotions()
        known = {model.version: model for model in self.versions()}
        standing = [number for number, one in enumerate(history) if one.undone_at is None and one.version in known]
        if len(standing) < 2:
            raise PipelineError(
                f"{self.name} has no champion before the current one to go back to; `pf promote VERSION` makes any "
                "registered version the champion"
            )
        before, last = standing[-2:]
        history[last] = replace(history[last], undone_at=_now(), undone_because=because)
        self._write(history)  # before the alias: interrupted here, the promotion stands, and can be undone
        self._client.set_registered_model_alias(self.name, "champion", str(history[before].version))
        return known[history[before].version]

    def promotions(self) -> list[Promotion]:
        """The history of champions, oldest first; the last one that was not undone serves.

        If the alias says otherwise, because it was moved in MLflow or `promote` was interrupted, the alias is right.
        """
        written = sorted((key, value) for key, value in self._tags().items() if key.startswith(PROMOTION_TAG))
        history = [Promotion(**json.loads(value)) for _, value in written]
        standing = [one.version for one in history if one.undone_at is None]
        champion = self.champion()
        if champion is not None and standing[-1:] != [champion.version]:
            because = champion.tags.get("promoted_because", "its alias was set in MLflow")
            history.append(Promotion(version=champion.version, because=because, promoted_at=None))
        return history

    def _write(self, history: Sequence[Promotion]) -> None:
        written = self._tags()
        for number, promotion in enumerate(history):
            key, value = f"{PROMOTION_TAG}{number:04d}", json.dumps(asdict(promotion))
            if written.get(key) != value:
                self._client.set_registered_model_tag(self.name, key, value)

    def _tags(self) -> Mapping[str, str]:
        entry = self._entry()
        return {} if entry is None else entry.tags

    def _by_alias(self, alias: Alias) -> RegisteredModel | None:
        entry = self._entry()
        if entry is None or alias not in entry.aliases:
            return None
        return self._model_of(self._client.get_model_version(self.name, str(entry.aliases[alias])))

    def _model_of(self, found: "ModelVersion") -> RegisteredModel:
        return RegisteredModel(
            version=int(found.version),
            model_version=found.tags["model_version"],
            run_id=str(found.run_id),
            path=artifact_path(found.source or ""),
            tags=found.tags,
        )

    def _entry(self) -> "RegistryEntry | None":
        """The registered model, once there is one."""
        return next(iter(self._client.search_registered_models(f"name = '{self.name}'")), None)

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
        refuse_if_unreachable(self.uri)
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)


def artifact_path(uri: str) -> Path:
    """Return the path of an artifact URI of MLflow: local (file:///…), or remote (s3://…)."""
    return path_of(uri) if uri.startswith(SCHEME) else Path(urllib.parse.unquote(urllib.parse.urlparse(uri).path))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
