"""The feature store of a release: user id → (embedding, the day on which it was computed), as services look it up.

A release builds its store once and owns it. From then on the store is read; the only change is that forgotten users
are deleted. `lmdb_store.py` is the store for one machine, `redis_store.py` the one for many. The values in both are the
day (little-endian int32, days since 1970), then the embedding's float16 bytes, equal to the snapshot's bit for bit.
"""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Protocol

import numpy as np
import pyarrow as pa

from pf_core.embeddings.vectors import matrix_of
from pf_core.errors import PipelineError

DAY_BYTES = 4

EPOCH = date(1970, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """The values of N users, in the order of the ids that were looked up."""

    vectors_ND: np.ndarray
    """Embeddings, float32; NaN for a user who is not in the store."""
    days_N: np.ndarray
    """Days on which the vectors were computed, in days since 1970; 0 for a user who is not in the store."""
    found_N: np.ndarray
    """Whether each user is in the store."""

    def computed_ds(self) -> list[str | None]:
        return [
            (EPOCH + timedelta(days=int(day))).isoformat() if is_found else None
            for day, is_found in zip(self.days_N, self.found_N, strict=True)
        ]


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


class Values:
    """The encoded values of a bucket's rows. They are encoded as they are taken, so that a vector is copied once."""

    def __init__(self, rows: pa.Table) -> None:
        self._days = rows["computed_ds"].cast(pa.int32()).to_numpy().astype("<i4")
        self._vectors = matrix_of(rows["embedding"]).astype("<f2", copy=False)
        self.num_bytes = DAY_BYTES + self._vectors.shape[1] * self._vectors.itemsize
        """Length of one value."""

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
        raise PipelineError(
            f"the store is damaged: a value does not have the {width} bytes of {embedding_dim} dimensions"
        )
    rows = np.frombuffer(joined, np.uint8).reshape(len(values), width)
    found = np.array([value is not None for value in values], bool)
    vectors = np.ascontiguousarray(rows[:, DAY_BYTES:]).view("<f2").astype(np.float32)
    vectors[~found] = np.nan
    days = np.ascontiguousarray(rows[:, :DAY_BYTES]).view("<i4")[:, 0]
    return Lookup(vectors_ND=vectors, days_N=days.astype(np.int32), found_N=found)
