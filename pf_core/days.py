"""Days of partitions: `ds` is an ISO date, in UTC."""

from datetime import UTC, date, datetime, timedelta

from pf_core.errors import PipelineError


def parse_ds(ds: str) -> date:
    """A partition's day; anything but an ISO date is a PipelineError."""
    try:
        day = date.fromisoformat(ds)
    except ValueError as error:
        raise PipelineError(f"{ds!r} is not a day: write it as YYYY-MM-DD") from error
    if day.isoformat() != ds:  # 20260101 and 2026-W01-4 are ISO too, but days are compared as text
        raise PipelineError(f"{ds!r} is not a day: write it as YYYY-MM-DD")
    return day


def shift_ds(ds: str, num_days: int) -> str:
    try:
        return (parse_ds(ds) + timedelta(days=num_days)).isoformat()
    except OverflowError:
        raise PipelineError(f"{ds} is out of the calendar's range") from None


def ds_range(first_ds: str, last_ds: str) -> list[str]:
    """Every day from first to last, both included."""
    num_days = (parse_ds(last_ds) - parse_ds(first_ds)).days
    return [shift_ds(first_ds, offset) for offset in range(num_days + 1)]


def ds_start(ds: str) -> datetime:
    day = parse_ds(ds)
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def ds_start_us(ds: str) -> int:
    return int(ds_start(ds).timestamp()) * 1_000_000


DAY_US = 86_400_000_000
