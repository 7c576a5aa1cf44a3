"""The feature store of a release: user id → record (vector, memory, seen pins), as services look it up.

A release builds its store once and owns it. From then on the store is read; the only change is that forgotten users
are deleted. `lmdb_store.py` is the store for one machine, `redis_store.py` the one for many. `values.py` describes the
values, which are the same in both.
"""

from typing import Protocol

import pyarrow as pa

from pf_core.serving.values import Lookup


class UserStore(Protocol):
    """The users of one release. Reading is thread-safe. Each store has its own way of being filled."""

    def count(self) -> int: ...

    def get(self, ids: pa.Array) -> Lookup: ...

    def delete(self, ids: pa.Array) -> int:
        """Delete these users; returns how many of them were in the store."""

    def announce(self) -> None:
        """Record in the store that its release is the current one, for services that do not read current.json."""

    def drop(self) -> None:
        """Remove the store with all its users."""

    def close(self) -> None: ...
