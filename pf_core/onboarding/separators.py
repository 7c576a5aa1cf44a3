"""How the lines of a text are divided into values: separator, quotes, and whether the first line names the columns.

Of several separators that divide the lines alike, the one is taken whose columns are those of a log: a time, and two
that could be ids. Dates and titles have commas, lists of genres have bars, times have colons.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence

from pf_core.onboarding import words
from pf_core.onboarding.times import looks_like_time

CONSISTENT = 0.9
"""Share of the lines that must have the same number of fields."""

SEPARATORS = ("\t", "\x01", "::", "||", "|", ";", ",")
"""Separators that are tried first, in this order."""

PROSE = (",", ";")
"""Separators that stand in texts and dates with a space behind them."""

CLOCK = (":", " ", "/")
"""Characters that divide times and dates into more values."""

LOOKED_AT = 100
"""Lines whose values are looked at."""

_PLAIN = re.compile(r"[\w.@+:/=?&%#{}()-]*")
"""A value without spaces, and without what mostly separates values."""

Division = tuple[str, str | None, list[list[str]]]
"""A separator, the quote character, and the lines of the usual number of values."""


def find_separator(lines: Sequence[str]) -> Division | None:
    """Return the separator of the values, the quote character, and the lines of the usual number of values."""
    punctuation = Counter(run for run in re.findall(r"[^\w\s\"'.\-+]+", lines[0]) if len(run) <= 3)
    others = sorted(punctuation, key=lambda run: (run == ":", -len(run), -punctuation[run]))  # times have colons
    delimiters = (*SEPARATORS, *(run for run in others if run not in SEPARATORS), " ")
    divisions = [found for delimiter in delimiters if (found := _division(lines, delimiter)) is not None]
    best: Division | None = None
    for found in divisions:
        if _is_log(found[2]):
            return found
    for found in divisions:
        delimiter = found[0].strip() or " "
        is_prose = found[0] != delimiter and delimiter in PROSE
        if len(found[2][0]) > 2 and not is_prose and best is None:
            return found
        # Two values, or commas as in "Jan 15, 2023": another separator may divide the lines into more values.
        num_values, most = len(found[2][0]), len(best[2][0]) if best else 0
        if num_values > most and (most <= 2 or delimiter not in CLOCK):
            best = found
    return best


def _division(lines: Sequence[str], delimiter: str) -> Division | None:
    """Divide the lines by a separator, with the spaces that always stand around it; None if they are no table then."""
    quote = _quote_of(lines, delimiter)
    rows = _divided(lines, delimiter, quote)
    if rows is None or not _fits(rows, delimiter):
        return None
    spaced = _with_spaces(rows, delimiter)
    divided = _divided(lines, spaced, quote) if spaced != delimiter else None
    return (delimiter, quote, rows) if divided is None else (spaced, quote, divided)


def _is_log(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a column is a time, and two others have one word or number in each line and not always the same."""
    columns = [column[-LOOKED_AT:] for column in zip(*rows[1:], strict=True)]
    num_times = sum(_is_mostly(column, looks_like_time) for column in columns)
    return num_times > 0 and sum(map(_is_time_or_id, columns)) > 2


def _is_time_or_id(column: Sequence[str]) -> bool:
    """Large ids look like times: both are counted together."""
    return len(set(column)) > 1 and _is_mostly(
        column, lambda value: bool(_PLAIN.fullmatch(value)) or looks_like_time(value)
    )


def _is_mostly(column: Sequence[str], holds: Callable[[str], bool]) -> bool:
    """Whether this holds of nearly all values that are given."""
    given = [value for value in column if value]
    return len(given) > 0 and sum(map(holds, given)) >= CONSISTENT * len(given)


def _with_spaces(rows: list[list[str]], delimiter: str) -> str:
    """Return the separator with the spaces that stand around it in every line."""
    before = " " * all(value.endswith(" ") for row in rows for value in row[:-1])
    after = " " * all(value.startswith(" ") for row in rows for value in row[1:])
    return f"{before}{delimiter}{after}" if delimiter != " " else delimiter


def _fits(rows: list[list[str]], delimiter: str) -> bool:
    """Whether the lines are a table: a separator that is not one of the usual ones must give three values."""
    columns = list(zip(*rows, strict=True))
    has_empty = len(rows) > 2 and any(not any(column[1:]) for column in columns)
    return len(columns) >= (2 if delimiter in SEPARATORS else 3) and not (has_empty and delimiter not in SEPARATORS)


def _quote_of(lines: Sequence[str], delimiter: str) -> str | None:
    """Return the quote character: the usual one, unless lines are only divided alike without it."""
    if len(delimiter.encode()) > 1:
        return '"'  # nothing is quoted then, whatever the character
    by_quote = {quote: _divided(lines, delimiter, quote) for quote in ('"', None)}
    single = _divided(lines, delimiter, "'")
    quoted = sum(line.count(f"{delimiter}'") + line.count(f"'{delimiter}") for line in lines) > len(lines)
    if quoted and single is not None and len(single) >= len(by_quote[None] or ()):
        return "'"
    return None if len(by_quote[None] or ()) > len(by_quote['"'] or ()) else '"'


def _divided(lines: Sequence[str], delimiter: str, quote: str | None) -> list[list[str]] | None:
    """Divide the lines; return those with the usual number of values, or None if too many have another number."""
    if len(delimiter.encode()) > 1 or quote is None:
        rows = [line.split(delimiter) for line in lines]
    elif delimiter == quote:
        return None
    else:
        rows = [next(iter(csv.reader([line], delimiter=delimiter, quotechar=quote)), [""]) for line in lines]
    usual, num_lines = Counter(map(len, rows)).most_common(1)[0]
    if usual < 2 or num_lines < CONSISTENT * len(lines) or len(rows[0]) != usual:
        return None
    return [row for row in rows if len(row) == usual]


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns: where all others have numbers or times, it has words.

    If all values are words, it must have a word that names columns, and none of its values may come again.
    """
    first, others = rows[0], rows[1:]
    if not others:
        return not any(value[:1].isdigit() for value in first) and any(map(words.words_of, first))
    numeric = [starts_with_digit(values) for values in zip(*others, strict=True)]
    if any(numeric):
        return not any(
            starts_with_digit([value]) for value, is_numeric in zip(first, numeric, strict=True) if is_numeric
        )
    known = words.USER | words.ITEM | words.TIME | words.ACTION | words.RATING | {"id", "name"}
    is_again = any(value in column for value, column in zip(first, zip(*others, strict=True), strict=True))
    return not is_again and len(set(first)) == len(first) and any(words.says(value, known) for value in first)


def starts_with_digit(values: Sequence[str]) -> bool:
    """Whether the values that are not empty begin with a digit or a sign and a digit."""
    given = [value for value in values if value.strip()]
    return bool(given) and sum(bool(re.match(r"\s*[-+]?[.]?\d", value)) for value in given) >= 0.98 * len(given)
