"""Readers of foreign files: CSV, JSON lines and Parquet as streams of Arrow batches with row numbers.

Text formats are read as strings, so that one bad value never makes a whole file unreadable; Parquet keeps its types.
A row that the format's parser rejects is returned as text, with its number: no row is lost, and nothing except the
format is checked. A problem of a whole file (missing, truncated, without a needed column) is a PipelineError that
names it.
"""

import codecs
import glob
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from pf_core.config.source import DAY, Files
from pf_core.errors import PipelineError
from pf_core.storage.files import is_remote, reaching

BLOCK_BYTES = 8 << 20

BATCH_ROWS = 1 << 20

JOINED_ROWS = 1 << 18

MARK = "\ufffd"
"""Replacement character: precedes bytes that are not UTF-8."""

MalformedRow = tuple[int, str, str]  # row number, reason, text


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Consecutive rows of one file. Row numbers count from 1; a CSV's header is row 1."""

    file: Path
    rows: pa.Table
    row_number: np.ndarray
    malformed: list[MalformedRow] = field(default_factory=list)


def find_files(files: Files, root: Path, ds: str | None = None) -> list[Path]:
    """Return the files of a day (dated) or all files (undated), sorted by name; an empty list if there are none."""
    path = files.path.replace(DAY, ds) if ds is not None else files.path
    if is_remote(root):
        with reaching(root):
            return sorted(match for match in root.glob(path) if match.is_file())
    pattern = str(Path(glob.escape(str(root))) / path)
    return sorted(Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file())


def read_file(path: Path, files: Files, columns: Sequence[str], categories: Sequence[str] = ()) -> Iterator[RawBatch]:
    """Yield all rows of one file in order, with the named columns; at least one batch, which may be empty.

    `categories` are columns with few distinct values; from Parquet they are read as dictionary arrays.
    """
    try:
        match files.file_format:
            case "csv":
                batches = _read_csv(path, files, columns)
            case "jsonl":
                batches = _read_jsonl(path, columns)
            case _:
                batches = _read_parquet(path, columns, categories)
        is_empty = True
        for batch in batches:
            yield batch
            is_empty = False
        if is_empty:
            yield _no_rows(path, columns, [])
    except (pa.ArrowInvalid, OSError, EOFError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path} cannot be read as {files.file_format}: {error}") from error


def join_batches(files: Iterable[Iterator[RawBatch]]) -> Iterator[list[RawBatch]]:
    """Yield lists of batches with the same columns, across files: one query for many small files is faster."""
    held: list[RawBatch] = []
    for batch in itertools.chain.from_iterable(files):
        if held and (batch.rows.schema != held[0].rows.schema or sum(len(b.row_number) for b in held) > JOINED_ROWS):
            yield held
            held = []
        held.append(batch)
    if held:
        yield held


def _no_rows(path: Path, columns: Sequence[str], malformed: list[MalformedRow]) -> RawBatch:
    rows = pa.table({column: pa.array([], pa.string()) for column in columns})
    return RawBatch(file=path, rows=rows, row_number=np.empty(0, np.int64), malformed=malformed)


def _check_columns(path: Path, present: Sequence[str], needed: Sequence[str]) -> None:
    missing = [column for column in needed if column not in present]
    if missing:
        raise PipelineError(
            f"{path} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present))}",
            "fix the column names in the site file",
        )
    repeated = {column for column in needed if list(present).count(column) > 1}
    if repeated:
        raise PipelineError(f"{path} has column {', '.join(map(repr, sorted(repeated)))} more than once")


def _read_csv(path: Path, files: Files, columns: Sequence[str]) -> Iterator[RawBatch]:
    parse: dict[str, Any] = {"delimiter": files.delimiter, "quote_char": files.quote or False}
    first_block = _TextStream(path).read(1 << 16)
    if not first_block.strip():
        return  # an empty file: not even a header
    header = pa_csv.read_csv(
        pa.BufferReader(first_block.split(b"\n", 1)[0] + b"\n"), parse_options=pa_csv.ParseOptions(**parse)
    )
    _check_columns(path, header.column_names, columns)
    if b"\n" not in first_block.rstrip(b"\r\n"):
        return  # only a header

    invalid: list[MalformedRow] = []

    def keep_invalid(row: Any) -> str:
        reason = f"malformed: {row.actual_columns} fields instead of {row.expected_columns}"
        invalid.append((row.number, reason, row.text))
        return "skip"

    stream = _TextStream(path)
    reader = pa_csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),  # threads lose row numbers
        parse_options=pa_csv.ParseOptions(
            **parse, invalid_row_handler=keep_invalid, ignore_empty_lines=False, newlines_in_values=False
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types={name: pa.string() for name in header.column_names},
            include_columns=list(columns),
            check_utf8=False,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    )
    next_row = 2
    for batch in reader:
        row_number, malformed, next_row = _number_rows(next_row, batch.num_rows, invalid)
        yield _valid_text(path, pa.table(batch), row_number, malformed, stream)
    if invalid:
        yield _no_rows(path, columns, list(invalid))
    if next_row - 1 + len(invalid) != stream.num_lines:
        raise PipelineError(
            f"{path} has a quoted value that runs over the end of its line (an unclosed quote?)",
            "fix the file, or set `quote: null` if the log does not quote",
        )


def _mark(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: replace a byte that is not UTF-8 by MARK and its value; 0xE9 becomes �\\xe9."""
    assert isinstance(error, UnicodeDecodeError)
    wrong = error.object[error.start : error.end]
    return MARK + "".join(f"\\x{byte:02x}" for byte in wrong), error.end


codecs.register_error("pf_core.mark", _mark)


def _open_text(path: Path) -> pa.NativeFile:
    if not is_remote(path):
        return pa.input_stream(str(path), compression="detect")
    compression = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(path.suffix)
    return pa.input_stream(pa.PythonFile(path.open("rb"), "r"), compression=compression)


class _TextStream(io.RawIOBase):
    """Decompressed bytes of a text file; counts the lines, and marks bytes that are not UTF-8."""

    def __init__(self, path: Path) -> None:
        self._stream = _open_text(path)
        self._decoder = codecs.getincrementaldecoder("utf-8")("pf_core.mark")
        self._num_ends, self._open_line = 0, False
        self.was_marked = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while True:
            data = self._stream.read(size)
            if data:
                self._num_ends += data.count(b"\n")
                self._open_line = not data.endswith(b"\n")
            if data.isascii() and not self._decoder.getstate()[0]:
                return data
            text = self._decoder.decode(data, final=not data)
            if text or not data:  # part of a character: an empty result would look like the end of the file
                self.was_marked |= MARK in text
                return text.encode()

    @property
    def num_lines(self) -> int:
        return self._num_ends + self._open_line


def _number_rows(
    next_row: int, num_rows: int, invalid: list[MalformedRow]
) -> tuple[np.ndarray, list[MalformedRow], int]:
    """Return the row numbers of a batch, the skipped rows among them, and the number of the next row.

    `invalid` lists rows that the parser skipped; those that belong to this batch are removed from it.
    """
    skipped = []
    end = next_row + num_rows
    while invalid and invalid[0][0] < end:
        skipped.append(invalid.pop(0))
        end += 1
    numbers = np.arange(next_row, end)
    return np.setdiff1d(numbers, [number for number, _, _ in skipped], assume_unique=True), skipped, end


def _valid_text(
    path: Path, rows: pa.Table, row_number: np.ndarray, malformed: list[MalformedRow], stream: _TextStream
) -> RawBatch:
    """Return a batch in which rows with bytes that are not UTF-8 are malformed."""
    if stream.was_marked:
        is_bad = np.zeros(rows.num_rows, bool)
        for name in rows.column_names:
            is_bad |= pc.match_substring(rows[name], MARK).fill_null(False).to_numpy()
        for index in np.flatnonzero(is_bad):
            text = " | ".join(str(value).replace(MARK, "") for value in rows.slice(index, 1).to_pylist()[0].values())
            malformed = [*malformed, (int(row_number[index]), "malformed: not valid UTF-8", text)]
        rows, row_number = rows.filter(pa.array(~is_bad)), row_number[~is_bad]
    return RawBatch(file=path, rows=rows, row_number=row_number, malformed=malformed)


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[RawBatch]:
    """Read JSON lines; each line is parsed by itself, so that a broken line affects no other line."""
    paths = ["$." + json.dumps(column) for column in columns]
    connection = duckdb.connect(config={"threads": 1})
    for batch in _read_lines(path):
        lines = batch.rows
        parsed = connection.sql(
            """
            SELECT is_object, json_extract_string(CASE WHEN is_object THEN line END, ?) AS document
            FROM (SELECT line, CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END AS is_object
                  FROM lines)
            """,
            params=[paths],
        ).to_arrow_table()
        good = parsed["is_object"].to_numpy()
        documents = parsed["document"].combine_chunks()
        malformed = [
            (int(batch.row_number[index]), "malformed: not a JSON object", lines["line"][index].as_py())
            for index in np.flatnonzero(~good)
            if lines["line"][index].is_valid  # a blank line is not a row
        ]
        yield RawBatch(
            file=path,
            rows=_to_columns(documents.filter(pa.array(good)), columns),
            row_number=batch.row_number[good],
            malformed=sorted([*batch.malformed, *malformed]),
        )


def _to_columns(documents: pa.Array, columns: Sequence[str]) -> pa.Table:
    """Convert lists with one value for each column to a table."""
    values = documents.flatten()
    return pa.table({c: values.take(pa.array(np.arange(i, len(values), len(columns)))) for i, c in enumerate(columns)})


def _read_lines(path: Path) -> Iterator[RawBatch]:
    """Read the lines of a text file as one column, `line`."""
    if not _TextStream(path).read(1):
        return
    invalid: list[MalformedRow] = []

    def keep_invalid(row: Any) -> str:
        invalid.append((row.number, "malformed: not a JSON object", row.text))
        return "skip"

    stream = _TextStream(path)
    reader = pa_csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=["line"]),
        parse_options=pa_csv.ParseOptions(
            delimiter="\x01", quote_char=False, ignore_empty_lines=False, invalid_row_handler=keep_invalid
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types={"line": pa.string()}, check_utf8=False, null_values=[""], strings_can_be_null=True
        ),
    )
    next_row = 1
    for batch in reader:
        row_number, malformed, next_row = _number_rows(next_row, batch.num_rows, invalid)
        yield _valid_text(path, pa.table(batch), row_number, malformed, stream)
    if invalid:
        yield _no_rows(path, ["line"], list(invalid))


def _read_parquet(path: Path, columns: Sequence[str], categories: Sequence[str]) -> Iterator[RawBatch]:
    opened = path.open("rb") if is_remote(path) else path
    with pq.ParquetFile(opened, read_dictionary=list(categories)) as file:
        _check_columns(path, file.schema_arrow.names, columns)
        next_row = 1
        held: list[pa.RecordBatch] = []
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns))
        for batch in itertools.chain(batches, [None]):
            if batch is not None:
                held.append(batch)
            num_rows = sum(part.num_rows for part in held)
            if held and (
                batch is None or num_rows >= BATCH_ROWS // 2
            ):  # batches end with row groups, which may be small
                rows = pa.Table.from_batches(held)
                yield RawBatch(file=path, rows=rows, row_number=np.arange(next_row, next_row + num_rows))
                next_row += num_rows
                held = []
