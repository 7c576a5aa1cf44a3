"""Log content on a terminal and on a page: shown, not executed, and cut."""

import pickle

import pytest

from pf_core.errors import MAX_CHARS, PipelineError
from pf_core.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("two\r\nlines\tand NUL\x00", r"two\r\nlines\tand NUL\x00"),
        ("\x9b31m", r"\x9b31m"),  # CSI as one character
        ("\u202egnp.exe", r"\u202egnp.exe"),  # right-to-left override
        ("\u2028", r"\u2028"),
        ("[red]a|b[/red] `code` <script>", "[red]a|b[/red] `code` <script>"),
        ("durée 中文 🎉", "durée 中文 🎉"),
        ("", ""),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_long_texts_are_cut() -> None:
    assert printable("x" * 10, max_chars=10) == "x" * 10
    assert printable("x" * 11, max_chars=10) == "x" * 9 + "…"
    assert printable("\x1b" * 3_000_000, max_chars=10) == r"\x1b\x1b\…"


def test_kept_characters() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_an_error_shows_what_it_quotes() -> None:
    error = PipelineError("a.csv has no column 'x'; it has '\x1b[2J'\nand more", "fix it")
    assert str(error) == "a.csv has no column 'x'; it has '\\x1b[2J'\nand more; fix it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    long = PipelineError("x" * 3_000_000, "fix it")
    assert str(long) == "x" * (MAX_CHARS - 1) + "…; fix it"
    assert str(pickle.loads(pickle.dumps(long))) == str(long)
