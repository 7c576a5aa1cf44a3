"""Which columns of a log have the values of another table beside it that has each of them once, as a catalogue has."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.errors import PipelineError
from pf_core.onboarding import words
from pf_core.onboarding.columns import Column, describe
from pf_core.onboarding.folders import Group
from pf_core.onboarding.sampled import SAMPLE_BYTES, SMALL_BYTES, sample_of

UNIQUE = 0.98
"""Least share of the values of a key that are distinct."""

MOST_MISSING = 0.1

FREQUENT = 1000
"""Frequent values of a column that are looked up."""

LEAST_FREQUENT = 20
"""A column with fewer values is none of ids."""

LEAST_FOUND = 0.9

MAX_TABLES = 30

MAX_LARGE = 3
"""Tables of which a larger part is read, since the first part has some of the values."""

SPARSE = 10
"""Integers that are spread over so many times their number are not found in another table by chance, as 1, 2, 3 are."""


def is_key(column: Column) -> bool:
    """Whether a table has each value of the column once, and nearly no row without."""
    is_once = column.num_distinct >= UNIQUE * column.num_given
    return column.num_given > 0 and is_once and column.missing_share < MOST_MISSING


def find_keys(columns: Mapping[str, Column], beside: Sequence[Group]) -> dict[str, str]:
    """Return the columns whose frequent values are nearly all in a key of another table, each with that key.

    Tables of users, orders and sessions do not count: what is looked for are things.
    """
    found: dict[str, str] = {}
    asked = [column for column in columns.values() if _could_refer(column)]
    num_large = 0
    for group in beside[:MAX_TABLES] if asked else []:
        name = group.files[0].name
        if _is_of_others(name):
            continue
        try:
            sampled = sample_of(group, SMALL_BYTES)
            shares = _shares(asked, describe(sampled.table))
            if shares and not sampled.plan.is_whole and num_large < MAX_LARGE:
                num_large += 1
                shares = _shares(asked, describe(sample_of(group, SAMPLE_BYTES).table))
        except PipelineError:
            continue
        for column, (share, key) in shares.items():
            if share >= LEAST_FOUND:
                found.setdefault(column, f"its values are those of column {key} of {name}, which has each once")
    return found


def _could_refer(column: Column) -> bool:
    is_none = column.is_unique or column.has_fractions or _is_of_others(column.name)
    return column.num_distinct >= LEAST_FREQUENT and not is_none


def _shares(asked: Sequence[Column], table: Mapping[str, Column]) -> dict[str, tuple[float, str]]:
    """Return the share of each column's frequent values that a key of the table has, where there are any."""
    keys = [key for key in table.values() if is_key(key) and not _is_of_others(key.name)]
    found: dict[str, tuple[float, str]] = {}
    for column in asked:
        shares = [(_share_found(column, key.distinct), key.name) for key in keys if _is_telling(column, key)]
        best = max(shares, default=(0.0, ""))
        if best[0] > 0:
            found[column.name] = best
    return found


def _is_of_others(name: str) -> bool:
    """Whether the name of a column or file says users, orders or sessions."""
    return words.says(name, words.USER | words.WEAK_USER | words.ROW) and not words.says(name, words.ITEM)


def _share_found(column: Column, values: pa.Array) -> float:
    frequent = column.distinct[:FREQUENT]
    return float(pc.is_in(frequent, values).to_numpy(zero_copy_only=False).mean())


def _is_telling(column: Column, key: Column) -> bool:
    """Whether common values are no chance: texts, a common name, or numbers that are not 1, 2, 3."""
    if not (column.is_integer and key.is_integer):
        return True
    is_named = column.name.lower() == key.name.lower() and not column.name.startswith("column_")
    return is_named or bool(key.numbers.max() - key.numbers.min() > SPARSE * key.num_distinct)
