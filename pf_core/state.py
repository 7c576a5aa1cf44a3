"""State that changes a little every day and must stay readable for every day: Lance datasets, one a bucket.

A day is a JSON manifest that names the version of every bucket's dataset; it is written last, atomically, and
is the truth. Lance shares unchanged files between versions, so a day costs what changed on it. Building a day
starts from the previous day's version, whatever was built since; other days are never touched. Tags only keep
the versions that manifests name from being cleaned up.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from pf_core.atomic import exclusive, read_json, write_json
from pf_core.contracts import PipelineError
from pf_core.engine import LocalEngine

Manifest = dict[str, Any]
MERGE_BATCH_ROWS = 8192


@dataclass(frozen=True, kw_only=True)
class DailyState:
    """Where a state asset lies and how to open one of its days."""

    root: Path
    asset: str
    num_buckets: int

    def bucket_path(self, bucket: int) -> Path:
        return self.root / f"bucket-{bucket:05d}.lance"

    def manifest_path(self, ds: str) -> Path:
        return self.root / "days" / f"{ds}.json"

    def days(self) -> list[str]:
        return sorted(path.stem for path in (self.root / "days").glob("*.json"))

    def manifest(self, ds: str) -> Manifest | None:
        path = self.manifest_path(ds)
        return read_json(path) if path.exists() else None

    def require(self, ds: str) -> Manifest:
        manifest = self.manifest(ds)
        if manifest is None:
            raise PipelineError(
                f"{self.asset} has no partition {ds}; make it with: "
                f"dagster asset materialize --select {self.asset} --partition {ds} -m pf_assets.definitions"
            )
        if manifest["num_buckets"] != self.num_buckets:
            raise PipelineError(
                f"{self.asset} {ds} has {manifest['num_buckets']} buckets, the site file says {self.num_buckets}: "
                "change it back, or re-materialize raw_actions and rebuild the state"
            )
        return manifest

    def open_bucket(self, ds: str, bucket: int) -> lance.LanceDataset:
        return lance.dataset(self.bucket_path(bucket), version=self.require(ds)["versions"][bucket])

    def publish(self, ds: str, versions: list[int], manifest: Manifest) -> Manifest:
        complete = {**manifest, "ds": ds, "num_buckets": self.num_buckets, "versions": versions}
        write_json(self.manifest_path(ds), complete)
        return complete

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return exclusive(self.root, self.asset)

    def refuse_if_dropped(self, days: Sequence[str], num_days: int) -> None:
        """A day older than what is kept would vanish as soon as it is built."""
        kept = sorted({*self.days(), *days})[-num_days:]
        if days[-1] < kept[0]:
            raise PipelineError(
                f"{self.asset} {days[-1]} is older than the {num_days} days that are kept (from {kept[0]} on): "
                "raise retention_days in the site file to build it"
            )

    def retain(self, num_days: int, engine: LocalEngine, progress: Callable[[str], None]) -> None:
        """Drop all but the newest `num_days` days, and every file that no remaining day needs.

        Days in another number of buckets cannot be read any more and are dropped too.
        """
        manifests = {ds: read_json(self.manifest_path(ds)) for ds in self.days()[-num_days:]}
        kept = {ds: m["versions"] for ds, m in manifests.items() if m["num_buckets"] == self.num_buckets}
        for ds in set(self.days()) - kept.keys():
            self.manifest_path(ds).unlink()
        for path in self.root.glob("bucket-*.lance"):
            if path >= self.bucket_path(self.num_buckets):
                shutil.rmtree(path)
        tasks = [
            _Retention(str(self.bucket_path(bucket)), {ds: versions[bucket] for ds, versions in kept.items()})
            for bucket in range(self.num_buckets)
        ]
        freed = sum(engine.map_buckets(_retain_bucket, tasks))
        progress(f"{self.asset}: {len(kept)} days kept, {freed / 1e6:.1f} MB of older versions removed")


@dataclass(frozen=True)
class _Retention:
    path: str
    versions: dict[str, int]


def _retain_bucket(task: _Retention) -> int:
    dataset = lance.dataset(task.path)
    wanted = {f"ds-{ds}": version for ds, version in task.versions.items()}
    present = {name: tag["version"] for name, tag in dataset.tags.list().items()}
    for name in present.keys() - wanted.keys():
        dataset.tags.delete(name)
    for name, version in wanted.items():
        if name not in present:
            dataset.tags.create(name, version)
        elif present[name] != version:
            dataset.tags.update(name, version)
    return int(dataset.cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False).bytes_removed)


def create_bucket(path: Path, rows: pa.Table) -> lance.LanceDataset:
    """A dataset, or a new version of one, that holds just these rows; what it held before stays readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return lance.write_dataset(_independent_batches(rows), path, mode="overwrite" if path.exists() else "create")


def advance_bucket(
    path: Path, *, base_version: int, upserts: pa.Table, deleted_ids: pa.Array, key: str, compact_after: int
) -> lance.LanceDataset:
    """The dataset as of `base_version`, with rows replaced or added by `key` and others deleted, as new head."""
    dataset = lance.dataset(path, version=base_version)
    if upserts.num_rows == 0 and len(deleted_ids) == 0:
        return dataset
    if dataset.latest_version != base_version:
        dataset.restore()
        dataset = lance.dataset(path)
    if len(deleted_ids):
        dataset.delete(_is_one_of(key, deleted_ids))
        dataset = lance.dataset(path)
    if upserts.num_rows:
        dataset.merge_insert(key).when_matched_update_all().when_not_matched_insert_all().execute(
            _independent_batches(upserts)
        )
        dataset = lance.dataset(path)
    if len(dataset.get_fragments()) > compact_after:
        dataset.optimize.compact_files()
        dataset = lance.dataset(path)
    return dataset


def _is_one_of(key: str, ids: pa.Array) -> str:
    values = ids.to_pylist()
    literals = [str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'" for value in values]
    return f"{key} IN ({', '.join(literals)})"


def _independent_batches(rows: pa.Table) -> pa.RecordBatchReader:
    """Batches with buffers of their own: Lance counts a slice at the size of the whole that it was cut from."""

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows.num_rows, MERGE_BATCH_ROWS):
            end = min(start + MERGE_BATCH_ROWS, rows.num_rows)
            yield from rows.take(pa.array(np.arange(start, end))).combine_chunks().to_batches()

    return pa.RecordBatchReader.from_batches(rows.schema, batches())
