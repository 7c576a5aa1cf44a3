"""`pf demo`: makes the demo site's logs and runs the whole asset graph on them."""

import os
import shlex
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from pf_assets.cli.output import show
from pf_assets.cli.run import run_missing, show_next
from pf_assets.cli.summary import show_summary
from pf_assets.cli.world import write_world
from pf_assets.demo_site import open_demo
from pf_assets.settings import site_path
from pf_core.config.site import load_site

SERVED_DAYS = 4
"""Number of the demo's newest days that are embedded and released: the last one as the daily schedule does."""


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
    write_world(world, site.log_root, "csv.gz")
    run_missing(site, path, world.dates[-1], served_days=SERVED_DAYS, verbose=verbose)
    show_summary(site, world.dates[-1], time.monotonic() - started)
    if site_path(os.environ).resolve() != path:
        show(f"\nfor these commands: unset DAGSTER_HOME; export PF_SITE={shlex.quote(str(path))}", keep="\n")
    show_next(site)
