"""JSON lines as a stream of Arrow batches: lines are found first (`lines.py`), and DuckDB parses each by itself."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.files import Encoding
from pf_core.errors import PipelineError
from pf_core.logs.lines import LineBlock, TextFile
from pf_core.logs.raw_batch import RawBatch
from pf_core.logs.remedies import NOT_AN_OBJECT, column_remedy


def read_jsonl(path: Path, columns: Sequence[str], *, encoding: Encoding, refuses_absent: bool) -> Iterator[RawBatch]:
    """Parse one document a line, so that a broken line costs one row; a column that no row has is an error.

    A column is a key of the line's object or, with dots in its name, of an object within it; a key counts first.
    """
    places = {column: _pointers(column) for column in columns}
    pointers = [pointer for found in places.values() for pointer in found]
    connection = _json_database().cursor()
    unseen, num_rows = dict(places) if refuses_absent else {}, 0
    keys: list[str] | None = None
    for block in TextFile(path, has_header=False, is_cr_an_end=False, encoding=encoding).blocks():
        lines = pa.table({"line": _line_array(block)})
        parsed = connection.sql(
            """
            SELECT is_object, json_extract_string(CASE WHEN is_object THEN line END, ?) AS document
            FROM (SELECT line, CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END AS is_object
                  FROM lines)
            """,
            params=[pointers],
        ).to_arrow_table()
        good = parsed["is_object"].to_numpy()
        rows = _take_apart(parsed["document"].combine_chunks().filter(pa.array(good)), places)
        unseen = {name: found for name, found in unseen.items() if rows[name].null_count == rows.num_rows}
        if unseen and rows.num_rows:
            objects = lines.filter(pa.array(good))
            unseen = {
                name: found
                for name, found in unseen.items()
                if not any(_has_key(connection, objects, pointer) for pointer in found)
            }
            if keys is None:
                keys = connection.sql("SELECT json_keys(line) FROM objects LIMIT 1").fetchall()[0][0]
        num_rows += rows.num_rows
        whole = block.without(np.flatnonzero(~good), NOT_AN_OBJECT)
        yield RawBatch(file=path, rows=rows, row_number=block.number[good], malformed=whole.malformed)
    if unseen and num_rows:
        raise PipelineError(
            f"no row of {path} has a key {', '.join(map(repr, unseen))}; the first row has {keys}",
            column_remedy(keys or (), list(unseen)),
        )


@functools.cache
def _json_database() -> duckdb.DuckDBPyConnection:
    """One for each process: to open one takes longer than to read a small file."""
    return duckdb.connect(config={"threads": 1})


def _has_key(connection: duckdb.DuckDBPyConnection, objects: pa.Table, pointer: str) -> bool:
    found = connection.sql("SELECT bool_or(json_exists(line, ?)) FROM objects", params=[pointer])
    return bool(found.fetchall()[0][0])


def _line_array(block: LineBlock) -> pa.Array:
    """The lines as strings, with their ends, which are white space in JSON."""
    offsets = pa.py_buffer(np.concatenate([[0], block.end]).astype(np.int64))
    return pa.LargeStringArray.from_buffers(len(block.number), offsets, pa.py_buffer(block.data))


def _pointers(column: str) -> list[str]:
    """Return the JSON pointers of a column: the key itself and, if it has dots, the key within objects."""
    escaped = column.replace("~", "~0").replace("/", "~1")
    return ["/" + escaped, "/" + escaped.replace(".", "/")] if "." in column else ["/" + escaped]


def _take_apart(documents: pa.Array, places: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return the values of each column: of its first pointer that has one."""
    columns: dict[str, pa.Array] = {}
    values, start, step = documents.flatten(), 0, sum(map(len, places.values()))
    for column, found in places.items():
        parts = [values.take(pa.array(np.arange(start + i, len(values), step))) for i in range(len(found))]
        columns[column] = parts[0] if len(parts) == 1 else pc.coalesce(*parts)
        start += len(found)
    return pa.table(columns)
