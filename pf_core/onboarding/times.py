"""Which columns of a sample are times, in which unit or format, and whether they name a time zone."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.fields import TimeField
from pf_core.days import DAY_US
from pf_core.logs.mapping_sql import EARLIEST_US, LATEST_US, as_raw, time_us
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column

LEAST_SHARE = 0.9
"""A column is one of times if this share of its values can be read in one way."""

TRIED_VALUES = 2000
"""Values on which formats are tried first."""

OLDEST_US = 315_532_800_000_000  # 1980-01-01

UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}

_ZONE = r":\d{2}([.,]\d+)?\s*(Z|UTC|GMT|[A-Z][A-Za-z]+/[A-Za-z_/-]+|[+-]\d{2}:?(\d{2})?)$"

_SHORT_ZONE = re.compile(r":\d{2}([.,]\d+)?\s*(?P<zone>[A-Z]{3,5})$")

_CLOCK = re.compile(
    r"(?P<gap>[ T:]|, ?)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?P<second>:\d{2})?(?P<fraction>[.,]\d+)?"
    r"(?P<half> ?[AaPp][Mm])?(?P<zone> ?(?:[+-]\d{2}:?\d{2}|UTC|GMT|Z))?(?P<year> \d{4})?$"
)
_DATE = re.compile(r"(?P<a>\d{1,4})(?P<gap>[-/. ])(?P<b>\d{1,2}|[A-Za-z]{3,9})(?P=gap)(?P<c>\d{2,4})")
_NAMED = re.compile(r"(?P<month>[A-Za-z]{3,9}) (?P<day>\d{1,2})(?P<year>,? \d{4})?")
_WEEKDAY = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*(?P<gap>,? )")
_MONTHS = frozenset("jan feb mar apr may jun jul aug sep oct nov dec".split())
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?\s*(Z|UTC|GMT|[+-]\d{2}:?(\d{2})?)?)?")
_SINCE_1970 = {9: 1_000_000, 10: 1_000_000, 12: 1_000, 13: 1_000, 15: 1, 16: 1}
"""Microseconds of a unit, by the number of digits of a number of that unit since 1970."""
_COMPACT = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}


@dataclass(frozen=True, eq=False)
class TimeColumn:
    """A column of times, and how it is read."""

    column: Column
    field: TimeField
    us: np.ndarray
    """Microseconds since 1970 of each row, read as UTC where it names no zone; -1 where it is no time."""
    read_share: float
    """Share of the given values that can be read."""
    zone_share: float
    """Share of the given values that name a time zone, or are a number since 1970."""
    early_share: float = 0.0
    """Share of the given values that are numbers of the years 1980 to 1999, which the pipeline does not read."""
    other_format: str | None = None
    """Another format that reads as many values: day and month could be the other way round."""
    time_of_day: Column | None = None
    """Another column, which has the time of day."""

    @cached_property
    def num_instants(self) -> int:
        return len(np.unique(self.us[self.us >= 0]))

    @cached_property
    def has_clock(self) -> bool:
        """Whether the times are more than days."""
        known = self.us[self.us >= 0]
        return bool(len(known)) and bool((known % DAY_US != 0).any())

    def how(self) -> str:
        """Return how the column is read, for a message."""
        if self.field.format is not None:
            return f"text in the format {self.field.format}"
        unit = {"s": "seconds since 1970", "ms": "milliseconds since 1970", "us": "microseconds since 1970"}
        return unit.get(self.field.unit or "", "ISO 8601 text" if self.field.unit == "iso" else "timestamps")


class TimeReader:
    """Reads columns as times, with the SQL of a run."""

    def __init__(self, zone: str = "UTC") -> None:
        self._connection = duckdb.connect(config={"threads": 1})
        self._connection.execute("SET TimeZone = ?", [zone])

    def read_again(self, time: TimeColumn) -> np.ndarray:
        """Return the times as this reader's time zone has them."""
        return self.read(time.column.values, time.field, time_of_day=time.time_of_day)

    def read(
        self,
        values: pa.ChunkedArray,
        field: TimeField,
        *,
        time_of_day: Column | None = None,
        earliest_us: int = EARLIEST_US,
    ) -> np.ndarray:
        """Return microseconds since 1970; -1 where a value is no time between 2000 (or another year) and 2100."""
        table = pa.table({field.column: values})
        if time_of_day is not None:
            table = table.append_column(time_of_day.name, time_of_day.values)
        raw = as_raw(table)  # noqa: F841 (the statement reads it by name)
        try:
            found = self._connection.sql(f"SELECT {time_us(field, table.schema)} AS us FROM raw").to_arrow_table()
        except duckdb.Error:  # a format that DuckDB does not know reads nothing
            return np.full(len(values), -1)
        us = found["us"].cast(pa.int64()).fill_null(-1).to_numpy()
        return np.where((us < earliest_us) | (us > LATEST_US), -1, us)

    def find(self, column: Column) -> TimeColumn | None:
        """Return the column as times, or None if it holds none."""
        if not column.num_distinct:
            return None
        kind = column.values.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            zone_share = float(pa.types.is_timestamp(kind) and kind.tz is not None)
            return self._described(column, TimeField(column=column.name), zone_share)
        if pa.types.is_boolean(kind):
            return None
        some = pa.chunked_array([column.distinct[:TRIED_VALUES]])
        ways = [(float((self._read_early(some, field) >= 0).mean()), field) for field in _ways(column)]
        best = max((share for share, _ in ways), default=0.0)
        if best < LEAST_SHARE:
            return None
        fields = [field for share, field in ways if share >= best - 1e-9]
        if len(fields) > 1 and fields[0].format is not None:
            fields.sort(key=lambda field: self._disorder(column, field))
        names_zone = fields[0].unit in UNITS or "%z" in (fields[0].format or "")
        zone_share = 1.0 if names_zone else _zone_share(column)
        other = fields[1].format if len(fields) > 1 and fields[0].format is not None else None
        return self._described(column, fields[0], zone_share, other)

    def _described(
        self, column: Column, field: TimeField, zone_share: float, other: str | None = None
    ) -> TimeColumn | None:
        us = self._read_early(column.values, field)
        is_early, num_given = (us >= 0) & (us < EARLIEST_US), max(1, column.num_given)
        share, early_share = float((us >= 0).sum() / num_given), float(is_early.sum() / num_given)
        if share < LEAST_SHARE or share - early_share < 1 - LEAST_SHARE:
            return None
        us = np.where(is_early, -1, us)
        return TimeColumn(column, field, us, share, zone_share, early_share=early_share, other_format=other)

    def _read_early(self, values: pa.ChunkedArray, field: TimeField) -> np.ndarray:
        """Read numbers from 1980 on, which rules can leave out by their size, and other times from 2000 on."""
        return self.read(values, field, earliest_us=OLDEST_US if field.unit in UNITS else EARLIEST_US)

    def _disorder(self, column: Column, field: TimeField) -> tuple[float, int]:
        """Return how often a time is before the one of the row before, and the time between the first and the last.

        Of two ways to read a date, the right one has the rows of a log in order, or on fewer months.
        """
        us = self.read(column.values, field)
        known = us[us >= 0]
        back = float((np.diff(known) < 0).mean()) if len(known) > 1 else 0.0
        return round(back, 3), int(known.max() - known.min()) if len(known) else 0


def with_time_of_day(time: TimeColumn, columns: Iterable[Column]) -> TimeColumn:
    """Return times that are days together with the column that has the time of day, if there is one."""
    if time.has_clock or time.field.unit in UNITS:
        return time
    other = words.OTHER_TIME | words.DURATION | {"length"}
    for column in columns:
        if column is time.column or column.is_constant or words.says(column.name, other):
            continue
        clocks = [clock for text in column.top(20) if (clock := _CLOCK.fullmatch(f" {text}")) is not None]
        if len(clocks) < len(column.top(20)):
            continue
        clock, unit, form = clocks[0], time.field.unit, None
        if time.field.format is not None or clock["half"]:
            unit, form = None, (time.field.format or "%Y-%m-%d") + _clock_format(clock)
        field = TimeField(column=time.column.name, unit=unit, format=form, time_of_day=column.name)
        us = TimeReader().read(time.column.values, field, time_of_day=column)
        share = float((us >= 0).sum() / max(1, time.column.num_given))
        if share >= LEAST_SHARE:
            return replace(time, field=field, us=us, read_share=share, time_of_day=column)
    return time


def is_timezone(name: str) -> bool:
    """Whether a time zone has this name."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        return False
    return True


def counts_from_zero(column: Column) -> bool:
    """Whether a column of whole numbers could be seconds since the start of the log instead of since 1970."""
    return column.is_number and column.numbers.min() >= 0 and column.numbers.max() < EARLIEST_US // 1_000_000


def short_zone(column: Column) -> str | None:
    """Return the abbreviation of a time zone, such as CEST, with which the values end; None if they have none."""
    found = [match["zone"] for value in column.top(20) if (match := _SHORT_ZONE.search(value)) is not None]
    return found[0] if len(found) > 0.5 * len(column.top(20)) else None


def is_in_nanoseconds(column: Column) -> bool:
    """Whether a column of whole numbers could be nanoseconds since 1970."""
    if not column.is_number:
        return False
    inside = (column.numbers > EARLIEST_US * 1000) & (column.numbers < LATEST_US * 1000)
    return bool(inside.mean() >= LEAST_SHARE)


def _ways(column: Column) -> Iterator[TimeField]:
    """Yield the ways in which the values of a column could be read."""
    texts = column.top(20)
    formats = dict.fromkeys(form for text in texts for form in formats_of(text))
    if column.is_number:
        for unit in UNITS:
            yield TimeField.model_validate({"column": column.name, "unit": unit})
    elif pa.types.is_string(column.values.type) or pa.types.is_large_string(column.values.type):
        yield TimeField(column=column.name, unit="iso")
    for form in formats:
        yield TimeField(column=column.name, format=form)


def _zone_share(column: Column) -> float:
    has_zone = pc.match_substring_regex(column.distinct, _ZONE).to_numpy(zero_copy_only=False)
    return float(column.counts[has_zone].sum() / max(1, column.num_given))


def looks_like_time(text: str) -> bool:
    """Whether a text could be a time with its day: ISO 8601, a usual date, or a number since 1970."""
    if text.isdigit() and len(text) in _SINCE_1970:
        return EARLIEST_US <= int(text) * _SINCE_1970[len(text)] <= LATEST_US
    return _ISO.fullmatch(text) is not None or any(True for _ in formats_of(text.strip()))


def formats_of(text: str) -> Iterator[str]:
    """Yield the formats, in the words of strptime, that a text could be written in; ISO 8601 is not among them."""
    if text.isdigit() and len(text) in _COMPACT:
        yield _COMPACT[len(text)]
        return
    weekday = _WEEKDAY.match(text)
    start = f"%a{weekday['gap']}" if weekday else ""
    rest = text[weekday.end() :] if weekday else text
    clock = _CLOCK.search(rest)
    date = rest[: clock.start()] if clock else rest
    for form in _date_formats(date):
        whole = start + form + (_clock_format(clock) if clock else "")
        if "%Y" in whole or "%y" in whole:
            yield whole


def _clock_format(clock: re.Match[str]) -> str:
    hour = "%I" if clock["half"] else "%H"
    seconds = ":%S" if clock["second"] else ""
    fraction = f"{clock['fraction'][0]}%f" if clock["fraction"] else ""
    half = clock["half"].replace(clock["half"].strip(), "%p") if clock["half"] else ""
    zone = clock["zone"] or ""
    if zone and zone.strip()[0] in "+-":
        zone = zone.replace(zone.strip(), "%z")
    year = " %Y" if clock["year"] else ""
    return f"{clock['gap']}{hour}:%M{seconds}{fraction}{half}{zone}{year}"


def _date_formats(text: str) -> Iterator[str]:
    if text.isdigit() and len(text) == 8:
        yield "%Y%m%d"
    if (found := _NAMED.fullmatch(text)) and found["month"][:3].lower() in _MONTHS:
        year = found["year"].replace(found["year"].strip(", "), "%Y") if found["year"] else ""
        yield f"{_month_format(found['month'])} %d{year}"
    if not (found := _DATE.fullmatch(text)):
        return
    gap, year = found["gap"], "%Y" if len(found["c"]) == 4 else "%y"
    if len(found["a"]) == 4:
        yield f"%Y{gap}%m{gap}%d"
        return
    if not found["b"].isdigit():
        yield f"%d{gap}{_month_format(found['b'])}{gap}{year}"
        return
    yield f"%m{gap}%d{gap}{year}"
    yield f"%d{gap}%m{gap}{year}"


def _month_format(month: str) -> str:
    return "%b" if len(month) == 3 else "%B"
