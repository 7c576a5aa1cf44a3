"""What every command prints with: durations, questions, JSON."""

import json

import pytest

from pf_assets.cli.output import confirm, cut, duration, show, show_json


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3600 * 2 + 60 * 5, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_json_is_read_back_and_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"pin_id": "\x1b[2J\u202e", "score": 0.5}
    show_json(content)
    out = capsys.readouterr().out
    assert json.loads(out) == content
    assert out.replace("\n", "").isprintable()
    assert out.isascii()


def test_a_line_without_a_colour_is_the_text_itself(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\x1bb", fg=None)
    assert capsys.readouterr().out == "a\\x1bb\n"
    assert cut("x" * 200) == "x" * 99 + "…"


def test_nobody_is_asked_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    confirm("really", yes=False)
    assert capsys.readouterr().out == ""
