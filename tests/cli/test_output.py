"""What every command prints with: durations, questions, JSON."""

import io
import json

import pytest

from pf_assets.cli.output import confirm, cut, duration, rough_duration, show, show_json, show_wrapped


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3600 * 2 + 60 * 5, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_guesses_have_no_seconds_beside_minutes() -> None:
    assert [rough_duration(seconds) for seconds in (8, 200, 7500)] == ["8 s", "3 min", "2 h 05 min"]


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_sentences_break_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    sentence = "below a baseline (95 % of the difference to the best)"
    for output, lines in {
        Terminal(): ["  below a baseline (95 % of", "  the difference to the best)"],
        io.StringIO(): [f"  {sentence}"],
    }.items():
        monkeypatch.setattr("sys.stdout", output)
        show_wrapped(sentence, indent="  ")
        assert output.getvalue().splitlines() == lines


def test_a_person_is_asked_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, is_done in {"y\n": True, "n\n": False, "\n": False}.items():
        answers, shown = Terminal(answer), Terminal()
        monkeypatch.setattr("sys.stdin", answers)
        monkeypatch.setattr("sys.stdout", shown)
        if is_done:
            confirm("user 5 will be deleted", yes=False)
        else:
            with pytest.raises(SystemExit) as ended:
                confirm("user 5 will be deleted", yes=False)
            assert ended.value.code == 1
        assert shown.getvalue().startswith("user 5 will be deleted\n")
        assert ("nothing was done" in shown.getvalue()) == (not is_done)
    monkeypatch.setattr("sys.stdin", Terminal(""))
    confirm("user 5 will be deleted", yes=True)
