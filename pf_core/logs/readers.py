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

import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.files import DAY, Files
from pf_core.errors import PipelineError
from pf_core.logs.csv_reader import read_csv
from pf_core.logs.jsonl_reader import read_jsonl
from pf_core.logs.lines import COMPRESSION
from pf_core.logs.parquet_columns import find_invalid_text, leaf_names, raw_json, with_leaves, with_plain_types
from pf_core.logs.raw_batch import RawBatch, check_columns, no_rows
from pf_core.logs.remedies import NOT_UTF8, file_remedy
from pf_core.storage.files import is_remote, reaching

BATCH_ROWS = 1 << 20

JOINED_ROWS = 1 << 18

JOINED_BYTES = 64 << 20


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
        if not match.is_file() and not match.is_dir():
            raise PipelineError(f"{match} is no file but a pipe, a socket or a device", "remove it, or change the path")
        return match.is_file()
    except UnicodeEncodeError as error:
        raise PipelineError(f"the name of {match} is not UTF-8", "rename the file") from error
    except OSError as error:
        raise PipelineError(f"{match} cannot be read: {error.strerror}") from error


def read_file(
    path: Path,
    files: Files,
    columns: Sequence[str],
    categories: Sequence[str] = (),
    *,
    absent_keys: Literal["refuse", "null"] = "refuse",
) -> Iterator[RawBatch]:
    """Yield all rows of one file in order, with the named columns; at least one batch, which may be empty.

    `categories` are columns with few distinct values; from Parquet they are read as dictionary arrays. A key that no
    row of a JSON lines file has is refused, or null in every row.
    """
    try:
        match files.file_format:
            case "csv":
                batches = read_csv(path, files, columns)
            case "jsonl":
                batches = read_jsonl(path, columns, encoding=files.encoding, refuses_absent=absent_keys == "refuse")
            case _:
                batches = _read_parquet(path, columns, categories)
        is_empty = True
        for batch in batches:
            yield batch
            is_empty = False
        if is_empty:
            yield no_rows(path, columns, [])
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


def _read_parquet(path: Path, columns: Sequence[str], categories: Sequence[str]) -> Iterator[RawBatch]:
    opened = path.open("rb") if is_remote(path) else path
    with path.open("rb") as file:
        flat = {column.name for column in pq.read_schema(file) if pa.types.is_string(column.type)}
    with pq.ParquetFile(opened, read_dictionary=[name for name in categories if name in flat]) as file:
        check_columns(path, list(leaf_names(file.schema_arrow)), columns)
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
                rows = with_plain_types(with_leaves(pa.Table.from_batches(held), columns))
                yield _valid_rows(path, rows, next_row)
                next_row += num_rows
                held = []


def read_row_group(path: Path, columns: Sequence[str], *, group: int, max_rows: int) -> Iterator[RawBatch]:
    """Yield the first rows of a row group of a Parquet file."""
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            check_columns(path, list(leaf_names(file.schema_arrow)), columns)
            first = 1 + sum(file.metadata.row_group(number).num_rows for number in range(group))
            num_left = max_rows
            for batch in file.iter_batches(
                batch_size=min(BATCH_ROWS // 8, max_rows), row_groups=[group], columns=list(columns)
            ):
                rows = pa.Table.from_batches([batch]).slice(0, num_left)
                yield _valid_rows(path, with_plain_types(with_leaves(rows, columns)), first + max_rows - num_left)
                num_left -= rows.num_rows
                if num_left == 0:
                    return
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(f"{path} cannot be read as parquet: {error}", file_remedy(path, None, error)) from error


def _valid_rows(path: Path, rows: pa.Table, first_row: int) -> RawBatch:
    """Return the rows as a batch; those with text that is not UTF-8 are malformed."""
    number = np.arange(first_row, first_row + rows.num_rows)
    wrong = find_invalid_text(rows)
    if not len(wrong):
        return RawBatch(file=path, rows=rows, row_number=number)
    reasons = itertools.repeat(NOT_UTF8)
    malformed = list(zip(number[wrong].tolist(), reasons, raw_json(rows, wrong), strict=False))
    is_row = np.ones(len(number), bool)
    is_row[wrong] = False
    return RawBatch(file=path, rows=rows.filter(pa.array(is_row)), row_number=number[is_row], malformed=malformed)
