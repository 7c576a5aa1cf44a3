"""How a file is laid out, by its first bytes: format, separator, quotes, header, names of the columns.

A file that is no log is refused with a sentence that says what it is and what to do.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.files import Encoding, Files
from pf_core.errors import PipelineError
from pf_core.logs.lines import BYTE_ORDER_MARK, COMPRESSION, open_text
from pf_core.logs.parquet_columns import leaf_names, with_leaves
from pf_core.logs.remedies import UTF16, file_remedy
from pf_core.onboarding.encodings import cp1252_evidence
from pf_core.onboarding.separators import CONSISTENT, find_separator, has_header, starts_with_digit

HEAD_BYTES = 1 << 16

MAX_LINES = 500

REMARK = re.compile(r"\s*(#|%|//)")
"""How a line begins that is no row, above the others."""

MAX_REMARKS = 20

MAX_DEPTH = 4
"""Depth of objects within a JSON line that are looked into."""

BINARIES = {
    b"%PDF": ("a PDF document", "export the table as CSV"),
    b"PK\x03\x04": ("a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV"),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "save the sheet as CSV"),
    b"\x89PNG": ("an image", "name the files of the log"),
    b"\xff\xd8\xff": ("an image", "name the files of the log"),
    b"\x93NUMPY": ("a NumPy array", "name it under source.pins.vectors if it has the vectors of pins"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"ORC": ("an ORC file", "convert it to Parquet"),
    b"Obj\x01": ("an Avro file", "convert it to Parquet"),
    b"\xff\xfe": ("UTF-16 or UTF-32 text", UTF16),
    b"\xfe\xff": ("UTF-16 or UTF-32 text", UTF16),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it"),
    b"Rar!": ("a RAR archive", "unpack it"),
}
"""First bytes of files that are no logs: what they are, and what to do."""

CODECS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst", b"\x04\x22\x4d\x18": ".lz4"}
"""First bytes of compressed files, and the suffix by which the pipeline knows them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How files are parsed, and the columns they have."""

    files: Files
    """Its path is a name only."""
    columns: tuple[str, ...]
    """Columns with plain values."""
    lists: tuple[str, ...] = ()
    """Columns with lists of numbers, which may be vectors."""
    nested: tuple[str, ...] = ()
    """Columns with other lists, which are not read."""
    partial: tuple[str, ...] = ()
    """Columns that some of the files do not have, which are not read."""
    kinds: tuple[str, ...] = ()
    """For CSV without a header, whether each column has numbers (1) or text (a)."""
    evidence: str
    """Why it is read like this."""
    encoding_evidence: str | None = None
    """Why its text is not UTF-8."""

    def is_like(self, other: "Layout", *, least_shared: float) -> bool:
        """Whether files of both can be read as one table: more than this share of their columns have the same names."""
        own, its = self.files, other.files
        if (own.file_format, own.delimiter) != (its.file_format, its.delimiter):
            return False
        if self.kinds or other.kinds:
            return self.kinds == other.kinds
        shared = set(self.columns) & set(other.columns)
        return len(shared) > least_shared * len(set(self.columns) | set(other.columns))

    def joined(self, other: "Layout") -> "Layout":
        """Return the layout of files of both: JSON lines have the keys of all, tables the columns that all have."""
        if self.files.file_format == "jsonl":
            return replace(self, columns=tuple(dict.fromkeys([*self.columns, *other.columns])))
        columns = tuple(name for name in self.columns if name in other.columns)
        known = {*self.columns, *other.columns, *self.partial, *other.partial}
        return replace(self, columns=columns, partial=tuple(sorted(known - {*columns})))


def layout_of(path: Path) -> Layout:
    """Find out how a file is laid out; a PipelineError says why it is no log."""
    try:
        with path.open("rb") as file:
            start = file.read(32)
        if not start:
            raise PipelineError(f"{path} is empty", "restore it, or leave it out")
        if start.startswith(b"PAR1"):
            return _parquet_layout(path)
        _refuse_binary(path, start)
        with open_text(path) as stream:
            head, is_all = stream.read(HEAD_BYTES), stream.read(1) == b""
    except PermissionError as error:
        raise PipelineError(f"{path} cannot be read: {error.strerror}", "let the user who runs pf read it") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        if not path.exists():
            raise PipelineError(
                f"{path} is a link to a file that does not exist", "restore the file or remove the link"
            ) from error
        raise PipelineError(f"{path} cannot be read: {error}", _remedy(path, error)) from error
    if codec := COMPRESSION.get(path.suffix):
        _refuse_binary(path, head, f"{codec} of ")
    return _text_layout(path, head, is_all)


def _remedy(path: Path, error: Exception) -> str:
    """Return what to do about a file that cannot be read."""
    codec = COMPRESSION.get(path.suffix)
    return "restore it, or leave it out" if codec is None else f"{file_remedy(path, codec, error)}, or leave it out"


def _refuse_binary(path: Path, start: bytes, prefix: str = "") -> None:
    for magic, (what, remedy) in BINARIES.items():
        if start.startswith(magic):
            raise PipelineError(f"{path} is {prefix}{what}, not a log", remedy)
    for magic, suffix in CODECS.items():
        if start.startswith(magic) and path.suffix != suffix:
            raise PipelineError(
                f"{path} is compressed, and its name does not say so", f"let its name end with {suffix}"
            )


def _parquet_layout(path: Path) -> Layout:
    names = list(leaf_names(pq.read_schema(path)))
    empty = with_leaves(pq.read_schema(path).empty_table(), [name for name in names if not _is_struct(name, names)])
    plain = tuple(field.name for field in empty.schema if not pa.types.is_nested(field.type))
    lists = tuple(field.name for field in empty.schema if _is_vector(field.type))
    return Layout(
        files=_named(path, "parquet"),
        columns=plain,
        lists=lists,
        nested=tuple(name for name in empty.schema.names if name not in plain and name not in lists),
        evidence=f"Parquet with {len(names)} columns",
    )


def _is_struct(name: str, names: Sequence[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


def _is_vector(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_floating(kind.value_type))


def _named(path: Path, kind: str, **options: Any) -> Files:
    """Return the description of files of this format, which says so only where the name does not."""
    files = Files.model_validate({"path": path.name, "format": kind, **options})
    by_name = Files.model_construct(path=path.name).file_format
    return files.model_copy(update={"format": None}) if by_name == kind else files


def _text_layout(path: Path, head: bytes, is_all: bool) -> Layout:
    if b"\0" in head or sum(byte < 9 or 13 < byte < 32 for byte in head if byte not in (1, 27, 31)) > len(head) // 50:
        raise PipelineError(f"{path} holds binary data, not a log", "name files of CSV, JSON lines or Parquet")
    is_marked, whole = head.startswith(BYTE_ORDER_MARK), head.splitlines()[: None if is_all else -1]
    encoding: Encoding = "utf-8" if is_marked or cp1252_evidence(whole) is None else "cp1252"
    text = head.removeprefix(BYTE_ORDER_MARK).decode(encoding, "replace")
    lines = [line for line in re.split(r"\r\n|\n|\r", text)[: None if is_all else -1] if line]
    if len(lines) < 2 and re.match(r"\[\s*\{", text.lstrip()):
        raise PipelineError(f"{path} is one JSON array", "write one object in each line, for example with: jq -c '.[]'")
    if not lines:
        what = "has no line" if is_all else f"has no end of a line in its first {HEAD_BYTES:,} bytes"
        raise PipelineError(f"{path} {what}", "name files of CSV, JSON lines or Parquet")
    if text.lstrip()[0] in "{[" and (found := _json_layout(path, lines, text.lstrip(), encoding)):
        return found
    return _csv_layout(path, lines[:MAX_LINES], encoding)


# JSON lines


def _json_layout(path: Path, lines: Sequence[str], text: str, encoding: Encoding) -> Layout | None:
    rows = [row for line in lines for row in [_parsed(line)] if isinstance(row, dict)]
    if len(rows) >= CONSISTENT * len(lines):
        keys = dict(key for row in rows for key in values_of(row))
        return Layout(
            files=_named(path, "jsonl", encoding=encoding),
            columns=tuple(key for key, value in keys.items() if not isinstance(value, list)),
            lists=tuple(key for key, value in keys.items() if _is_numbers(value)),
            nested=tuple(key for key, value in keys.items() if isinstance(value, list) and not _is_numbers(value)),
            evidence=f"JSON lines with {len(keys)} keys",
        )
    if re.match(r"\[\s*\{", text):  # over several lines
        raise PipelineError(f"{path} is one JSON array", "write one object in each line, for example with: jq -c '.[]'")
    if re.match(r'\{\s*(\n|")', text):
        raise PipelineError(
            f"{path} is JSON, but its lines are no objects", "write one object in each line, for example with: jq -c ."
        )
    return None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(number, float) for number in value)


def values_of(row: dict[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the keys of an object with their values, those of objects within it with dots."""
    for key, value in row.items():
        if isinstance(value, dict) and depth < MAX_DEPTH:
            yield from values_of(value, f"{prefix}{key}.", depth + 1)
        elif not isinstance(value, dict):
            yield f"{prefix}{key}", value


# CSV


def _csv_layout(path: Path, lines: Sequence[str], encoding: Encoding) -> Layout:
    found = find_separator(lines)
    num_remarks = next((place for place, line in enumerate(lines) if not REMARK.match(line)), 0)
    if found is None or num_remarks > 1:  # a single one may be the header
        _refuse_first_lines(path, lines, max(1, num_remarks))
    if found is None:
        if _spans_lines(lines):
            raise PipelineError(
                f"{path} has quoted values that go on in the next line, which no log may have",
                "write each row as one line",
            )
        raise PipelineError(
            f"{path} is no table: no separator divides its lines into the same number of fields; the first line is "
            f"{lines[0][:80]!r}",
            "write the log as CSV, JSON lines or Parquet",
        )
    delimiter, quote, rows = found
    options: dict[str, Any] = {"encoding": encoding, "delimiter": delimiter, "quote": quote}
    named = (
        f"{len(rows[0])} values in {len(rows)} of the first {len(lines)} lines, separated by {json.dumps(delimiter)}"
    )
    if has_header(rows):
        columns = tuple(name for name in rows[0] if name)
        repeated = [name for name in columns if columns.count(name) > 1]
        if repeated:
            raise PipelineError(f"{path} has two columns {repeated[0]!r}", "give each column a name of its own")
        if len(rows) == 1 and len(lines) == 1:
            raise PipelineError(f"{path} has a header and no rows", "restore it, or leave it out")
        return Layout(files=_named(path, "csv", **options), columns=columns, evidence=f"{named}; the first is a header")
    columns = tuple(f"column_{number}" for number in range(1, len(rows[0]) + 1))
    kinds = tuple("1" if starts_with_digit(values) else "a" for values in zip(*rows, strict=True))
    files = _named(path, "csv", **options, columns=columns)
    return Layout(files=files, columns=columns, kinds=kinds, evidence=f"{named}; the first line has values, no names")


def _refuse_first_lines(path: Path, lines: Sequence[str], least: int) -> None:
    """Raise a PipelineError if the lines are a table without the first ones."""
    for place in range(least, min(MAX_REMARKS, len(lines) - 3)):
        found = find_separator(lines[place:])
        if found is not None and len(found[2]) > 2 and len(found[2][0]) > 2:
            which = "the first line is" if place == 1 else f"the first {place} lines are"
            raise PipelineError(
                f"{path} has a table, but {which} not of it: {lines[0][:80]!r}",
                f"leave out what is above the table, for example with: tail -n +{place + 1}",
            )


def _spans_lines(lines: Sequence[str]) -> bool:
    """Whether the lines are a table if quoted values may contain the end of a line."""
    if not any(line.count('"') % 2 for line in lines):
        return False
    for delimiter in (",", ";", "\t"):
        rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter))
        usual, num_rows = Counter(map(len, rows)).most_common(1)[0]
        if usual > 1 and CONSISTENT * len(rows) <= num_rows < len(lines):
            return True
    return False
