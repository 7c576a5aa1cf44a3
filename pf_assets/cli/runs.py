"""Dagster runs that `pf` starts, each as a process of its own, and the days that are missing."""

import fcntl
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.cli.output import show
from pf_assets.cli.run_log import read_line
from pf_assets.cli.stages import StagesView, showing
from pf_assets.failures import why_failed
from pf_assets.settings import REPOSITORY, dagster_home
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.logs.partition import read_manifest
from pf_core.parent_process import tied
from pf_core.pins.features import pin_state
from pf_core.storage.privacy import private, umask_for
from pf_core.timelines.build import timeline_state

SPOKEN = {"loggers": {"console": {"config": {"log_level": "DEBUG"}}}}
"""Run configuration: the console tells the beginning and the end of each step, which the view needs."""

PREPARING = ".preparing"
"""File of a Dagster home that is locked while its databases are created."""


def materialize(
    assets: str,
    days: list[str] | None = None,
    *,
    partition: str | None = None,
    config: dict[str, Any] | None = None,
    site_file: Path | None = None,
    view: StagesView | None = None,
    row: str | None = None,
) -> None:
    """Run `dagster asset materialize` for the site of PF_SITE, or for another site file.

    What it does is shown in `view`, or in a view of its own; `row` names the view's stage that the run is as a whole.
    """
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", assets]
    command += [] if days is None else ["--partition-range", f"{days[0]}...{days[-1]}"]
    command += [] if partition is None else ["--partition", partition]
    command += ["-m", "pf_assets.definitions"]
    home = dagster_home(site_file)
    environment = {**os.environ, "DAGSTER_HOME": home}
    environment |= {} if site_file is None else {"PF_SITE": str(site_file)}
    prepare_instance(Path(home))
    with showing(view, assets.split(","), home=Path(home)) as shown:
        if row is not None:
            shown.start_row(row)
        run = _follow(
            tied([*command, "--config-json", json.dumps(SPOKEN | (config or {}))]), environment, shown, days or [], row
        )
        shown.finish(is_good=run.exit_code == 0, row=row)
    if run.exit_code:
        raise _failure(command, run, shown, home)


@dataclass
class _Run:
    """A Dagster run in a process of its own."""

    run_id: str = ""
    exit_code: int = 0


def _follow(
    command: list[str], environment: dict[str, str], view: StagesView, days: list[str], row: str | None
) -> _Run:
    """Start the process, and show its lines until it ends."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        umask=umask_for(Path(environment["DAGSTER_HOME"])),  # Dagster's databases and logs quote the site's logs
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    run = _Run()
    try:
        for line in process.stdout:
            said = read_line(line.rstrip("\n"))
            run.run_id = run.run_id or said.run_id
            view.receive(line.rstrip("\n"), said, days=days, row=row)
        run.exit_code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the run has received Ctrl-C, too, and ends its own processes
        raise
    return run


def _failure(command: list[str], run: _Run, view: StagesView, home: str) -> PipelineError:
    """Return the error of a run that failed, after the last lines of the stage that failed were printed."""
    lines = view.last_lines()
    if lines:
        show(f"the last lines of its log ({view.log} has all):", err=True)
    for line in lines:
        show(f"  {line}", err=True)
    what = why_failed(home, run.run_id) if run.run_id else None
    what = what or f"the run ended with exit code {run.exit_code} before an asset did; its log is {view.log}"
    return PipelineError(what, f"to run it again: {shlex.join(['dagster', *command[3:]])}")


def prepare_instance(home: Path) -> None:
    """Create Dagster's databases before a run does it: two processes that create one at once damage it for good."""
    with private(home):
        home.mkdir(parents=True, exist_ok=True)
    with private(home), (home / PREPARING).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()


def missing_days(site: Site, until: str) -> dict[str, list[str]]:
    """Return the runs that build what is missing of the assets made from logs: selection of assets to days."""
    days = ds_range(site.start_ds, until)
    built = {
        "raw_actions": {ds for ds in days if read_manifest(site, ds) is not None},
        "pin_features": set(pin_state(site).days()),
        "user_timelines": set(timeline_state(site).days()),
    }
    runs: dict[tuple[str, ...], list[str]] = {}
    for asset, present in built.items():
        absent = tuple(ds for ds in days if ds not in present)
        if absent:
            runs.setdefault(absent, []).append(asset)
    return {",".join(assets): list(absent) for absent, assets in runs.items()}
