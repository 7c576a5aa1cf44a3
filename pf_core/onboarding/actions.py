"""What kind of action a row is, where it happened, how long it took, which rows are no actions, and which are positive.

The paper's names (repin, closeup, click on the Homefeed) fit few logs. Here every action is positive, except those
against a pin (hide, return) and those that only show it; shares of all types stand beside, for whoever wants less.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pf_core.logs.mapping_sql import EARLIEST_US
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column, describe_column
from pf_core.onboarding.questions import Notes, Question, percent
from pf_core.onboarding.roles import Roles
from pf_core.onboarding.surface import find_duration, find_surfaces, unit_of
from pf_core.onboarding.times import UNITS

MAX_TYPES = 50

LEAST_MISSING = 0.002
"""Rows without a user or pin are left out by a rule from this share on; fewer are quarantined."""

OTHER = "other"

NAME_OF_CONSTANT = {
    "purchase": frozenset(
        "quantity qty invoice order ordered basket price amount purchase purchased bought sale sold checkout receipt "
        "bestellnr bestellung rechnung preis menge".split()
    ),
    "play": frozenset("play plays played track song artist album listen listens playlist stream".split()),
    "click": frozenset("click clicks clicked ctr".split()),
    "watch": frozenset("watch watches watched movie film video episode".split()),
    "read": frozenset("read reads article news".split()),
    "view": frozenset("view views viewed page url pageview visit".split()),
}
"""Name of the only action type, by words of the columns and files; the first that fits."""


@dataclass(kw_only=True)
class ActionMapping:
    """The keys of the site file about the kind of an action."""

    action_type: dict[str, Any] | str
    surface: str | None = None
    duration_s: dict[str, str] | None = None
    positive: list[str]
    """Positive action types."""


def choose_mapping(columns: dict[str, Column], roles: Roles, file_names: str, notes: Notes) -> ActionMapping:
    """Return how actions are typed."""
    free = {name: column for name, column in columns.items() if name not in roles.names}
    skip = list(_skip_rules(free, roles, notes))
    typed, flags = find_action_type(free), find_flags(free)
    if typed is not None:
        free.pop(typed.name)
        mapping = _by_column(typed, roles, skip, notes)
    elif flags:
        mapping = _by_flags(flags, skip, roles, notes)
        free = {name: column for name, column in free.items() if column not in flags}
    else:
        mapping = _constant(columns, free, file_names, skip, notes)
    surface = find_surfaces(free, roles)
    if surface:
        mapping.surface = surface[0].name
        beside = f"; also: {', '.join(each.name for each in surface[1:6])}" if len(surface) > 1 else ""
        notes.guessed["surface"] = f"{surface[0].num_distinct} values: {surface[0].examples(6)}{beside}"
        free.pop(surface[0].name)
    duration = find_duration(free, roles)
    if duration is not None:
        unit, reason = unit_of(duration)
        mapping.duration_s = {"column": duration.name, "unit": unit}
        notes.guessed["duration_s"] = reason
    return mapping


# Rows that are no actions


def _skip_rules(free: dict[str, Column], roles: Roles, notes: Notes) -> Iterator[dict[str, Any]]:
    """Yield rules that leave out rows without a user, pin or time, and rows of nothing bought."""
    for what, column in (("user", roles.user), ("pin", roles.pin), ("time", roles.time.column)):
        marks = [
            *column.stand_ins,
            *(["-1"] if what != "time" and column.is_integer and "-1" in column.top(20) else []),
        ]
        share = column.missing_share + ("-1" in marks) * column.shares().get("-1", 0.0)
        if share < LEAST_MISSING:
            continue
        instead = [other.name for other in free.values() if what == "user" and _could_be_user(other)]
        beside = f"; {instead[0]} has a value in every row, and could be the user instead" if instead else ""
        notes.hints.append(f"{percent(share)} of the rows have no {what} (column {column.name}): left out{beside}.")
        stand_ins = float(column.is_any(marks).mean()) if marks else 0.0
        if share > stand_ins + 1e-9:
            yield {"skip": True, "when": {column.name: {"missing": True}}}
        if marks:
            yield {"skip": True, "when": {column.name: marks}}
    time = roles.time
    if time.early_share:
        notes.hints.append(f"{percent(time.early_share)} of the rows are of before 2000, which is not read: left out.")
        yield {"skip": True, "when": {time.column.name: {"below": EARLIEST_US // UNITS[time.field.unit or "us"]}}}
    for column in free.values():
        if words.says(column.name, words.QUANTITY) and column.is_number and (column.numbers <= 0).any():
            share = float(column.counts[column.numbers <= 0].sum() / column.num_rows)
            if share < 0.5:
                notes.hints.append(
                    f"{percent(share)} of the rows have a {column.name} of 0 or less, as returns have: left out."
                )
                yield {"skip": True, "when": {column.name: {"at_most": 0}}}


def _could_be_user(column: Column) -> bool:
    is_id = words.says(column.name, words.WEAK_USER) and not column.has_fractions
    return is_id and column.num_distinct > MAX_TYPES and column.num_given == column.num_rows


# Action types


def find_action_type(free: dict[str, Column]) -> Column | None:
    """Return the column whose values are types of actions: by its name, or by values such as view and purchase."""
    scored = [(score, column) for column in free.values() if (score := _type_score(column)) >= 2]
    return max(scored, key=lambda each: each[0])[1] if scored else None


def _type_score(column: Column) -> float:
    if not 2 <= column.num_distinct <= MAX_TYPES or column.has_fractions or column.is_flag:
        return 0.0
    known = words.STRONG_ACTIONS | words.USES | words.AGAINST | words.SHOWN
    is_known = [bool(words.value_words(value) & known) for value in column.top(MAX_TYPES)]
    by_value = 0.0 if column.is_number else 2.5 * sum(is_known) / len(is_known)
    own = set(words.words_of(column.name))
    by_name = 2.0 * bool(own & words.ACTION) + 0.5 * bool(own & words.WEAK_ACTION)
    is_surface = bool(own & (set(words.SURFACE) | words.RATING | words.TIME)) and not own & words.ACTION
    is_id = "id" in own and not column.is_number and by_value == 0
    return by_name + by_value - 2.0 * is_surface - 1.0 * is_id


def kind_of(action: str) -> str:
    """Return what an action type is, by its words: against, shown, strong, use or unknown."""
    own = words.value_words(action)
    for kind, known in (
        ("against", words.AGAINST),
        ("shown", words.SHOWN),
        ("strong", words.STRONG_ACTIONS),
        ("use", words.USES),
    ):
        if own & known:
            return kind
    return "unknown"


def _by_column(typed: Column, roles: Roles, skip: Sequence[dict[str, Any]], notes: Notes) -> ActionMapping:
    is_action = (roles.user.codes >= 0) & (roles.pin.codes >= 0)
    column = describe_column(typed.name, typed.values.filter(pa.array(is_action)))
    types = column.top(MAX_TYPES)
    shares = ", ".join(f"{value[:40]} {percent(share)}" for value, share in list(column.shares().items())[:10])
    notes.guessed["action_type"] = f"{column.num_distinct} values: {shares}"
    positive = _positive(types, f"of the rows are {shares}", notes)
    if skip or column.missing_share:
        rules = [{"is": value, "when": {column.name: value}} for value in types]
        mapping = ActionMapping(action_type={"rules": [*skip, *rules, {"is": OTHER}]}, positive=positive)
    else:
        mapping = ActionMapping(action_type=column.name, positive=positive)
    return mapping


def _positive(types: Sequence[str], shares: str, notes: Notes) -> list[str]:
    """Return the positive types, by default all but those against a pin and those that only show it."""
    chosen = [name for name in types if kind_of(name) not in ("against", "shown")] or list(types)
    left_out = [name for name in types if name not in chosen]
    strong = [name for name in chosen if kind_of(name) == "strong"]
    evidence = shares
    if strong and len(strong) < len(chosen):
        evidence += f"; to learn only the strong ones, take {', '.join(strong)}"
    default = ", ".join(chosen)
    question = Question(
        text="Which action types are positive, with commas between them?",
        evidence=evidence,
        default=default,
        accepts=lambda answer: answer == default or {*map(str.strip, answer.split(","))} <= set(types),
    )
    answer = notes.ask(question)
    beside = f"not {', '.join(left_out)}; " if left_out else ""
    notes.guessed["positive"] = f"{beside}{evidence}"
    return chosen if answer == default else [name.strip() for name in answer.split(",")]


# Flags: a column of 0 and 1 for each kind of action


def find_flags(free: dict[str, Column]) -> list[Column]:
    """Return the columns of 0 and 1 that say what the user did, the rarest first, those against a pin before them."""
    known = words.STRONG_ACTIONS | words.USES | words.AGAINST
    flags = [
        column
        for column in free.values()
        if column.num_distinct == 2
        and column.is_flag
        and words.value_words(column.name) & known
        and not words.says(column.name, words.NO_ACTION)
    ]
    return sorted(flags, key=lambda column: (kind_of(column.name) != "against", _share_set(column)))


def _share_set(column: Column) -> float:
    return sum(share for value, share in column.shares().items() if value.lower() in ("1", "true"))


def _name_of_flag(column: Column) -> str:
    return column.name.removeprefix("is_").removeprefix("has_")


def _by_flags(flags: Sequence[Column], skip: Sequence[dict[str, Any]], roles: Roles, notes: Notes) -> ActionMapping:
    shares = ", ".join(f"{_name_of_flag(column)} {percent(_share_set(column))}" for column in flags)
    is_set = np.zeros(roles.user.num_rows, bool)
    for column in flags:
        is_set |= column.is_any(["1", "true"])
    none = float(1 - is_set.mean())
    notes.guessed["action_type"] = (
        f"columns of 0 and 1, the rarest first: {shares}; {percent(none)} of the rows have none of them"
    )
    if none > 0:
        notes.hints.append(f"{percent(none)} of the rows have no flag set: shown, and no action; they are left out.")
    rules = [{"is": _name_of_flag(column), "when": {column.name: _set_value(column)}} for column in flags]
    names = [_name_of_flag(column) for column in flags]
    positive = _positive(names, f"of the rows are {shares}", notes) if len(names) > 1 else names
    return ActionMapping(action_type={"rules": [*skip, *rules, {"skip": True}]}, positive=positive)


def _set_value(column: Column) -> int | bool:
    return 1 if column.is_number else True


# One type


def _constant(
    columns: dict[str, Column], free: dict[str, Column], file_names: str, skip: Sequence[dict[str, Any]], notes: Notes
) -> ActionMapping:
    rating = find_rating(free)
    named = {word for name in [*columns, file_names] for word in words.words_of(name)}
    name = "rating" if rating is not None else _name_of_constant(named)
    notes.guessed["action_type"] = "no column of action types: every row is one action, and positive"
    if rating is not None:
        threshold = _ask_rating(rating, notes)
        if threshold is not None:
            rules = [{"is": "high_rating", "when": {rating.name: {"at_least": threshold}}}, {"is": "rating"}]
            return ActionMapping(action_type={"rules": [*skip, *rules]}, positive=["high_rating"])
    action_type: dict[str, Any] = {"rules": [*skip, {"is": name}]} if skip else {"constant": name}
    return ActionMapping(action_type=action_type, positive=[name])


def _name_of_constant(named: set[str]) -> str:
    """Return the name of the only action type, by the words of the log."""
    return next((name for name, known in NAME_OF_CONSTANT.items() if named & known), "action")


def find_rating(free: dict[str, Column]) -> Column | None:
    """Return the column of ratings: by its name, or in a log without names by few numbers of at most 10."""
    for column in free.values():
        if not column.is_number or not 2 <= column.num_distinct <= 101:
            continue
        is_unnamed = column.name.startswith("column_") and column.num_distinct <= 20 and column.numbers.max() > 1
        if words.says(column.name, words.RATING) or (
            is_unnamed and column.numbers.min() >= 0 and column.numbers.max() <= 10
        ):
            return column
    return None


def _ask_rating(column: Column, notes: Notes) -> float | None:
    """Return the least rating that is positive; None: all are."""
    order = np.argsort(column.numbers)
    numbers, counts = column.numbers[order], column.counts[order]
    above = np.cumsum(counts[::-1])[::-1] / counts.sum()
    place = int(np.searchsorted(-above, -0.5, side="right")) - 1  # the largest that at least half of the rows reach
    high, share = numbers[place], percent(float(above[place]))
    evidence = f"{column.name} has {numbers[0]:g} to {numbers[-1]:g}, {share} are at least {high:g}"
    question = Question(
        text="Which ratings are positive: all, or from which number on?",
        evidence=evidence,
        default="all",
        accepts=lambda answer: answer == "all" or _is_number(answer),
    )
    answer = notes.ask(question)
    rules = f"[{{is: high_rating, when: {{{column.name}: {{at_least: {high:g}}}}}}}, {{is: rating}}]"
    notes.hints.append(
        f"{evidence}. To count only these as positive: action_type: {{rules: {rules}}} and "
        "positive: {action_types: [high_rating]}."
    )
    return float(answer) if _is_number(answer) else None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
