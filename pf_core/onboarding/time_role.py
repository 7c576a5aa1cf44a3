"""Which column of a log is the time of the action, and how it is read; why a log without one is refused."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.logs.routing import ds_of
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column
from pf_core.onboarding.questions import Notes, Question, percent
from pf_core.onboarding.times import (
    TimeColumn,
    TimeReader,
    counts_from_zero,
    is_in_nanoseconds,
    short_zone,
    with_time_of_day,
)

CLEAR_MARGIN = 0.7
"""A column is clear if its score is better than that of any other by so much."""

FUTURE_SHARE = 0.5

DAY_S = 86_400

OLDEST_S = 3650 * DAY_S
"""Seconds since 1970 from which on a number is a time, and not one that counts from the start of the log."""


def find_times(columns: dict[str, Column]) -> list[TimeColumn]:
    """Return the columns that can be read as times."""
    reader = TimeReader()
    return [
        found
        for column in columns.values()
        if not _is_id_by_name(column) and (found := reader.find(column)) is not None
    ]


def _is_id_by_name(column: Column) -> bool:
    """Whether the name says that a number is an id; ids of ten digits look like seconds since 1970."""
    is_id = words.says(column.name, words.USER | words.ITEM | words.ROW | words.WEAK_USER)
    return column.is_number and is_id and not words.says(column.name, words.TIME)


def choose_best_time(times: Sequence[TimeColumn]) -> tuple[TimeColumn, float]:
    """Return the best column, and by how much it is better than the next."""
    scored = sorted(times, key=_time_score, reverse=True)
    margin = _time_score(scored[0]) - _time_score(scored[1]) if len(scored) > 1 else math.inf
    return scored[0], margin


def choose_time(columns: dict[str, Column], notes: Notes) -> TimeColumn:
    """Return the column of the times, and ask where it is not clear."""
    times = find_times(columns)
    if not times:
        _refuse_without_time(columns)
    time, margin = choose_best_time(times)
    others = [other for other in times if other is not time]
    if margin < CLEAR_MARGIN:
        answer = notes.ask(
            Question(
                text="Which column is the time of the action?",
                evidence=f"{', '.join(each.column.name for each in times)} are times",
                options=[each.column.name for each in times],
                default=time.column.name,
            )
        )
        time = next(each for each in times if each.column.name == answer)
    beside = f"; also times: {', '.join(each.column.name for each in others)}" if others else ""
    evidence = f"{time.how()}, {percent(time.read_share)} can be read, such as {time.column.examples(1)}{beside}"
    if time.other_format is not None:
        assert time.field.format is not None
        answer = notes.ask(
            Question(
                text=f"In which format is {time.column.name}?",
                evidence=f"{time.column.examples(2)} can be read in both, and the rows are more in order by the first",
                options=[time.field.format, time.other_format],
                default=time.field.format,
            )
        )
        if answer != time.field.format:
            field = time.field.model_copy(update={"format": answer})
            us = TimeReader().read(time.column.values, field)
            time = TimeColumn(time.column, field, us, time.read_share, time.zone_share)
    time = with_time_of_day(time, columns.values())
    if (clock := time.time_of_day) is not None:
        evidence += f"; {clock.name} has the time of day, such as {clock.examples(1)}"
    notes.guessed["ts"] = evidence
    _refuse_future(time)
    return time


def _time_score(time: TimeColumn) -> float:
    name = time.column.name
    score = 2.0 * words.says(name, words.TIME - words.WEAK_TIME) + 1.0 * words.says(name, words.WEAK_TIME)
    score -= 2.0 * words.says(name, words.OTHER_TIME)
    if words.says(name, words.TIME):  # of two such columns, the one that says which instant it is
        score += 0.5 * time.zone_share
    score += 1.0 * time.has_clock + min(1.0, math.log10(max(1, time.num_instants)) / 4)
    return score - 2.0 * time.column.missing_share


def _refuse_without_time(columns: dict[str, Column]) -> None:
    named = [column for column in columns.values() if words.says(column.name, words.TIME)]
    for column in columns.values():
        if (zone := short_zone(column)) is not None:
            raise PipelineError(
                f"the times in column {column.name!r} end with {zone}, and time zones are not read by their "
                f"abbreviations, such as {column.examples(1)}",
                "write the offset (+02:00) or the name of the zone (Europe/Berlin) instead",
            )
    for column in named:
        if is_in_nanoseconds(column):
            raise PipelineError(
                f"column {column.name!r} looks like nanoseconds since 1970, such as {column.examples(1)}",
                "divide it by 1000: the site file knows s, ms and us",
            )
        if column.num_distinct > 1 and counts_from_zero(column):
            low, high = column.numbers.min(), column.numbers.max()
            if low > OLDEST_S:
                raise PipelineError(
                    f"the times in column {column.name!r} are of {ds_of(low // DAY_S)} to {ds_of(high // DAY_S)}, and "
                    "times before 2000 are not read",
                    "name a log of later days, or add as many seconds to all times",
                )
            raise PipelineError(
                f"column {column.name!r} counts from {low:,.0f} to {high:,.0f}, not from 1970: the days of the log are "
                "not known",
                "add the time at which the log begins to it, in seconds since 1970",
            )
    tried = "; ".join(f"{column.name}: {column.examples(1)}" for column in (named or list(columns.values()))[:8])
    raise PipelineError(
        f"no column is a time: in none can {percent(0.9)} of the values be read as seconds, ms or us since 1970 (from "
        f"2000 on), ISO 8601 or a usual date ({tried})",
        "name a log with the time of each action",
    )


def _refuse_future(time: TimeColumn) -> None:
    known = time.us[time.us >= 0]
    now_us = round(datetime.now(UTC).timestamp() * 1_000_000)
    share = float((known > now_us + DAY_US).mean())
    if share > FUTURE_SHARE:
        name, last = time.column.name, ds_of(int(known.max() // DAY_US))
        raise PipelineError(
            f"{percent(share)} of the times in column {name!r} ({time.how()}) are in the future, up to {last}",
            "mend the clock or the unit of the log, or name a log of the past",
        )
