"""Which of the other files is a catalogue: one row a pin, and ids that are those of the log."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.onboarding import words
from pf_core.onboarding.columns import Column
from pf_core.onboarding.folders import Group
from pf_core.onboarding.keys import is_key
from pf_core.onboarding.questions import Notes, percent
from pf_core.onboarding.roles import Roles

LEAST_OVERLAP = 0.1
"""A catalogue has at least this share of the log's pins, or of its own pins the log has this share."""

CLEAR_OVERLAP = 0.9

LEAST_INTERESTS, MOST_INTERESTS = 2, 5000


@dataclass(frozen=True, kw_only=True, eq=False)
class CatalogueChoice:
    """A group of files that is the catalogue, and its columns."""

    group: Group
    pin: Column
    overlap: float
    """Share of the log's pins that it has."""
    interest: Column | None = None
    is_candidate: Column | None = None
    vectors: str | None = None

    def is_clear(self, pin: Column) -> bool:
        """Whether nobody needs to be asked: the column is called as in the log, and has nearly all of its pins."""
        return self.pin.name == pin.name and self.overlap > CLEAR_OVERLAP

    @property
    def quality(self) -> tuple[bool, float, bool]:
        """How good a catalogue it is: one with interests or vectors is better, then one with more of the pins."""
        says_more = self.interest is not None or self.vectors is not None
        return says_more, round(self.overlap, 2), self.is_candidate is not None


def read_as_catalogue(group: Group, columns: dict[str, Column], roles: Roles) -> CatalogueChoice | None:
    """Return a group of files as catalogue, or None if it has no column with the log's pins, once each."""
    pins = roles.pin.distinct
    found = [
        (column.name == roles.pin.name, _overlap(column, pins), column)
        for column in columns.values()
        if column.name != roles.user.name
        and (column.name == roles.pin.name or not _is_of_others(column))
        and is_key(column)
        and not _has_users(column, roles)
    ]
    best = max(found, key=lambda each: each[:2], default=None)
    if best is None or best[1] < LEAST_OVERLAP:
        return None
    pin = best[2]
    others = [column for column in columns.values() if column is not pin]
    return CatalogueChoice(
        group=group,
        pin=pin,
        overlap=float(pc.is_in(pins, pin.distinct).to_numpy(zero_copy_only=False).mean()),
        interest=_interest(others),
        is_candidate=_is_candidate(others),
        vectors=group.layout.lists[0] if group.layout.lists else None,
    )


def _is_of_others(column: Column) -> bool:
    """Whether the name says ids of users or of rows, such as orders, and not of pins."""
    return words.says(column.name, words.USER | words.ROW) and not words.says(column.name, words.ITEM)


def _has_users(column: Column, roles: Roles) -> bool:
    """Whether a column whose name does not say pins has the log's users rather than its pins: both may be 1, 2, 3."""
    if column.name == roles.pin.name or words.says(column.name, words.ITEM):
        return False
    return _likeness(column.distinct, roles.user.distinct) > _likeness(column.distinct, roles.pin.distinct)


def _likeness(one: pa.Array, other: pa.Array) -> float:
    """Return the share of the values of either that both have."""
    both = int(pc.is_in(one, other).to_numpy(zero_copy_only=False).sum())
    return both / max(1, len(one) + len(other) - both)


def _overlap(column: Column, pins: pa.Array) -> float:
    """Return the share of the log's pins in the column, or of the column's values in the log, if that is more."""
    of_log = pc.is_in(pins, column.distinct).to_numpy(zero_copy_only=False).mean()
    of_column = pc.is_in(column.distinct, pins).to_numpy(zero_copy_only=False).mean()
    return float(max(of_log, of_column))


def _interest(columns: Sequence[Column]) -> Column | None:
    """Return the column that says what a pin is about."""
    ranked = [
        (rank, column)
        for column in columns
        if LEAST_INTERESTS <= column.num_distinct <= min(MOST_INTERESTS, max(2, column.num_given // 2))
        and not column.has_fractions
        and (rank := words.rank_of(column.name, words.INTEREST)) is not None
    ]
    return min(ranked, key=lambda each: each[0])[1] if ranked else None


def _is_candidate(columns: Sequence[Column]) -> Column | None:
    """Return the column that says which pins may be recommended."""
    for column in columns:
        is_flag = {value.lower() for value in column.top(3)} <= {"0", "1", "true", "false"}
        if words.says(column.name, words.CANDIDATE) and is_flag and column.num_given == column.num_rows:
            return column
    return None


def best_catalogue(choices: Sequence[CatalogueChoice]) -> CatalogueChoice | None:
    """Return the best catalogue; None if there is none."""
    return max(choices, key=lambda choice: choice.quality, default=None)


def note_catalogue(chosen: CatalogueChoice, choices: Sequence[CatalogueChoice], notes: Notes) -> None:
    """Note what was chosen, and what could have been."""
    beside = [choice.group.files[0].name for choice in choices if choice.group.files != chosen.group.files]
    others = f"; others with ids of pins: {', '.join(beside)}" if beside else ""
    share = percent(chosen.overlap)
    notes.guessed["catalogue"] = (
        f"{chosen.group.files[0].name}, column {chosen.pin.name}: {share} of the log's pins that were read{others}"
    )
    if chosen.group.layout.encoding_evidence is not None:
        notes.guessed["catalogue_encoding"] = chosen.group.layout.encoding_evidence
    if chosen.interest is not None:
        notes.guessed["interest"] = f"{chosen.interest.num_distinct:,} values, such as {chosen.interest.examples()}"
    if chosen.is_candidate is not None:
        share = percent(float(chosen.is_candidate.is_any(["1", "true"]).mean()))
        notes.guessed["is_candidate"] = f"true for {share} of the pins"
    if chosen.vectors is not None:
        notes.guessed["vectors"] = "lists of numbers"
