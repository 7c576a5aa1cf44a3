"""Train a planned model in processes of its own, and track it in MLflow.

The folder of a planned model decides what is left to do: nothing if it is trained, the rest if it was interrupted.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from pf_assets.launch.processes import run_ranks
from pf_assets.launch.train_job import TrainJob
from pf_assets.metadata.model import plot_training
from pf_assets.metadata.pages import save_figure
from pf_assets.settings import REPOSITORY, mlflow_server
from pf_assets.tracking.runs import RunStore, TrackedRun, git_commit, run_url
from pf_assets.tracking.tracking import DATA_READ_TAG, JUDGED_VERSION_TAG, REFIT_OF_TAG, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.storage.files import remove_tree, rename_folder, write_json
from pf_core.training.plan import Measurement, PlannedModel, training_fault
from pf_core.training.training_set import DESCRIPTION

NUM_OBSERVATIONS = 30
"""Number of points in the curves that the asset's page shows while a model is trained."""

OBSERVED = ("loss", "recall_at_10", "vector_recall_at_10", "temperature", "examples_per_s", "data_wait_share")


def train_and_register(
    context: dg.AssetExecutionContext, site: Site, plan: PlannedModel, *, refit_of: RegisteredModel | None = None
) -> TrackedRun:
    """Train the model unless it is trained already, and register it if its loss fell.

    It is registered as the candidate, or as the refit of a judged model.
    """
    tracking = Tracking(site)
    run = tracking.find(plan.run_dir)
    if plan.is_trained:
        context.log.info(
            f"model {plan.model_version} is trained already, from the same configuration, training set and code: "
            f"{plan.run_dir}. The run configuration retrain: true trains it again"
        )
    if run is None or run.version is None or not plan.is_trained:
        tags = source_tags(context, site) | model_tags(site, plan)
        if refit_of is not None:
            tags |= {JUDGED_VERSION_TAG: str(refit_of.version), REFIT_OF_TAG: refit_of.served_version}
        params = plan.config.model_dump(mode="json")
        run = tracking.start(plan.run_dir, name=plan.model_version, params=params, tags=tags)
        context.log.info(f"model {plan.model_version}; MLflow run {run_url(run, mlflow_server())}")
        with tracking.watching(run):
            train_planned(context, site, plan, tracking, run)
            save_figure(plot_training(plan.history), plan.run_dir / "training.png")
            names = ("model", "result.json", "history.jsonl", "training.png")
            tracking.keep(run, [*(plan.run_dir / name for name in names), plan.training_set / DESCRIPTION])
    fault = training_fault(plan.history)
    if fault is not None:
        context.log.error(f"model {plan.model_version} is not registered: {fault}")
        return run
    return tracking.register(
        run, plan.run_dir, model_version=plan.model_version, refit_of=refit_of, cut_ds=plan.manifest["cut_ds"]
    )


def train_planned(
    context: dg.AssetExecutionContext, site: Site, plan: PlannedModel, tracking: RunStore, run: TrackedRun
) -> None:
    """Train the model unless it is trained already; afterwards its MLflow run has the complete history."""
    if not plan.is_trained:
        launch, num_steps = site.training.launch, plan.config.optimizer.num_steps
        job = TrainJob(
            config=plan.config,
            training_set=str(plan.training_set),
            run_dir=str(plan.run_dir),
            num_workers=launch.num_workers,
            data_read_at=data_read_at(plan.training_set),
        )
        write_json(plan.run_dir / "job.json", job.model_dump(mode="json"))
        run_ranks(
            context,
            launch,
            plan.run_dir / "job.json",
            receive=_Curve(context, tracking, run, num_steps=num_steps).receive,
        )
    tracking.measure_missing(run, plan.history)


def set_aside(run_dir: Path) -> None:
    """Rename a model's folder before it is retrained, in case that fails; it is kept until the next retraining."""
    aside = run_dir.with_name(f"{run_dir.name}.before-retrain")
    if run_dir.exists():
        remove_tree(aside)
        rename_folder(run_dir, aside)


def source_tags(context: dg.AssetExecutionContext, site: Site) -> dict[str, str]:
    """Tags of an MLflow run that name the asset, code, site and Dagster run that it comes from."""
    return {
        "mlflow.source.name": context.asset_key.to_user_string(),
        "mlflow.source.type": "JOB",
        "mlflow.source.git.commit": git_commit(REPOSITORY),
        "site": site.name,
        "site_fingerprint": site.fingerprint(),
        "dagster_run_id": context.run.run_id,
    }


def model_tags(site: Site, plan: PlannedModel) -> dict[str, str]:
    """Tags of an MLflow run that name what decides the model, and its folder."""
    launch = site.training.launch
    return {
        "code": plan.code,
        "training_set": plan.manifest["fingerprint"],
        "cut_ds": plan.manifest["cut_ds"],
        "model_version": plan.model_version,
        "processes": str(launch.num_nodes * launch.processes_per_node),
        "run_dir": str(plan.run_dir),
        DATA_READ_TAG: data_read_at(plan.training_set),
    }


def data_read_at(training_set: Path) -> str:
    """Return the time of the oldest file of a training set, ISO 8601: the deletion list was read after it."""
    oldest_s = min(path.stat().st_mtime for path in training_set.rglob("*") if path.is_file())
    return datetime.fromtimestamp(oldest_s, UTC).isoformat()


class _Curve:
    """Receives measurements during training: logs all in MLflow, and a few as observations, which Dagster plots."""

    def __init__(
        self, context: dg.AssetExecutionContext, tracking: RunStore, run: TrackedRun, *, num_steps: int
    ) -> None:
        self._context, self._tracking, self._run = context, tracking, run
        self._num_steps = num_steps
        self._every = math.ceil(num_steps / NUM_OBSERVATIONS)
        self._observed_at = -self._every
        self._latest: Measurement = {}

    def receive(self, measurements: Sequence[Measurement]) -> None:
        problem = self._tracking.measure_live(self._run, measurements)
        if problem is not None:
            self._context.log.warning(problem)
        for measurement in measurements:
            self._latest |= measurement
            step = int(measurement["step"])
            if step >= self._observed_at + self._every:
                self._observed_at = step
                self._observe(step)

    def _observe(self, step: int) -> None:
        finite = {name: value for name, value in self._latest.items() if math.isfinite(value)}
        numbers: dict[str, str | float] = {name: finite[name] for name in OBSERVED if name in finite}
        observation = dg.AssetObservation(
            self._context.asset_key,
            partition=self._context.partition_key if self._context.has_partition_key else None,
            metadata={"step": f"{step} of {self._num_steps}", **numbers},
        )
        self._context.log_event(observation)
