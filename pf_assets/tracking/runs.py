"""Runs in MLflow: their parameters, measurements, artifacts and status.

One SQLite database, or the one that PF_MLFLOW_URI names, and one artifact folder for all sites of a data directory.
Both are passed explicitly in every call, so that no environment variable of MLflow's own decides where a run is
stored. `pf dev` serves the same database. Only the Dagster process writes to it: the ranks report through Pipes, and no
training step waits for a database. MLflow is imported on first use, which takes seconds: the asset graph loads without
it.
"""

import contextlib
import functools
import json
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pf_assets.tracking.database import database_uri, is_database_there, open_client
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.names import path_name_of
from pf_core.storage.cache import fetched
from pf_core.storage.files import SCHEME, path_of, read_json, write_json
from pf_core.storage.privacy import private

if TYPE_CHECKING:
    from mlflow import MlflowClient


Status = Literal["FINISHED", "FAILED", "KILLED"]

RUN_FILE = "mlflow.json"
"""File in a model's folder that names its MLflow run, and its registry version once it has one."""

MAX_PARAM_CHARS = 500

MAX_METRICS_PER_CALL = 1000


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run's ids in MLflow; `version` is the registry version of its model, if it is registered."""

    experiment_id: str
    run_id: str
    version: int | None = None


class RunStore:
    """The runs of one MLflow experiment of a site."""

    def __init__(self, site: Site) -> None:
        self.root = site.workspace.parent / "mlflow"
        self.artifacts = site.directory.parent / "mlflow" / "artifacts"
        self.name = f"pinnerformer-{site.name}"
        """Name of the experiment."""

    @property
    def uri(self) -> str:
        return database_uri(self.root)

    def prepare(self) -> None:
        """Create the database and the MLflow experiment, before several processes do so at the same time."""
        self._experiment_id()

    @property
    def exists(self) -> bool:
        """Whether there is a database: asking it would create a file."""
        return is_database_there(self.root)

    @property
    def artifact_folder(self) -> Path:
        """Folder of the artifacts of the experiment's runs."""
        return self.artifacts / self.name

    def find(self, run_dir: Path) -> TrackedRun | None:
        """Return the run of a model's folder; None if there is none, or if the database no longer has it.

        No model depends on the database: somebody may have deleted it.
        """
        path = run_dir / RUN_FILE
        if not path.exists():
            return None
        run = TrackedRun(**read_json(path))
        known = self._client.search_runs([run.experiment_id], f"attributes.run_id = '{run.run_id}'")
        return run if known else None

    def start(self, run_dir: Path, *, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> TrackedRun:
        """Start the run of this folder, or continue it: a training that resumes after a crash keeps its MLflow run."""
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
        """Log measurements; each is {"step": …, name: value, …}. A name may contain an action type of the site."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(path_name_of(name), float(value), now_ms, int(measurement["step"]))
            for measurement in measurements
            for name, value in measurement.items()
            if name != "step"
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self._client.log_batch(run.run_id, metrics=metrics[start : start + MAX_METRICS_PER_CALL])

    def measure_live(self, run: TrackedRun, measurements: Sequence[Mapping[str, float]]) -> str | None:
        """Log measurements while training runs; return the problem, if there is one.

        It does not raise: a locked database must not end a training.
        """
        try:
            self.measure(run, measurements)
        except PipelineError as error:
            return f"MLflow refused {len(measurements)} measurements, which are added when training ends: {error}"
        return None

    def measure_missing(self, run: TrackedRun, history: Sequence[Mapping[str, float]]) -> None:
        """Log the measurements of a complete history that MLflow does not have: an interruption may have lost some."""
        names = {name for measurement in history for name in measurement} - {"step"}
        known = {
            name: {metric.step for metric in self._client.get_metric_history(run.run_id, path_name_of(name))}
            for name in names
        }
        missing = [
            {"step": measurement["step"]}
            | {name: measurement[name] for name in measurement.keys() & names if measurement["step"] not in known[name]}
            for measurement in history
        ]
        self.measure(run, missing)

    def keep(self, run: TrackedRun, files: Iterable[Path]) -> None:
        """Copy files and folders into the run's artifacts, under their own names."""
        with private(self.artifacts):
            for path in files:
                local = fetched(path)
                if local.is_dir():
                    self._client.log_artifacts(run.run_id, str(local), path.name)
                else:
                    self._client.log_artifact(run.run_id, str(local))

    @contextlib.contextmanager
    def watching(self, run: TrackedRun) -> Iterator[None]:
        """Set the run's status to how this context ends: finished, failed or killed."""
        status: Status = "KILLED"  # Ctrl-C and Dagster's interrupt are not subclasses of Exception
        try:
            yield
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            self._client.set_terminated(run.run_id, status)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(self.name, self.artifact_folder.as_uri()))

    @functools.cached_property
    def _client(self) -> "MlflowClient":
        return open_client(self.root, self.uri)


def artifact_path(uri: str) -> Path:
    """Path of an artifact URI of MLflow: a local path, a file:// URI (percent-encoded) or an s3:// URI."""
    return path_of(uri) if uri.startswith(SCHEME) else Path(urllib.parse.unquote(urllib.parse.urlparse(uri).path))


def run_url(run: TrackedRun, server: str) -> str:
    """Address of the run's page, in the part of MLflow's UI for model training."""
    return f"{server}/#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return `{"model": {"num_layers": 2}}` as `{"model.num_layers": "2"}`."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def git_commit(repository: Path) -> str:
    """Return the checked-out commit, or "unknown" if the code is not a git checkout."""
    git = shutil.which("git")
    if git is None or not (repository / ".git").exists():
        return "unknown"
    result = subprocess.run([git, "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
