"""Column tables: dataclasses whose fields are arrays with one row per user, session or action."""

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

Doubles = NDArray[np.float64]

Ints = NDArray[np.int64]

Bools = NDArray[np.bool_]

Table = TypeVar("Table")


def take(table: Table, rows: NDArray[Any]) -> Table:
    """Return the given rows (indices) of every column."""
    columns = {f.name: np.take(getattr(table, f.name), rows, axis=0) for f in fields(table)}  # type: ignore[arg-type]
    return type(table)(**columns)


def concat(tables: list[Table]) -> Table:
    """Return the rows of all tables, in order."""
    columns = {
        f.name: np.concatenate([getattr(table, f.name) for table in tables])
        for f in fields(tables[0])  # type: ignore[arg-type]
    }
    return type(tables[0])(**columns)


def positions_within(counts: Ints) -> Ints:
    """Return 0, 1, ... within each group of the given sizes: [2, 3] gives [0, 1, 0, 1, 2]."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
