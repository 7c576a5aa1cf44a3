"""Where an action happened, and how long it took: the columns that say so."""

import numpy as np

from pf_core.onboarding import words
from pf_core.onboarding.columns import Column
from pf_core.onboarding.roles import Roles

MAX_SURFACES = 100

MAX_PAGES = 50
"""A column of more values that each pin has one of is the pin's page, and no surface."""


def find_surfaces(free: dict[str, Column], roles: Roles) -> list[Column]:
    """Return the columns that could be surfaces, the best first: few values, none missing, and not a page of a pin."""
    ranked = [
        (rank, column)
        for column in free.values()
        if 2 <= column.num_distinct <= MAX_SURFACES
        and column.num_given == column.num_rows
        and not column.has_fractions
        and not column.is_flag
        and not (column.num_distinct > MAX_PAGES and is_of_the_pin(roles.pin, column))
        and (rank := words.rank_of(column.name, words.SURFACE)) is not None
    ]
    return [column for _, column in sorted(ranked, key=lambda each: each[0])]


def find_duration(free: dict[str, Column], roles: Roles) -> Column | None:
    """Return the column that says how long an action took; the length of a video is one of the pin, and none of it."""
    named = []
    for column in free.values():
        own = set(words.words_of(column.name))
        is_named = bool(own & words.DURATION and own & words.LENGTH) or bool(own & words.DURATION_NAMES)
        is_time = column.is_number and column.num_distinct > 2 and column.numbers.min() >= 0
        if is_named and is_time and not is_of_the_pin(roles.pin, column):
            named.append((not own & words.DURATION, -column.num_distinct, column))
    return min(named, key=lambda each: each[:2])[2] if named else None


def is_of_the_pin(pin: Column, column: Column) -> bool:
    """Whether nearly all pins with several rows have one value of the column."""
    pair = np.unique(np.stack([pin.codes, column.codes]), axis=1)[0]
    several = np.flatnonzero(np.bincount(pin.codes[pin.codes >= 0]) > 1)
    if not len(several):
        return False
    values = np.bincount(pair[pair >= 0], minlength=int(several.max()) + 1)[several]
    return bool((values == 1).mean() > 0.9)


def unit_of(column: Column) -> tuple[str, str]:
    own = set(words.words_of(column.name))
    order = np.argsort(column.numbers)
    middle = np.searchsorted(np.cumsum(column.counts[order]), column.num_given / 2)
    median = column.numbers[order][middle]
    largest = column.numbers.max()
    most = f"{largest:,.0f}" if largest > 999 else f"{largest:.4g}"
    shown = f"median {median:,.4g}, at most {most}"
    if own & {"ms", "msec", "millis", "milliseconds"}:
        return "ms", f"{shown}; its name says ms"
    if own & {"s", "sec", "secs", "seconds"}:
        return "s", f"{shown}; its name says s"
    is_ms = median > 3600
    return ("ms", f"{shown}: as seconds, more than an hour") if is_ms else ("s", f"{shown}: seconds, as ms hardly one")
