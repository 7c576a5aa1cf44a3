"""How `pf` prints: log content without its control characters, and an error as one sentence with exit code 1."""

from typing import NoReturn

import typer

from pf_core.printable import printable


def show(line: str) -> None:
    """Print a line that quotes log content: terminal escapes and markup in it are shown, not executed."""
    typer.echo(printable(line))


def fail(message: str) -> NoReturn:
    shown = printable(message, keep="\n\t")
    typer.secho(f"error: {shown}", fg="red", err=True)
    raise SystemExit(1)
