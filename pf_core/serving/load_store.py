"""Copies a day's snapshot, without the forgotten users, into the store of a release, and verifies the copy.

Redis accepts buckets in any order from many writers: each bucket is a task of the engine, so that all its machines load
at once, and a task that runs again puts the same values. LMDB has one writer, which needs buckets in order: this
process writes them, and reads the next one meanwhile. Memory of a process: one bucket of the snapshot, or two.

Before a reader can see the release, the store must have the expected number of users, and users of every bucket are
read back and compared with the snapshot bit for bit.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.embeddings.tables import SnapshotManifest
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.progress import Progress, Throttle
from pf_core.serving.lmdb_store import LmdbStore, prefetched
from pf_core.serving.redis_store import RedisLocation, RedisStore
from pf_core.serving.releases import ReleaseDraft, StoreChecks, store_of
from pf_core.serving.store import UserStore
from pf_core.serving.values import RECORD_COLUMNS, Lookup, Values

STORED_COLUMNS = (*RECORD_COLUMNS, "model_version")

READ_BACK_USERS = 1000
"""Minimum number of users that are read back: the last rows of every bucket, in proportion to its size."""


@dataclass(frozen=True)
class _BucketTask:
    """A bucket of the snapshot to be read."""

    ds: str
    model_version: str
    bucket: int
    path: Path
    """Lance dataset of the bucket."""
    version: int
    """Lance version of the bucket as of the day."""
    num_users: int
    """Number of users in the whole snapshot."""
    forgotten: pa.Array
    """Forgotten users whose ids hash to this bucket."""


@dataclass(frozen=True)
class _RedisTask:
    """A bucket to be loaded into Redis by a worker of the engine.

    `location` contains the URL of Redis with its password. Workers on other machines have neither the site file nor its
    environment, so this task has to carry it; it is the only one that contains a secret.
    """

    read: _BucketTask
    location: RedisLocation


@dataclass(frozen=True)
class _LoadedBucket:
    num_read: int
    num_left_out: int
    """Number of forgotten users among those that were read."""
    sampled: pa.Table
    """Rows to be read back."""


class _LoadedUsers:
    """Sums over the buckets that are loaded, with a progress message from time to time."""

    def __init__(self, release: str, num_users: int, progress: Progress) -> None:
        self._release, self._progress = release, Throttle(progress)
        self.num_users = num_users
        self.num_read = self.num_left_out = 0
        self.sampled: list[pa.Table] = []

    def add(self, loaded: _LoadedBucket) -> None:
        self.num_read += loaded.num_read
        self.num_left_out += loaded.num_left_out
        self.sampled.append(loaded.sampled)
        self._progress(f"release {self._release}: {self.num_read:,} of {self.num_users:,} users are in the store")


def load_users(
    site: Site,
    draft: ReleaseDraft,
    snapshot: StateDay[SnapshotManifest],
    folder: Path,
    *,
    engine: Engine,
    progress: Progress,
) -> StoreChecks:
    """Fill the store of the release in `folder` and verify it. Replaces what an earlier attempt left in the store."""
    tasks = _bucket_tasks(site, draft, snapshot)
    users = _LoadedUsers(draft["release"], tasks[0].num_users, progress)
    with contextlib.closing(store_of(site, folder, draft)) as store:
        if isinstance(store, LmdbStore):
            store.build(_in_order(tasks, users), num_users=users.num_users)
        else:
            assert isinstance(store, RedisStore)
            store.drop()
            loading = [_RedisTask(task, store.location) for task in tasks]
            for loaded in engine.map_buckets(_load_into_redis, loading, progress):
                users.add(loaded)
        return _verify(draft, store, users)


def _bucket_tasks(site: Site, draft: ReleaseDraft, opened: StateDay[SnapshotManifest]) -> list[_BucketTask]:
    state, snapshot, forgotten = opened.state, opened.manifest, read_deletion_list(site)
    bucket_of_forgotten = bucket_of(forgotten, snapshot["num_buckets"])
    return [
        _BucketTask(
            ds=draft["ds"],
            model_version=draft["model_version"],
            bucket=bucket,
            path=state.bucket_path(bucket),
            version=version,
            num_users=snapshot["counts"]["users"],
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
        )
        for bucket, version in enumerate(snapshot["versions"])
    ]


def _in_order(tasks: list[_BucketTask], users: _LoadedUsers) -> Iterator[tuple[int, pa.Table]]:
    """Yield (bucket, rows) for a single writer; a bucket is read while the one before it is written."""
    for task, (rows, loaded) in zip(tasks, prefetched(map(_read_bucket, tasks)), strict=True):
        yield task.bucket, rows
        users.add(loaded)


def _load_into_redis(task: _RedisTask) -> _LoadedBucket:
    rows, loaded = _read_bucket(task.read)
    with contextlib.closing(RedisStore(task.location)) as store:
        store.put(task.read.bucket, rows)
    return loaded


def _read_bucket(task: _BucketTask) -> tuple[pa.Table, _LoadedBucket]:
    """Return the rows of a bucket that belong in the store."""
    rows = open_dataset(task.path, version=task.version).to_table(columns=list(STORED_COLUMNS))
    _validate(task, rows)
    num_read = rows.num_rows
    if len(task.forgotten):
        rows = rows.filter(pc.invert(pc.is_in(rows["user_id"], task.forgotten)))
    num_sampled = min(rows.num_rows, math.ceil(READ_BACK_USERS * rows.num_rows / max(1, task.num_users)))
    last = np.arange(rows.num_rows - num_sampled, rows.num_rows)
    sampled = rows.take(pa.array(last))  # a copy: a slice would keep the whole bucket in memory
    return rows, _LoadedBucket(num_read, num_read - rows.num_rows, sampled)


def _validate(task: _BucketTask, rows: pa.Table) -> None:
    for name in STORED_COLUMNS:
        if rows[name].null_count:
            raise PipelineError(f"user_embedding_snapshot: {name} is missing in rows of bucket {task.bucket}")
    versions = set(rows["model_version"].unique().to_pylist())
    if not versions <= {task.model_version}:
        raise PipelineError(
            f"user_embedding_snapshot {task.ds} is of model {task.model_version}, but bucket {task.bucket} has rows of "
            f"{', '.join(sorted(versions))}",
            f"rebuild the day: {materialize_command('user_embedding_snapshot', task.ds)}",
        )


def _verify(draft: ReleaseDraft, store: UserStore, users: _LoadedUsers) -> StoreChecks:
    """Compare the store with the snapshot; returns what was checked, for the manifest."""
    num_stored, release = store.count(), draft["release"]
    if not num_stored + users.num_left_out == users.num_read == users.num_users:
        raise PipelineError(
            f"release {release}: the snapshot has {users.num_users:,} users, {users.num_read:,} were read and "
            f"{users.num_left_out:,} of them are forgotten, but {num_stored:,} are in the store; nothing was published"
        )
    sampled = pa.concat_tables(users.sampled)
    is_equal = _is_equal(store.get(sampled["user_id"].combine_chunks()), sampled)
    if not is_equal.all():
        raise PipelineError(
            f"release {release}: {int((~is_equal).sum()):,} of {len(is_equal):,} users read back from the store differ "
            f"from the snapshot, such as {sampled['user_id'][int(np.argmin(is_equal))].as_py()!r}; "
            "nothing was published"
        )
    return {
        "users_in_snapshot": users.num_users,
        "users_in_store": num_stored,
        "forgotten_left_out": users.num_left_out,
        "users_read_back_equal": len(is_equal),
    }


def _is_equal(stored: Lookup, rows: pa.Table) -> np.ndarray:
    """Return which records are stored as the snapshot has them: the bytes, and the vector and day that they encode."""
    days = rows["computed_ds"].cast(pa.int32()).to_numpy()
    vectors = matrix_of(rows["embedding"]).astype(np.float32)
    is_equal = stored.found_N & (stored.days_N == days) & (stored.vectors_ND == vectors).all(axis=1)
    encoded = Values(rows).take(np.arange(len(rows)))
    return is_equal & np.array([value == other for value, other in zip(stored.values, encoded, strict=True)], bool)
