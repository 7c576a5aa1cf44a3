"""Columns of Parquet files that Arrow's kernels, DuckDB or Python cannot take as they are.

A file may have types without kernels (string_view), times that neither DuckDB nor Python's datetime can hold (the year
290,000), and text that is not UTF-8: Arrow does not check it when it reads Parquet.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_US = 1 << 53
"""Largest distance of a time from 1970 in microseconds: the year 2255. Times beyond it are set to it."""

UNITS_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def leaf_names(schema: pa.Schema) -> Iterator[str]:
    """Yield the names of the columns, and those of the fields of structs with dots: `item`, `item.id`."""

    def within(field: pa.Field, name: str) -> Iterator[str]:
        yield name
        if pa.types.is_struct(field.type):
            for index in range(field.type.num_fields):
                inner = field.type.field(index)
                yield from within(inner, f"{name}.{inner.name}")

    for field in schema:
        yield from within(field, field.name)


def with_leaves(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Take structs apart until every one of the columns is there."""
    while not set(columns) <= set(rows.column_names):
        rows = rows.flatten()
    return rows


def with_plain_types(rows: pa.Table) -> pa.Table:
    """Cast views to the types that all kernels know, and decode dictionaries of anything but text."""
    for index, field in enumerate(rows.schema):
        kind = field.type
        if pa.types.is_string_view(kind):
            kind = pa.large_string()
        elif pa.types.is_binary_view(kind):
            kind = pa.large_binary()
        elif pa.types.is_dictionary(kind) and not pa.types.is_string(kind.value_type):
            kind = kind.value_type
        if kind != field.type:
            rows = rows.set_column(index, field.name, rows[index].cast(kind))
    return rows


def find_invalid_text(rows: pa.Table) -> np.ndarray:
    """Return the positions of the rows with a text that is not valid UTF-8."""
    is_wrong = np.zeros(rows.num_rows, bool)
    for column in rows.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            is_wrong |= np.fromiter(map(_is_invalid_text, column), bool, len(column))
    return np.flatnonzero(is_wrong)


def _is_invalid_text(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return True
    except (ValueError, OverflowError, LookupError):
        return False
    return False


def within_calendar(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Set times beyond MAX_US to it, and cast float16 to float32: DuckDB can hold the result."""
    kind = column.type
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    if pa.types.is_date32(kind):
        high = MAX_US // UNITS_PER_DAY["us"]
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        high = MAX_US * UNITS_PER_DAY[kind.unit] // UNITS_PER_DAY["us"]
    elif pa.types.is_time(kind):
        high = UNITS_PER_DAY[kind.unit] - 1
    else:
        return column
    number = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    low = 0 if pa.types.is_time(kind) else -high
    for bounded, bound in ((pc.min_element_wise, high), (pc.max_element_wise, low)):
        number = bounded(number, pa.scalar(bound, number.type), skip_nulls=False)
    return number.cast(kind)


def raw_json(raw: pa.Table, positions: np.ndarray) -> list[str]:
    """Return the rows at `positions` as JSON texts, for the quarantine."""
    rows = raw.take(pa.array(positions))
    try:
        shown = rows.to_pylist()
    except (ValueError, OverflowError, LookupError):
        columns = [list(map(_shown, column)) for column in rows.columns]
        shown = [dict(zip(rows.column_names, values, strict=True)) for values in zip(*columns, strict=True)]
    return [json.dumps(row, default=str) for row in shown]


def _shown(value: pa.Scalar) -> Any:
    """Return a value for a person to read: as number where it is no date, escaped where it is no text."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        text = value.value if isinstance(value, pa.DictionaryScalar) else value
        return text.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    except (ValueError, OverflowError, LookupError):  # beyond Python's calendar, or in an unknown time zone
        return value.value
