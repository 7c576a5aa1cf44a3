"""The stages of the product on a benchmark's log, in this process: raw_actions, pin_features, timelines, training set.

They run in a data folder of the benchmark's own, never in the site's data_dir. The name of that folder is a hash of
what decides its content (the site file, the log's files, the code of these stages), so that a second benchmark of the
same log reuses the partitions and a changed log or stage never meets old ones.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pf_core.config.site import Site
from pf_core.config.source import NpyVectors
from pf_core.days import ds_range, shift_ds
from pf_core.engine.base import Engine
from pf_core.errors import PipelineError
from pf_core.hashing import digest_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import ingested_days
from pf_core.logs.readers import find_files
from pf_core.logs.training_users import read_training_users
from pf_core.pins.features import build_pin_features, pin_state
from pf_core.progress import Progress, Throttle
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import path_of, read_json, stamp_of
from pf_core.timelines.build import build_timelines, timeline_state
from pf_core.training.build_set import build_training_set
from pf_core.training.plan import code_fingerprint
from pf_core.training.training_set import latest_training_set

STAGE_CODE = ("hashing.py", "days.py", "schemas.py", "config", "engine", "logs", "pins", "timelines", "training")
"""Files and folders of pf_core that decide what the stages write."""

MAX_EVALUATION_DAYS = 14
"""Days after the cut unless the site file has training.evaluation_days; a log of fewer than 56 days has a quarter."""


def benchmark_site(site: Site, cache: Path) -> Site:
    """Return the site with a data folder below `cache` that belongs to its log, as it is now, alone."""
    end_ds = site.end_ds or _newest_day(site)
    digest = digest_of(
        {
            "site": site.fingerprint(),
            "held_out_share": site.training.held_out_share,
            "users": None if site.answers is not None else read_training_users(site).selection,  # those of the log
            "end_ds": end_ds,
            "files": [stamp_of(file) for file in _input_files(site, end_ds)],
            "code": code_fingerprint(STAGE_CODE),
        }
    )
    num_days = len(ds_range(site.start_ds, end_ds))
    timelines = site.timelines.model_copy(update={"retention_days": max(2, num_days)})
    changes = {"data_dir": str(cache / f"{site.name}-{digest}"), "end_ds": end_ds, "timelines": timelines}
    return site.model_copy(update=changes)


def _newest_day(site: Site) -> str:
    """Return the newest day with a file, for a site file without end_ds."""
    actions = site.source.actions
    if not actions.is_dated:
        raise PipelineError(
            f"the site file of {site.name} has no end_ds, and its log has no file for each day: the last day is not "
            "known",
            "add `end_ds: YYYY-MM-DD`, the last whole day of the log",
        )
    for ds in reversed(ds_range(site.start_ds, datetime.now(UTC).date().isoformat())):
        if find_files(actions, site.log_root, ds):
            return ds
    raise PipelineError(
        f"no file matches {site.log_root / actions.path} from {site.start_ds} on", "fix `source` in the site file"
    )


def _input_files(site: Site, end_ds: str) -> list[Path]:
    """Return every file that the stages read."""
    actions, pins = site.source.actions, site.source.pins
    days = ds_range(site.start_ds, shift_ds(end_ds, actions.late_days))
    files: list[Path] = []
    for described in (actions, pins.catalogue):
        if described is not None:
            for ds in days if described.is_dated else [None]:
                files += find_files(described, site.log_root, ds)
    if isinstance(pins.vectors, NpyVectors):
        files += [site.log_root / pins.vectors.npy, site.log_root / pins.vectors.ids]
    if site.deletion_list is not None:
        files.append(path_of(site.deletion_list))
    return [file for file in files if file.is_file()]  # the stage that needs a missing one reports it


def ingest_log(site: Site, *, engine: Engine, progress: Progress) -> list[str]:
    """Ingest the days that raw_actions lacks; return all days of the site."""
    assert site.end_ds is not None
    days, known = ds_range(site.start_ds, site.end_ds), set(ingested_days(site))
    missing = [ds for ds in days if ds not in known]
    if missing:
        progress(f"ingesting {missing[0]} to {missing[-1]} into {site.directory}")
        forgotten = read_deletion_list(site)
        wanted = ds_range(missing[0], missing[-1])
        throttled = Throttle(progress)  # a log may have hundreds of days
        for _ in ingest_days(site, wanted, engine=engine, forgotten=forgotten, progress=throttled):
            pass
    return days


def cut_of_log(site: Site, days: Sequence[str]) -> tuple[str, int, str]:
    """Return the last day that contenders see, the number of days after it, and where that number comes from."""
    chosen: Any = site.training.evaluation_days if "evaluation_days" in site.training.model_fields_set else None
    if chosen is not None:
        num_days, reason = int(chosen), "training.evaluation_days in the site file"
    else:
        num_days = max(1, min(MAX_EVALUATION_DAYS, len(days) // 4))
        reason = f"by default, for a log of {len(days)} days"
    if not 1 <= num_days < len(days):
        raise PipelineError(
            f"the log has {len(days)} days, and {num_days} of them are to evaluate ({reason}): a benchmark needs at "
            "least one day after the cut and one before it",
            "set training.evaluation_days in the site file, or use a log with more days",
        )
    return days[-1 - num_days], num_days, reason


def build_pins(site: Site, cut_ds: str, *, engine: Engine, progress: Progress) -> None:
    """Build pin_features of the cut's day."""
    if pin_state(site).manifest(cut_ds) is None:
        known = pin_state(site).days()
        first_ds = cut_ds
        if site.source.pins.is_incremental:
            first_ds = next((shift_ds(ds, 1) for ds in reversed(known) if ds < cut_ds), site.start_ds)
        for _ in build_pin_features(site, ds_range(first_ds, cut_ds), engine=engine, progress=progress):
            pass


def prepare_training_set(site: Site, cut_ds: str, *, engine: Engine, progress: Progress) -> Path:
    """Build user_timelines of the cut's day and the training set that ends with it; return the set's folder."""
    if timeline_state(site).manifest(cut_ds) is None:
        for _ in build_timelines(
            site, [cut_ds], engine=engine, rebuild=True, progress=progress
        ):  # from the logs of the whole window, which gives what building day by day gives
            pass
    manifest = site.directory / "training_set" / MANIFEST
    if not manifest.exists() or read_json(manifest)["cut_ds"] != cut_ds:
        build_training_set(site, cut_ds=cut_ds, engine=engine, progress=progress)
    return latest_training_set(site)
