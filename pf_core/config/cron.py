"""Cron expressions: five fields, as Dagster's schedules understand them."""

import re

FIELDS = (
    ("minute", range(60), ()),
    ("hour", range(24), ()),
    ("day of the month", range(1, 32), ()),
    ("month", range(1, 13), ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")),
    ("day of the week", range(8), ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")),
)
"""Name of each field, its numbers, and the names that its first numbers have."""

PART = re.compile(r"(\*|[0-9A-Za-z]{1,3})(?:-([0-9A-Za-z]{1,3}))?(?:/([0-9]{1,2}))?")
"""A part of a field: `*`, a value or a range, and a step."""

LONGEST = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}
"""Days of the months that have fewer than 31."""

EXAMPLE = "write minute, hour, day, month and weekday, such as `0 2 * * *` for every day at 02:00"


def cron_text(value: object) -> str:
    """Return a cron expression; a ValueError says what is wrong with one that no schedule can have."""
    texts = value.split() if isinstance(value, str) else []
    if len(texts) != len(FIELDS):
        raise ValueError(f"{value!r} is not a cron expression of five fields: {EXAMPLE}")
    _, _, days, months, _ = (_numbers(text, *field) for text, field in zip(texts, FIELDS, strict=True))
    if not any(day <= LONGEST.get(month, 31) for month in months for day in days):
        raise ValueError(f"{value!r} names a day that its months do not have")
    return " ".join(texts)


def _numbers(text: str, name: str, numbers: range, names: tuple[str, ...]) -> set[int]:
    """Return the numbers that a field names."""
    values = dict(zip(names, numbers, strict=False)) | {str(n): n for n in numbers}
    found: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part)
        first, last, step = match.groups() if match is not None else ("", None, None)
        if first == "*" and last is None:
            low, high = numbers[0], numbers[-1]
        else:
            low = values.get(_plain(first), -1)
            high = low if last is None else values.get(_plain(last), -1)
            high = numbers[-1] if last is None and step is not None else high
        if not 0 <= low <= high or (step is not None and not 1 <= int(step) <= high - low):
            raise ValueError(f"{part!r} is no {name} ({numbers[0]} to {numbers[-1]}): {EXAMPLE}")
        found.update(range(low, high + 1, int(step or 1)))
    return found


def _plain(value: str) -> str:
    """Return a value without leading zeros, a name in capitals."""
    return value.lstrip("0") or "0" if value.isdigit() else value.upper()
