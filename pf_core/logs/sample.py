"""A bounded part of a log's files, spread evenly over them and read as a run reads whole files.

A small log is read whole. Of a larger one, text files are cut into pieces at equal distances in bytes, and Parquet
files give the first rows of row groups at equal distances. A compressed text file can only be read from its start.
A piece of text is written to a temporary file, under the header of its file, and goes through the same reader.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.files import Files
from pf_core.errors import PipelineError
from pf_core.logs.lines import COMPRESSION, MAX_LINE_BYTES, open_text
from pf_core.logs.raw_batch import RawBatch
from pf_core.logs.readers import read_file, read_row_group
from pf_core.logs.remedies import file_remedy

T = TypeVar("T")

MAX_PIECES = 256

MAX_WHOLE_FILES = 500
"""Of more files, however small, only some are opened."""

PLAIN_PER_COMPRESSED = 5
"""Bytes of a log for each byte of it compressed, roughly."""

HEADER_BYTES = 1 << 16

RAW_BYTES = 64 << 20
"""Bytes of a file whose encoding is looked at."""

BYTES_PER_PARQUET_ROW = 40
"""Bytes of a log's row as text, roughly: turns a number of bytes to read into a number of rows."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a file."""

    file: Path
    start: int = 0
    """Its first byte; of Parquet, the row group."""
    size: int | None = None
    """Its number of bytes, or of rows of Parquet; None: the whole file."""
    weight: float = 1.0
    """Rows of the log for each row of the piece."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is read of a log."""

    pieces: list[Piece]
    num_files: int
    num_bytes: int
    """Bytes of all files on disk."""
    num_read_bytes: int
    """Bytes that are read, of compressed files after decompression, roughly."""
    misses_ends: bool = False
    """Whether the ends of some files cannot be seen: compressed text, or long row groups."""

    @property
    def is_whole(self) -> bool:
        return all(piece.size is None for piece in self.pieces) and len(self.pieces) == self.num_files

    def __str__(self) -> str:
        files = "1 file" if self.num_files == 1 else f"{self.num_files:,} files"
        if self.is_whole:
            return f"all rows of {files} ({size_text(self.num_bytes)})"
        ends = "; the ends of compressed files and of long row groups cannot be seen" if self.misses_ends else ""
        pieces = "1 piece" if len(self.pieces) == 1 else f"{len(self.pieces):,} pieces"
        return (
            f"a sample: {pieces}, {size_text(self.num_read_bytes)} together, spread over {files} "
            f"({size_text(self.num_bytes)}){ends}"
        )


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as kB, MB, GB or TB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1000:.3g} kB"


def plan_sample(files: Sequence[Path], source: Files, *, max_bytes: int) -> Plan:
    """Plan to read about `max_bytes` of the files; all of them if they have no more."""
    sizes = [file.stat().st_size for file in files]
    if source.file_format == "parquet":
        return _plan_parquet(files, sizes, max_bytes // BYTES_PER_PARQUET_ROW)
    plain = [
        size * (PLAIN_PER_COMPRESSED if is_compressed(file) else 1) for file, size in zip(files, sizes, strict=True)
    ]
    if sum(plain) <= max_bytes and len(files) <= MAX_WHOLE_FILES:
        return Plan(
            pieces=[Piece(file=file) for file in files],
            num_files=len(files),
            num_bytes=sum(sizes),
            num_read_bytes=sum(plain),
        )
    pieces = _spread(files, plain, max_bytes)
    return Plan(
        pieces=pieces,
        num_files=len(files),
        num_bytes=sum(sizes),
        num_read_bytes=sum(piece.file.stat().st_size if piece.size is None else piece.size for piece in pieces),
        misses_ends=any(is_compressed(piece.file) for piece in pieces),
    )


def is_compressed(file: Path) -> bool:
    """Whether a text file is compressed, by its suffix."""
    return file.suffix in COMPRESSION


def _spread(files: Sequence[Path], sizes: Sequence[int], max_bytes: int) -> list[Piece]:
    """Return pieces at equal distances in the files, as if these were one; the last piece ends with the last file."""
    total = sum(sizes)
    length, stretch = min(max_bytes, total) // MAX_PIECES, total / MAX_PIECES
    places = [round(number * (total - length) / (MAX_PIECES - 1)) for number in range(MAX_PIECES - 1)]
    places.append(max(total - length, total - sizes[-1]))
    pieces: dict[tuple[Path, int], Piece] = {}
    number, first = 0, 0
    for place in places:
        while first + sizes[number] <= place:
            first += sizes[number]
            number += 1
        file, start = files[number], place - first if sizes[number] > length else 0
        if is_compressed(file):  # the stretches of a file are one piece at its start
            known = pieces.get((file, 0), Piece(file=file, size=0, weight=0.0))
            size = (known.size or 0) + length
            pieces[file, 0] = replace(known, size=size, weight=(known.weight * (known.size or 0) + stretch) / size)
        else:
            size = min(length, sizes[number] - start)
            is_whole = size == sizes[number]
            pieces[file, start] = Piece(file=file, start=start, size=None if is_whole else size, weight=stretch / size)
    return list(pieces.values())


def _plan_parquet(files: Sequence[Path], sizes: Sequence[int], max_rows: int) -> Plan:
    opened = evenly(files, MAX_PIECES)
    groups = [(file, group, rows) for file in opened for group, rows in enumerate(rows_of_groups(file))]
    num_rows, share = sum(rows for *_, rows in groups), len(opened) / len(files)
    if num_rows <= max_rows and share == 1 and len(files) <= MAX_WHOLE_FILES:
        pieces = [Piece(file=file) for file in files]
        return Plan(pieces=pieces, num_files=len(files), num_bytes=sum(sizes), num_read_bytes=sum(sizes))
    chosen = evenly(groups, MAX_PIECES)
    length = max(1, max_rows // len(chosen))
    weight = num_rows / share / sum(min(length, rows) for *_, rows in chosen) if num_rows else 1.0
    read_share = sum(min(length, rows) for *_, rows in chosen) / max(1, num_rows) * share
    return Plan(
        pieces=[Piece(file=file, start=group, size=min(length, rows), weight=weight) for file, group, rows in chosen],
        num_files=len(files),
        num_bytes=sum(sizes),
        num_read_bytes=round(read_share * sum(sizes)),
        misses_ends=any(rows > length for *_, rows in chosen),
    )


def rows_of_groups(file: Path) -> list[int]:
    """Return the number of rows of each row group of a Parquet file."""
    try:
        with file.open("rb") as opened:
            metadata = pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(f"{file} cannot be read as parquet: {error}", file_remedy(file, None, error)) from error
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def read_piece(
    piece: Piece, source: Files, columns: Sequence[str], *, absent_keys: Literal["refuse", "null"] = "null"
) -> Iterator[RawBatch]:
    """Yield the rows of a piece. Row numbers count from the start of the piece, and for Parquet of the file.

    A key that no row of a part of a JSON lines file has is null: others of the file may have it. `absent_keys` is for
    whole files.
    """
    if source.file_format == "parquet" and piece.size is not None:
        yield from read_row_group(piece.file, columns, group=piece.start, max_rows=piece.size)
        return
    if piece.size is None:
        yield from read_file(piece.file, source, columns, absent_keys=absent_keys)
        return
    with tempfile.NamedTemporaryFile(prefix="pf-sample-") as file:
        file.write(_text_of(piece, has_header=source.file_format == "csv" and source.columns is None))
        file.flush()
        try:
            for batch in read_file(Path(file.name), source, columns, absent_keys="null"):
                yield replace(batch, file=piece.file)
        except PipelineError as error:
            raise PipelineError(str(error).replace(file.name, str(piece.file))) from error


def raw_lines(piece: Piece) -> list[bytes]:
    """Return the lines of a piece of text as the file has them, of a large file at most RAW_BYTES."""
    return _text_of(replace(piece, size=piece.size or RAW_BYTES), has_header=False).splitlines()


def _text_of(piece: Piece, *, has_header: bool) -> bytes:
    """Return the lines that begin in a piece, whole, after the header of their file."""
    assert piece.size is not None
    codec = COMPRESSION.get(piece.file.suffix)
    try:
        with open_text(piece.file) as stream:
            if piece.start == 0:
                return _to_line_end(stream.read(piece.size), stream)
            header = _header_of(stream) if has_header else b""
            stream.seek(piece.start - 1)
            text = _to_line_end(stream.read(piece.size + 1), stream)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(f"{piece.file} cannot be read: {error}", file_remedy(piece.file, codec, error)) from error
    return header + text.partition(b"\n" if b"\n" in text else b"\r")[2]


def _header_of(stream: pa.NativeFile) -> bytes:
    """Return the first line that is not blank, with its end."""
    text = stream.read(HEADER_BYTES)
    if len(text.strip(b"\r\n").splitlines()) < 2:
        text += stream.read(MAX_LINE_BYTES)
    return next((line for line in text.splitlines(keepends=True) if line.strip(b"\r\n")), b"")


def _to_line_end(text: bytes, stream: pa.NativeFile) -> bytes:
    """Return the text with the rest of its last line; without that line if it is very long."""
    rest = stream.read(HEADER_BYTES)
    end = b"\n" if b"\n" in text + rest else b"\r"
    if text.endswith(end):
        return text
    first = rest.find(end)
    if first >= 0:
        return text + rest[: first + 1]
    return text + rest if len(rest) < HEADER_BYTES else text[: text.rfind(end) + 1]
