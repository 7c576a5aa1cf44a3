"""The feature store of a release: what every store can do, and how a value is encoded."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from pf_core.embeddings.vectors import matrix_of
from pf_core.errors import PipelineError

DAY_BYTES = 4

Item = TypeVar("Item")

EPOCH = date(1970, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """N users, in the order in which they were asked for."""

    vectors_ND: np.ndarray
    """float32; NaN for a user who is not in the store."""
    days_N: np.ndarray
    """On which the vectors were computed, in days since 1970; 0 for a user who is not in the store."""
    found_N: np.ndarray

    def computed_ds(self) -> list[str | None]:
        return [
            (EPOCH + timedelta(days=int(day))).isoformat() if is_found else None
            for day, is_found in zip(self.days_N, self.found_N, strict=True)
        ]


class UserStore(Protocol):
    """The users of one release; how they come in is each store's own matter. Reading is thread-safe."""

    def count(self) -> int: ...

    def get(self, ids: pa.Array) -> Lookup: ...

    def delete(self, ids: pa.Array) -> int:
        """Forget these users; returns how many there were."""

    def announce(self) -> None:
        """Tell those who do not read the pointer file that this release is the current one."""

    def drop(self) -> None: ...

    def close(self) -> None: ...


# Values


class Values:
    """The values of a bucket's rows; encoded when they are taken, so that a vector is copied once."""

    def __init__(self, rows: pa.Table) -> None:
        self._days = rows["computed_ds"].cast(pa.int32()).to_numpy().astype("<i4")
        self._vectors = matrix_of(rows["embedding"]).astype("<f2", copy=False)
        self.num_bytes = DAY_BYTES + self._vectors.shape[1] * self._vectors.itemsize
        """Of one value."""

    def take(self, rows: np.ndarray) -> list[bytes]:
        values_NW = np.empty((len(rows), self.num_bytes), np.uint8)
        values_NW[:, :DAY_BYTES] = self._days[rows, None].view(np.uint8)
        values_NW[:, DAY_BYTES:] = self._vectors[rows].view(np.uint8)
        return values_NW.view(f"V{self.num_bytes}")[:, 0].tolist()


def decode_values(values: list[bytes | None], embedding_dim: int) -> Lookup:
    width = DAY_BYTES + 2 * embedding_dim
    missing = bytes(width)
    joined = b"".join(missing if value is None else value for value in values)
    if len(joined) != len(values) * width:
        raise PipelineError(f"the store is damaged: a value has not the {width} bytes of {embedding_dim} dimensions")
    rows = np.frombuffer(joined, np.uint8).reshape(len(values), width)
    found = np.array([value is not None for value in values], bool)
    vectors = np.ascontiguousarray(rows[:, DAY_BYTES:]).view("<f2").astype(np.float32)
    vectors[~found] = np.nan
    days = np.ascontiguousarray(rows[:, :DAY_BYTES]).view("<i4")[:, 0]
    return Lookup(vectors_ND=vectors, days_N=days.astype(np.int32), found_N=found)


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; while one is used, a thread makes the next."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = thread.submit(next, items, None)
            yield item
