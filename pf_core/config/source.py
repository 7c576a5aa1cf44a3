"""The declarative mapping from foreign logs to our contracts: what a user writes to bring their own site.

One YAML section says where the files are and how each contract field is read from their columns. Nothing here
touches a file: `reading` opens them, `mapping` translates their rows. Unknown keys are errors, so that a typo
never becomes a silently ignored option.
"""

import re
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
    return {"column": value} if isinstance(value, str) else value


def ds_text(value: Any) -> str:
    """YAML reads 2026-01-01 as a date."""
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
    column: str
    type: IdType = "int"


class TimeField(Strict):
    """Epoch numbers in a stated unit, or ISO 8601 text. `timezone` is for ISO text that names no zone."""

    column: str
    unit: TimeUnit
    timezone: Annotated[str, AfterValidator(_known_timezone)] = "UTC"


class DurationField(Strict):
    column: str
    unit: Literal["s", "ms"] = "s"


class Condition(Strict):
    """A test of one column. All the bounds given must hold; a missing or non-numeric value fails them."""

    equals: str | int | float | bool | None = None
    any_of: tuple[str | int | float | bool, ...] | None = None
    above: FiniteFloat | None = None
    at_least: FiniteFloat | None = None
    below: FiniteFloat | None = None
    at_most: FiniteFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_value_means_equals_and_list_any_of(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"any_of": value}
        return value if isinstance(value, dict | Condition) else {"equals": value}

    @model_validator(mode="after")
    def _says_something(self) -> "Condition":
        if self.any_of == () or not self.model_fields_set or None in (getattr(self, n) for n in self.model_fields_set):
            raise ValueError("an empty condition: give a value, or one of any_of, above, at_least, below, at_most")
        return self


class Rule(Strict):
    """`is: like, when: {is_like: 1}`; without `when` it always holds. `skip: true` leaves the row out, counted."""

    value: str | None = Field(default=None, alias="is")
    skip: bool = False
    when: dict[str, Condition] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_outcome(self) -> "Rule":
        if (self.value is None) != self.skip:
            raise ValueError("a rule needs exactly one of `is: NAME` and `skip: true`")
        return self


class CategoryField(Strict):
    """An action type or a surface: a column as it is, a column through a value map, rules, or a constant."""

    column: str | None = None
    values: Annotated[dict[Annotated[str, BeforeValidator(_foreign_value)], str], Field(min_length=1)] | None = None
    rules: tuple[Rule, ...] = ()
    constant: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "CategoryField":
        if sum((self.column is not None, bool(self.rules), self.constant is not None)) != 1:
            raise ValueError("give exactly one of `column` (with or without `values`), `rules`, `constant`")
        if self.values is not None and self.column is None:
            raise ValueError("`values` maps the values of a column: name it in `column`")
        return self

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """The values that the mapping can give, sorted; None where it takes a column's values as they are."""
        if self.constant is not None:
            return (self.constant,)
        if self.rules:
            return tuple(sorted({rule.value for rule in self.rules if rule.value is not None}))
        return None if self.values is None else tuple(sorted(set(self.values.values())))

    @property
    def columns(self) -> set[str]:
        named = {self.column} if self.column else set()
        return named.union(*(rule.when.keys() for rule in self.rules))


class Files(Strict):
    """Where files lie, relative to the source's root. `{ds}` makes one file set a day; `*` and `**` are globs."""

    path: str
    format: FileFormat | None = None
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """Of a CSV; a .tsv has tabs."""
    quote: str | None = Field(default='"', min_length=1, max_length=1)
    """Around CSV values with a delimiter in them; null if the log does not quote. No value may span lines."""

    @model_validator(mode="before")
    @classmethod
    def _tabs_in_tsv(cls, value: Any) -> Any:
        if isinstance(value, dict) and re.search(r"\.tsv(\.\w+)?$", str(value.get("path"))):
            return {"delimiter": "\t", **value}
        return value

    @model_validator(mode="after")
    def _format_is_known(self) -> "Files":
        if self.format is None and self.file_format is None:
            raise ValueError(f"cannot tell the format of {self.path!r}: add `format: csv`, `jsonl` or `parquet`")
        return self

    @property
    def file_format(self) -> FileFormat | None:
        if self.format is not None:
            return self.format
        suffixes = [suffix for suffix in PurePath(self.path).suffixes if suffix not in (".gz", ".zst", ".bz2")]
        return _SUFFIXES.get(suffixes[-1]) if suffixes else None

    @property
    def is_dated(self) -> bool:
        return DAY in self.path


class ActionsSource(Files):
    """The event log.

    A dated log (`{ds}` in the path) has one file set for each day of *arrival*. A row that arrived up to
    `late_days` days after it happened goes to the day on which it happened: partition ds reads the files of
    ds and, as far as they exist, of the `late_days` days after it. Rows later than that are quarantined with
    the day that they arrived on. `early_days` is the same for files that are cut at a local midnight west of
    Greenwich. In an undated log every row goes to its own day.
    """

    user_id: Annotated[IdField, BeforeValidator(_column_shorthand)]
    pin_id: Annotated[IdField, BeforeValidator(_column_shorthand)]
    ts: TimeField
    action_type: Annotated[CategoryField, BeforeValidator(_column_shorthand)]
    surface: Annotated[CategoryField, BeforeValidator(_column_shorthand)]
    duration_s: Annotated[DurationField, BeforeValidator(_column_shorthand)] | None = None
    late_days: int = Field(default=1, ge=0, le=30)
    early_days: int = Field(default=0, ge=0, le=1)

    @model_validator(mode="after")
    def _each_column_once(self) -> "ActionsSource":
        single = [self.user_id.column, self.pin_id.column, self.ts.column]
        if self.duration_s:
            single.append(self.duration_s.column)
        for column in single:
            if single.count(column) > 1:
                raise ValueError(f"column {column!r} is mapped to two of user_id, pin_id, ts and duration_s")
        return self

    @property
    def categories(self) -> list[str]:
        return sorted(self.action_type.columns | self.surface.columns)

    @property
    def columns(self) -> list[str]:
        """Every column that the mapping reads, sorted."""
        columns = {self.user_id.column, self.pin_id.column, self.ts.column}
        columns |= self.action_type.columns | self.surface.columns
        if self.duration_s:
            columns.add(self.duration_s.column)
        return sorted(columns)


class NpyVectors(Strict):
    """A matrix and the pin id of each of its rows."""

    npy: str
    ids: str


class LearnedVectors(Strict):
    """No content vectors: learn them from co-engagement before `until` (exclusive; keep it before evaluation)."""

    until: Annotated[str, BeforeValidator(ds_text)]
    dim: int = Field(default=64, ge=2)
    window_actions: int = Field(default=20, ge=1, le=40)
    min_count: int = Field(default=5, ge=1)
    max_pins: int = Field(default=200_000, ge=2)
    max_pairs: int = Field(default=20_000_000, ge=1)
    """Bounds the memory of the decomposition: about 100 bytes a pair."""

    @model_validator(mode="after")
    def _more_pins_than_dimensions(self) -> "LearnedVectors":
        if self.max_pins <= self.dim:
            raise ValueError(f"max_pins is {self.max_pins}: keep more pins than dim={self.dim}")
        return self


class ColumnVectors(Strict):
    column: str


def _vector_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return "npy" if "npy" in keys or "ids" in keys else "column" if "column" in keys else "learned"


Vectors = Annotated[
    Annotated[NpyVectors, Tag("npy")]
    | Annotated[LearnedVectors, Tag("learned")]
    | Annotated[ColumnVectors, Tag("column")],
    Discriminator(_vector_kind),
    BeforeValidator(_column_shorthand),
]


class PinsSource(Strict):
    """The catalogue: ids, interests and candidates from files, vectors from a column, a matrix, or the actions.

    A dated catalogue adds a day's pins to those known before, and the newest row of a pin wins. An undated one
    is read whole for every partition.
    """

    pin_id: Annotated[IdField, BeforeValidator(_column_shorthand)]
    catalogue: Files | None = None
    vectors: Vectors
    interest: str | None = None
    is_candidate: str | None = None

    @model_validator(mode="after")
    def _columns_need_a_catalogue(self) -> "PinsSource":
        from_columns = [self.interest, self.is_candidate, getattr(self.vectors, "column", None)]
        if self.catalogue is None and any(from_columns):
            raise ValueError("`interest`, `is_candidate` and a vector column are read from `catalogue`: give its path")
        if self.catalogue is not None and isinstance(self.vectors, ColumnVectors):
            if self.catalogue.file_format == "csv":
                raise ValueError("vectors in a column need a Parquet or JSON-lines catalogue; CSV has no lists")
        elif self.catalogue is not None and self.catalogue.is_dated:
            raise ValueError("a catalogue with {ds} in its path needs the vectors in one of its columns")
        return self

    @property
    def is_incremental(self) -> bool:
        return self.catalogue is not None and self.catalogue.is_dated


class Positive(Strict):
    """Which actions are positive engagement; the paper's default (section 3)."""

    action_types: tuple[str, ...] = ("repin", "closeup", "click")
    longer_than_s: dict[str, float] = Field(default_factory=lambda: {"closeup": 10.0, "click": 10.0})
    surfaces: tuple[str, ...] | None = ("homefeed",)


class Source(Strict):
    """A site's logs. Relative paths count from `root`, and a relative root from the file that holds this section."""

    root: str = "."
    actions: ActionsSource
    pins: PinsSource
    positive: Positive = Positive()

    @model_validator(mode="after")
    def _pin_ids_agree(self) -> "Source":
        if self.actions.pin_id.type != self.pins.pin_id.type:
            raise ValueError(
                f"pin ids are {self.actions.pin_id.type} in `actions` and {self.pins.pin_id.type} in `pins`: "
                "give both the same `type`"
            )
        return self
