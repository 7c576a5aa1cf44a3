"""Which columns are the user, the pin and the time: by their names, and where these say nothing, by their values.

A user and a pin are columns with many values that come again, a user's on other days; a column of unique values numbers
the rows. Of the pins' columns that are left, the one with most values is the pin: a track rather than its artist. Users
stand before pins in logs whose columns have no names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.logs.routing import ds_of
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column, share_of_one
from pf_core.onboarding.questions import Notes, Question, percent
from pf_core.onboarding.times import (
    UNITS,
    TimeColumn,
    TimeReader,
    counts_from_zero,
    is_in_nanoseconds,
    short_zone,
    with_time_of_day,
)

CLEAR_MARGIN = 0.7
"""A column is clear if its score is better than that of any other by so much."""

NAMED = 1.5
"""Least score of a name that says what the column is."""

FUTURE_SHARE = 0.5

MAX_KINDS = 50
"""Kinds of actions that a column may have."""

DAY_S = 86_400

OLDEST_S = 3650 * DAY_S
"""Seconds since 1970 from which on a number is a time, and not one that counts from the start of the log."""


@dataclass(frozen=True, eq=False)
class Roles:
    """The columns that every log needs."""

    user: Column
    pin: Column
    time: TimeColumn

    @property
    def names(self) -> set[str]:
        return {self.user.name, self.pin.name, *self.time.field.columns}


def missing_roles(columns: dict[str, Column]) -> str | None:
    """Return which of user, pin and time the columns lack; None if they could be a log."""
    times = find_times(columns)
    if not times:
        return "no column of times"
    others = _ids(columns, choose_best_time(times)[0], times)
    return None if len(others) >= 2 else "no two columns that could be users and pins"


def find_roles(columns: dict[str, Column], notes: Notes) -> Roles:
    """Return the columns of a log; a PipelineError says what it lacks."""
    time = _choose_time(columns, notes)
    candidates = _ids(columns, time, find_times(columns))
    if len(candidates) < 2:
        refuse_single(columns, time)
    user, pin = _choose_ids(candidates, time, notes)
    _refuse_one_value(user, "user", "a model learns from many users: name a log with more of them")
    _refuse_one_value(pin, "pin", "a model learns from many pins: name a log with more of them")
    return Roles(user, pin, time)


def _refuse_one_value(column: Column, what: str, remedy: str) -> None:
    if column.is_constant:
        raise PipelineError(
            f"the log has a single {what}: column {column.name!r} has only {column.examples()!r}", remedy
        )


def refuse_single(columns: dict[str, Column], time: TimeColumn) -> None:
    """Raise a PipelineError about a log without columns for users and pins."""
    for column in columns.values():
        for what, known in (("user", words.USER), ("pin", words.ITEM)):
            if words.says(column.name, known) and column.is_constant and column.num_given:
                _refuse_one_value(column, what, f"a model learns from many {what}s: name a log with more of them")
    empty = [repr(column.name) for column in columns.values() if not column.num_given]
    beside = f", and {', '.join(empty)} has no value" if empty else ""
    raise PipelineError(
        f"no two columns could be users and pins: the log has {', '.join(map(repr, columns))}, of which "
        f"{time.column.name!r} is the time{beside}",
        "name a log with a column of users and a column of things",
    )


# Time


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


def _choose_time(columns: dict[str, Column], notes: Notes) -> TimeColumn:
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


# Users and pins


def _ids(columns: dict[str, Column], time: TimeColumn, times: Sequence[TimeColumn]) -> list[Column]:
    """Return the columns that could be ids; numbers of users and pins may look like times."""
    dates = {each.column.name for each in times if each.field.unit not in UNITS or _is_time_by_name(each.column)}
    taken = {*dates, *time.field.columns}
    return [
        column
        for column in columns.values()
        if column.name not in taken
        and column.num_distinct > 1
        and (not column.has_fractions or _is_text_of_user(column))
        and not pa.types.is_boolean(column.values.type)
        and not _names_actions(column)
        and not words.says(column.name, words.RATING | words.QUANTITY)
    ]


def _is_time_by_name(column: Column) -> bool:
    return words.says(column.name, words.TIME) and not words.says(column.name, words.USER | words.ITEM)


def _is_text_of_user(column: Column) -> bool:
    """Whether ids have a point within them, as the user_pseudo_id of Google Analytics."""
    return pa.types.is_string(column.values.type) and words.says(column.name, words.USER)


def _names_actions(column: Column) -> bool:
    """Whether the values are kinds of actions, such as view and purchase, by the column's name and theirs."""
    own = set(words.words_of(column.name))
    if column.num_distinct > MAX_KINDS or not own & words.ACTION or "id" in own:
        return False
    known = words.STRONG_ACTIONS | words.USES | words.AGAINST | words.SHOWN
    return 2 * sum(bool(words.value_words(value) & known) for value in column.top(MAX_KINDS)) >= column.num_distinct


def _choose_ids(candidates: Sequence[Column], time: TimeColumn, notes: Notes) -> tuple[Column, Column]:
    """Return the columns of users and of pins."""
    user_score = np.array([_user_score(column, time) - 0.05 * place for place, column in enumerate(candidates)])
    pin_score = np.array([_pin_score(column) - 0.01 * place for place, column in enumerate(candidates)])
    likely = candidates[int(user_score.argmax())]
    pin_score -= [1.5 * _share_of_session(column, likely, time) for column in candidates]
    total = user_score[:, None] + pin_score[None, :]
    np.fill_diagonal(total, -np.inf)
    user, pin = np.unravel_index(int(total.argmax()), total.shape)
    chosen: dict[str, str] = {}
    for what, index, score, other, known in (
        ("user", int(user), user_score, int(pin), _user_name_score),
        ("pin", int(pin), pin_score, int(user), _pin_name_score),
    ):
        column = candidates[index]
        rest = np.delete(np.arange(len(candidates)), [index, other])
        margin = score[index] - score[rest].max() if len(rest) else math.inf
        is_named = known(column) >= NAMED
        evidence = (
            f"{column.num_distinct:,} {column.kind()} in {column.num_given:,} rows, such as {column.examples()}"
            f"{'' if is_named else '; its name does not say so'}"
        )
        if not is_named or margin < CLEAR_MARGIN:
            answer = notes.ask(
                Question(
                    text=f"Which column is the {what}?",
                    evidence=evidence,
                    options=[each.name for each in candidates if each.name not in chosen.values()],
                    default=column.name,
                )
            )
            column = next(each for each in candidates if each.name == answer)
        chosen[what] = column.name
        notes.guessed[f"{what}_id"] = evidence
    by_name = {column.name: column for column in candidates}
    return by_name[chosen["user"]], by_name[chosen["pin"]]


def _user_name_score(column: Column) -> float:
    strong = 3.0 * words.says(column.name, words.USER) or 1.5 * words.says(column.name, words.WEAK_USER)
    by_value = 3.0 * _values_say(column, words.USER)
    return max(strong, by_value) - 3.0 * words.says(column.name, words.ITEM) - 1.5 * words.says(column.name, words.ROW)


def _pin_name_score(column: Column) -> float:
    strong = 3.0 * words.says(column.name, words.ITEM) or 1.5 * words.says(column.name, words.WEAK_ITEM)
    by_value = 3.0 * _values_say(column, words.ITEM)
    is_group = words.says(column.name, frozenset(words.INTEREST))
    against = 3.0 * words.says(column.name, words.USER) + 1.5 * words.says(column.name, words.ROW | words.WEAK_USER)
    return max(strong, by_value) - 1.5 * is_group - against


def _values_say(column: Column, known: frozenset[str]) -> bool:
    """Whether most values are ids with one of the words in them, as in user_17."""
    some = column.top(50)
    return not column.has_spaces and sum(words.says(value[:40], known) for value in some) > 0.9 * len(some)


def _user_score(column: Column, time: TimeColumn) -> float:
    return _user_name_score(column) + _id_score(column) - 1.5 * share_of_one(column.codes, time.us // DAY_US)


def _share_of_session(column: Column, user: Column, time: TimeColumn) -> float:
    """Return the share of the values that are those of one user or one day, as sessions and orders are, and no pins."""
    of_user = share_of_one(column.codes, user.codes) if column is not user else 0.0
    return max(of_user, share_of_one(column.codes, time.us // DAY_US))


def _pin_score(column: Column) -> float:
    return _pin_name_score(column) + _id_score(column) - 2.0 * column.missing_share


def _id_score(column: Column) -> float:
    """Return how much a column looks like one of ids that come again."""
    own = set(words.words_of(column.name))
    score = 0.5 * ("id" in own) - 0.5 * bool(own & {"name", "title", "description"})
    score -= 1.5 * column.has_spaces + 2.0 * column.is_unique
    score -= 1.0 * bool(own & set(words.SURFACE)) + 1.0 * bool(own & (words.ACTION | words.TIME))
    return score + min(1.5, math.log10(max(1, column.num_distinct)) / 3)


def likeness(columns: dict[str, Column]) -> float:
    """Return how much a table with all roles looks like a log: named users and pins, and pins that come again."""
    times = find_times(columns)
    time = choose_best_time(times)[0]
    candidates = _ids(columns, time, times)
    user = max(candidates, key=lambda column: _user_score(column, time))
    pin = max((column for column in candidates if column is not user), key=_pin_score)
    unique = 3.0 * pin.is_unique + 3.0 * user.is_unique
    return min(3.0, _user_name_score(user)) + min(3.0, _pin_name_score(pin)) - unique
