"""What a sample of a log shows of each column: its type, how many values it has, and which are frequent."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.hashing import combined

NO_VALUES = frozenset(
    ["", "null", "NULL", "Null", "none", "None", "nan", "NaN", "NA", "N/A", "n/a", "\\N", "undefined", "(not set)", "-"]
)
"""Texts that stand for no value."""

INTEGER = r"^-?(0|[1-9][0-9]{0,18})$"
NUMBER = r"^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$"


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a sample."""

    name: str
    values: pa.ChunkedArray
    """As the log has them: text, or the types of Parquet."""
    distinct: pa.Array = field(repr=False)
    """The distinct values as text, without missing ones; the most frequent first."""
    counts: np.ndarray = field(repr=False)
    """How many rows each of them has."""
    stand_ins: tuple[str, ...] = ()
    """Texts that stand for no value, and that occur; an empty text is none of them."""

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def num_given(self) -> int:
        """Number of rows with a value."""
        return int(self.counts.sum())

    @property
    def num_distinct(self) -> int:
        return len(self.distinct)

    @property
    def missing_share(self) -> float:
        """Share of the rows that have no value: null, an empty text, or a text that stands for none."""
        return 1 - self.num_given / self.num_rows if self.num_rows else 0.0

    @cached_property
    def is_integer(self) -> bool:
        """Whether every value is an integer of 64 bits, without leading zeros."""
        if not self._all_match(INTEGER):
            return False
        try:
            self.distinct.cast(pa.int64())
        except pa.ArrowInvalid:
            return False
        return True

    def kind(self) -> str:
        """Return what the values are, for a message."""
        if self.is_integer:
            return "integers"
        if self._all_match(r"^-?[0-9]+$"):
            return "numbers with leading zeros or of many digits"
        return "numbers" if self.is_number else "texts"

    @cached_property
    def is_number(self) -> bool:
        """Whether every value is a number."""
        return self._all_match(NUMBER)

    def _all_match(self, pattern: str) -> bool:
        return self.num_distinct > 0 and bool(pc.all(pc.match_substring_regex(self.distinct, pattern)).as_py())

    @cached_property
    def numbers(self) -> np.ndarray:
        """The distinct values as numbers; only if `is_number`."""
        return np.asarray(self.distinct.cast(pa.float64()).to_numpy(zero_copy_only=False))

    @cached_property
    def has_fractions(self) -> bool:
        """Whether the values are numbers, some of them not whole."""
        return self.is_number and bool((self.numbers != np.floor(self.numbers)).any())

    @cached_property
    def has_spaces(self) -> bool:
        """Whether most of the frequent values are texts of several words."""
        some = self.top(1000)
        return sum(" " in value.strip() for value in some) > 0.5 * len(some)

    @property
    def is_constant(self) -> bool:
        return self.num_distinct < 2

    @property
    def is_unique(self) -> bool:
        """Whether hardly any value comes twice."""
        return self.num_given > 1 and self.num_distinct > 0.98 * self.num_given

    @property
    def is_flag(self) -> bool:
        """Whether the values are 0 and 1, or true and false."""
        return set(self.top(3)) <= {"0", "1"} or {value.lower() for value in self.top(3)} <= {"true", "false"}

    def top(self, number: int) -> list[str]:
        """Return the most frequent values."""
        return list(self.distinct[:number].to_pylist())

    def shares(self) -> dict[str, float]:
        """Return the share of all rows that each value has, most frequent first."""
        return {str(value): count / self.num_rows for value, count in zip(self.top(100), self.counts, strict=False)}

    def examples(self, number: int = 3) -> str:
        """Return the most frequent values for a message."""
        return ", ".join(value[:40] for value in self.top(number))

    def is_any(self, texts: list[str]) -> np.ndarray:
        """Return which rows have one of these values, upper or lower case."""
        lower = pc.utf8_lower(as_text(self.values))
        wanted = pa.array([text.lower() for text in texts], pa.large_string())
        return np.asarray(combined(pc.is_in(lower, wanted)).to_numpy(zero_copy_only=False))

    @cached_property
    def codes(self) -> np.ndarray:
        """A number for each row that is the same where the value is; -1 where it is missing."""
        encoded = combined(as_text(self.values)).dictionary_encode()
        codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
        is_none = np.append(np.isin(encoded.dictionary.to_numpy(zero_copy_only=False), list(NO_VALUES)), True)
        return np.where(is_none[codes], -1, codes)


def describe(table: pa.Table) -> dict[str, Column]:
    """Return the columns of a sample by name; nested ones are left out."""
    plain = [name for name in table.column_names if not pa.types.is_nested(table[name].type)]
    return {name: describe_column(name, table[name]) for name in plain}


def describe_column(name: str, values: pa.ChunkedArray) -> Column:
    """Count the values of a column."""
    counted = pc.value_counts(combined(as_text(values)))
    distinct, counts = counted.field("values"), counted.field("counts").to_numpy(zero_copy_only=False)
    is_none = np.asarray(pc.or_(distinct.is_null(), pc.is_in(distinct, pa.array(NO_VALUES, pa.large_string()))))
    stand_ins = tuple(sorted(value for value in distinct.filter(pa.array(is_none)).to_pylist() if value))
    distinct, counts = distinct.filter(pa.array(~is_none)), counts[~is_none]
    order = pc.sort_indices(
        pa.table({"count": counts, "value": distinct}), [("count", "descending"), ("value", "ascending")]
    )
    return Column(name, values, distinct.take(order), counts[order.to_numpy()], stand_ins)


def share_of_one(codes: np.ndarray, other: np.ndarray) -> float:
    """Return the share of the values with several rows that all have one value of the other; -1 is none.

    A session has one day and one user, and users and pins have several.
    """
    known = (codes >= 0) & (other >= 0)
    codes, other = codes[known], other[known]
    if not len(codes):
        return 0.0
    order = np.lexsort((other, codes))
    codes, other = codes[order], other[order]
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    last = np.append(first[1:], len(codes)) - 1
    several = last > first
    return float((other[first] == other[last])[several].mean()) if several.any() else 0.0


def as_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return plain values as text: whole floats without their point, NaN (pandas' missing value) as null."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    if pa.types.is_floating(kind):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, kind), values)
        bound = pc.max(pc.abs(values)).as_py()
        if bound is not None and bound < 2**53 and pc.all(pc.equal(pc.floor(values), values)).as_py():
            values = values.cast(pa.int64())
    if not pa.types.is_string(kind) and any(is_kind(kind) for is_kind in _WITHOUT_TEXT):
        return pa.chunked_array([pa.nulls(len(values), pa.large_string())])
    return values.cast(pa.large_string())


_WITHOUT_TEXT = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
