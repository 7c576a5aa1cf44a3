"""The feature store for one machine: LMDB, one memory-mapped file.

A key is the user's bucket and id, encoded so that bytes sort as ids do. Buckets are written in order, so every put is
an append: no page is split, and the file has its smallest size. One process writes; a thread prepares the next
transaction meanwhile. Readers take part in LMDB's locks, so a deletion is safe while they read: each of them sees the
store before it or after it.
"""

import hashlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np
import pyarrow as pa

from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.serving.values import Lookup, Values, decode_values, fixed_bytes
from pf_core.storage.cache import fetched
from pf_core.storage.files import is_remote, remove_tree, scratch_dir, upload

MAX_KEY_BYTES = 511
"""LMDB's limit for the length of a key."""

MAX_READERS = 4096
"""Number of simultaneous read transactions over all processes; LMDB's default is 126."""

COMMIT_BYTES = 8 << 20
"""Size of the values in one LMDB transaction, which are in memory together with their bucket."""

MAP_SHARE = 4
"""Size of the map over that of its content: address space, not disk; pages are not full, and deletions copy some."""

DATA = "data.mdb"
"""LMDB's name for its file."""

Item = TypeVar("Item")


# Keys


def _keys(ids: pa.Array | pa.ChunkedArray, bucket: np.ndarray) -> np.ndarray:
    """Return the key of each user: the bucket (big-endian), then the id (int64 big-endian, sign bit flipped, or UTF-8).

    An id that is too long is cut, and its BLAKE2b hash is appended. Only such keys have the full length, so none of
    them equals the key of a shorter id.
    """
    if pa.types.is_integer(ids.type):
        keys_NW = np.empty((len(ids), 10), np.uint8)
        keys_NW[:, :2] = bucket.astype(">u2")[:, None].view(np.uint8)
        flipped = ids.to_numpy().view(np.uint64) ^ np.uint64(1 << 63)
        keys_NW[:, 2:] = flipped.astype(">u8")[:, None].view(np.uint8)
        return keys_NW.view("V10")[:, 0]
    keys = np.empty(len(ids), object)
    keys[:] = [
        number.to_bytes(2, "big") + _bounded(text.encode())
        for number, text in zip(bucket.tolist(), ids.to_pylist(), strict=True)
    ]
    return keys


def _bounded(encoded: bytes) -> bytes:
    limit = MAX_KEY_BYTES - 2
    if len(encoded) < limit:
        return encoded
    return encoded[: limit - 32] + hashlib.blake2b(encoded, digest_size=32).digest()


# Environments


class _Environments:
    """The open LMDB environments of this process, shared: LMDB forbids opening a file twice in one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a garbage collection may call give_back in any line
        self._opened: dict[Path, lmdb.Environment] = {}
        self._num_holders: Counter[Path] = Counter()

    def take(self, path: Path) -> lmdb.Environment:
        with self._lock:
            self._num_holders[path] += 1  # before opening, so that no other thread closes it
            try:
                if path not in self._opened:
                    self._opened[path] = _open_environment(path)
                return self._opened[path]
            except BaseException:
                self.give_back(path)
                raise

    def give_back(self, path: Path) -> None:
        with self._lock:
            self._num_holders[path] -= 1
            if self._num_holders[path] == 0:
                del self._num_holders[path]
                environment = self._opened.pop(path, None)
                if environment is not None:
                    environment.close()


_environments = _Environments()


def _open_environment(path: Path) -> lmdb.Environment:
    if not (path / DATA).exists():
        raise FileNotFoundError(f"no store in {path}")
    if not (path / DATA).stat().st_size:  # LMDB would take it for a new store, and find nobody
        raise _cut_off(path)
    try:
        environment = lmdb.open(
            str(path),
            create=False,
            readonly=not os.access(path / DATA, os.W_OK),
            map_size=0,  # the size that it was built with, so that no process has to map it again
            max_readers=MAX_READERS,
            readahead=False,  # users are looked up at random
        )
    except lmdb.Error as error:
        raise PipelineError(
            f"the store in {path} cannot be opened ({error})",
            "check that the service may read data.mdb and write lock.mdb",
        ) from error
    num_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if (path / DATA).stat().st_size < num_bytes:  # the kernel kills whoever reads a page that is not there
        environment.close()
        raise _cut_off(path)
    environment.reader_check()  # frees the slots of readers that were killed
    return environment


def _cut_off(path: Path) -> PipelineError:
    return PipelineError(
        f"the store in {path} is damaged: {DATA} is cut off",
        "publish the day again, or return to an earlier release with: pf rollback",
    )


# The store


class LmdbStore:
    def __init__(self, path: Path, *, num_buckets: int, embedding_dim: int) -> None:
        self._path, self._num_buckets, self._embedding_dim = path, num_buckets, embedding_dim
        self._lock = threading.Lock()
        self._environment: lmdb.Environment | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def build(self, buckets: Iterable[tuple[int, pa.Table]], *, num_users: int) -> None:
        """Fill the store with (bucket, rows of the snapshot), buckets ascending, and make it durable.

        Replaces what an earlier attempt left. Memory: two buckets and COMMIT_BYTES.
        """
        remove_tree(self._path)
        if is_remote(self._path):
            with scratch_dir("store") as folder:
                self._fill(folder, buckets, num_users=num_users)
                upload(folder / DATA, self._path / DATA)
        else:
            self._path.mkdir(parents=True)
            self._fill(self._path, buckets, num_users=num_users)

    def _fill(self, folder: Path, buckets: Iterable[tuple[int, pa.Table]], *, num_users: int) -> None:
        map_size, num_list_bytes = self._map_size(num_users), 0
        environment = lmdb.open(
            str(folder),
            map_size=map_size,
            sync=False,
            metasync=False,
            meminit=False,
            mode=0o770,  # the umask decides: readers of a shared folder write lock.mdb
        )
        try:
            for bucket, keys, values in prefetched(self._encoded(buckets)):
                num_list_bytes += sum(map(len, values)) - len(values) * fixed_bytes(self._embedding_dim)
                if self._map_size(num_users) + MAP_SHARE * num_list_bytes > map_size:
                    map_size = 2 * map_size + MAP_SHARE * num_list_bytes
                    environment.set_mapsize(map_size)
                with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                    _, num_added = cursor.putmulti(zip(keys, values, strict=True), append=True)
                if num_added != len(keys):
                    raise PipelineError(f"a user has two rows in bucket {bucket}, or the buckets are not in order")
            environment.sync(True)
        except lmdb.Error as error:
            raise PipelineError(
                f"the users cannot be written to {self._path} ({error})",
                "check that the disk is not full, then re-run",
            ) from error
        finally:
            environment.close()

    def _encoded(self, buckets: Iterable[tuple[int, pa.Table]]) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
        """Yield (bucket, keys, values) of one transaction after the other, in the order of the keys."""
        for bucket, rows in prefetched(iter(buckets)):
            ids, values = rows["user_id"], Values(rows)
            keys = _keys(ids, np.full(rows.num_rows, bucket, np.uint16))
            order = np.argsort(ids.to_numpy() if pa.types.is_integer(ids.type) else keys)
            portion = np.cumsum(values.sizes[order]) // COMMIT_BYTES
            for taken in np.split(order, np.flatnonzero(np.diff(portion)) + 1):
                if len(taken):
                    yield bucket, keys.take(taken).tolist(), values.take(taken)

    def _map_size(self, num_users: int) -> int:
        """Return the size of the map for values without lists; it grows with the lists that are written."""
        return (64 << 20) + MAP_SHARE * num_users * (MAX_KEY_BYTES + fixed_bytes(self._embedding_dim) + 64)

    def _opened(self) -> lmdb.Environment:
        with self._lock:
            if self._environment is None:
                local = fetched(self._path).resolve()
                self._environment = _environments.take(local)
                self._finalizer = weakref.finalize(self, _environments.give_back, local)
                self._finalizer.atexit = False
            return self._environment

    def count(self) -> int:
        return int(self._opened().stat()["entries"])

    def get(self, ids: pa.Array) -> Lookup:
        keys = _keys(ids, bucket_of(ids, self._num_buckets))
        with self._opened().begin() as transaction:
            values = [transaction.get(key) for key in keys.tolist()]
        return decode_values(values, self._embedding_dim)

    def delete(self, ids: pa.Array) -> int:
        keys = _keys(ids, bucket_of(ids, self._num_buckets))
        try:
            with self._opened().begin(write=True) as transaction:
                num_deleted = sum(transaction.delete(key) for key in keys.tolist())
        except lmdb.Error as error:
            raise PipelineError(f"users cannot be deleted from {self._path}: {error}") from error
        if num_deleted and is_remote(self._path):  # so far, they are deleted from the local copy
            with scratch_dir("store") as folder:
                self._opened().copy(str(folder))
                upload(folder / DATA, self._path / DATA)
        return num_deleted

    def announce(self) -> None:
        pass

    def drop(self) -> None:
        self.close()
        remove_tree(self._path)

    def close(self) -> None:
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._environment = self._finalizer = None


def prefetched(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items; a thread makes the next one while the current one is used."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = thread.submit(next, items, None)
            yield item
