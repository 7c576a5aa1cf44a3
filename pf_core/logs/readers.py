"""Foreign files as streams of Arrow batches with row numbers, whatever their format.

Text formats come as strings, so that one bad value never costs a file; Parquet comes with its own types. A row
that the format's parser cannot take is handed on as text, with its number: nothing is lost here, and nothing
is judged except the format itself. What is wrong with a whole file (missing, truncated, without a needed
column) is a PipelineError that names it.
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
import pyarrow.csv

from pf_core.config.source import DAY, Files
from pf_core.errors import PipelineError
from pf_core.storage.files import is_remote, reaching

BLOCK_BYTES = 8 << 20

BATCH_ROWS = 1 << 20

JOINED_ROWS = 1 << 18

MARK = "\ufffd"

MalformedRow = tuple[int, str, str]  # row number, reason, text


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Consecutive rows of one file. `row_number` counts from 1; a CSV's header is row 1."""

    file: Path
    rows: pa.Table
    row_number: np.ndarray
    malformed: list[MalformedRow] = field(default_factory=list)


def find_files(files: Files, root: Path, ds: str | None = None) -> list[Path]:
    """The files of a day (dated) or all files (undated), sorted by name; an empty list if there are none."""
    path = files.path.replace(DAY, ds) if ds is not None else files.path
    if is_remote(root):
        with reaching(root):
            return sorted(match for match in root.glob(path) if match.is_file())
    pattern = str(Path(glob.escape(str(root))) / path)
    return sorted(Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file())


def read_file(path: Path, files: Files, columns: Sequence[str], categories: Sequence[str] = ()) -> Iterator[RawBatch]:
    """All rows of one file, with the named columns, in order; at least one batch, if an empty one.

    `categories` are columns of few values, which Parquet hands over as codes, without spelling them out.
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
    """Batches of the same columns, joined across files: a query for each of many small files would cost more."""
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
            f"{path} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present))}. "
            "Mend the column names in the site file"
        )
    repeated = {column for column in needed if list(present).count(column) > 1}
    if repeated:
        raise PipelineError(f"{path} has column {', '.join(map(repr, sorted(repeated)))} more than once")


def _read_csv(path: Path, files: Files, columns: Sequence[str]) -> Iterator[RawBatch]:
    parse: dict[str, Any] = {"delimiter": files.delimiter, "quote_char": files.quote or False}
    first_block = _TextStream(path).read(1 << 16)
    if not first_block.strip():
        return  # an empty file: not even a header
    header = pa.csv.read_csv(
        pa.BufferReader(first_block.split(b"\n", 1)[0] + b"\n"), parse_options=pa.csv.ParseOptions(**parse)
    )
    _check_columns(path, header.column_names, columns)
    if b"\n" not in first_block.rstrip(b"\r\n"):
        return  # a header alone

    invalid: list[MalformedRow] = []

    def keep_invalid(row: Any) -> str:
        reason = f"malformed: {row.actual_columns} fields instead of {row.expected_columns}"
        invalid.append((row.number, reason, row.text))
        return "skip"

    stream = _TextStream(path)
    reader = pa.csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),  # threads lose row numbers
        parse_options=pa.csv.ParseOptions(
            **parse, invalid_row_handler=keep_invalid, ignore_empty_lines=False, newlines_in_values=False
        ),
        convert_options=pa.csv.ConvertOptions(
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
            f"{path} has a quoted value that runs over the end of its line (an unclosed quote?). Mend the file, or "
            "set `quote: null` if the log does not quote"
        )


def _mark(error: UnicodeError) -> tuple[str, int]:
    """A byte that is not UTF-8, as the replacement character and its value: 0xE9 becomes �\\xe9."""
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
    """A text file's bytes, decompressed; counts its lines, and marks bytes that are not UTF-8."""

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
            if text or not data:  # half a character alone would look like the end of the file
                self.was_marked |= MARK in text
                return text.encode()

    @property
    def num_lines(self) -> int:
        return self._num_ends + self._open_line


def _number_rows(
    next_row: int, num_rows: int, invalid: list[MalformedRow]
) -> tuple[np.ndarray, list[MalformedRow], int]:
    """Numbers of a batch's rows, given the rows that the parser skipped; takes the skipped ones before its end."""
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
    """Move rows with bytes that were not UTF-8 to the malformed ones."""
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
    """Lines, parsed one document at a time, so that a broken line stays one broken line."""
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
            if lines["line"][index].is_valid  # a blank line is no row
        ]
        yield RawBatch(
            file=path,
            rows=_take_apart(documents.filter(pa.array(good)), columns),
            row_number=batch.row_number[good],
            malformed=sorted([*batch.malformed, *malformed]),
        )


def _take_apart(documents: pa.Array, columns: Sequence[str]) -> pa.Table:
    values = documents.flatten()
    return pa.table({c: values.take(pa.array(np.arange(i, len(values), len(columns)))) for i, c in enumerate(columns)})


def _read_lines(path: Path) -> Iterator[RawBatch]:
    if not _TextStream(path).read(1):
        return
    invalid: list[MalformedRow] = []

    def keep_invalid(row: Any) -> str:
        invalid.append((row.number, "malformed: not a JSON object", row.text))
        return "skip"

    stream = _TextStream(path)
    reader = pa.csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=["line"]),
        parse_options=pa.csv.ParseOptions(
            delimiter="\x01", quote_char=False, ignore_empty_lines=False, invalid_row_handler=keep_invalid
        ),
        convert_options=pa.csv.ConvertOptions(
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
    with pa.parquet.ParquetFile(opened, read_dictionary=list(categories)) as file:
        _check_columns(path, file.schema_arrow.names, columns)
        next_row = 1
        held: list[pa.RecordBatch] = []
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns))
        for batch in itertools.chain(batches, [None]):
            if batch is not None:
                held.append(batch)
            num_rows = sum(part.num_rows for part in held)
            if held and (batch is None or num_rows >= BATCH_ROWS // 2):  # a batch ends with its row group: too small
                rows = pa.Table.from_batches(held)
                yield RawBatch(file=path, rows=rows, row_number=np.arange(next_row, next_row + num_rows))
                next_row += num_rows
                held = []
