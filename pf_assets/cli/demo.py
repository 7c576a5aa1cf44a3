"""`pf demo`: makes the demo site's logs and runs the whole asset graph on them."""

import os
import time
from typing import Annotated

import typer

from pf_assets.cli.run import run_missing, show_next
from pf_assets.cli.summary import show_summary
from pf_assets.cli.world import write_world
from pf_assets.settings import DEMO_SITE
from pf_core.config.site import load_site
from pf_core.errors import PipelineError
from pf_core.world import config as world_config

SERVED_DAYS = 4
"""Number of the demo's newest days that are embedded and released: the last one as the daily schedule does."""


def demo(
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
) -> None:
    """Write the demo site's logs and materialize every asset on them; keep what exists already."""
    started = time.monotonic()
    if not DEMO_SITE.exists():
        raise PipelineError(
            f"pf demo needs the repository: there is no {DEMO_SITE}", "clone it, and run `make demo` in the clone"
        )
    site = load_site(DEMO_SITE, environment=os.environ)
    assert site.end_ds is not None
    write_world(world_config.demo(), site.log_root, "csv.gz")
    run_missing(site, DEMO_SITE, site.end_ds, again="pf demo", served_days=SERVED_DAYS, verbose=verbose)
    show_summary(site, site.end_ds, time.monotonic() - started)
    show_next(site)
