"""CSV as a stream of Arrow batches: lines are found first (`lines.py`), and pyarrow parses each by itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from pf_core.config.files import Files
from pf_core.errors import PipelineError
from pf_core.logs.lines import BYTE_ORDER_MARK, LineBlock, TextFile, line_text
from pf_core.logs.raw_batch import RawBatch, check_columns, no_rows
from pf_core.logs.remedies import OPEN_QUOTE, WRONG_NUMBER_OF_FIELDS

UNIT_SEPARATOR = "\x1f"
"""Stands for a delimiter of several bytes while a line is parsed: Arrow splits at single ones."""


def read_csv(path: Path, files: Files, columns: Sequence[str]) -> Iterator[RawBatch]:
    """Parse blocks of lines, each line by itself: a quote that its line does not close costs that line alone."""
    is_long = len(files.delimiter.encode()) > 1
    delimiter, quote = (UNIT_SEPARATOR, None) if is_long else (files.delimiter, files.quote)
    parse: dict[str, Any] = {"delimiter": delimiter, "quote_char": quote or False}
    file = TextFile(path, has_header=files.columns is None, is_cr_an_end=True, encoding=files.encoding)
    names = list(files.columns or ())
    if files.columns is None:
        if file.header is None:
            return  # an empty file: not even a header
        header = file.header.decode("utf-8", "backslashreplace")
        names = header.split(files.delimiter) if is_long else _header_names(path, header, parse)
    check_columns(path, names, columns)
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
        return no_rows(path, convert.include_columns, block.malformed)
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
