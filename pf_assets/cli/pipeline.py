"""What is missing until the newest day of a site is released, as Dagster runs: for `pf run` and `pf demo`.

Each run is decided when the one before it has ended, from what is stored. So an interrupted call goes on where it
stopped, and a call with nothing left to do starts no run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli.runs import missing_days
from pf_assets.schedules import DAILY_ASSETS, KEEP_MODEL, morning_days, training_assets
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.tables import snapshot_state
from pf_core.errors import PipelineError
from pf_core.logs.readers import find_files
from pf_core.serving.releases import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.training.plan import current_model, plan_model

LOG_ASSETS = ("raw_actions", "pin_features", "user_timelines")

SERVING_ASSETS = DAILY_ASSETS[DAILY_ASSETS.index("user_embeddings") :]

MAX_QUIET_DAYS = 60
"""A dated log whose newest file is older than this many days has no newest day to release."""


@dataclass(frozen=True, kw_only=True)
class DagsterRun:
    """The assets of one run, and its days if they have partitions."""

    assets: tuple[str, ...]
    days: list[str] | None = None
    config: dict[str, Any] | None = None

    @classmethod
    def of(cls, assets: str, days: list[str] | None = None, config: dict[str, Any] | None = None) -> "DagsterRun":
        """Return the run of a selection of assets."""
        return cls(assets=tuple(assets.split(",")), days=days, config=config)


def stage_names(site: Site) -> list[str]:
    """Return all assets that may be materialized, in the order of the pipeline."""
    return [*LOG_ASSETS, *training_assets(site), *SERVING_ASSETS]


def newest_day(site: Site) -> str:
    """Return the site's last day; of a site without one the newest complete day that has a log."""
    if site.end_ds is not None:
        return site.end_ds
    yesterday = shift_ds(datetime.now(UTC).date().isoformat(), -1)
    if yesterday < site.start_ds:
        raise PipelineError(
            f"the site's first day is {site.start_ds}, which is not over yet", "set an earlier start_ds"
        )
    if not site.source.actions.is_dated:
        return yesterday
    first = max(site.start_ds, shift_ds(yesterday, 1 - MAX_QUIET_DAYS))
    for ds in reversed(ds_range(first, yesterday)):
        if find_files(site.source.actions, site.log_root, ds):
            return ds
    raise PipelineError(
        f"no log of a day from {first} to {yesterday} below {site.log_root}", "set end_ds to the last day of the logs"
    )


def missing_runs(site: Site, ds: str, *, served_days: int = 1) -> Iterator[DagsterRun]:
    """Yield the runs that are missing until `ds` is released; of a new site the newest `served_days` days are."""
    for assets, days in missing_days(site, ds).items():
        yield DagsterRun(assets=tuple(assets.split(",")), days=days)
    yield from _training(site)
    yield from _serving(site, ds, served_days)


def planned_assets(site: Site, ds: str) -> set[str]:
    """Return the assets that are missing now; which models are trained and accepted may change what is run of them."""
    return {asset for each in missing_runs(site, ds) for asset in each.assets}


def _training(site: Site) -> Iterator[DagsterRun]:
    """Yield one run of what is missing until a model is judged, and refitted if it was accepted."""
    assets = missing_model(site)
    if assets or not is_evaluated(site):
        assets += ["offline_evaluation", *(["refitted_model"] if site.training.refit else [])]
    elif site.training.refit and wants_refit(site):
        assets = ["refitted_model"]
    if assets:
        yield DagsterRun(assets=tuple(assets))


def _serving(site: Site, ds: str, served_days: int) -> Iterator[DagsterRun]:
    if any(manifest["ds"] == ds for manifest in list_releases(site)):
        return
    if any(day < ds for day in snapshot_state(site).days()):
        yield DagsterRun(assets=DAILY_ASSETS, days=morning_days(site, ds), config=KEEP_MODEL)
    else:
        first = max(site.start_ds, shift_ds(ds, 1 - served_days))
        yield DagsterRun(assets=SERVING_ASSETS, days=ds_range(first, ds))


def missing_model(site: Site) -> list[str]:
    """Return the assets to materialize until the model that the site file describes is trained and registered."""
    if not (site.directory / "training_set" / MANIFEST).exists():
        return ["training_set", "pinnerformer_model"]
    trained = current_model(site)
    is_registered = trained is not None and trained["mlflow"]["version"] is not None
    is_wanted = trained is not None and trained["model_version"] == plan_model(site).model_version
    return [] if is_registered and is_wanted else ["pinnerformer_model"]


def is_evaluated(site: Site) -> bool:
    """Whether the newest evaluation is of the current candidate, and has led to a champion."""
    tracking, manifest = Tracking(site), read_evaluation(site)
    candidate = tracking.candidate()
    is_its = manifest is not None and candidate is not None and manifest["candidate"] == candidate.served_version
    return is_its and tracking.champion() is not None


def wants_refit(site: Site) -> bool:
    """Whether the candidate was accepted, and has no refit yet."""
    tracking = Tracking(site)
    champion = tracking.champion()
    return champion is not None and champion == tracking.candidate() and tracking.refit_of(champion) is None
