"""`pf world`: writes the logs of a synthetic site."""

import os
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import fail, show
from pf_core.days import parse_ds
from pf_core.progress import Progress
from pf_core.world import config as world_config
from pf_core.world.config import WorldConfig
from pf_core.world.logs import FileFormat, write_logs


def world(
    out: Annotated[Path, typer.Argument(help="folder for the site's logs")],
    preset: str = "demo",
    file_format: FileFormat = "csv.gz",
    num_users: int = 100_000,
    num_days: int = 30,
    seed: Annotated[
        int | None, typer.Option(help="seed of the random numbers; another seed makes another world of the same kind")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="move the days by whole weeks, so that the last one is this day or up to six before"),
    ] = None,
) -> None:
    """Write the logs of a synthetic site: tiny, demo, experiments, or large (with --num-users and --num-days)."""
    chosen = {} if seed is None else {"seed": seed}
    match preset:
        case "tiny":
            config = world_config.tiny(**chosen)
        case "demo":
            config = world_config.demo(**chosen)
        case "experiments":
            config = world_config.experiments(**chosen)
        case "large":
            config = world_config.large(num_users=num_users, num_days=num_days, **chosen)
        case _:
            fail(f"no preset {preset!r}: choose tiny, demo, experiments or large")
    if until is not None:
        config = world_config.ending_by(config, parse_ds(until).isoformat())
    write_world(config, out, file_format)


def write_world(config: WorldConfig, out: Path, file_format: FileFormat, *, progress: Progress = show) -> None:
    """Write the days whose logs do not exist yet."""
    try:
        write_logs(config, out, file_format=file_format, workers=os.cpu_count() or 1, progress=progress)
    except ValueError as error:  # the folder holds another world
        fail(str(error))
