"""How `pf` prints: without the control characters of what it quotes, and an error as one sentence with exit code 1.

Everything that the commands print goes through here: ids, action types, interests, reasons and file names come from
logs, and a terminal would execute what is in them.
"""

from typing import Any, NoReturn

import typer

from pf_core.printable import printable

MAX_CHARS = 100


def show(text: str, *, keep: str = "", err: bool = False, **style: Any) -> None:
    """Print a line that may quote a log: terminal escapes and markup in it are shown, not executed.

    `keep` has the control characters that are ours, such as line ends.
    """
    shown = printable(text, keep=keep)
    typer.echo(typer.style(shown, **style) if style else shown, err=err)


def cut(text: str) -> str:
    """Return a text of a log without what is beyond MAX_CHARS: it may have any length."""
    return printable(text, max_chars=MAX_CHARS)


def fail(message: str) -> NoReturn:
    show(f"error: {message}", keep="\n\t", err=True, fg="red")
    raise SystemExit(1)
