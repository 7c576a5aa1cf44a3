"""`pf check`: shows how a site file reads the logs, and ends with an error if a run would fail on them."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pf_assets.cli.output import fail
from pf_core.config.site import Site, load_site
from pf_core.config.source import DAY
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.preview import (
    LogPreview,
    Sample,
    names_without_rows,
    refuse_pins,
    refuse_rejects,
    refuse_without_positive,
    shown,
)
from pf_core.logs.readers import find_files

CHECKED_ROWS = 100_000
"""Number of rows that are read of the first file."""

DAYS_SEARCHED_FOR_LOGS = 14
"""Number of days after the chosen one in which a file is searched, where days without a file are allowed."""


def check(
    site_file: Annotated[Path, typer.Argument(help="YAML file that describes your site")],
    ds: Annotated[str | None, typer.Option(help="day to read; by default the site's first")] = None,
    rows: Annotated[int, typer.Option(help="number of mapped rows to print")] = 5,
) -> None:
    """Validate a site file and show how it reads the first file of your logs, without writing anything."""
    site = load_site(site_file, environment=os.environ)
    day, files = _find_logs(site, ds or site.start_ds)
    logs = LogPreview(site, day)
    sample = Sample()
    for part in logs.read(files[0], CHECKED_ROWS):
        sample.add(part, rows)
    _print_sample(sample, files)
    for warning in names_without_rows(site, sample):
        typer.echo(f"  warning: {warning}")
    problems = []
    examinations: list[Callable[[], Any]] = [
        partial(refuse_rejects, site, day, sample),
        partial(refuse_without_positive, site, files, logs, sample),
        partial(read_deletion_list, site),
        partial(refuse_pins, site, day),
    ]
    for examine in examinations:
        try:
            examine()
        except PipelineError as error:
            problems.append(str(error))
    if problems:
        fail("\n".join(problems))


def _find_logs(site: Site, ds: str) -> tuple[str, list[Path]]:
    """Return the day to read and its files: the first day from `ds` on that has files, if days without are allowed."""
    source = site.source.actions
    is_allowed = source.is_dated and source.missing_days == "allow"
    for day in ds_range(ds, shift_ds(ds, DAYS_SEARCHED_FOR_LOGS)) if is_allowed else [ds]:
        if files := find_files(source, site.log_root, day if source.is_dated else None):
            if day != ds:
                typer.echo(f"no file for {ds}, as `missing_days: allow` permits; reading {day} instead")
            return day, files
    other_day = ", or check another day with --ds" if source.is_dated else ""
    path = site.log_root / source.path.replace(DAY, ds)
    fail(f"no file matches {path}; fix `root` or `actions.path` in the site file{other_day}")


def _print_sample(sample: Sample, files: Sequence[Path]) -> None:
    typer.echo(f"{files[0]} (1 of {len(files)} files), first {sample.num_read:,} rows:")
    kept = f"{sample.num_kept:,} kept, {sample.num_positive:,} of them positive"
    outside = f", {sample.num_outside:,} outside the site's days" if sample.num_outside else ""
    typer.echo(f"  {kept}, {sample.num_skipped:,} skipped by a rule{outside}")
    for reason, numbers in sample.rejects.items():
        typer.echo(f"  {len(numbers):,} quarantined: {shown(reason)}; first in row {min(numbers)}")
    for row in sample.first_actions:
        typer.echo("  " + "  ".join(f"{name}={_short(value)}" for name, value in row.items()))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(str(value))
