"""How a field of our schemas is read from the columns of a foreign row: ids, times, durations and categories.

A category (an action type or a surface) is a column, with or without a map of its values, a list of rules on columns,
or a constant. `logs/mapping_sql.py` compiles these models to SQL.
"""

import re
import sys
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, model_validator

from pf_core.config.base import Strict
from pf_core.schemas import IdType

TimeUnit = Literal["s", "ms", "us", "iso"]

MAX_NUMBER = sys.float_info.max


def column_shorthand(value: Any) -> Any:
    """A plain string stands for `{column: string}`."""
    return {"column": value} if isinstance(value, str) else value


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
    """The column with the time of an action: a number since 1970 in a stated unit, ISO 8601 text, text in a stated
    format, or a timestamp of Parquet. Day and time of day may stand in two columns."""

    column: str
    """Name of the column."""
    unit: TimeUnit | None = None
    """Unit of the number (s, ms or us since 1970), or iso for ISO 8601 text; a timestamp column of Parquet needs
    none."""
    format: str | None = None
    """Format of text that is not ISO 8601, in the words of strptime, instead of `unit`: `%m/%d/%Y %H:%M` for
    12/1/2010 8:26. It names year, month and day."""
    time_of_day: str | None = None
    """Name of the column with the time of day (17:30, 17:30:01), where `column` has the day; with `format`, that of
    both, with a space between them."""
    timezone: Annotated[str, AfterValidator(_known_timezone)] = "UTC"
    """Time zone of text and timestamps that name none, such as Europe/Berlin."""

    @model_validator(mode="after")
    def _one_way_to_read(self) -> "TimeField":
        if self.time_of_day is not None and self.unit in ("s", "ms", "us"):
            raise ValueError(f"a number of unit {self.unit} has its time of day: leave out `time_of_day`")
        if self.time_of_day == self.column:
            raise ValueError(f"column {self.column!r} is both the day and `time_of_day`: leave out `time_of_day`")
        if self.format is None:
            return self
        if self.unit is not None:
            raise ValueError("give `unit` or `format`, not both")
        if not all(re.search(f"%-?[{letters}]", self.format) for letters in ("Yy", "mbB", "d")):
            raise ValueError(f"`format` {self.format!r} does not name year (%Y), month (%m or %b) and day (%d)")
        return self

    @property
    def columns(self) -> list[str]:
        """Columns that the time is read from."""
        return [self.column] if self.time_of_day is None else [self.column, self.time_of_day]


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
        named = set() if self.column is None else {self.column}
        return named.union(*(rule.when.keys() for rule in self.rules))
