"""What is left of a user: every place where a site stores users, what was found there, and until when it stays.

Something that is left is overdue if `pf forget` should have deleted it. It is not overdue where the site says when it
goes: earlier days go with their retention, training sets and models with the next training. A place that cannot be
searched is overdue, because nobody knows. Source logs, backups and copies made by others are not searched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.embeddings.tables import embedding_state, snapshot_state
from pf_core.engine.daily_state import DailyState
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.deletion_list import Entry, find_entry
from pf_core.logs.partition import ingested_days, partition_dir, read_manifest, require_manifest
from pf_core.logs.purge import count_rejects
from pf_core.logs.rejects import Forgotten
from pf_core.logs.settings import IngestSettings
from pf_core.operations.forgetting import SCORED, SCORES, benchmark_folders, score_files
from pf_core.operations.search import (
    bucket_number,
    datasets_below,
    has_deleted_row,
    has_user,
    tables_below,
    unnamed_files,
    versions_with,
)
from pf_core.pins.counts import counted_days, counts_forgotten
from pf_core.schemas import id_arrow_type
from pf_core.serving.export import files_of_export, partial_exports, recorded_exports
from pf_core.serving.releases import DESCRIPTION, opened_store, release_root
from pf_core.storage.files import is_remote, list_folder, local_dir, read_json
from pf_core.timelines.build import timeline_state

State = Literal["gone", "left", "overdue"]

FORGET_AGAIN = "`pf forget` deletes it"

TRAINING_SETS = ("training_set", "noisy_training_set")

MODELS = ("pinnerformer_model", "refitted_model", "ablation_runs")
"""Folders of the site with a folder for each trained model."""

JOB = "job.json"
"""File of a model's folder that says when its training set was read (`data_read_at`)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place that was searched."""

    name: str
    searched: str
    """What was searched there, such as "18 days"."""
    found: tuple[str, ...] = ()
    """Where the user was found."""
    until: str | None = None
    """When what was found will be gone, or what deletes it."""
    is_overdue: bool = False

    @property
    def state(self) -> State:
        if not self.found:
            return "gone"
        return "overdue" if self.is_overdue else "left"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that may have learned from a user: weights, factors and statistics hold no id, but what users did."""

    name: str
    data_read_at: str | None
    """When the deletion list was last read before its training, ISO 8601; None if nobody noted it."""
    serves: bool = False


@dataclass(frozen=True, kw_only=True)
class Remains:
    user_id: int | str
    entry: Entry | None
    """Line of the deletion list; None if the user is not on it."""
    places: list[Place]

    @property
    def is_forgotten(self) -> bool:
        """Whether the user is on the deletion list, and nothing is overdue."""
        return self.entry is not None and all(place.state != "overdue" for place in self.places)

    def as_json(self) -> dict[str, Any]:
        return {
            "user_id": self.user_id,
            "is_on_deletion_list": self.entry is not None,
            "since": None if self.entry is None else self.entry["since"],
            "is_forgotten": self.is_forgotten,
            "places": [{**asdict(place), "state": place.state} for place in self.places],
        }


def find_remains(
    site: Site, user_id: int | str, *, artifacts: Sequence[Path], models: Sequence[TrainedModel]
) -> Remains:
    """Search every place for a user. `artifacts` and `models` are the site's in MLflow; nothing is written."""
    ids = pa.array([user_id], id_arrow_type(site.source.actions.user_id.type))
    entry = find_entry(site, user_id)
    searches: dict[str, Callable[[], Iterator[Place]]] = {
        "raw_actions": lambda: _raw_actions(site, ids),
        "quarantine": lambda: _quarantine(site, ids),
        "pin_counts": lambda: _pin_counts(site),
        "user_timelines": lambda: _state(timeline_state(site), ids, site.timelines.retention_days),
        "user_embeddings": lambda: _state(embedding_state(site), ids, site.serving.retention_days),
        "user_embedding_snapshot": lambda: _state(snapshot_state(site), ids, site.serving.retention_days),
        "stores of releases": lambda: _stores(site, ids),
        "exports": lambda: _exports(site, ids),
        "training sets": lambda: _training_sets(site, ids),
        "evaluations": lambda: _scores(site, ids, artifacts),
        "models": lambda: _models(site, ids, entry, artifacts, models),
        "benchmarks": lambda: _benchmarks(site, ids),
        "other files": lambda: _other_files(site, ids),
    }
    places = [place for name, search in searches.items() for place in _searched(name, search)]
    return Remains(user_id=user_id, entry=entry, places=places)


def _searched(name: str, search: Callable[[], Iterator[Place]]) -> list[Place]:
    try:
        return list(search())
    except Exception as error:  # of any library, about a damaged file or a server that is away: nobody knows
        reason = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        return [Place(name=name, searched="not all", found=(f"it cannot be searched: {reason}",), is_overdue=True)]


# Logs


def _raw_actions(site: Site, ids: pa.Array) -> Iterator[Place]:
    days, found = ingested_days(site), []
    for ds in days:
        manifest = require_manifest(site, ds)
        build = partition_dir(site.directory, ds) / manifest["build"]
        bucket = bucket_number(ids, manifest["num_buckets"])
        names = [entry["name"] for entry in manifest["files"] if entry["bucket"] == bucket]
        found += [ds for name in names if has_user(build / name, ids)]
        if "answers" in manifest and has_user(build / manifest["answers"]["name"], ids):
            found.append(f"{ds}, among those who said whether they may be learned from")
    for build in _unpublished_builds(site):
        found += [f"{build}, of a killed run" for path in tables_below(build) if has_user(path, ids)][:1]
    yield _place("raw_actions", _number(days, "day"), found, until=FORGET_AGAIN, is_overdue=True)
    scratch = [str(path) for tmp in _tmp_folders(site) for path in list_folder(tmp)]
    until = "the runs that write them end; of killed runs, `pf forget` removes those of ingestions, others you remove"
    yield _place("temporary files", "names only", scratch, until=until)


def _quarantine(site: Site, ids: pa.Array) -> Iterator[Place]:
    settings, forgotten = IngestSettings.of(site), Forgotten(ids)
    days, found = ingested_days(site), []
    published = [
        (ds, partition_dir(site.directory, ds) / manifest["build"] / manifest["quarantine_file"])
        for ds in days
        if (manifest := require_manifest(site, ds))["quarantine_file"]
    ]
    left_behind = [
        (f"{build}, of a killed run", path) for build in _unpublished_builds(site) for path in build.glob("quarantine*")
    ]
    for where, path in (*published, *left_behind):
        num_listed, num_unknown = count_rejects(path, settings, forgotten)
        if num_listed:
            found.append(f"{where}: {_number(num_listed, 'row')} of the user")
        if num_unknown:
            found.append(f"{where}: {_number(num_unknown, 'row')} with content, of which nobody can tell whose it is")
    yield _place("quarantine", _number(days, "day"), found, until=FORGET_AGAIN, is_overdue=True)


def _unpublished_builds(site: Site) -> Iterator[Path]:
    """Yield the builds of raw_actions that killed runs left, or that are being written."""
    folders = [path for path in list_folder(site.directory / "raw_actions") if path.is_dir()]  # not the lock of all
    for folder in folders:
        manifest = read_manifest(site, folder.name)
        named = None if manifest is None else manifest["build"]
        yield from sorted(build for build in folder.glob("build-*") if build.name != named)


def _tmp_folders(site: Site) -> list[Path]:
    folders = {site.workspace / "tmp", site.directory / "tmp"} | (
        {local_dir() / "tmp"} if is_remote(site.directory) else set()
    )
    return [folder for folder in folders if folder.is_dir()]


def _pin_counts(site: Site) -> Iterator[Place]:
    counted = counted_days(site)
    found = [
        f"{ds}: numbers that count forgotten users, without their ids" for ds in counted if counts_forgotten(site, ds)
    ]
    until = "the day is counted again, when its numbers are needed"
    yield _place("pin_counts", _number(counted, "day"), found, until=until)


# Timelines, embeddings and releases


def _state(state: DailyState[Any], ids: pa.Array, retention_days: int) -> Iterator[Place]:
    """Search all versions of the user's bucket; the newest day must be without the user."""
    days, bucket = state.days(), bucket_number(ids, state.num_buckets)
    path, version_of = state.bucket_path(bucket), {ds: state.require(ds)["versions"][bucket] for ds in days}
    versions = versions_with(path, ids) if path.exists() else []
    left = [ds for ds in days if version_of[ds] in versions]
    is_overdue = bool(left) and left[-1] == days[-1]
    found = _ranges(left)
    unnamed = set(versions) - set(version_of.values())
    if leftovers := unnamed_files(path) if path.exists() else []:
        found.append(f"{_number(leftovers, 'file')} of killed runs in {path.name}, which nobody can search")
    found += [f"version {version} of {path.name}, which no day names" for version in sorted(unnamed)]
    if days and not is_overdue and has_deleted_row(path, version_of[days[-1]], ids):
        found.append(f"files of {days[-1]}, in a deleted row, until they are compacted")
    until = "the next day is built, or `pf forget` is called"
    if left:
        until = f"{shift_ds(left[-1], retention_days)} is built (retention_days: {retention_days})"
    if is_overdue:
        until = FORGET_AGAIN + " from the newest day"
    yield _place(state.asset, _number(days, "day"), found, until=until, is_overdue=is_overdue)


def _stores(site: Site, ids: pa.Array) -> Iterator[Place]:
    folders = [path for path in list_folder(release_root(site)) if (path / DESCRIPTION).exists()]
    found = []
    for folder in folders:
        with opened_store(site, folder) as store:
            if store.get(ids).found_N.any():
                found.append(folder.name)
    yield _place("stores of releases", _number(folders, "release"), found, until=FORGET_AGAIN, is_overdue=True)


def _exports(site: Site, ids: pa.Array) -> Iterator[Place]:
    records = recorded_exports(site)
    paths = {record["path"]: Path(record["path"]).is_dir() for record in records}
    found = [str(path) for record in records for path in files_of_export(record, ids) if has_user(path, ids)]
    partials = sorted({str(path) for record in records for path in partial_exports(record)})
    found += [f"{path}, an export that is not complete, and is not searched" for path in partials]
    searched = _number([path for path, is_there in paths.items() if is_there], "export")
    if moved := [path for path, is_there in paths.items() if not is_there]:
        searched += f"; no longer where they were written, and not searched: {', '.join(moved)}"
    yield _place("exports", searched, found, until=FORGET_AGAIN, is_overdue=True)


# Training and evaluation


def _training_sets(site: Site, ids: pa.Array) -> Iterator[Place]:
    folders = [folder / name for folder in {site.directory, site.workspace} for name in TRAINING_SETS]
    tables = [path for folder in folders if folder.is_dir() for path in tables_below(folder)]
    found = [str(path) for path in tables if has_user(path, ids)]
    until = f"the next training set is built: weekly_training_schedule, or {materialize_command('training_set')}"
    yield _place("training sets", _number(tables, "table"), found, until=until)


def _scores(site: Site, ids: pa.Array, artifacts: Sequence[Path]) -> Iterator[Place]:
    files = list(score_files(site, artifacts))
    found = [str(path) for path in files if has_user(path, ids)]
    yield _place(
        "evaluations", _number(files, "file") + " of scores, MLflow's too", found, until=FORGET_AGAIN, is_overdue=True
    )


def _models(
    site: Site, ids: pa.Array, entry: Entry | None, artifacts: Sequence[Path], models: Sequence[TrainedModel]
) -> Iterator[Place]:
    tables = [
        path
        for folder in (*(site.directory / name for name in MODELS), *artifacts)
        if folder.is_dir()
        for path in tables_below(folder)
        if path.name != SCORES
    ]
    found = [str(path) for path in tables if has_user(path, ids)]
    yield _place("files of models", _number(tables, "table"), found, until="they are removed by hand", is_overdue=True)
    since = None if entry is None else entry["since"]
    learned = [model for model in (*models, *_model_folders(site)) if _may_remember(model, since)]
    for name, serves, until in (
        ("model that serves", True, "the next training whose model is accepted: weekly_training_schedule"),
        ("other models", False, "somebody removes them: versions in MLflow, folders of the site"),
    ):
        known = [model.name for model in (*models, *_model_folders(site)) if model.serves == serves]
        remember = [model.name for model in learned if model.serves == serves]
        what = "weights, factors and statistics, which hold no id but what users did"
        yield _place(name, f"{_number(known, 'model')}: {what}", remember, until=until)


def _model_folders(site: Site) -> Iterator[TrainedModel]:
    for name in MODELS:
        for job in sorted((site.directory / name).rglob(JOB)):
            yield TrainedModel(name=str(job.parent), data_read_at=read_json(job).get("data_read_at"))


def _may_remember(model: TrainedModel, since: str | None) -> bool:
    """Return whether the model's training set may have had a user who is on the list since then."""
    if model.data_read_at is None or since is None:
        return True
    try:
        return _instant(model.data_read_at) <= _instant(since)
    except ValueError:  # a line that was written by hand
        return True


def _instant(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


# The rest


def _benchmarks(site: Site, ids: pa.Array) -> Iterator[Place]:
    folders = benchmark_folders(site)
    found = [str(path) for folder in folders for path in tables_below(folder) if has_user(path, ids)]
    found += [str(path) for folder in folders for path in datasets_below(folder) if versions_with(path, ids)]
    yield _place("benchmarks", _number(folders, "folder"), found, until=FORGET_AGAIN, is_overdue=True)


def _other_files(site: Site, ids: pa.Array) -> Iterator[Place]:
    known = ("raw_actions", "exports", "tmp", *TRAINING_SETS, *SCORED, *MODELS)
    files = list(tables_below(site.directory, without=known))
    found = [str(path) for path in files if has_user(path, ids)]
    yield _place("other files", _number(files, "table"), found, until="they are removed by hand", is_overdue=True)
    if is_remote(site.directory):
        copies = local_dir() / "cache"
        until = "others have taken their place (PF_CACHE_GB), or the folder is removed while no run uses it"
        found = [f"{copies}: copies of objects, which are not searched"] if copies.is_dir() else []
        yield _place("this machine's cache", "not searched", found, until=until)


def _place(name: str, searched: str, found: Sequence[str], *, until: str, is_overdue: bool = False) -> Place:
    if not found:
        return Place(name=name, searched=searched)
    return Place(name=name, searched=searched, found=tuple(found), until=until, is_overdue=is_overdue)


def _number(things: Sequence[Any] | int, what: str) -> str:
    number = things if isinstance(things, int) else len(things)
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _ranges(days: Sequence[str]) -> list[str]:
    """Return days as ranges without gaps: "2026-01-01 … 2026-01-03"."""
    ranges: list[list[str]] = []
    for ds in days:
        if ranges and shift_ds(ranges[-1][-1], 1) == ds:
            ranges[-1].append(ds)
        else:
            ranges.append([ds])
    return [part[0] if len(part) == 1 else f"{part[0]} … {part[-1]}" for part in ranges]
