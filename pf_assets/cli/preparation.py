"""What a command makes before it comes to its point: a synthetic site's logs, and the days that are not built yet."""

import os
from pathlib import Path

import typer

from pf_assets.cli.operations import fail
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.logs.partition import read_manifest
from pf_core.pins.features import pin_state
from pf_core.timelines.build import timeline_state
from pf_core.world.config import WorldConfig
from pf_core.world.logs import FileFormat, write_logs


def write_world(config: WorldConfig, out: Path, file_format: FileFormat) -> None:
    """Write the days that are not there yet."""
    try:
        write_logs(config, out, file_format=file_format, workers=os.cpu_count() or 1, progress=typer.echo)
    except ValueError as error:  # the folder holds another world
        fail(str(error))


def missing_days(site: Site) -> dict[str, list[str]]:
    """What is not there yet of the assets that are made of logs, as one run for each set of days."""
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
    made = {
        "raw_actions": {ds for ds in days if read_manifest(site, ds) is not None},
        "pin_features": set(pin_state(site).days()),
        "user_timelines": set(timeline_state(site).days()),
    }
    runs: dict[tuple[str, ...], list[str]] = {}
    for asset, present in made.items():
        absent = tuple(ds for ds in days if ds not in present)
        if absent:
            runs.setdefault(absent, []).append(asset)
    return {",".join(assets): list(absent) for absent, assets in runs.items()}
