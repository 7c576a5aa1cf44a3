"""A command line that imports the module of a command only when the command runs.

`pf --help` lists every command with its summary and imports none of them, so that it is fast, and works where only the
base dependencies are installed.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pf_assets.cli.output import INTERRUPTED, show
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
    goes_on: bool = False
    """Whether a call that was interrupted goes on where it stopped when it is repeated."""
    takes_ids: bool = False
    """Whether its arguments are ids, so that -5 is one and no option."""


class CommandOfIds(TyperCommand):
    """A command whose arguments may be negative integers. An id that looks like an option comes after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, after = args, []
        if "--" in args:
            place = args.index("--")
            before, after = args[:place], args[place + 1 :]
        negative = [argument for argument in before if re.fullmatch("-[0-9]+", argument)]
        options = [argument for argument in before if argument not in negative]
        return super().parse_args(ctx, [*options, "--", *negative, *after])


def lazy_app(commands: Mapping[str, LazyCommand], *, package: str, epilog: str) -> typer.Typer:
    """Return an app that lists `commands` in their order and imports the one that is run.

    `package` is what --version is of.
    """

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, listed, rest = super().resolve_command(ctx, args)
            if listed is None or (ctx.resilient_parsing and commands[str(name)].needs_pipeline):
                return name, listed, rest  # the shell completes a line: importing Dagster takes seconds
            return name, load_command(str(name), commands[str(name)]), rest

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except (KeyboardInterrupt, typer.Abort):  # the latter: Ctrl-C at a question
                command = commands.get(str(ctx.invoked_subcommand))
                hint = "; what is complete stays, and the same command goes on" if command and command.goes_on else ""
                show(f"\ninterrupted{hint}", keep="\n", err=True)
                raise SystemExit(INTERRUPTED) from None

    def show_version(is_wanted: bool) -> None:
        if is_wanted:
            show(f"{package} {importlib.metadata.version(package)}")
            raise typer.Exit

    app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, epilog=epilog)

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """User embeddings from event logs: from a file to recommendations."""

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
    app.command(name, cls=CommandOfIds if command.takes_ids else None)(function)
    return typer.main.get_command(app)
