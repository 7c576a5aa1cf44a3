"""`pf check`: shows how a site file reads the logs."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pf_assets.cli.output import fail
from pf_core.config.site import load_site
from pf_core.logs.mapping import ActionMapper
from pf_core.logs.readers import find_files, read_file
from pf_core.printable import printable

CHECKED_ROWS = 100_000
"""Reading stops after the batch that reaches this number of rows."""

MAX_VALUE_CHARS = 200
"""Longer texts of a log are cut."""


def check(
    site_file: Annotated[Path, typer.Argument(help="YAML file that describes your site")],
    ds: Annotated[str | None, typer.Option(help="day to read; by default the site's first")] = None,
    rows: Annotated[int, typer.Option(help="number of mapped rows to print")] = 5,
) -> None:
    """Validate a site file and show how it reads the first file of your logs, without writing anything."""
    site = load_site(site_file, environment=os.environ)
    source = site.source.actions
    files = find_files(source, site.log_root, (ds or site.start_ds) if source.is_dated else None)
    if not files:
        fail(f"no file matches {site.log_root / source.path} for {ds or site.start_ds}")
    mapper = ActionMapper(source)
    num_read = num_kept = num_skipped = 0
    reasons: dict[str, list[int]] = {}
    sample: list[dict[str, Any]] = []
    for batch in read_file(files[0], source, source.columns):
        mapped = mapper.map(batch.rows)
        num_read += len(batch.row_number) + len(batch.malformed)
        num_kept += mapped.actions.num_rows
        num_skipped += len(mapped.skipped)
        sample += mapped.actions.slice(0, rows - len(sample)).to_pylist()
        for number, reason, _ in batch.malformed:
            reasons.setdefault(reason, []).append(number)
        for number, reason in zip(batch.row_number[mapped.rejected].tolist(), mapped.reasons, strict=True):
            reasons.setdefault(reason, []).append(number)
        if num_read > CHECKED_ROWS:
            break
    typer.echo(f"{files[0]} (1 of {len(files)} files), first {num_read:,} rows:")
    typer.echo(f"  {num_kept:,} kept, {num_skipped:,} skipped by a rule")
    for reason, numbers in reasons.items():
        typer.echo(f"  {len(numbers):,} quarantined: {_printable(reason)}; first in row {min(numbers)}")
    for row in sample:
        typer.echo("  " + "  ".join(f"{name}={_short(value)}" for name, value in row.items()))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _printable(str(value))


def _printable(text: str) -> str:
    return printable(text, max_chars=MAX_VALUE_CHARS)
