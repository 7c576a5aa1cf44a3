"""`pf check`: shows how a site file reads the logs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pf_assets.cli.output import fail
from pf_core.config.site import Site, load_site
from pf_core.logs.mapping import ActionMapper, MappedBatch
from pf_core.logs.positives import positive_mask
from pf_core.logs.readers import find_files, read_file
from pf_core.printable import printable

CHECKED_ROWS = 100_000
"""Reading stops after the batch that reaches this number of rows."""

NAMES_SHOWN = 10
"""Number of action types and surfaces that an error lists."""

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
    day = ds or site.start_ds
    files = find_files(source, site.log_root, day if source.is_dated else None)
    if not files:
        fail(f"no file matches {site.log_root / source.path} for {day}")
    mapper = ActionMapper(source)
    num_read = num_kept = num_skipped = num_positive = 0
    reasons: dict[str, list[int]] = {}
    sample: list[dict[str, Any]] = []
    for batch in read_file(files[0], source, source.mapped_columns):
        mapped = mapper.map(batch.rows)
        num_read += len(batch.row_number) + len(batch.malformed)
        num_kept += mapped.actions.num_rows
        num_skipped += len(mapped.skipped)
        num_positive += _num_positive(mapped, site)
        sample += mapped.actions.slice(0, rows - len(sample)).to_pylist()
        for number, reason, _ in batch.malformed:
            reasons.setdefault(reason, []).append(number)
        for number, reason in zip(batch.row_number[mapped.rejected].tolist(), mapped.reasons, strict=True):
            reasons.setdefault(reason, []).append(number)
        if num_read > CHECKED_ROWS:
            break
    typer.echo(f"{files[0]} (1 of {len(files)} files), first {num_read:,} rows:")
    typer.echo(f"  {num_kept:,} kept, {num_positive:,} of them positive, {num_skipped:,} skipped by a rule")
    for reason, numbers in reasons.items():
        typer.echo(f"  {len(numbers):,} quarantined: {_printable(reason)}; first in row {min(numbers)}")
    for row in sample:
        typer.echo("  " + "  ".join(f"{name}={_short(value)}" for name, value in row.items()))
    if not num_positive:
        _require_positive(site, files, mapper)


def _require_positive(site: Site, files: Sequence[Path], mapper: ActionMapper) -> None:
    """Read the files up to their first positive action; end with an error if they have actions but none of these."""
    source, num_kept = site.source.actions, 0
    found: dict[str, set[str]] = {"action_type": set(), "surface": set()}
    for file in files:
        for batch in read_file(file, source, source.mapped_columns):
            mapped = mapper.map(batch.rows)
            if _num_positive(mapped, site):
                return
            num_kept += mapped.actions.num_rows
            for name, values in found.items():
                values.update(mapped.actions[name].unique().to_pylist())
    if num_kept:
        seen = "; ".join(f"{name}: {_listed(values)}" for name, values in found.items())
        fail(
            f"none of the {num_kept:,} actions of {len(files)} files is positive: source.positive is "
            f"{site.source.positive.model_dump(mode='json')}, the actions have {seen}; fix source.positive in the site "
            "file, or check another day with --ds"
        )


def _num_positive(mapped: MappedBatch, site: Site) -> int:
    return int(positive_mask(mapped.actions, site.source.positive).sum()) if mapped.actions.num_rows else 0


def _listed(values: set[str]) -> str:
    """Return the first names in alphabetical order, and how many more there are."""
    names = sorted(values)
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return _printable(", ".join(names[:NAMES_SHOWN])) + more


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _printable(str(value))


def _printable(text: str) -> str:
    return printable(text, max_chars=MAX_VALUE_CHARS)
