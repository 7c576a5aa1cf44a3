"""State that changes a little every day and stays readable for every day: Lance datasets, one for each bucket.

A day is a JSON manifest that names the version of every bucket's dataset; it is written last, atomically, and
is the truth. Lance shares unchanged files between versions, so a day costs what changed on it. Building a day
starts from the previous day's version, whatever was built since; other days are never touched. Tags only protect
the versions that manifests name from Lance's cleanup.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, cast

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import write_fragments

from pf_core.engine.base import Engine
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import Kind, is_current, marked, refuse_other_layout
from pf_core.progress import Progress
from pf_core.storage.files import find_json, read_json, remove_tree, write_json
from pf_core.storage.locks import exclusive, holding, removing
from pf_core.storage.privacy import private
from pf_core.storage.retention import refuse_expired

Manifest = dict[str, Any]

BATCH_ROWS = 8192

READ_AHEAD_BYTES = 32 << 20

ROW_ADDRESS = "_rowaddr"
"""Lance's column with the address of a row: the number of its fragment, and its offset there in the lower 32 bits."""

MAX_FRAGMENT_ROWS = 1 << 30

MIN_INT64 = -(1 << 63)

FRAGMENT_SHIFT, OFFSET_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
"""Split a row address into fragment and offset."""


class StateManifest(TypedDict):
    """What every state asset's manifest has; an asset adds what it records of its own."""

    ds: str
    num_buckets: int
    versions: list[int]
    """Lance version of each bucket's dataset."""
    layout: NotRequired[int]
    """Number of the layout (layouts.py); not in all manifests of earlier versions."""


M = TypeVar("M", bound=Mapping[str, Any])
"""Type of an asset's manifest: a TypedDict that extends StateManifest."""


@dataclass(frozen=True, kw_only=True)
class DailyState(Generic[M]):
    """Where a state asset is stored, which days it has, and how one of them is opened."""

    root: Path
    asset: Kind
    """Name of the asset, which is also the kind of its layout."""
    num_buckets: int
    rebuilt_by: str | None = None
    """Assets that are materialized to rebuild a day of another layout; by default this one."""
    rebuilt_with: Mapping[str, Any] | None = None
    """Run configuration of the first of them."""

    def bucket_path(self, bucket: int) -> Path:
        """Path of the Lance dataset of a bucket."""
        return self.root / f"bucket-{bucket:05d}.lance"

    def manifest_path(self, ds: str) -> Path:
        """Path of the manifest of a day."""
        return self.root / "days" / f"{ds}.json"

    def days(self) -> list[str]:
        """Days that are published, ascending."""
        return sorted(path.stem for path in (self.root / "days").glob("*.json"))

    def manifest(self, ds: str) -> M | None:
        """Manifest of a day; None if the day is not published."""
        found: M | None = find_json(self.manifest_path(ds))
        return found

    def require(self, ds: str) -> M:
        """Manifest of a day; a missing day, or one with another number of buckets, is a PipelineError."""
        manifest = self.manifest(ds)
        if manifest is None:
            raise PipelineError(
                f"{self.asset} has no partition {ds}", f"make it with: {materialize_command(self.asset, ds)}"
            )
        if manifest["num_buckets"] != self.num_buckets:
            raise PipelineError(
                f"{self.asset} {ds} has {manifest['num_buckets']} buckets, the site file says {self.num_buckets}",
                "change it back, or re-materialize raw_actions and rebuild the state",
            )
        refuse_other_layout(self.asset, manifest, what=f"{self.asset} {ds}", command=self.rebuild_command(ds))
        return manifest

    def rebuild_command(self, ds: str) -> str:
        """Command that rebuilds a day without reading it or the day before."""
        return materialize_command(self.rebuilt_by or self.asset, ds, config=self.rebuilt_with)

    def has_only_its_buckets(self) -> bool:
        """Return whether no day was built with another number of buckets than the site file says."""
        return all(read_json(self.manifest_path(ds))["num_buckets"] == self.num_buckets for ds in self.days())

    def is_readable(self, manifest: M) -> bool:
        """Return whether a day has the layout of this version of the code."""
        return is_current(self.asset, manifest)

    def open_day(self, ds: str) -> "StateDay[M]":
        """Read the manifest of a day once, to open any of its buckets."""
        return StateDay(state=self, manifest=self.require(ds))

    @contextlib.contextmanager
    def held(self, ds: str) -> Iterator["StateDay[M]"]:
        """Open a day and keep its versions until the end, whatever another run publishes meanwhile."""
        with holding(self.root, self.asset):
            yield self.open_day(ds)

    def open_bucket(self, ds: str, bucket: int) -> lance.LanceDataset:
        """Open one bucket of a day. To open several buckets, use `open_day`: this reads the manifest every time."""
        return self.open_day(ds).open_bucket(bucket)

    def publish(self, ds: str, versions: list[int], manifest: Mapping[str, Any]) -> M:
        """Write the manifest of a day, which makes the day visible; return it."""
        about = {"ds": ds, "num_buckets": self.num_buckets, "versions": versions, **marked(self.asset)}
        complete = {**manifest, **about}
        write_json(self.manifest_path(ds), complete)
        return cast("M", complete)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Lock the asset for one writer."""
        return exclusive(self.root, self.asset)

    def refuse_if_dropped(self, days: Sequence[str], num_days: int) -> None:
        """Refuse to build a day that is older than what is kept: it would be removed at once."""
        refuse_expired(self.asset, days, existing=self.days(), num_days=num_days)

    def retain(self, num_days: int, engine: Engine, progress: Progress, *, thoroughly: bool = False) -> None:
        """Drop all but the newest `num_days` days, and every file that no remaining day needs.

        Days with another number of buckets cannot be read any more and are dropped too. Days of another layout are
        kept: a rebuild replaces them. While another run reads any day, nothing is dropped: the next run does it. The
        caller is the only writer, so files that no version names are those of killed runs. Buckets of which nothing
        is out of date are looked at only if `thoroughly`.
        """
        with removing(self.root, self.asset) as is_free:
            if is_free:
                self._drop_all_but(num_days, engine, progress, thoroughly)
            else:
                progress(f"{self.asset}: another run is reading it, so older versions are removed by the next run")

    def _drop_all_but(self, num_days: int, engine: Engine, progress: Progress, thoroughly: bool) -> None:
        manifests = {ds: read_json(self.manifest_path(ds)) for ds in self.days()[-num_days:]}
        kept = {ds: m["versions"] for ds, m in manifests.items() if m["num_buckets"] == self.num_buckets}
        for ds in set(self.days()) - kept.keys():
            self.manifest_path(ds).unlink()
        for path in self.root.glob("bucket-*.lance"):
            if not kept or path >= self.bucket_path(self.num_buckets):
                remove_tree(path)
        if not kept:
            return
        tasks = [
            _Retention(path, {ds: versions[bucket] for ds, versions in kept.items()}, thoroughly)
            for bucket, path in enumerate(map(str, map(self.bucket_path, range(self.num_buckets))))
        ]
        freed = sum(engine.map_buckets(_retain_bucket, tasks))
        progress(f"{self.asset}: {len(kept)} days kept, {freed / 1e6:.1f} MB of older versions removed")


@dataclass(frozen=True, kw_only=True)
class StateDay(Generic[M]):
    """One published day of a state asset, whose manifest has been read. It can be pickled into a task."""

    state: DailyState[M]
    manifest: M

    def open_bucket(self, bucket: int) -> lance.LanceDataset:
        """Open the dataset of a bucket as of this day."""
        return open_dataset(self.state.bucket_path(bucket), version=self.manifest["versions"][bucket])

    def buckets(self) -> Iterator[lance.LanceDataset]:
        """Open the datasets of all buckets, one after the other."""
        for bucket in range(self.state.num_buckets):
            yield self.open_bucket(bucket)


@dataclass(frozen=True)
class _Retention:
    path: str
    versions: dict[str, int]
    """Version of the bucket by day, for the days that are kept."""
    thoroughly: bool


def _retain_bucket(task: _Retention) -> int:
    """Tag the versions that are kept and remove the others; return the number of bytes removed."""
    dataset = lance.dataset(task.path)
    wanted = {f"ds-{ds}": version for ds, version in task.versions.items()}
    present = {name: tag["version"] for name, tag in dataset.tags.list().items()}
    outdated = {name for name, version in present.items() if wanted.get(name) != version}
    for name in outdated:
        dataset.tags.delete(name)
    for name, version in wanted.items():
        if name not in present or name in outdated:
            dataset.tags.create(name, version)
    if not outdated and not task.thoroughly:
        return 0
    # Unverified: what a killed run has written without a version; otherwise Lance keeps it for a week.
    removed = dataset.cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    return int(removed.bytes_removed)


def open_dataset(path: Path, *, version: int) -> lance.LanceDataset:
    """Open a version of a Lance dataset; one that is gone is a PipelineError."""
    try:
        return lance.dataset(str(path), version=version)
    except ValueError as error:
        if "not found" not in str(error):
            raise
        raise PipelineError(
            f"{path} has no version {version}, which its manifest names",
            f"re-run, because another run may have replaced it meanwhile; if that does not help, rebuild "
            f"{path.parent.name}",
        ) from error


def create_bucket(path: Path, rows: pa.Table | pa.RecordBatchReader) -> lance.LanceDataset:
    """Write a dataset, or a new version of one, that holds exactly these rows; older versions stay readable."""
    batches = _independent_batches(rows) if isinstance(rows, pa.Table) else rows
    with private(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return lance.write_dataset(batches, str(path), mode="overwrite" if path.exists() else "create")


def advance_bucket(
    path: Path, *, base_version: int, upserts: pa.Table, deleted_ids: pa.Array, key: str, compact_after: int
) -> lance.LanceDataset:
    """Write a new version from `base_version`: rows are replaced or added by `key`, and others are deleted."""
    base = open_dataset(path, version=base_version)
    known = base.to_table(columns=[key], with_row_address=True)
    gone = pc.is_in(known[key], pa.chunked_array([*upserts[key].chunks, deleted_ids]))
    return replace_rows(base, gone=known[ROW_ADDRESS].filter(gone), rows=upserts, compact_after=compact_after)


def replace_rows(
    base: lance.LanceDataset,
    *,
    gone: pa.ChunkedArray,
    rows: pa.Table,
    compact_after: int,
    max_dead_share: float = math.inf,
) -> lance.LanceDataset:
    """Write a new version of a dataset without the rows at the addresses `gone`, and with `rows`; the base stays.

    New rows become a fragment of their own, and removed rows are only marked as deleted: this costs what changed. But
    fragments and deleted rows slow readers down, so the dataset is compacted:
    - Beyond `compact_after` fragments, the newest ones are merged, as many as are together no larger than the one
      before them, so that old rows are seldom rewritten.
    - When there are more deleted rows than `max_dead_share` times the living ones, everything is rewritten. This adds
      1 / max_dead_share rewritten rows for each changed row.
    Lance's `merge_insert` gives the same in two to four times the time, because it carries whole rows through a join.
    """
    if len(gone) == 0 and rows.num_rows == 0:
        return base
    if base.latest_version != base.version:
        base.restore()
    removed, updated = [], []
    address = gone.to_numpy()
    for fragment in base.get_fragments():
        offset = address[address >> FRAGMENT_SHIFT == fragment.fragment_id] & OFFSET_MASK
        if len(offset):
            left = fragment.delete_rows(offset)
            removed += [fragment.fragment_id] if left is None else []
            updated += [left] if left is not None else []
    added = write_fragments(_independent_batches(rows), base, mode="append") if rows.num_rows else []
    change = lance.LanceOperation.Update(removed_fragment_ids=removed, updated_fragments=updated, new_fragments=added)
    dataset = lance.LanceDataset.commit(base, change, read_version=base.version)
    fragments = dataset.get_fragments()
    num_living = [fragment.count_rows() for fragment in fragments]
    num_dead = sum(fragment.num_deletions for fragment in fragments)
    if num_dead > max_dead_share * sum(num_living):
        return _merge_fragments(dataset, fragments)
    if len(fragments) > compact_after:
        return _merge_fragments(dataset, fragments[_first_to_merge(num_living) :])
    return dataset


def _first_to_merge(num_rows: Sequence[int]) -> int:
    """Position of the first fragment to merge: those from it on are together no larger than the one before it.

    At least two fragments are merged.
    """
    for first in range(len(num_rows) - 2, 0, -1):
        if sum(num_rows[first:]) <= num_rows[first - 1]:
            return first
    return 0


def _merge_fragments(
    dataset: lance.LanceDataset, fragments: Sequence[lance.fragment.LanceFragment]
) -> lance.LanceDataset:
    """Write a version in which these neighbouring fragments are one, without deleted rows, in the same order."""
    batches = stream_batches(dataset, dataset.schema.names, fragments=fragments)
    reader = pa.RecordBatchReader.from_batches(dataset.schema, batches)
    merged = write_fragments(reader, dataset, mode="append", max_rows_per_file=MAX_FRAGMENT_ROWS)
    group = lance.LanceOperation.RewriteGroup([fragment.metadata for fragment in fragments], merged)
    change = lance.LanceOperation.Rewrite(groups=[group], rewritten_indices=[])
    return lance.LanceDataset.commit(dataset, change, read_version=dataset.version)


def stream_batches(
    dataset: lance.LanceDataset,
    columns: Sequence[str],
    fragments: Sequence[lance.fragment.LanceFragment] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Scan a dataset in bounded memory: by default, Lance reads ahead by up to 2 GB."""
    return dataset.scanner(
        columns=list(columns),
        batch_size=BATCH_ROWS,
        io_buffer_size=READ_AHEAD_BYTES,
        fragments=fragments,
    ).to_batches()


def take_rows(dataset: lance.LanceDataset, position: np.ndarray, columns: Sequence[str]) -> pa.Table:
    """Return the rows at these positions of a scan, in the given order.

    Where rows were deleted, Lance's own `take` needs up to a millisecond for each row to translate its position.
    """
    if not len(position) or not any(fragment.num_deletions for fragment in dataset.get_fragments()):
        return dataset.take(position, columns=list(columns))
    address = dataset.to_table(columns=[], with_row_address=True)[ROW_ADDRESS].take(pa.array(position))
    return take_addresses(dataset, address, columns)


def take_addresses(
    dataset: lance.LanceDataset, address: pa.Array | pa.ChunkedArray, columns: Sequence[str]
) -> pa.Table:
    """Return the rows at these addresses, in the given order."""
    if not len(address):
        return dataset.schema.empty_table().select(list(columns))
    found = dataset.to_table(columns=list(columns), filter=is_one_of(ROW_ADDRESS, address), with_row_address=True)
    return found.take(pc.index_in(address, found[ROW_ADDRESS])).select(list(columns))


def is_one_of(key: str, ids: pa.Array) -> str:
    """Return Lance's filter expression for the rows whose `key` is one of `ids`."""
    return f"{key} IN ({', '.join(map(_literal, ids.to_pylist()))})"


def _literal(value: int | str) -> str:
    """Return an id in Lance's SQL; there, the smallest integer is the negative of one that is too large, a float."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value) if value != MIN_INT64 else f"({MIN_INT64 + 1} - 1)"


def _independent_batches(rows: pa.Table) -> pa.RecordBatchReader:
    """Batches that own their buffers: Lance counts a slice with the size of the whole table that it was cut from."""

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows.num_rows, BATCH_ROWS):
            end = min(start + BATCH_ROWS, rows.num_rows)
            yield from rows.take(pa.array(np.arange(start, end))).combine_chunks().to_batches()

    return pa.RecordBatchReader.from_batches(rows.schema, batches())
