"""A command line that imports the module of a command only when the command runs.

`pf --help` lists every command with its summary and imports none of them, so that it is fast, and works where only the
base dependencies are installed.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from pf_core.errors import PipelineError

PIPELINE_PACKAGE = "dagster"
"""Package by which an installation with the extra `pipeline` is recognized."""


@dataclass(frozen=True)
class LazyCommand:
    """A command that is a function of the same name in `module`."""

    module: str
    summary: str
    """The function's docstring, for the list of commands; a test compares them."""
    needs_pipeline: bool = True
    """Whether the command needs the extra `pipeline`."""


def lazy_app(commands: Mapping[str, LazyCommand]) -> typer.Typer:
    """Return an app that lists `commands` in their order and imports the one that is run."""

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, listed, rest = super().resolve_command(ctx, args)
            return name, None if listed is None else load_command(str(name), commands[str(name)]), rest

    app = typer.Typer(cls=Group, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    for name, command in commands.items():
        app.command(name, help=command.summary)(_listed)
    return app


def _listed() -> None:
    """Stands for a command in the list of commands; `resolve_command` replaces it before it is called."""


def load_command(name: str, command: LazyCommand) -> Any:
    """Import a command. Raises a PipelineError if the extra that it needs is not installed."""
    if command.needs_pipeline and importlib.util.find_spec(PIPELINE_PACKAGE) is None:
        raise PipelineError(
            f"pf {name} needs the packages of the pipeline, which are not installed",
            "pip install 'pinnerformer[pipeline]'",
        )
    function = getattr(importlib.import_module(command.module), name)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(function)
    return typer.main.get_command(app)
