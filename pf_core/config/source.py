"""The site file's `source` section: how foreign logs are mapped to the schemas of the pipeline.

It names the files, and for each field of our schemas the column that it is read from. Nothing here touches a file:
`logs/readers.py` opens them, `logs/mapping.py` translates their rows. Unknown keys are errors, so that a typo never
becomes a silently ignored option.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, FiniteFloat, Tag, model_validator

from pf_core.config.base import Strict
from pf_core.days import parse_ds
from pf_core.schemas import IdType

FileFormat = Literal["csv", "jsonl", "parquet"]

TimeUnit = Literal["s", "ms", "us", "iso"]

DAY = "{ds}"

MAX_NUMBER = sys.float_info.max

_SUFFIXES: dict[str, FileFormat] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


def _column_shorthand(value: Any) -> Any:
    """A plain string stands for `{column: string}`."""
    return {"column": value} if isinstance(value, str) else value


def ds_text(value: Any) -> str:
    """Return a day as text, YYYY-MM-DD; YAML reads 2026-01-01 as a date."""
    text = str(value)
    parse_ds(text)
    return text


def _known_timezone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"{name!r} is not a time zone: write it like Europe/Berlin") from error
    return name


def _foreign_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)  # as text files and DuckDB spell them


class IdField(Strict):
    """The column with the ids of users or pins. A plain string means `column`."""

    column: str
    """Name of the column."""
    type: IdType = "int"
    """Type of the ids in our tables: int (64 bits) or string. Text like 17850.0, which pandas writes for integers in a
    column with missing values, is no int: write the column as integers, or choose string."""


class TimeField(Strict):
    """The column with the time of an action: a number since 1970 in a stated unit, ISO 8601 text, or a timestamp of
    Parquet."""

    column: str
    """Name of the column."""
    unit: TimeUnit | None = None
    """Unit of the number (s, ms or us since 1970), or iso for ISO 8601 text; a timestamp column of Parquet needs
    none."""
    timezone: Annotated[str, AfterValidator(_known_timezone)] = "UTC"
    """Time zone of ISO text and timestamps that name none, such as Europe/Berlin."""


class DurationField(Strict):
    """The column with the duration of an action. A plain string means `column`."""

    column: str
    """Name of the column; a missing value counts as 0."""
    unit: Literal["s", "ms"] = "s"
    """Unit of the duration: s or ms."""


class Condition(Strict):
    """A test of one column. All given bounds must hold; a missing or non-numeric value fails them, except `missing`.

    A plain value means `equals`, a list means `any_of`.
    """

    equals: str | int | float | bool | None = None
    """Value that the column must have."""
    any_of: tuple[str | int | float | bool, ...] | None = None
    """Values of which the column must have one."""
    above: FiniteFloat | None = None
    """The column must be greater than this number."""
    at_least: FiniteFloat | None = None
    """The column must be this number or greater."""
    below: FiniteFloat | None = None
    """The column must be less than this number."""
    at_most: FiniteFloat | None = None
    """The column must be this number or less."""
    missing: bool | None = None
    """true: the column must be empty or null; false: it must have a value."""

    @model_validator(mode="before")
    @classmethod
    def _plain_value_means_equals_and_list_any_of(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"any_of": value}
        return value if isinstance(value, dict | Condition) else {"equals": value}

    @model_validator(mode="after")
    def _says_something(self) -> "Condition":
        if self.any_of == () or not self.model_fields_set or None in (getattr(self, n) for n in self.model_fields_set):
            raise ValueError(
                "an empty condition: give a value, or one of any_of, above, at_least, below, at_most, missing"
            )
        for value in (self.equals, *(self.any_of or ())):
            if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
                raise ValueError(f"{value} is no number that a log can have; a text is written in quotes")
        if self.missing and len(self.model_fields_set) > 1:
            raise ValueError("`missing: true` holds for no value: leave out the other conditions of the column")
        return self


class Rule(Strict):
    """One rule of a category, such as `is: like, when: {is_like: 1}`; the first rule that holds decides."""

    value: str | None = Field(default=None, alias="is")
    """Name that the rule gives. In the site file the key is `is`."""
    skip: bool = False
    """Whether the row is left out; it is counted as skipped, also if its ids or its time are unusable."""
    when: dict[str, Condition] = Field(default_factory=dict)
    """Conditions by column, which must all hold; without any, the rule always holds."""

    @model_validator(mode="after")
    def _one_outcome(self) -> "Rule":
        if (self.value is None) != self.skip:
            raise ValueError("a rule needs exactly one of `is: NAME` and `skip: true`")
        return self


class CategoryField(Strict):
    """How an action type or a surface is read: from a column, from a column through a value map, by rules, or as a
    constant. A plain string means `column`."""

    column: str | None = None
    """Name of the column."""
    values: Annotated[dict[Annotated[str, BeforeValidator(_foreign_value)], str], Field(min_length=1)] | None = None
    """Map from values of the column to our names; a row with another value is quarantined."""
    rules: tuple[Rule, ...] = ()
    """Rules in order; the first one that holds decides, and a row for which none holds is quarantined."""
    constant: str | None = None
    """Name that every row gets."""

    @model_validator(mode="after")
    def _one_way(self) -> "CategoryField":
        if sum((self.column is not None, bool(self.rules), self.constant is not None)) != 1:
            raise ValueError("give exactly one of `column` (with or without `values`), `rules`, `constant`")
        if self.values is not None and self.column is None:
            raise ValueError("`values` maps the values of a column: name it in `column`")
        return self

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """Values that the mapping can return, sorted; None where it takes the values of a column as they are."""
        if self.constant is not None:
            return (self.constant,)
        if self.rules:
            return tuple(sorted({rule.value for rule in self.rules if rule.value is not None}))
        return None if self.values is None else tuple(sorted(set(self.values.values())))

    @property
    def columns(self) -> set[str]:
        """Columns that the field is read from."""
        named = {self.column} if self.column else set()
        return named.union(*(rule.when.keys() for rule in self.rules))


class Files(Strict):
    """A set of files, and how they are parsed."""

    path: str
    """Path of the files, relative to `root`. `{ds}` stands for the day and makes one set of files a day; `*`
    and `**` are wildcards."""
    format: FileFormat | None = None
    """csv, jsonl or parquet; by default by the suffix of `path`. The columns of jsonl are the keys of the line's
    object; keys of objects within it cannot be named."""
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

    def _check_named(self, mapped: Iterable[str]) -> None:
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


class ActionsSource(Files):
    """The event log.

    A dated log (`{ds}` in the path) has one set of files for each day of *arrival*. A row that arrived up to
    `late_days` days after it happened belongs to the day on which it happened: partition ds reads the files of
    ds and, as far as they exist, of the `late_days` days after it. Rows that are later are quarantined in the
    partition of the day on which they arrived. In an undated log every row belongs to its own day.
    """

    user_id: Annotated[IdField, BeforeValidator(_column_shorthand)]
    """The column with user ids."""
    pin_id: Annotated[IdField, BeforeValidator(_column_shorthand)]
    """The column with pin ids."""
    ts: TimeField
    """The column with the time of the action."""
    action_type: Annotated[CategoryField, BeforeValidator(_column_shorthand)]
    """How the type of the action is read."""
    surface: Annotated[CategoryField, BeforeValidator(_column_shorthand)] = CategoryField(constant="unknown")
    """How the surface, on which the action happened, is read; without it, every surface is `unknown`."""
    duration_s: Annotated[DurationField, BeforeValidator(_column_shorthand)] | None = None
    """The column with the duration of the action; without it, every duration is 0."""
    late_days: int = Field(default=1, ge=0, le=30)
    """Number of days after which a row may still arrive in a dated log; later rows are quarantined."""
    early_days: int = Field(default=0, ge=0, le=1)
    """Number of days that a row may be dated after the day of its file: 1 for files that are cut at a local
    midnight west of Greenwich."""
    missing_days: Literal["refuse", "allow"] = "refuse"
    """What a day without a file is in a dated log: refuse makes it an error, allow a day without rows (a shop that is
    closed on Sundays). Once its weekday is known, such a day must be usual to pass the check of the volume: see
    `quality.trailing_weeks`."""

    @model_validator(mode="after")
    def _each_column_once(self) -> "ActionsSource":
        single = [self.user_id.column, self.pin_id.column, self.ts.column]
        if self.duration_s:
            single.append(self.duration_s.column)
        for column in single:
            if single.count(column) > 1:
                raise ValueError(f"column {column!r} is mapped to two of user_id, pin_id, ts and duration_s")
        if self.ts.unit is None and self.file_format != "parquet":
            raise ValueError("`ts.unit` is missing: give s, ms, us or iso; only Parquet has columns of timestamps")
        self._check_named(self.mapped_columns)
        return self

    @property
    def categories(self) -> list[str]:
        """Columns that only action types and surfaces are read from, sorted: they have few different values."""
        return sorted((self.action_type.columns | self.surface.columns) - self._single_columns)

    @property
    def mapped_columns(self) -> list[str]:
        """Every column that the mapping reads, sorted."""
        return sorted(self._single_columns | self.action_type.columns | self.surface.columns)

    @property
    def _single_columns(self) -> set[str]:
        """Columns that are read as ids, times and durations."""
        columns = {self.user_id.column, self.pin_id.column, self.ts.column}
        return columns | {self.duration_s.column} if self.duration_s else columns


class NpyVectors(Strict):
    """Pin vectors from a matrix."""

    npy: str
    """Path of the .npy matrix with one vector a row, relative to `root`."""
    ids: str
    """Path of the .npy array with the pin id of each row, relative to `root`."""


class ColumnVectors(Strict):
    """Pin vectors from a column of the catalogue. A plain string means `column`."""

    column: str
    """Name of the column with lists of numbers."""


LEARNED_KEYS = {"until", "dim", "window_actions", "min_count", "max_pins", "max_pairs"}
"""Keys of `source.pins.vectors` in site files of earlier versions, which learned vectors from the actions."""


def _described_vectors(value: Any) -> Any:
    """Refuse vectors that are to be learned; a plain string stands for `{column: string}`."""
    keys = value.keys() if isinstance(value, dict) else set()
    if value == "learned" or (LEARNED_KEYS & keys and not {"npy", "ids", "column"} & keys):
        raise ValueError(
            "vectors are no longer learned by pin_features; delete `vectors`: the model learns factors itself"
        )
    return _column_shorthand(value)


def _vector_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return "npy" if "npy" in keys or "ids" in keys else "column"


VectorSource = Annotated[
    Annotated[NpyVectors, Tag("npy")] | Annotated[ColumnVectors, Tag("column")],
    Discriminator(_vector_kind),
    BeforeValidator(_described_vectors),
]


class PinsSource(Strict):
    """The pins: those of the catalogue, if the site has one, and every pin that has an action. Interests and candidates
    come from the catalogue, content vectors from one of its columns or from a matrix.

    A dated catalogue (`{ds}` in its path) adds a day's pins to the known ones, and the newest row of a pin wins. An
    undated one is read whole whenever it changes. A site without a catalogue and without vectors needs no `pins`.
    """

    pin_id: Annotated[IdField, BeforeValidator(_column_shorthand)] = IdField(column="pin_id")
    """The column of the catalogue with pin ids. A site without a catalogue may leave it out: the type of its ids is
    that of `actions.pin_id`."""
    catalogue: Files | None = None
    """Files with one row a pin; without them, the pins are those that have an action or a vector."""
    vectors: VectorSource | None = None
    """Where the content vector of each pin comes from; without it, pins have none, and the presets of the paper's model
    (paper, demo, tiny) cannot be trained. A pin may have no vector: a null in the column, or no row in the matrix."""
    interest: str | None = None
    """Name of the column with the interest (topic) of a pin; without it, every interest is unknown."""
    is_candidate: str | None = None
    """Name of the column that says whether a pin may be recommended; a pin outside of the catalogue may then not be.
    Without it, every pin may."""

    @model_validator(mode="after")
    def _columns_need_a_catalogue(self) -> "PinsSource":
        from_columns = [self.interest, self.is_candidate, getattr(self.vectors, "column", None)]
        if self.catalogue is None and any(from_columns):
            raise ValueError("`interest`, `is_candidate` and a vector column are read from `catalogue`: give its path")
        if self.catalogue is not None and "pin_id" not in self.model_fields_set:
            raise ValueError("`pin_id` is missing: name the column of the catalogue that has the pin ids")
        if self.catalogue is not None and isinstance(self.vectors, ColumnVectors):
            if self.catalogue.file_format == "csv":
                raise ValueError("vectors in a column need a Parquet or JSON-lines catalogue; CSV has no lists")
        elif self.catalogue is not None and self.catalogue.is_dated and self.vectors is not None:
            raise ValueError("a catalogue with {ds} in its path needs the vectors in one of its columns, or none")
        if self.catalogue is not None:
            self.catalogue._check_named(self.mapped_columns)
        return self

    @property
    def mapped_columns(self) -> list[str]:
        """Every column of the catalogue that is read."""
        vector = self.vectors.column if isinstance(self.vectors, ColumnVectors) else None
        named = (self.pin_id.column, self.interest, self.is_candidate, vector)
        return [column for column in dict.fromkeys(named) if column is not None]

    @property
    def is_incremental(self) -> bool:
        """Whether the catalogue has one set of files for each day."""
        return self.catalogue is not None and self.catalogue.is_dated


class Positive(Strict):
    """Which actions are positive engagement; the defaults are the paper's (section 3).

    Where the mapping of `actions.action_type` gives one name only (`constant`, or `values` or `rules` with one name),
    that type is positive by default, with any duration. A plain column needs `action_types`, even if all of its rows
    have the same value.
    """

    action_types: tuple[str, ...] = ("repin", "closeup", "click")
    """Types of positive actions."""
    longer_than_s: dict[str, float] = Field(default_factory=lambda: {"closeup": 10.0, "click": 10.0})
    """By action type, the duration in seconds that a positive action must exceed."""
    surfaces: tuple[str, ...] | None = ("homefeed",)
    """Surfaces of positive actions; null means all of them, which is the default where `actions.surface` is not
    given."""

    def completed(self, actions: ActionsSource) -> "Positive":
        """Replace the defaults that do not fit a log with one action type or without surfaces."""
        changes: dict[str, Any] = {}
        vocabulary = actions.action_type.vocabulary
        if vocabulary is not None and len(vocabulary) == 1 and "action_types" not in self.model_fields_set:
            changes["action_types"] = vocabulary
            if "longer_than_s" not in self.model_fields_set:
                changes["longer_than_s"] = {}
        if "surface" not in actions.model_fields_set and "surfaces" not in self.model_fields_set:
            changes["surfaces"] = None
        return self.model_copy(update=changes)

    def names_unknown_to(self, actions: ActionsSource) -> Iterator[str]:
        """Yield a sentence for each key with names that the mapping of the log never gives."""
        types, surfaces = actions.action_type.vocabulary, actions.surface.vocabulary
        for key, names, known in (
            ("action_types", self.action_types, types),
            ("longer_than_s", self.longer_than_s, types),
            ("surfaces", self.surfaces or (), surfaces),
        ):
            unknown = [name for name in names if known is not None and name not in known]
            is_default = key not in self.model_fields_set
            if unknown and not (is_default and (len(unknown) < len(names) or key == "longer_than_s")):
                field = "surface" if key == "surfaces" else "action_type"
                yield (
                    f"`positive.{key}` {'is by default' if is_default else 'names'} {', '.join(unknown)}, but "
                    f"`actions.{field}` only gives {', '.join(known or ())}"
                )


class Source(Strict):
    """A site's logs and pins."""

    root: str = "."
    """Folder that the paths below are relative to: a path relative to the site file, or s3://bucket/folder."""
    actions: ActionsSource
    """The event log."""
    pins: PinsSource = PinsSource()
    """The pins and their vectors; without it, the pins are those that have an action."""
    positive: Positive = Positive()
    """Which actions are positive engagement."""

    @model_validator(mode="after")
    def _complete(self) -> "Source":
        """Fill in what follows from the description of the log."""
        if "pin_id" not in self.pins.model_fields_set:
            object.__setattr__(self, "pins", self.pins.model_copy(update={"pin_id": self.actions.pin_id}))
        object.__setattr__(self, "positive", self.positive.completed(self.actions))
        return self

    @model_validator(mode="after")
    def _positive_actions_can_occur(self) -> "Source":
        problems = list(self.positive.names_unknown_to(self.actions))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _pin_ids_agree(self) -> "Source":
        if self.actions.pin_id.type != self.pins.pin_id.type:
            raise ValueError(
                f"pin ids are {self.actions.pin_id.type} in `actions` and {self.pins.pin_id.type} in `pins`: "
                "give both the same `type`"
            )
        return self
