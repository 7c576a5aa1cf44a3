"""`pf demo`: makes the demo site's logs and runs the whole asset graph on them."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import show
from pf_assets.cli.run import run_missing, show_next
from pf_assets.cli.run_log import Said
from pf_assets.cli.stages import StagesView
from pf_assets.cli.summary import show_summary
from pf_assets.cli.world import write_world
from pf_assets.demo_site import open_demo
from pf_assets.settings import dagster_home
from pf_core.config.site import Site, load_site
from pf_core.world.config import WorldConfig
from pf_core.world.logs import WORLD_FILE

SERVED_DAYS = 4
"""Number of the demo's newest days that are embedded and released: the last one as the daily schedule does."""

STAGE = "logs"


def demo(
    until: Annotated[
        str | None,
        typer.Option(help="the days end on this one, or up to six before (whole weeks); by default yesterday (UTC)"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
) -> None:
    """Write the demo site's logs and materialize every asset on them; keep what exists already."""
    started = time.monotonic()
    path, world = open_demo(datetime.now(UTC).date().isoformat(), until)
    site = load_site(path, environment=os.environ)
    show(f"the demo: {path} on days {world.dates[0]} to {world.dates[-1]}, in {site.directory.parent}")
    _write_logs(world, site, Path(dagster_home(path)), verbose=verbose)
    run_missing(site, path, world.dates[-1], again="pf demo", served_days=SERVED_DAYS, verbose=verbose)
    show_summary(site, world.dates[-1], time.monotonic() - started)
    show_next(site, path)


def _write_logs(world: WorldConfig, site: Site, home: Path, *, verbose: bool) -> None:
    """Write the days that are missing, as one stage; a line for each day is in its log file."""
    if (site.log_root / WORLD_FILE).exists():
        write_world(world, site.log_root, "csv.gz")  # nothing is missing, or it is another world
        return
    with StagesView([STAGE], home=home, verbose=verbose, result_of=lambda _: f"{world.num_days} days written") as view:

        def hear(line: str) -> None:
            view.receive(line, Said("message", step=STAGE, text=line), days=[], row=STAGE)

        view.start([STAGE], row=STAGE)
        write_world(world, site.log_root, "csv.gz", progress=hear)
        view.finish(is_good=True, row=STAGE)
