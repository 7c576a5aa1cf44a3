"""Readers of foreign files: CSV, JSON lines and Parquet as streams of Arrow batches with row numbers.

Text formats are read as strings, so that one bad value never makes a whole file unreadable; Parquet keeps its types.
A row that the format's parser rejects is returned as text, with its number: no row is lost, and nothing except the
format is checked. A problem of a whole file (missing, truncated, without a needed column) is a PipelineError that
names it.

Why lines are found first (`lines.py`) and only then parsed, CSV by pyarrow and JSON by DuckDB: the libraries' own
readers lose rows. Of 2,000 mutated CSV files, pyarrow's `open_csv` miscounted 157 and refused 163, DuckDB's `read_csv`
with `store_rejects` miscounted 197, this reader none; of 2,000 mutated JSON lines files DuckDB's `read_json` miscounted
4, and returned broken rows as NULLs without a number. Processor time on 3M rows: plain CSV 1.4 x pyarrow's and 0.7 x
DuckDB's, quoted CSV 1.1 x and 0.65 x, JSON lines 2 x DuckDB's (`benchmarks/bench_readers.py`).
"""

import functools
import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from pf_core.logs.lines import BYTE_ORDER_MARK, COMPRESSION, LineBlock, MalformedRow, TextFile, line_text
from pf_core.logs.parquet_columns import find_invalid_text, raw_json, with_plain_types
from pf_core.logs.remedies import (
    NOT_AN_OBJECT,
    NOT_UTF8,
    OPEN_QUOTE,
    WRONG_NUMBER_OF_FIELDS,
    column_remedy,
    file_remedy,
)
from pf_core.storage.files import is_remote, reaching

BATCH_ROWS = 1 << 20

JOINED_ROWS = 1 << 18

JOINED_BYTES = 64 << 20


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
    return [match for match in sorted(map(Path, glob.glob(pattern, recursive=True))) if _is_log(match)]


def _is_log(match: Path) -> bool:
    """Whether a name that the pattern matches is a file; one that cannot be read is an error, not left out."""
    try:
        if not match.exists():
            raise PipelineError(
                f"{match} is a link to a file that does not exist", "restore the file or remove the link"
            )
        str(match).encode()
        return match.is_file()
    except UnicodeEncodeError as error:
        raise PipelineError(f"the name of {match} is not UTF-8", "rename the file") from error
    except OSError as error:
        raise PipelineError(f"{match} cannot be read: {error.strerror}") from error


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
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise PipelineError(
            f"{path} cannot be read as {files.file_format}: {error}",
            file_remedy(path, COMPRESSION.get(path.suffix), error),
        ) from error


def join_batches(files: Iterable[Iterator[RawBatch]]) -> Iterator[list[RawBatch]]:
    """Yield lists of batches with the same columns, across files: one query for many small files is faster."""
    held: list[RawBatch] = []
    num_rows = num_bytes = 0
    for batch in itertools.chain.from_iterable(files):
        is_full = num_rows > JOINED_ROWS or num_bytes > JOINED_BYTES
        if held and (is_full or batch.rows.schema != held[0].rows.schema):
            yield held
            held, num_rows, num_bytes = [], 0, 0
        held.append(batch)
        num_rows += len(batch.row_number) + len(batch.malformed)
        num_bytes += batch.rows.nbytes + sum(len(text) for _, _, text in batch.malformed)
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
            column_remedy(present, missing),
        )
    repeated = {column for column in needed if list(present).count(column) > 1}
    if repeated:
        raise PipelineError(f"{path} has column {', '.join(map(repr, sorted(repeated)))} more than once")


def _read_csv(path: Path, files: Files, columns: Sequence[str]) -> Iterator[RawBatch]:
    """Parse blocks of lines, each line by itself: a quote that its line does not close costs that line alone."""
    is_long = len(files.delimiter.encode()) > 1
    delimiter, quote = (UNIT_SEPARATOR, None) if is_long else (files.delimiter, files.quote)
    parse: dict[str, Any] = {"delimiter": delimiter, "quote_char": quote or False}
    file = TextFile(path, has_header=files.columns is None, is_cr_an_end=True)
    names = list(files.columns or ())
    if files.columns is None:
        if file.header is None:
            return  # an empty file: not even a header
        header = file.header.decode("utf-8", "backslashreplace")
        names = header.split(files.delimiter) if is_long else _header_names(path, header, parse)
    _check_columns(path, names, columns)
    convert = pa_csv.ConvertOptions(
        column_types={name: pa.string() for name in names},
        include_columns=list(columns),
        check_utf8=False,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    for block in file.blocks():
        written = block
        if is_long:
            written = _without_separator(block)
            block = _replace_delimiter(written, files.delimiter)
        batch = _parse_csv(path, block, written, names, parse, convert)
        if batch is None and quote is not None:
            block = block.without(_open_quotes(block, delimiter, quote), OPEN_QUOTE)
            batch = _parse_csv(path, block, block, names, parse, convert)
        assert batch is not None, f"{path}: a line was not parsed by itself"
        yield batch


def _without_separator(block: LineBlock) -> LineBlock:
    """Move the lines that contain the unit separator to the malformed ones."""
    separator = UNIT_SEPARATOR.encode()
    if separator not in block.data:
        return block
    places = np.flatnonzero(np.frombuffer(block.data, np.uint8) == separator[0])
    wrong = np.unique(np.searchsorted(block.end, places, side="right"))
    return block.without(wrong, "malformed: contains the control character 0x1F")


def _replace_delimiter(block: LineBlock, delimiter: str) -> LineBlock:
    """Replace a delimiter of several bytes by the unit separator."""
    data = block.data.replace(delimiter.encode(), UNIT_SEPARATOR.encode())
    return replace(block, data=data, end=_line_ends(data, len(block.number)))


def _line_ends(data: bytes, num_lines: int) -> np.ndarray:
    """The positions after the line ends of lines that are not blank."""
    buffer = np.frombuffer(data, np.uint8)
    is_end = (buffer == ord("\n")) | (buffer == ord("\r"))
    is_end[:-1] &= ~((buffer[:-1] == ord("\r")) & (buffer[1:] == ord("\n")))
    end = np.flatnonzero(is_end) + 1
    return end if len(end) == num_lines else np.append(end, len(data))


def _header_names(path: Path, header: str, parse: dict[str, Any]) -> list[str]:
    read, options = pa_csv.ReadOptions(use_threads=False), pa_csv.ParseOptions(**parse)
    try:
        return list(pa_csv.read_csv(pa.BufferReader(header.encode() + b"\n"), read, options).column_names)
    except pa.ArrowInvalid as error:
        raise PipelineError(
            f"{path}: a quoted name in the header does not end in its line: {header[:200]}",
            "write the header as one line, or set `quote: null` if nothing is quoted",
        ) from error


def _parse_csv(
    path: Path,
    block: LineBlock,
    written: LineBlock,
    names: list[str],
    parse: dict[str, Any],
    convert: pa_csv.ConvertOptions,
) -> RawBatch | None:
    """Parse the lines of a block; None if a line was not parsed by itself, because a quoted value goes beyond its end.

    Every row ends where a line ends, so that there are as many rows as lines exactly if no quoted value contains the
    end of a line. One more line at the end of the block shows whether its last value is closed. `written` has the same
    lines as the file has them, for the text of malformed ones.
    """
    invalid: list[tuple[int, str]] = []

    def keep_invalid(row: Any) -> str:
        invalid.append(
            (row.number - 1, f"malformed: {row.actual_columns} {WRONG_NUMBER_OF_FIELDS} {row.expected_columns}")
        )
        return "skip"

    if not len(block.number):
        return _no_rows(path, convert.include_columns, block.malformed)
    # Arrow drops a byte order mark at the start of what it parses; one that a line begins with must stay.
    start = BYTE_ORDER_MARK if block.data.startswith(BYTE_ORDER_MARK) else b""
    end = b"" if block.data.endswith((b"\n", b"\r")) else b"\n"
    one_more = b"x" + parse["delimiter"].encode() * (len(names) - 1) + b"\n"
    data = b"".join([start, block.data, end, one_more])
    try:
        rows = pa_csv.read_csv(
            pa.BufferReader(data),
            read_options=pa_csv.ReadOptions(  # threads lose row numbers
                use_threads=False, block_size=len(data) + 1, column_names=names
            ),
            parse_options=pa_csv.ParseOptions(**parse, invalid_row_handler=keep_invalid, newlines_in_values=False),
            convert_options=convert,
        )
    except pa.ArrowInvalid:
        return None
    if rows.num_rows + len(invalid) != len(block.number) + 1:
        return None
    rows = rows.slice(0, rows.num_rows - 1)
    malformed, is_row = block.malformed, np.ones(len(block.number), bool)
    if invalid:
        found = [(int(block.number[index]), reason, line_text(written.line(index))) for index, reason in invalid]
        malformed = sorted([*malformed, *found])
        is_row[[index for index, _ in invalid]] = False
    return RawBatch(file=path, rows=rows, row_number=block.number[is_row], malformed=malformed)


UNIT_SEPARATOR = "\x1f"
"""Stands for a delimiter of several bytes while a line is parsed: Arrow splits at single ones."""


def _closed_line(delimiter: str, quote: str) -> str:
    """Regular expression of a line in which every quoted value ends.

    A value is quoted if it begins with a quote; a doubled quote in it stands for one; text may follow its end. In any
    other value a quote is a character like the others.
    """
    q, d = (f"\\x{{{ord(character):x}}}" for character in (quote, delimiter))
    value = f"(?:{q}(?:[^{q}]|{q}{q})*{q}(?:[^{d}{q}][^{d}]*)?|[^{q}{d}][^{d}]*|)"
    return f"^{value}(?:{d}{value})*$"


def _open_quotes(block: LineBlock, delimiter: str, quote: str) -> np.ndarray:
    """Return the indices of the lines with a quoted value that does not end in the line.

    Most lines pass a test on the neighbours of their quotes, of which there must be an even number: an odd one begins
    a value or doubles the quote before it, an even one ends a value or is doubled by the next. The others are matched
    with a regular expression.
    """
    padded = np.frombuffer(b"\n" + block.data + b"\n", np.uint8)
    is_quote = padded[1:-1] == ord(quote)
    start = np.concatenate([[0], block.end[:-1]])
    num_quotes = np.add.reduceat(is_quote, start, dtype=np.int32)
    place = np.flatnonzero(is_quote)
    number = np.arange(len(place), dtype=np.int32)
    is_odd = num_quotes & 1 == 1
    if is_odd.any():  # otherwise the number in the block has the same parity as the number in the line
        number -= np.repeat(np.cumsum(num_quotes) - num_quotes, num_quotes).astype(np.int32)
    borders = np.zeros(256, bool)
    borders[[ord(delimiter), ord(quote), ord("\n"), ord("\r")]] = True
    is_plain = np.where(number & 1 == 0, borders[padded[place]], borders[padded[place + 2]])
    unusual = np.searchsorted(block.end, place[~is_plain], side="right")
    doubtful = np.union1d(unusual, np.flatnonzero(is_odd))
    if not len(doubtful):
        return doubtful
    texts = [block.data[start[index] : block.end[index]].rstrip(b"\r\n").decode() for index in doubtful]
    closed = pc.match_substring_regex(pa.array(texts, pa.large_string()), f"(?s){_closed_line(delimiter, quote)}")
    return doubtful[~closed.to_numpy(zero_copy_only=False)]


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[RawBatch]:
    """Parse one document a line, so that a broken line costs one row; a column that no row has is an error."""
    pointers = ["/" + column.replace("~", "~0").replace("/", "~1") for column in columns]
    connection = _json_database().cursor()
    unseen, num_rows = dict(zip(columns, pointers, strict=True)), 0
    keys: list[str] | None = None
    for block in TextFile(path, has_header=False, is_cr_an_end=False).blocks():
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
        rows = _take_apart(parsed["document"].combine_chunks().filter(pa.array(good)), columns)
        unseen = {name: pointer for name, pointer in unseen.items() if rows[name].null_count == rows.num_rows}
        if unseen and rows.num_rows:
            objects = lines.filter(pa.array(good))
            unseen = {name: pointer for name, pointer in unseen.items() if not _has_key(connection, objects, pointer)}
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


def _take_apart(documents: pa.Array, columns: Sequence[str]) -> pa.Table:
    values = documents.flatten()
    return pa.table({c: values.take(pa.array(np.arange(i, len(values), len(columns)))) for i, c in enumerate(columns)})


def _read_parquet(path: Path, columns: Sequence[str], categories: Sequence[str]) -> Iterator[RawBatch]:
    opened = path.open("rb") if is_remote(path) else path
    with path.open("rb") as file:
        flat = {column.name for column in pq.read_schema(file) if pa.types.is_string(column.type)}
    with pq.ParquetFile(opened, read_dictionary=[name for name in categories if name in flat]) as file:
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
                yield _valid_rows(path, pa.Table.from_batches(held), next_row)
                next_row += num_rows
                held = []


def _valid_rows(path: Path, rows: pa.Table, first_row: int) -> RawBatch:
    """Return the rows as a batch; those with text that is not UTF-8 are malformed."""
    rows, number = with_plain_types(rows), np.arange(first_row, first_row + rows.num_rows)
    wrong = find_invalid_text(rows)
    if not len(wrong):
        return RawBatch(file=path, rows=rows, row_number=number)
    reasons = itertools.repeat(NOT_UTF8)
    malformed = list(zip(number[wrong].tolist(), reasons, raw_json(rows, wrong), strict=False))
    is_row = np.ones(len(number), bool)
    is_row[wrong] = False
    return RawBatch(file=path, rows=rows.filter(pa.array(is_row)), row_number=number[is_row], malformed=malformed)
