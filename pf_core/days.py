"""Days of partitions: `ds` is an ISO date, in UTC."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta

from pf_core.errors import PipelineError

DAY_US = 86_400_000_000
"""Microseconds of a day."""

COUNT_WINDOWS_DAYS = (1, 7, 28, 91, 364)
"""Lengths of the windows in which the uses of pins are counted; the last one is the longest."""


def parse_ds(ds: str) -> date:
    """Parse the day of a partition; anything but YYYY-MM-DD is a PipelineError."""
    try:
        day = date.fromisoformat(ds)
    except ValueError as error:
        raise PipelineError(f"{ds!r} is not a day", "write it as YYYY-MM-DD") from error
    if day.isoformat() != ds:  # 20260101 and 2026-W01-4 are ISO too, but days are compared as text
        raise PipelineError(f"{ds!r} is not a day", "write it as YYYY-MM-DD")
    return day


def shift_ds(ds: str, num_days: int) -> str:
    """Return the day that is `num_days` days later; earlier, if negative."""
    try:
        return (parse_ds(ds) + timedelta(days=num_days)).isoformat()
    except OverflowError:
        raise PipelineError(f"{num_days} days from {ds} are outside the calendar") from None


def ds_range(first_ds: str, last_ds: str) -> list[str]:
    """All days from the first to the last, both included; empty if the last is before the first."""
    num_days = (parse_ds(last_ds) - parse_ds(first_ds)).days
    return [shift_ds(first_ds, offset) for offset in range(num_days + 1)]


def day_ranges(days: Iterable[str]) -> list[tuple[str, str]]:
    """Return the ranges without gaps that make up the days: first and last day of each, ascending."""
    ranges: list[tuple[str, str]] = []
    for ds in sorted(set(days)):
        if ranges and shift_ds(ranges[-1][1], 1) == ds:
            ranges[-1] = (ranges[-1][0], ds)
        else:
            ranges.append((ds, ds))
    return ranges


def days_text(days: Iterable[str], *, max_ranges: int = 5) -> str:
    """Return days as a person reads them: "2026-01-01 to 2026-01-31, 2026-02-03"; of many ranges the first."""
    ranges = day_ranges(days)
    shown = [first if first == last else f"{first} to {last}" for first, last in ranges[:max_ranges]]
    more = len(ranges) - max_ranges
    return ", ".join([*shown, *([f"and {more} more ranges"] if more > 0 else [])])


def ds_start(ds: str) -> datetime:
    """First moment of a day, in UTC."""
    day = parse_ds(ds)
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def ds_start_us(ds: str) -> int:
    """First moment of a day, in microseconds since 1970."""
    return int(ds_start(ds).timestamp()) * 1_000_000
