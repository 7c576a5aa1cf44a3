"""What `pf forget` deletes at once, and what it lets Dagster build again.

A request is granted when its users are on the deletion list: they stay out of whatever is built from then on. The rest
deletes what was built before, and may be repeated as often as one likes: it ends in the same state. `remains.py` tells
what is left, and until when.
"""

import contextlib
import fcntl
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.tables import embedding_state, snapshot_state
from pf_core.engine.daily_state import DailyState
from pf_core.engine.local import LocalEngine
from pf_core.logs.deletion_list import without_listed
from pf_core.logs.log_day import open_log_day
from pf_core.logs.partition import ingested_days
from pf_core.logs.purge import purge_days
from pf_core.logs.settings import IngestSettings
from pf_core.pins.counts import counted_days, counts_forgotten, day_counts, forget_counts
from pf_core.progress import Progress
from pf_core.serving.export import forget_in_exports
from pf_core.serving.releases import list_releases
from pf_core.serving.rollback import forget_users
from pf_core.storage.files import list_folder, local_dir, read_parquet, remove_tree, write_file
from pf_core.timelines.build import timeline_state

SCORES = "scores.parquet"
"""Name of the files with the scores of every evaluated user (`evaluation/scores.py`)."""

SCORED = ("offline_evaluation", "ablation_runs")
"""Folders of a site with such files, besides MLflow's artifacts."""

LOCK = "forgetting.lock"


@contextlib.contextmanager
def one_at_a_time(site: Site, progress: Progress) -> Iterator[None]:
    """Wait until no other `pf forget` of this machine deletes users of the site."""
    site.workspace.mkdir(parents=True, exist_ok=True)
    with (site.workspace / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another `pf forget`, which deletes users of this site")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def delete_users(site: Site, user_ids: pa.Array, *, artifacts: Sequence[Path], progress: Progress) -> None:
    """Delete users wherever they are stored by their id, except in timelines, embeddings and training sets.

    `artifacts` are the folders of the site's artifacts in MLflow.
    """
    for release, count in forget_users(site, user_ids, progress).items():
        progress(f"release {release}: {count:,} deleted from the store")
    _purge_logs(site, user_ids, progress)
    _remove_leftovers(site, progress)
    for path, count in forget_in_exports(site, user_ids).items():
        progress(f"export {path}: {count:,} deleted")
    num_ids = sum(_without_ids(path, user_ids) for path in score_files(site, artifacts))
    progress(f"evaluations: {num_ids:,} ids deleted from the scores of users")
    for folder in benchmark_folders(site):
        remove_tree(folder)
        progress(f"{folder}: removed, a benchmark makes it again without the users")


def _purge_logs(site: Site, user_ids: pa.Array, progress: Progress) -> None:
    num_actions = num_rejects = num_redacted = num_days = 0
    for day in purge_days(IngestSettings.of(site), ingested_days(site), user_ids):
        num_days += 1
        num_actions, num_rejects = num_actions + day.actions, num_rejects + day.rejects
        num_redacted += day.redacted
    for ds in counted_days(site):  # also of days that a request purged which was killed before it came here
        if not counts_forgotten(site, ds):
            continue
        if site.answers is not None:  # who may be learned from is not known while days are to be ingested again
            forget_counts(site, ds)
        else:
            day_counts(site, open_log_day(site, ds))
    unknown = f"; {num_redacted:,} others lost their content, because nobody can tell whose they are"
    progress(
        f"raw_actions: {num_actions:,} actions and {num_rejects:,} rejected rows deleted on {num_days:,} days"
        + (unknown if num_redacted else "")
    )


def _remove_leftovers(site: Site, progress: Progress) -> None:
    """Remove what killed runs left beside the published days; refused while a run writes an asset.

    Such a run may have read the deletion list before the request. Whoever writes after this has read it since, so the
    newest days are found when it is over (`plan_rebuild`).
    """
    states: list[tuple[DailyState[Any], int]] = [
        (timeline_state(site), site.timelines.retention_days),
        (embedding_state(site), site.serving.retention_days),
        (snapshot_state(site), site.serving.retention_days),
    ]
    with LocalEngine(num_workers=1, memory_mb=1, temp_dir=site.workspace / "tmp") as engine:
        for state, num_days in states:
            if state.root.exists():
                with state.writing():
                    if state.has_only_its_buckets():
                        state.retain(num_days, engine, progress, thoroughly=True)


# Evaluations and benchmarks


def score_files(site: Site, artifacts: Sequence[Path]) -> Iterator[Path]:
    """Yield the files with scores of users."""
    for folder in (*(site.directory / name for name in SCORED), *artifacts):
        if folder.is_dir():
            yield from sorted(folder.rglob(SCORES))


def _without_ids(path: Path, user_ids: pa.Array) -> int:
    """Replace the ids of these users by null; return how many there were.

    Their scores stay, without saying whose they are: evaluations with the same question are compared row by row.
    """
    scores = read_parquet(path)
    ids = without_listed(scores["user_id"], user_ids)
    num_listed = ids.null_count - scores["user_id"].null_count
    if num_listed:
        scores = scores.set_column(scores.schema.get_field_index("user_id"), "user_id", ids)
        with write_file(path) as partial:
            pq.write_table(scores, partial, compression="zstd")
    return int(num_listed)


def benchmark_folders(site: Site) -> list[Path]:
    """Return what `pf benchmark` keeps of the site's log on this machine: its data, and what it gave to peers."""
    root, name = local_dir() / "benchmark", re.escape(site.name)
    data = [path for path in list_folder(root) if re.fullmatch(rf"{name}-[0-9a-f]{{16}}", path.name)]
    results = [path for path in list_folder(root / "results") if re.fullmatch(rf"{name}-[a-z]+-[0-9]+", path.name)]
    return [*data, *(path / "peers" for path in results if (path / "peers").is_dir())]


# What is built again


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """The newest days, which are built again without the users; earlier days keep them until retention drops these."""

    timeline_days: list[str]
    from_logs: bool
    """Build the timelines from the logs, because the day before is no longer kept."""
    embedding_days: list[str]
    """Days of user_embeddings and of user_embedding_snapshot."""
    release_days: list[str]
    """The day of the current release, if it is the newest of the snapshot; after a rollback it is not."""


def plan_rebuild(site: Site) -> Rebuild:
    """Return the newest days, as far as there are any."""
    timelines, embeddings = timeline_state(site).days(), embedding_state(site).days()
    snapshots = snapshot_state(site).days()
    timeline_days, newest_embeddings = timelines[-1:], embeddings[-1:]
    embedding_days = ds_range((snapshots or newest_embeddings)[-1], newest_embeddings[0]) if newest_embeddings else []
    released = [release["ds"] for release in list_releases(site) if release["is_current"]]
    return Rebuild(
        timeline_days=timeline_days,
        from_logs=bool(timeline_days)
        and timeline_days != [site.start_ds]
        and shift_ds(timeline_days[0], -1) not in timelines,
        embedding_days=embedding_days,
        release_days=released if released == snapshots[-1:] else [],
    )
