"""The separator of the values is the one whose columns are those of a log."""

import pytest

from pf_core.onboarding.separators import find_separator

TIMES = ["Jan 15, 2023 01:00:07 AM", "Feb 02, 2023 11:30:00 PM", "Mar 20, 2023 07:15:59 AM"]


def lines(*values: str, delimiter: str) -> list[str]:
    """Twelve lines with other numbers and times."""
    return [delimiter.join(values).format(n=10 + n, at=TIMES[n % 3], iso=f"2023-01-{10 + n}") for n in range(12)]


@pytest.mark.parametrize(
    ("delimiter", "values"),
    [
        ("~", ("0.{n}", "{at}", "Thing, no. {n}", "s{n}", "{n}", "{n}")),  # a comma in every date and title
        (",", ("{n}", "{n}", "{iso}", "Drama|War|Comedy")),  # two bars in every list of genres
        (",", ("{n}", "{n}", "{iso}", "rgb;a;b")),
        (" | ", ("10000000001{n}", "10.01.2023 06:45:{n}", "10000000000{n}")),  # spaces divide it, too
        (";", ("{n}", "{n}", "{iso} 10:15:00", "12,50", "9,90")),  # decimal commas
        ("^", ("{n}", "u{n}@example.com", "{iso}T10:15:00.123+02:00", "a, b, c")),
        (" ", ("{n}", "p{n}", "16737444{n}")),
        ("\t", ("{n}", "Song, the {n}", "{iso} 10:15:00", "a | b | c")),
    ],
)
def test_the_separator_gives_a_time_and_ids(delimiter: str, values: tuple[str, ...]) -> None:
    found = find_separator(lines(*values, delimiter=delimiter))
    assert found is not None
    assert found[0] == delimiter
    assert len(found[2][0]) == len(values)


def test_a_table_without_times_has_the_first_usual_separator() -> None:
    assert (find_separator(["id::title", "1::The One, 1999", "2::Two, 1998"]) or "")[0] == "::"
