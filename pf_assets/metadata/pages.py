"""What the metadata of all assets is made of: entries by partition, tables, figures and column schemas."""

import base64
import io
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_core.printable import printable
from pf_core.storage.disk import disk_errors
from pf_core.storage.files import write_file

Metadata = dict[str, Any]

MAX_SAMPLE_ROWS = 12
"""Largest number of rows in a table that shows a sample."""

MAX_CELL_CHARS = 200
"""Longer texts in a table are cut: a log may have values of any length, and Dagster stores the table with the event."""


# Partitions


def record_days(
    context: dg.AssetExecutionContext,
    manifests: Iterable[Mapping[str, Any]],
    describe: Callable[[Mapping[str, Any], float], Metadata],
) -> None:
    """Build one day after the other, and attach to each partition the metadata of its own manifest.

    `manifests` builds a day when its manifest is read; `describe` is called with the manifest and the seconds that the
    day took. Metadata that the asset function returned would be attached to every partition of the range.
    """
    started = time.monotonic()
    for manifest in manifests:
        context.add_asset_metadata(describe(manifest, time.monotonic() - started), partition_key=manifest["ds"])
        started = time.monotonic()


def record_newest(context: dg.AssetExecutionContext, metadata: Metadata) -> None:
    """Attach the metadata to the newest partition of the run, which is the only one that was built."""
    *earlier, newest = context.partition_keys
    context.add_asset_metadata(metadata, partition_key=newest)
    for ds in earlier:
        superseded = {"published": False, "why": f"the same run built {newest}, which is newer"}
        context.add_asset_metadata(superseded, partition_key=ds)


# Values


def column_schema(schema: Any) -> dg.TableSchema:
    """Return an Arrow schema as Dagster shows it on an asset's definition page."""
    return dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in schema])


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue:
    """Return rows as a table, or the text "none" without rows; numbers have four significant digits.

    Cells and names of columns may hold log content. Long texts are cut, and control characters are shown as escapes.
    Dagster shows the cells of a table as plain text, so markup needs no escapes; log content must not go into Markdown.
    """
    if not rows:
        return dg.MetadataValue.text("none")
    shown = _column_names(rows[0])
    return dg.MetadataValue.table([dg.TableRecord({shown[k]: _cell(v) for k, v in row.items()}) for row in rows])


def _column_names(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the name under which each column is shown; names that become equal when they are cut get numbers."""
    shown: dict[str, str] = {}
    for name in row:
        text = printable(name, max_chars=MAX_CELL_CHARS)
        numbered = (text if number == 1 else f"{text} ({number})" for number in itertools.count(1))
        shown[name] = next(name for name in numbered if name not in shown.values())
    return shown


def _cell(value: Any) -> str | int | bool | float:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value if isinstance(value, int | bool) else printable(str(value), max_chars=MAX_CELL_CHARS)


def shown_json(value: Any) -> dg.MetadataValue:
    """Return a JSON value whose texts may be log content: long ones are cut, control characters are escapes."""
    return dg.MetadataValue.json(_shown(value))


def _shown(value: Any) -> Any:
    match value:
        case str():
            return printable(value, max_chars=MAX_CELL_CHARS)
        case Mapping():
            return {_shown(name): _shown(each) for name, each in value.items()}
        case list() | tuple():
            return [_shown(each) for each in value]
    return value


def picture(figure: Figure, path: Path) -> dg.MetadataValue:
    """Save the figure as a PNG file and return it inline as Markdown.

    The file is there because the page shows Markdown only after a click.
    """
    encoded = base64.b64encode(save_figure(figure, path)).decode()
    return dg.MetadataValue.md(f"![{path.stem}](data:image/png;base64,{encoded})")


def save_figure(figure: Figure, path: Path) -> bytes:
    """Write the figure to a PNG file, and return the file's content."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80)
    with disk_errors(path.parent, path.name), write_file(path) as file:
        file.write_bytes(content.getvalue())
    return content.getvalue()
