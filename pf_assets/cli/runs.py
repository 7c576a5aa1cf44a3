"""Dagster runs that `pf` starts, each as a process of its own, and the days that are missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.cli.output import show
from pf_assets.settings import REPOSITORY, dagster_home
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.logs.partition import read_manifest
from pf_core.parent_process import tied
from pf_core.pins.features import pin_state
from pf_core.storage.privacy import private, umask_for
from pf_core.timelines.build import timeline_state

QUIET = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}


def materialize(
    assets: str,
    days: list[str] | None = None,
    *,
    partition: str | None = None,
    config: dict[str, Any] | None = None,
    site_file: Path | None = None,
) -> None:
    """Run `dagster asset materialize` for the site of PF_SITE, or for another site file."""
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", assets]
    command += [] if days is None else ["--partition-range", f"{days[0]}...{days[-1]}"]
    command += [] if partition is None else ["--partition", partition]
    command += ["-m", "pf_assets.definitions"]
    what = assets if partition is None else f"{assets} {partition}"
    show(what if days is None else f"{what}: {days[0]} to {days[-1]}")
    environment = {**os.environ, "DAGSTER_HOME": dagster_home(site_file)}
    environment |= {} if site_file is None else {"PF_SITE": str(site_file)}
    process = subprocess.Popen(
        tied([*command, "--config-json", json.dumps(QUIET | (config or {}))]),
        cwd=REPOSITORY,
        env=environment,
        umask=umask_for(Path(environment["DAGSTER_HOME"])),  # Dagster's databases and logs quote the site's logs
    )
    try:
        exit_code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the run has received Ctrl-C, too, and ends its own processes
        raise
    if exit_code:
        raise PipelineError(f"the run failed: {' '.join(command)}", "its log is above, and in the UI (pf dev)")


def prepare_instance(site_file: Path) -> None:
    """Create Dagster's databases before several runs start: two runs that create one at once damage its schema."""
    home = dagster_home(site_file)
    with private(Path(home)), dg.DagsterInstance.from_config(home) as instance:
        instance.get_runs_count()
        instance.all_asset_keys()
        instance.all_instigator_state()


def missing_days(site: Site) -> dict[str, list[str]]:
    """Return the runs that build what is missing of the assets made from logs: selection of assets to days."""
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
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
