"""The lines of a text file in bounded memory: blocks of lines that a parser can take, and the others with a reason.

A line is what an editor shows as one. In CSV it ends with LF, CRLF or a lone CR; in JSON lines with LF or CRLF, because
there a lone CR is white space within a document (unless the first block of the file has no LF). Blank lines are no
rows, but they count in line numbers. A line that is not UTF-8, contains a NUL byte or is longer than MAX_LINE_BYTES is
returned as malformed, and costs no other line: memory is bounded by BLOCK_BYTES and MAX_LINE_BYTES, whatever the file
contains.

Text in another encoding becomes UTF-8 as it is read. Each of its bytes is a character, so that blocks can end anywhere.
A byte that the encoding does not define is left as it is: alone it is not valid UTF-8, and so its line is malformed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.files import Encoding
from pf_core.errors import PipelineError
from pf_core.logs.remedies import UTF16, not_valid
from pf_core.storage.files import is_remote

BLOCK_BYTES = 8 << 20

BLOCK_LINES = 1 << 18
"""Most lines of a block, malformed ones included: each of those costs some hundred bytes as Python objects."""

MAX_LINE_BYTES = 8 << 20
"""A longer line is malformed."""

MAX_TEXT_BYTES = 64 << 10
"""Bytes of a malformed line that are kept as its text."""

COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LF, CR, NUL = 10, 13, 0

MalformedRow = tuple[int, str, str]
"""Row number, reason, text."""


@dataclass(frozen=True, kw_only=True)
class LineBlock:
    """Consecutive lines of a file that are not blank and valid UTF-8, and the malformed lines among them."""

    data: bytes
    """The lines with their ends; the last line of a file may have none."""
    end: np.ndarray
    """For each line, the position in `data` after its end."""
    number: np.ndarray
    """Line number of each line, from 1."""
    malformed: list[MalformedRow] = field(default_factory=list)

    def line(self, index: int) -> bytes:
        """Return one line with its end."""
        return self.data[self.end[index - 1] if index else 0 : self.end[index]]

    def without(self, wrong: np.ndarray, reason: str) -> "LineBlock":
        """Return the block with the lines at some indices moved to the malformed ones."""
        if not len(wrong):
            return self
        start = np.concatenate([[0], self.end[:-1]])
        found = [(int(self.number[index]), reason, line_text(self.line(index))) for index in wrong]
        keep = np.ones(len(self.number), bool)
        keep[wrong] = False
        length = self.end - start
        data = np.frombuffer(self.data, np.uint8)[np.repeat(keep, length)].tobytes()
        return LineBlock(
            data=data,
            end=np.cumsum(length[keep]),
            number=self.number[keep],
            malformed=sorted([*self.malformed, *found]),
        )


def line_text(line: bytes) -> str:
    """A malformed line as text: bytes that are not UTF-8 as \\xe9, and at most MAX_TEXT_BYTES."""
    line = line.rstrip(b"\r\n")
    cut = line[:MAX_TEXT_BYTES].decode("utf-8", "backslashreplace")
    return cut if len(line) <= MAX_TEXT_BYTES else f"{cut}… ({len(line):,} bytes)"


class TextFile:
    """The lines of one file, read once: `header`, if it has one, then `blocks`."""

    def __init__(self, path: Path, *, has_header: bool, is_cr_an_end: bool, encoding: Encoding) -> None:
        self._path, self._is_cr_an_end, self._encoding = path, is_cr_an_end, encoding
        self._next_number = 1
        self._chunks = self._read_chunks()
        self._pending: tuple[bytes, bool] | None = None
        self.header = self._take_header() if has_header else None
        """The first line that is not blank, without its end; None if there is none."""

    def blocks(self) -> Iterator[LineBlock]:
        """Yield all lines after the header."""
        while (piece := self._next_piece()) is not None:
            data, is_whole = piece
            if is_whole:
                yield from self._split(data)
            else:
                yield self._too_long(data)

    def _next_piece(self) -> tuple[bytes, bool] | None:
        if self._pending is not None:
            piece, self._pending = self._pending, None
            return piece
        return next(self._chunks, None)

    def _take_header(self) -> bytes | None:
        while (piece := self._next_piece()) is not None:
            data, is_whole = piece
            start = 0
            while start < len(data):
                end = self._line_end(data, start)
                line = data[start:end]
                self._next_number += 1
                if line.strip(b"\r\n"):
                    if not is_whole:
                        raise PipelineError(f"{self._path}: the header is longer than {MAX_LINE_BYTES:,} bytes")
                    if end < len(data):
                        self._pending = data[end:], True
                    return line.rstrip(b"\r\n")
                start = end
        return None

    def _line_end(self, data: bytes, start: int) -> int:
        """Return the position after the end of the line that begins at `start`."""
        ends = [place + 1 for place in [data.find(b"\n", start)] if place >= 0]
        if self._is_cr_an_end and (place := data.find(b"\r", start)) >= 0:
            ends.append(place + 2 if data[place + 1 : place + 2] == b"\n" else place + 1)
        return min(ends, default=len(data))

    def _read_chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield (whole lines, True), as many as a block holds, and (its start, False) for a line that is too long."""
        held, is_first = b"", True
        is_skipping = is_after_cr = False
        with open_text(self._path) as stream:
            while chunk := stream.read(BLOCK_BYTES):
                if is_first:
                    chunk, is_first = self._check_start(chunk), False
                if self._encoding != "utf-8" and not chunk.isascii():
                    chunk = chunk.decode(self._encoding, "surrogateescape").encode("utf-8", "surrogateescape")
                if is_skipping:
                    chunk, is_skipping, is_after_cr = self._skip_line(chunk, is_after_cr)
                held += chunk
                end = self._last_end(held)
                if end:
                    yield held[:end], True
                    held = held[end:]
                if len(held) > MAX_LINE_BYTES + 1:  # even without a CR at its end
                    yield held[: MAX_TEXT_BYTES + 1], False
                    is_skipping, is_after_cr = True, self._is_cr_an_end and held.endswith(b"\r")
                    held = b""
        if held:
            yield held, True

    def _skip_line(self, chunk: bytes, is_after_cr: bool) -> tuple[bytes, bool, bool]:
        """Return what follows the rest of a line, whether the line still goes on, and whether a CR ended the chunk."""
        if is_after_cr:
            return chunk.removeprefix(b"\n"), False, False
        end = self._line_end(chunk, 0)
        if self._is_cr_an_end and end == len(chunk) and chunk.endswith(b"\r"):
            return b"", True, True
        if chunk[end - 1 : end] not in (b"\n", b"\r") or (chunk[end - 1 : end] == b"\r" and not self._is_cr_an_end):
            return b"", True, False
        return chunk[end:], False, False

    def _check_start(self, chunk: bytes) -> bytes:
        if chunk.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise PipelineError(f"{self._path} is UTF-16 or UTF-32 text", UTF16)
        if self._encoding != "utf-8" and chunk.startswith(BYTE_ORDER_MARK):
            raise PipelineError(
                f"{self._path} is UTF-8 text with a mark of byte order, and `encoding` in the site file says "
                f"{self._encoding}",
                "delete `encoding` if all files are UTF-8, or write all in one encoding",
            )
        if not self._is_cr_an_end and b"\n" not in chunk and b"\r" in chunk:
            self._is_cr_an_end = True  # a file of an old system: CR alone ends its lines
        return chunk.removeprefix(BYTE_ORDER_MARK)

    def _last_end(self, data: bytes) -> int:
        """Return the position after the last line end; a CR at the very end waits for a LF that may follow."""
        end = data.rfind(b"\n") + 1
        return max(end, data.rfind(b"\r", 0, len(data) - 1) + 1) if self._is_cr_an_end else end

    def _too_long(self, start: bytes) -> LineBlock:
        entry = (self._next_number, _too_long(), line_text(start))
        self._next_number += 1
        return LineBlock(data=b"", end=np.empty(0, np.int64), number=np.empty(0, np.int64), malformed=[entry])

    def _split(self, data: bytes) -> Iterator[LineBlock]:
        """Yield whole lines in blocks of at most BLOCK_LINES, with those that cannot be text among the malformed."""
        buffer = np.frombuffer(data, np.uint8)
        is_end = buffer == LF
        if self._is_cr_an_end and b"\r" in data:
            is_lone_cr = buffer == CR
            is_lone_cr[:-1] &= ~is_end[1:]
            is_end |= is_lone_cr
        end = np.flatnonzero(is_end) + 1
        if not len(end) or end[-1] != len(data):
            end = np.append(end, len(data))
        start = 0
        for first in range(0, len(end), BLOCK_LINES):
            ends = end[first : first + BLOCK_LINES]
            number = np.arange(self._next_number, self._next_number + len(ends))
            self._next_number += len(ends)
            block = LineBlock(data=data[start : ends[-1]], end=ends - start, number=number)
            yield _valid_lines(block, self._encoding)
            start = ends[-1]


def _valid_lines(block: LineBlock, encoding: Encoding) -> LineBlock:
    """Leave out blank lines, and move lines that cannot be text in the file's encoding to the malformed ones."""
    block = _without_blank(block)
    block = block.without(np.flatnonzero(_content_length(block) > MAX_LINE_BYTES), _too_long())
    if b"\0" in block.data:
        places = np.flatnonzero(np.frombuffer(block.data, np.uint8) == NUL)
        wrong = np.unique(np.searchsorted(block.end, places, side="right"))
        block = block.without(wrong, "malformed: contains a NUL byte")
    return block.without(_not_utf8(block), not_valid(encoding))


def _too_long() -> str:
    return f"malformed: longer than {MAX_LINE_BYTES:,} bytes"


def _content_length(block: LineBlock) -> np.ndarray:
    """Length of each line without its end."""
    length = np.diff(block.end, prepend=0)
    if not len(length) or length.max() <= MAX_LINE_BYTES:
        return length
    buffer = np.frombuffer(block.data, np.uint8)
    last, before = buffer[block.end - 1], buffer[np.maximum(block.end - 2, 0)]
    return length - ((last == LF) | (last == CR)) - ((last == LF) & (before == CR) & (length > 1))


def _without_blank(block: LineBlock) -> LineBlock:
    """Leave out the lines that consist of their end alone."""
    length = np.diff(block.end, prepend=0)
    if length.min() > 2:
        return block
    buffer = np.frombuffer(block.data, np.uint8)
    first = buffer[block.end - length]
    second = buffer[np.minimum(block.end - length + 1, len(buffer) - 1)]
    is_blank = ((length == 1) & ((first == LF) | (first == CR))) | ((length == 2) & (first == CR) & (second == LF))
    if not is_blank.any():
        return block
    data = buffer[np.repeat(~is_blank, length)].tobytes()
    return LineBlock(data=data, end=np.cumsum(length[~is_blank]), number=block.number[~is_blank])


def _not_utf8(block: LineBlock) -> np.ndarray:
    """Return the indices of the lines that are not valid UTF-8."""
    if block.data.isascii():
        return np.empty(0, np.int64)
    try:
        block.data.decode()
        return np.empty(0, np.int64)
    except UnicodeDecodeError:
        pass
    places = np.flatnonzero(np.frombuffer(block.data, np.uint8) > 127)
    suspicious = np.unique(np.searchsorted(block.end, places, side="right"))
    start = np.concatenate([[0], block.end[:-1]])
    wrong = []
    for index, first, last in zip(
        suspicious.tolist(), start[suspicious].tolist(), block.end[suspicious].tolist(), strict=True
    ):
        try:
            block.data[first:last].decode()
        except UnicodeDecodeError:
            wrong.append(index)
    return np.array(wrong, np.int64)


def open_text(path: Path) -> pa.NativeFile:
    """Open a text file, decompressed by its suffix."""
    compression = COMPRESSION.get(path.suffix)
    if compression is not None and path.stat().st_size == 0:
        raise PipelineError(f"{path} is empty, and so is no {compression} file: it was cut off", "restore the file")
    source = pa.PythonFile(path.open("rb"), "r") if is_remote(path) else str(path)
    return pa.input_stream(source, compression=compression)
