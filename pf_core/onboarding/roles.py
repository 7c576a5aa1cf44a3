"""Which columns are the user and the pin: by their names, and where these say nothing, by their values. The time is
found first (`time_role.py`). A column with the ids of another table, such as a catalogue, is the pin (`keys.py`).

A user and a pin are columns with many values that come again, a user's on other days; a column of unique values numbers
the rows. Of the pins' columns that are left, the one with most values is the pin: a track rather than its artist. Users
stand before pins in logs whose columns have no names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column, share_of_one
from pf_core.onboarding.questions import Notes, Question
from pf_core.onboarding.time_role import CLEAR_MARGIN, choose_best_time, choose_time, find_times
from pf_core.onboarding.times import UNITS, TimeColumn

NAMED = 1.5
"""Least score of a name that says what the column is."""

MAX_KINDS = 50
"""Kinds of actions that a column may have."""

KEY = 4.0
"""Score of a column whose values are the keys of another table."""

FEW, FEW_OF_MANY, MANY_ROWS = 10, 20, 2000
"""A column with fewer values, or in a log with so many rows with fewer than FEW_OF_MANY, is hardly one of ids."""

LONG_TITLE = 80
"""Titles of more characters on average are texts, and name nothing."""

LEAST_HASH = 1e9
"""Integers above it are ids, such as hashes, even where some are negative."""


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


def find_roles(columns: dict[str, Column], notes: Notes, keys: Mapping[str, str]) -> Roles:
    """Return the columns of a log; a PipelineError says what it lacks.

    `keys` are those with the ids of another table, each with the evidence.
    """
    time = choose_time(columns, notes)
    candidates = _ids(columns, time, find_times(columns))
    if len(candidates) < 2:
        refuse_single(columns, time)
    user, pin = _choose_ids(candidates, time, notes, keys)
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
        and not _is_measure(column)
    ]


def _is_measure(column: Column) -> bool:
    """Whether the name says a duration or money; price_id is an id."""
    return words.says(column.name, words.MEASURE) and "id" not in words.words_of(column.name)


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


def _choose_ids(
    candidates: Sequence[Column], time: TimeColumn, notes: Notes, keys: Mapping[str, str]
) -> tuple[Column, Column]:
    """Return the columns of users and of pins."""
    keyed = {column.name for column in candidates if column.name in keys and not _is_of_another(column, candidates)}
    user_score = np.array([_user_score(column, time) - 0.05 * place for place, column in enumerate(candidates)])
    pin_score = np.array([_pin_score(column) - 0.01 * place for place, column in enumerate(candidates)])
    likely = candidates[int(user_score.argmax())]
    pin_score -= [1.5 * _share_of_session(column, likely, time) for column in candidates]
    pin_score += [KEY * (column.name in keyed) for column in candidates]
    total = user_score[:, None] + pin_score[None, :]
    np.fill_diagonal(total, -np.inf)
    user, pin = np.unravel_index(int(total.argmax()), total.shape)
    chosen: dict[str, str] = {}
    for what, index, score, other, known in (
        ("user", int(user), user_score, int(pin), _user_name_score),
        ("pin", int(pin), pin_score, int(user), _pin_name_score),
    ):
        free = [place for place, each in enumerate(candidates) if each.name not in chosen.values()]
        is_taken = index not in free  # by another answer
        index = max(free, key=lambda place: score[place]) if is_taken else index
        column = candidates[index]
        rest = np.delete(np.arange(len(candidates)), [index, other])
        margin = score[index] - score[rest].max() if len(rest) else math.inf
        is_keyed = what == "pin" and column.name in keyed
        is_clear = not is_taken and (is_keyed or known(column) >= NAMED)
        reason = (
            f"; {keys[column.name]}" if is_keyed else "" if known(column) >= NAMED else "; its name does not say so"
        )
        evidence = (
            f"{column.num_distinct:,} {column.kind()} in {column.num_given:,} rows, such as {column.examples()}{reason}"
        )
        if not is_clear or margin < CLEAR_MARGIN or _has_few(column):
            answer = notes.ask(
                Question(
                    text=f"Which column is the {what}?",
                    evidence=evidence,
                    options=[candidates[place].name for place in free],
                    default=column.name,
                )
            )
            column = next(each for each in candidates if each.name == answer)
        chosen[what] = column.name
        notes.guessed[f"{what}_id"] = evidence
    by_name = {column.name: column for column in candidates}
    return by_name[chosen["user"]], by_name[chosen["pin"]]


def _is_of_another(column: Column, candidates: Sequence[Column]) -> bool:
    """Whether another column names things, each with one value of this one, as tracks have one artist."""
    return any(
        other.num_distinct > column.num_distinct
        and words.says(other.name, words.ITEM)
        and not other.is_unique
        and share_of_one(other.codes, column.codes) > 0.9
        for other in candidates
        if other is not column
    )


def _user_name_score(column: Column) -> float:
    strong = 3.0 * words.says(column.name, words.USER) or 1.5 * words.says(column.name, words.WEAK_USER)
    by_value = 3.0 * _values_say(column, words.USER)
    return max(strong, by_value) - 3.0 * words.says(column.name, words.ITEM) - 1.5 * words.says(column.name, words.ROW)


def _pin_name_score(column: Column) -> float:
    strong = 3.0 * words.says(column.name, words.ITEM) or 1.5 * words.says(column.name, words.WEAK_ITEM)
    by_value = max(3.0 * _values_say(column, words.ITEM), 2.5 * _has_titles(column))
    is_group = words.says(column.name, frozenset(words.INTEREST))
    against = 3.0 * words.says(column.name, words.USER) + 1.5 * words.says(column.name, words.ROW | words.WEAK_USER)
    return max(strong, by_value) - 1.5 * is_group - against


def _has_titles(column: Column) -> bool:
    """Whether the values are titles of things that come again, and no long texts."""
    some = column.top(1000)
    is_short = sum(map(len, some)) < LONG_TITLE * len(some)
    return words.says(column.name, words.TITLE) and is_short and not column.is_unique


def _has_few(column: Column) -> bool:
    """Whether a column has too few values for ids."""
    return column.num_distinct < (FEW_OF_MANY if column.num_given >= MANY_ROWS else FEW)


def _is_signed(column: Column) -> bool:
    """Whether the values are integers, some of them negative, as ids are not; hashes may be."""
    return column.is_integer and bool(column.numbers.min() < 0 and column.numbers.max() < LEAST_HASH)


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
    score -= 1.5 * column.has_spaces + 2.0 * column.is_unique + 3.0 * _has_few(column)
    score -= 2.0 * (_is_signed(column) and not words.says(column.name, words.USER | words.ITEM))
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
