"""One training, as every asset that trains does it: its processes are started, and what they measure is handed on.

The folder of a planned model decides what is left to do: nothing if it is trained, the rest if it was interrupted.
"""

import math
from collections.abc import Sequence

import dagster as dg

from pf_assets.launch.processes import run_ranks
from pf_assets.launch.train_job import TrainJob
from pf_assets.settings import REPOSITORY
from pf_assets.tracking.tracking import TrackedRun, Tracking, git_commit
from pf_core.config.site import Site
from pf_core.storage.files import write_json
from pf_core.training.plan import Measurement, PlannedModel

NUM_OBSERVATIONS = 30
"""Of a training run: points of the curves on the asset's page while it is trained."""

OBSERVED = ("loss", "recall_at_10", "temperature", "examples_per_s", "data_wait_share")


def train_planned(
    context: dg.AssetExecutionContext, site: Site, plan: PlannedModel, tracking: Tracking, run: TrackedRun
) -> None:
    """Train what is not trained yet; afterwards the run in MLflow has the whole history."""
    if not plan.is_trained:
        launch, num_steps = site.training.launch, plan.config.optimizer.num_steps
        job = TrainJob(
            config=plan.config,
            training_set=str(plan.training_set),
            run_dir=str(plan.run_dir),
            num_workers=launch.num_workers,
        )
        write_json(plan.run_dir / "job.json", job.model_dump(mode="json"))
        run_ranks(
            context,
            launch,
            plan.run_dir / "job.json",
            receive=_Curve(context, tracking, run, num_steps=num_steps).receive,
        )
    tracking.measure_missing(run, plan.history)


def source_tags(context: dg.AssetExecutionContext, site: Site) -> dict[str, str]:
    """Where a run of MLflow comes from."""
    return {
        "mlflow.source.name": context.asset_key.to_user_string(),
        "mlflow.source.type": "JOB",
        "mlflow.source.git.commit": git_commit(REPOSITORY),
        "site": site.name,
        "site_fingerprint": site.fingerprint(),
        "dagster_run_id": context.run.run_id,
    }


def model_tags(site: Site, plan: PlannedModel) -> dict[str, str]:
    """What decides a model, and where it lies."""
    launch = site.training.launch
    return {
        "code": plan.code,
        "training_set": plan.manifest["fingerprint"],
        "cut_ds": plan.manifest["cut_ds"],
        "model_version": plan.model_version,
        "processes": str(launch.num_nodes * launch.processes_per_node),
        "run_dir": str(plan.run_dir),
    }


class _Curve:
    """Measurements as they come: all of them to MLflow, a few as observations, which Dagster plots over time."""

    def __init__(
        self, context: dg.AssetExecutionContext, tracking: Tracking, run: TrackedRun, *, num_steps: int
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
