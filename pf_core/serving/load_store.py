"""The users of a release: a day's snapshot, without those who are forgotten, copied into its store and verified there.

Redis takes a bucket from whoever has it: each is a task of the engine, so that all its machines load at once. A task
that runs again puts the same again. LMDB has one writer, who wants buckets in order: this process reads one ahead.
Memory of a process: a bucket of the snapshot, or two.

Before anybody can see the release, the store must have as many users as it should, and some of every bucket are
read back and compared with the snapshot bit for bit.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.embeddings.tables import SnapshotManifest, snapshot_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import Manifest, open_dataset
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.redis_store import RedisStore
from pf_core.serving.releases import store_of
from pf_core.serving.store import UserStore, one_ahead

STORED_COLUMNS = ("user_id", "embedding", "model_version", "computed_ds")

READ_BACK_USERS = 1000
"""At least so many are read back: the last rows of every bucket."""

REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class _BucketTask:
    site: Site
    draft: Manifest
    folder: Path
    """Of the release, while it is built."""
    bucket: int
    version: int
    """Of the snapshot's bucket."""
    num_users: int
    """Of the whole snapshot."""
    forgotten: pa.Array
    """Of this bucket."""


@dataclass(frozen=True)
class _Copied:
    """What is known of a bucket that went into the store."""

    num_read: int
    num_left_out: int
    sampled: pa.Table


class _Tally:
    """What is known of all buckets, told from time to time."""

    def __init__(self, draft: Manifest, num_users: int, progress: Callable[[str], None]) -> None:
        self._release, self._progress, self._told = draft["release"], progress, time.monotonic()
        self.num_users = num_users
        self.num_read = self.num_left_out = 0
        self.sampled: list[pa.Table] = []

    def add(self, copied: _Copied) -> None:
        self.num_read += copied.num_read
        self.num_left_out += copied.num_left_out
        self.sampled.append(copied.sampled)
        if time.monotonic() - self._told > REPORT_EVERY_S:
            self._told = time.monotonic()
            self._progress(f"release {self._release}: {self.num_read:,} of {self.num_users:,} users are in the store")


def load_users(
    site: Site, draft: Manifest, folder: Path, *, engine: Engine, progress: Callable[[str], None]
) -> dict[str, int]:
    """Fill the store of the release in `folder` and verify it; returns what was checked, for the manifest.

    Whatever an earlier attempt left in the store is replaced.
    """
    snapshot = snapshot_state(site).require(draft["ds"])
    tasks = _tasks(site, draft, folder, snapshot)
    tally = _Tally(draft, snapshot["counts"]["users"], progress)
    with contextlib.closing(store_of(site, folder, draft)) as store:
        if isinstance(store, LmdbStore):
            store.build(_in_order(tasks, tally), num_users=tally.num_users)
        else:
            store.drop()
            for copied in engine.map_buckets(_copy_bucket, tasks, progress):
                tally.add(copied)
        return _verify(draft, store, tally)


def _tasks(site: Site, draft: Manifest, folder: Path, snapshot: SnapshotManifest) -> list[_BucketTask]:
    forgotten = read_deletion_list(site)
    bucket_of_forgotten = bucket_of(forgotten, snapshot["num_buckets"])
    return [
        _BucketTask(
            site=site,
            draft=draft,
            folder=folder,
            bucket=bucket,
            version=version,
            num_users=snapshot["counts"]["users"],
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
        )
        for bucket, version in enumerate(snapshot["versions"])
    ]


def _in_order(tasks: list[_BucketTask], tally: _Tally) -> Iterator[tuple[int, pa.Table]]:
    """For one writer: a bucket is read while the one before it is written."""
    for task, (rows, copied) in zip(tasks, one_ahead(map(_take, tasks)), strict=True):
        yield task.bucket, rows
        tally.add(copied)


def _copy_bucket(task: _BucketTask) -> _Copied:
    """For a store that many write to."""
    rows, copied = _take(task)
    with contextlib.closing(store_of(task.site, task.folder, task.draft)) as store:
        assert isinstance(store, RedisStore)
        store.put(task.bucket, rows)
    return copied


def _take(task: _BucketTask) -> tuple[pa.Table, _Copied]:
    """The rows of a bucket that belong into the store."""
    dataset = open_dataset(snapshot_state(task.site).bucket_path(task.bucket), version=task.version)
    rows = dataset.to_table(columns=list(STORED_COLUMNS))
    _judge(task, rows)
    num_read = rows.num_rows
    if len(task.forgotten):
        rows = rows.filter(pc.invert(pc.is_in(rows["user_id"], task.forgotten)))
    num_sampled = min(rows.num_rows, math.ceil(READ_BACK_USERS * rows.num_rows / max(1, task.num_users)))
    last = np.arange(rows.num_rows - num_sampled, rows.num_rows)
    sampled = rows.take(pa.array(last))  # a slice would keep the whole alive
    return rows, _Copied(num_read, num_read - rows.num_rows, sampled)


def _judge(task: _BucketTask, rows: pa.Table) -> None:
    for name in STORED_COLUMNS:
        if rows[name].null_count:
            raise PipelineError(f"user_embedding_snapshot: {name} is missing in rows of bucket {task.bucket}")
    versions = set(rows["model_version"].unique().to_pylist())
    if not versions <= {task.draft["model_version"]}:
        raise PipelineError(
            f"user_embedding_snapshot {task.draft['ds']} is of model {task.draft['model_version']}, but bucket "
            f"{task.bucket} has rows of {', '.join(sorted(versions))}: build the day anew"
        )


def _verify(draft: Manifest, store: UserStore, tally: _Tally) -> dict[str, int]:
    """What was written is what should have been; what was checked, for the manifest."""
    num_stored, release = store.count(), draft["release"]
    if not num_stored + tally.num_left_out == tally.num_read == tally.num_users:
        raise PipelineError(
            f"release {release}: the snapshot has {tally.num_users:,} users, {tally.num_read:,} were read and "
            f"{tally.num_left_out:,} of them are forgotten, but {num_stored:,} are in the store. Nothing was published"
        )
    sampled = pa.concat_tables(tally.sampled)
    stored = store.get(sampled["user_id"].combine_chunks())
    days = sampled["computed_ds"].cast(pa.int32()).to_numpy()
    vectors = matrix_of(sampled["embedding"]).astype(np.float32)
    is_equal = stored.found_N & (stored.days_N == days) & (stored.vectors_ND == vectors).all(axis=1)
    if not is_equal.all():
        raise PipelineError(
            f"release {release}: {int((~is_equal).sum()):,} of {len(is_equal):,} users who were read back from the "
            f"store differ from the snapshot, such as {sampled['user_id'][int(np.argmin(is_equal))].as_py()!r}. "
            "Nothing was published"
        )
    return {
        "users_in_snapshot": tally.num_users,
        "users_in_store": num_stored,
        "forgotten_left_out": tally.num_left_out,
        "users_read_back_equal": len(is_equal),
    }
