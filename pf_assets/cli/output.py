"""How `pf` prints: without the control characters of what it quotes, and an error as one sentence with exit code 1.

Everything that the commands print goes through here: ids, action types, interests, reasons and file names come from
logs, and a terminal would execute what is in them.
"""

import json
import shutil
import sys
import textwrap
from typing import Any, NoReturn, Protocol, runtime_checkable

import typer

from pf_core.printable import printable

MAX_CHARS = 100

NAME_CHARS = 24
"""Width of the column with the names of assets."""

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended: 128 + SIGINT, as shells have it."""


@runtime_checkable
class CarriesLines(Protocol):
    """An error that has lines to print before its sentence."""

    def show_lines(self) -> None: ...


def show(text: str, *, keep: str = "", err: bool = False, **style: Any) -> None:
    """Print a line that may quote a log: terminal escapes and markup in it are shown, not executed.

    `keep` has the control characters that are ours, such as line ends.
    """
    shown = printable(text, keep=keep)
    styles = {name: value for name, value in style.items() if value is not None}
    typer.echo(typer.style(shown, **styles) if styles else shown, err=err)


def cut(text: str) -> str:
    """Return a text of a log without what is beyond MAX_CHARS: it may have any length."""
    return printable(text, max_chars=MAX_CHARS)


def fail(message: str) -> NoReturn:
    show_error(message)
    raise SystemExit(1)


def show_error(message: str) -> None:
    show(f"error: {message}", keep="\n\t", err=True, fg="red")


def show_wrapped(text: str, *, indent: str = "") -> None:
    """Print a long sentence; on a terminal in lines of its width, which break between words."""
    if not sys.stdout.isatty():
        show(f"{indent}{text}")
        return
    width = max(shutil.get_terminal_size().columns, 2 * len(indent) + 20)
    for line in textwrap.wrap(
        printable(text), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    ):
        show(line)


def show_json(content: Any) -> None:
    """Print JSON for a program; what is no ASCII is escaped."""
    typer.echo(json.dumps(content, indent=1, ensure_ascii=True))


def duration(seconds: float) -> str:
    """Return a duration as 8 s, 3 min 20 s, or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def rough_duration(seconds: float) -> str:
    """Return a duration that is a guess: 8 s, 3 min, or 2 h 05 min."""
    whole = round(seconds)
    return duration(seconds) if whole < 60 or whole >= 3600 else f"{round(whole / 60)} min"


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person before what cannot be undone; exit code 1 if they do not agree.

    Without a terminal nobody is asked: a script that runs the command has decided.
    """
    if yes or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    show(question)
    if not typer.confirm("go on?"):
        show("nothing was done")
        raise SystemExit(1)
