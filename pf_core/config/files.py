"""Sets of files: where they are, and how text is divided into rows and values. `logs/readers.py` opens them."""

import codecs
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pf_core.config.base import Strict

FileFormat = Literal["csv", "jsonl", "parquet"]

Encoding = Literal["utf-8", "latin-1", "cp1252"]

_ENCODINGS: dict[str, Encoding] = {
    "ascii": "utf-8",
    "utf-8": "utf-8",
    "utf-8-sig": "utf-8",
    "iso8859-1": "latin-1",
    "cp1252": "cp1252",
}
"""Encodings that are read, by Python's names of them."""

DAY = "{ds}"
"""Stands for the day in a path."""

_SUFFIXES: dict[str, FileFormat] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


def _encoding_of(value: Any) -> Any:
    """Return the encoding that a name stands for: `ISO-8859-1` and `latin1` are latin-1, `windows-1252` is cp1252."""
    try:
        name = codecs.lookup(value).name
    except (LookupError, TypeError, ValueError):
        name = ""
    if name not in _ENCODINGS:
        raise ValueError(
            f"{value!r} is not read, only utf-8, latin-1 (ISO-8859-1) and cp1252 (windows-1252): convert the files, "
            f"for example with: iconv -f {value} -t UTF-8"
        )
    return _ENCODINGS[name]


class Files(Strict):
    """A set of files, and how they are parsed."""

    path: str
    """Path of the files, relative to `root`. `{ds}` stands for the day and makes one set of files a day; `*`
    and `**` are wildcards."""
    format: FileFormat | None = None
    """csv, jsonl or parquet; by default by the suffix of `path`. The columns of jsonl are the keys of the line's
    object; a key of an object within it, or of a struct of Parquet, is named with dots: `item.id`."""
    encoding: Annotated[Encoding, BeforeValidator(_encoding_of)] = "utf-8"
    """How the characters of CSV and JSON lines files are written: utf-8; latin-1, also called ISO-8859-1; or cp1252,
    also called windows-1252. A line with a byte that the encoding does not define is quarantined."""
    delimiter: str = Field(default=",", min_length=1)
    """Text between the values of a CSV file, one character or several, such as `::`; by default a tab for .tsv files
    and a comma for others."""
    columns: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Names of the columns of CSV files without a header, in their order; without it, the first line is the
    header."""
    quote: str | None = Field(default='"', min_length=1, max_length=1)
    """Character around CSV values that contain the delimiter; null if the log does not quote. No value may span lines,
    and with a delimiter of several characters, or not of ASCII, nothing is quoted."""

    @model_validator(mode="before")
    @classmethod
    def _tabs_in_tsv(cls, value: Any) -> Any:
        if isinstance(value, dict) and re.search(r"\.tsv(\.\w+)?$", str(value.get("path"))):
            return {"delimiter": "\t", **value}
        return value

    @model_validator(mode="after")
    def _format_is_known(self) -> "Files":
        if self.format is None and self.file_format is None:
            raise ValueError(f"unknown file format of {self.path!r}: add `format: csv`, `jsonl` or `parquet`")
        return self

    @model_validator(mode="after")
    def _only_text_is_encoded(self) -> "Files":
        if self.encoding != "utf-8" and self.file_format == "parquet":
            raise ValueError("`encoding` is for CSV and JSON lines; the text of Parquet is UTF-8: delete the key")
        return self

    @model_validator(mode="after")
    def _text_can_be_divided(self) -> "Files":
        if "\n" in self.delimiter or "\r" in self.delimiter:
            raise ValueError("`delimiter` contains the end of a line, which ends a row")
        if "\0" in self.delimiter or (len(self.delimiter) > 1 and "\x1f" in self.delimiter):
            raise ValueError("`delimiter` contains NUL, or is several characters with 0x1F: no line may contain these")
        if self.quote is not None and (not self.quote.isascii() or self.quote in "\0\r\n"):
            raise ValueError(f"`quote` is {self.quote!r}: only ASCII characters can quote, and no end of a line")
        if self.quote is not None and self.quote in self.delimiter:
            raise ValueError(
                f"`delimiter` contains the quote character {self.quote}: if nothing is quoted, `quote: null`"
            )
        if self.columns is None:
            return self
        if self.file_format != "csv":
            raise ValueError(f"`columns` names the columns of CSV files; {self.file_format} files name their own")
        for column in self.columns:
            if self.columns.count(column) > 1:
                raise ValueError(f"`columns` names {column!r} twice")
        return self

    def check_named(self, mapped: Iterable[str]) -> None:
        """Raise a ValueError if `columns` lacks a column that the mapping reads."""
        absent = [column for column in mapped if self.columns is not None and column not in self.columns]
        if absent:
            raise ValueError(f"`columns` does not name {', '.join(map(repr, absent))}, which the mapping reads")

    @property
    def file_format(self) -> FileFormat | None:
        """Format of the files, by `format` or by the suffix of `path`; None if it is unknown."""
        if self.format is not None:
            return self.format
        suffixes = [suffix for suffix in PurePath(self.path).suffixes if suffix not in (".gz", ".zst", ".bz2")]
        return _SUFFIXES.get(suffixes[-1]) if suffixes else None

    @property
    def is_dated(self) -> bool:
        """Whether there is one set of files for each day."""
        return DAY in self.path
