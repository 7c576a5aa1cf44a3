"""`pf run`: everything that is missing until the newest day of a site is released."""

import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import show, show_json
from pf_assets.cli.pipeline import missing_runs, newest_day, planned_assets, stage_names
from pf_assets.cli.results import result_of
from pf_assets.cli.runs import materialize
from pf_assets.cli.stages import StagesView
from pf_assets.cli.status import pending_model
from pf_assets.cli.summary import show_summary, summary_json
from pf_assets.cli.time_left import expected_seconds, seconds_left, size_of
from pf_assets.settings import dagster_home, own_site_path, site_path
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site, load_site


def run(
    site_file: Annotated[
        Path | None,
        typer.Argument(help="YAML file that describes your site; by default that of PF_SITE, or ./site.yaml"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the summary as JSON; the stages go to standard error")
    ] = False,
) -> None:
    """Build everything that is missing until the newest day is released: logs, model, embeddings, index, release."""
    started = time.monotonic()
    path = site_file or own_site_path(os.environ)
    site = load_site(path, environment=os.environ)
    ds = newest_day(site)
    again = "pf run" if site_file is None else shlex.join(["pf", "run", str(path)])
    run_missing(site, path.resolve(), ds, again=again, verbose=verbose, to_stderr=as_json)
    seconds = time.monotonic() - started
    if as_json:
        show_json(summary_json(site, ds, seconds))
        return
    show_summary(site, ds, seconds)
    show_next(site, path.resolve())


def run_missing(
    site: Site,
    site_file: Path,
    ds: str,
    *,
    again: str = "pf run",
    served_days: int = 1,
    verbose: bool = False,
    to_stderr: bool = False,
) -> None:
    """Start the runs that are missing, one after the other, and show them; `again` is the command that does it."""
    planned = planned_assets(site, ds)
    if not planned:
        show(f"{ds} is released, and nothing is missing", err=to_stderr)
        if pending := pending_model(site, Tracking(site)):
            show(pending, err=to_stderr)
        return
    names = stage_names(site)
    expected = expected_seconds(size_of(site, ds))
    with StagesView(
        names,
        home=Path(dagster_home(site_file)),
        verbose=verbose,
        there=[name for name in names if name not in planned],
        result_of=partial(result_of, site, ds),
        seconds_left=lambda stages: seconds_left(stages, expected),
        to_stderr=to_stderr,
    ) as view:
        for each in missing_runs(site, ds, served_days=served_days):
            materialize(
                ",".join(each.assets), each.days, config=each.config, site_file=site_file, view=view, again=again
            )
            expected |= expected_seconds(size_of(site, ds))  # what was read tells more than the files


def show_next(site: Site, path: Path) -> None:
    """Print what a person may do now; `path` is the site file."""
    if site_path(os.environ).resolve() != path:
        show(f"\nfor these commands: unset DAGSTER_HOME; export PF_SITE={shlex.quote(str(path))}", keep="\n")
    show("\nNext", keep="\n", bold=True)
    for command, what in {
        "pf recommend USER": "the best pins for a user, with what the user did last",
        "pf dev": "Dagster on http://localhost:3000 and MLflow on http://localhost:5000",
        "pf status": "days, models, and whether the model beats the baselines",
    }.items():
        show(f"  {command:<20} {what}")
    again = f"end_ds is {site.end_ds}: raise it when newer logs are there" if site.end_ds else "when a new day is over"
    show(f"  {'pf run':<20} {again}; only what is missing runs")
