"""Pieces of an asset's page: tables, plots, schemas."""

import base64
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

Metadata = dict[str, Any]

MAX_SAMPLE_ROWS = 12


def record_days(
    context: dg.AssetExecutionContext,
    manifests: Iterable[Mapping[str, Any]],
    describe: Callable[[Mapping[str, Any], float], Metadata],
) -> None:
    """Build day after day, and give each partition its own metadata: what a range run returns goes to all alike."""
    started = time.monotonic()
    for manifest in manifests:
        context.add_asset_metadata(describe(manifest, time.monotonic() - started), partition_key=manifest["ds"])
        started = time.monotonic()


def column_schema(schema: Any) -> dg.TableSchema:
    """An Arrow schema for the asset's definition page."""
    return dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in schema])


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue:
    if not rows:
        return dg.MetadataValue.text("none")
    return dg.MetadataValue.table([dg.TableRecord({k: _plain(v) for k, v in row.items()}) for row in rows])


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")  # a table is there to be read
    return value if isinstance(value, str | int | bool) else str(value)


def picture(figure: Figure, path: Path) -> dg.MetadataValue:
    """The figure inline; it is kept as a file, too, because the page shows Markdown only behind a link."""
    encoded = base64.b64encode(save_figure(figure, path)).decode()
    return dg.MetadataValue.md(f"![{path.stem}](data:image/png;base64,{encoded})")


def save_figure(figure: Figure, path: Path) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return content.getvalue()
