"""Deletes the rows of forgotten users from days of raw_actions that were ingested before, and from their quarantine.

A day gets a new build: files without such users are linked, the others are written again. What was built from the day
leaves the users out by itself, so nothing is out of date afterwards: `raw_digest` stays. Builds and scratch files that
killed runs left behind are removed, because they may hold these users, too.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.hashing import bucket_of
from pf_core.logs.answers import write_without
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.partition import (
    BucketEntry,
    RawManifest,
    digest_of_files,
    partition_dir,
)
from pf_core.logs.partition_writer import write_actions
from pf_core.logs.positives import positive_mask
from pf_core.logs.quarantine import REDACTED, Quarantine
from pf_core.logs.rejects import Forgotten, users_of
from pf_core.logs.settings import IngestSettings
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.cache import fetched
from pf_core.storage.files import link_or_copy, read_json, read_parquet, remove_tree
from pf_core.storage.locks import exclusive

BATCH_ROWS = 65_536

CATEGORIES = (("by_type", "action_type"), ("by_surface", "surface"))


@dataclass(frozen=True, kw_only=True)
class PurgedDay:
    """What was deleted from a day."""

    ds: str
    actions: int
    rejects: int
    """Rows of the quarantine that were deleted."""
    redacted: int
    """Rows of the quarantine that lost their content."""


def purge_days(settings: IngestSettings, days: Sequence[str], user_ids: pa.Array) -> Iterator[PurgedDay]:
    """Delete the users from the days, one after the other; yield each day that changed."""
    forgotten = Forgotten(user_ids)
    with contextlib.ExitStack() as stack:
        if not settings.actions.is_dated:  # one lock for all days, as for ingestion
            stack.enter_context(exclusive(partition_dir(settings.directory, "."), "raw_actions"))
        for ds in days:
            with contextlib.ExitStack() as lock:
                folder = partition_dir(settings.directory, ds)
                if settings.actions.is_dated:
                    lock.enter_context(exclusive(folder, f"raw_actions {ds}"))
                purged = _purge_day(settings, folder, forgotten, user_ids)
                for tmp in {settings.directory / "tmp", settings.workspace / "tmp"}:
                    for leftover in tmp.glob(f"raw_actions-{ds}-*"):
                        remove_tree(leftover)
            if purged is not None:
                yield purged


def purge_if_listed_since(site: Site, days: Sequence[str], forgotten: pa.Array) -> None:
    """Delete from the days the users who came on the deletion list after `forgotten` was read, if there are any.

    An ingestion that began before a request would otherwise bring the user back.
    """
    listed = read_deletion_list(site)
    if not listed.equals(forgotten):
        for _ in purge_days(IngestSettings.of(site), days, listed):
            pass


def _purge_day(settings: IngestSettings, folder: Path, forgotten: Forgotten, user_ids: pa.Array) -> PurgedDay | None:
    manifest: RawManifest = read_json(folder / MANIFEST)
    build = folder / manifest["build"]
    for leftover in folder.glob("build-*"):
        if leftover.name != build.name:
            remove_tree(leftover)
    buckets = set(bucket_of(user_ids, manifest["num_buckets"]).tolist())
    changed = [
        entry["name"]
        for entry in manifest["files"]
        if entry["bucket"] in buckets and _has_listed(build / entry["name"], forgotten)
    ]
    answers = manifest.get("answers")
    is_answered = answers is not None and _has_listed(build / answers["name"], forgotten)
    rejects = build / manifest["quarantine_file"] if manifest["quarantine_file"] else None
    if not changed and not is_answered and (rejects is None or not any(count_rejects(rejects, settings, forgotten))):
        return None
    with building(folder) as target:
        removed = _Removed()
        files = [
            entry
            for old in manifest["files"]
            if (entry := _rewritten(settings, build, target, old, forgotten, removed, old["name"] in changed))
        ]
        quarantine = Quarantine(target / "quarantine.parquet")
        num_rejects = 0 if rejects is None else _without_forgotten(rejects, settings, forgotten, quarantine)
        num_redacted = quarantine.num_redacted - manifest["counts"].get("redacted", 0)
        new = _updated(manifest, files, quarantine, removed, num_rejects)
        if answers is not None:
            id_type = settings.actions.user_id.type
            num_users = write_without(build / answers["name"], target / answers["name"], user_ids, id_type)
            new["answers"] = {**answers, "num_users": num_users}
        publish_build(target, dict(new))
    return PurgedDay(ds=manifest["ds"], actions=removed.counts["kept"], rejects=num_rejects, redacted=num_redacted)


def _has_listed(path: Path, forgotten: Forgotten) -> bool:
    return bool(forgotten.are_listed(read_parquet(path, columns=["user_id"])["user_id"]).any())


class _Removed:
    """Counts of the actions that are deleted from a day."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.categories: dict[str, Counter[str]] = {name: Counter() for name, _ in CATEGORIES}

    def add(self, settings: IngestSettings, actions: pa.Table) -> None:
        self.counts["kept"] += actions.num_rows
        self.counts["users"] += len(actions["user_id"].unique())
        self.counts["positive"] += int(positive_mask(actions, settings.positive).sum())
        for name, column in CATEGORIES:
            for row in actions[column].value_counts().to_pylist():
                self.categories[name][row["values"]] += row["counts"]


def _rewritten(
    settings: IngestSettings,
    build: Path,
    target: Path,
    entry: BucketEntry,
    forgotten: Forgotten,
    removed: _Removed,
    is_changed: bool,
) -> BucketEntry | None:
    """Put a bucket's file into the new build; return its entry, or None if no action is left in it."""
    if not is_changed:
        link_or_copy(build / entry["name"], target / entry["name"])
        return entry
    actions = read_parquet(build / entry["name"])
    is_listed = pa.array(forgotten.are_listed(actions["user_id"]))
    removed.add(settings, actions.filter(is_listed))
    left = actions.filter(pc.invert(is_listed))
    return write_actions(target, entry["bucket"], left, settings.actions) if left.num_rows else None


def _updated(
    manifest: RawManifest,
    files: list[BucketEntry],
    quarantine: Quarantine,
    removed: _Removed,
    num_rejects: int,
) -> RawManifest:
    """Return the manifest of the new build; its rows add up as before, with more of them forgotten."""
    new: RawManifest = {**manifest, "quarantine_file": quarantine.close(), "files": files}
    counts = {name: number - removed.counts[name] for name, number in manifest["counts"].items()}  # type: ignore[operator]
    counts["quarantined"] = quarantine.by_reason.total()
    counts["redacted"] = quarantine.num_redacted
    counts["forgotten"] += removed.counts["kept"] + num_rejects
    new["counts"] = counts  # type: ignore[typeddict-item]
    for name, _ in CATEGORIES:
        before: dict[str, int] = manifest[name]  # type: ignore[literal-required]
        new[name] = dict(Counter(before) - removed.categories[name])  # type: ignore[literal-required]
    new["quarantined_by_reason"] = dict(quarantine.by_reason)
    new["ingested_digest"] = manifest.get("ingested_digest") or digest_of_files(manifest["files"])
    new["users_deleted"] = manifest.get("users_deleted", 0) + removed.counts["users"]
    return new


# The quarantine


def count_rejects(path: Path, settings: IngestSettings, forgotten: Forgotten) -> tuple[int, int]:
    """Return how many rows of a quarantine are of forgotten users, and how many others may be and have content."""
    num_listed = num_unknown = 0
    for rows, is_listed, may_be in _attributed(path, settings, forgotten):
        has_content = pc.not_equal(rows["raw"], REDACTED).to_numpy()
        num_listed += int(is_listed.sum())
        num_unknown += int((may_be & ~is_listed & has_content).sum())
    return num_listed, num_unknown


def _without_forgotten(path: Path, settings: IngestSettings, forgotten: Forgotten, into: Quarantine) -> int:
    """Copy the rows of a quarantine as ingestion would write them now; return how many are left out."""
    num_left_out = 0
    for rows, is_listed, may_be in _attributed(path, settings, forgotten):
        num_left_out += int(is_listed.sum())
        for row, left_out, redacted in zip(rows.to_pylist(), is_listed, may_be, strict=True):
            if not left_out:
                raw = REDACTED if redacted else row["raw"]
                into.add(row["source_file"], row["row_number"], row["reason"], raw)
    return num_left_out


def _attributed(
    path: Path, settings: IngestSettings, forgotten: Forgotten
) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
    """Yield rows of a quarantine, which of them are of forgotten users, and which of them may be."""
    with pq.ParquetFile(fetched(path)) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            rows: Any = pa.table(batch)
            users = users_of(rows, settings.actions.user_id)
            yield rows, forgotten.are_listed(users), forgotten.may_be(users)
