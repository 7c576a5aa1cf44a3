"""How `pf` reports an error: one sentence on the standard error stream, and exit code 1."""

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    typer.secho(f"error: {message}", fg="red", err=True)
    raise SystemExit(1)
