"""What pin_features is built from: the files of the catalogue and of the matrix, and the pins of the log."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.files import DAY
from pf_core.config.site import Site
from pf_core.config.source import NpyVectors, PinsSource
from pf_core.errors import PipelineError
from pf_core.logs.log_day import LogDay
from pf_core.logs.readers import find_files
from pf_core.pins.catalogue import UNKNOWN_INTEREST, Catalogue, read_catalogue, read_matrix
from pf_core.schemas import IdType, id_arrow_type, pin_features_schema
from pf_core.storage.files import read_parquet

IDS_AT_ONCE = 1 << 20
"""Pin ids of the log that are collected before repeated ones are removed."""


# Files


def dated_files(site: Site, ds: str) -> list[Path]:
    """Return the catalogue files of a day; none if the catalogue is not dated."""
    catalogue = site.source.pins.catalogue
    if catalogue is None or not catalogue.is_dated:
        return []
    files = find_files(catalogue, site.log_root, ds)
    if not files:
        raise PipelineError(
            f"no pin catalogue for {ds}: nothing matches {site.log_root / catalogue.path.replace(DAY, ds)}",
            "if no pin was added that day, put a catalogue without rows there",
        )
    return files


def undated_files(site: Site) -> list[Path]:
    """Return the files that are the same for all days: those of an undated catalogue, and the matrix."""
    vectors = site.source.pins.vectors
    files = _undated_catalogue(site)
    if isinstance(vectors, NpyVectors):
        files += [site.log_root / vectors.npy, site.log_root / vectors.ids]
    for file in files:
        if not file.is_file():
            raise PipelineError(f"no file at {file}", "fix `pins` in the site file")
    return files


def _undated_catalogue(site: Site) -> list[Path]:
    catalogue = site.source.pins.catalogue
    if catalogue is None or catalogue.is_dated:
        return []
    files = find_files(catalogue, site.log_root)
    if not files:
        raise PipelineError(
            f"no pin catalogue matches {site.log_root / catalogue.path}", "fix `pins.catalogue.path` in the site file"
        )
    return files


def undated_catalogue_pins(site: Site) -> pa.Array | None:
    """Return the pins of an undated catalogue, with a vector or without; None if the site has no such catalogue."""
    files = _undated_catalogue(site)
    return read_catalogue(site.source.pins, files, dim=None).rows["pin_id"].combine_chunks() if files else None


def read_described_pins(site: Site, files: Sequence[Path], *, dim: int | None) -> Catalogue:
    """Read the pins of these catalogue files, and those of the matrix: each pin once.

    `dim` is the required length of the vectors in a column; None: the length of the first one.
    """
    pins = site.source.pins
    described = read_catalogue(pins, files, dim=dim) if files else no_pins(site)
    if not isinstance(pins.vectors, NpyVectors):
        return described
    matrix = read_matrix(pins.vectors, site.log_root, pins)
    vectors = matrix.rows
    position = pc.index_in(vectors["pin_id"], described.rows["pin_id"])
    interest = described.rows["interest"].take(position).fill_null(UNKNOWN_INTEREST)
    candidate = described.rows["is_candidate"].take(position).fill_null(_is_outsider_candidate(pins))
    rows = vectors.append_column("interest", interest).append_column("is_candidate", candidate)
    others = described.rows.filter(pc.invert(pc.is_in(described.rows["pin_id"], vectors["pin_id"])))
    return Catalogue(joined(rows, others), [*described.quarantined, *matrix.quarantined])


def catalogue_files(site: Site, ds: str) -> list[Path]:
    """Return the catalogue files that are read for a day: those of the day, or all of an undated catalogue."""
    return dated_files(site, ds) or _undated_catalogue(site)


# Pins of the log


def read_log_pins(site: Site, days: Sequence[LogDay]) -> pa.Array:
    """Return the distinct pins with an action on these days, ascending; memory grows with their number alone."""
    parts: list[pa.Array] = [pa.array([], id_arrow_type(site.source.pins.pin_id.type))]
    num_pending = 0
    for day in days:
        for path in day.files.values():
            parts.append(read_parquet(path, columns=["pin_id"])["pin_id"].unique())
            num_pending += len(parts[-1])
            if num_pending > max(IDS_AT_ONCE, len(parts[0])):
                parts, num_pending = [pa.chunked_array(parts).unique()], 0
    pin_ids = pa.chunked_array(parts).unique()
    return pin_ids.take(pc.sort_indices(pin_ids))


def rows_of_log_pins(pin_ids: pa.Array, pins: PinsSource) -> pa.Table:
    """Return rows of pins that nothing describes."""
    interest = pa.repeat(UNKNOWN_INTEREST, len(pin_ids))
    candidate = pa.repeat(_is_outsider_candidate(pins), len(pin_ids))
    return pa.table({"pin_id": pin_ids, "interest": interest, "is_candidate": candidate})


def _is_outsider_candidate(pins: PinsSource) -> bool:
    """Whether a pin that is not in the catalogue may be recommended: unless the catalogue names the candidates."""
    return pins.is_candidate is None


def without(pin_ids: pa.Array, known: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the pins that are not among the known ones."""
    return pin_ids.filter(pc.invert(pc.is_in(pin_ids, known)))


def digest_of_ids(pin_ids: pa.Array) -> str:
    """Return a digest of ascending pin ids."""
    digest = hashlib.sha256(f"{len(pin_ids)}".encode())
    whole = pa.concat_arrays([pin_ids])  # a filtered array owns its buffers; a slice would hash its neighbours
    for buffer in whole.buffers()[1:]:
        if buffer is not None:
            digest.update(buffer)
    return digest.hexdigest()[:16]


# Rows


def no_pins(site: Site) -> Catalogue:
    """Return a catalogue without rows."""
    schema = pin_features_schema(site.source.pins.pin_id.type, 0)
    return Catalogue(schema.empty_table().select(["pin_id", "interest", "is_candidate"]), [])


def dim_of(rows: pa.Table) -> int:
    """Return the dimension of the vectors of some rows; 0 if they have none."""
    return rows.schema.field("feature").type.list_size if "feature" in rows.column_names else 0


def joined(rows: pa.Table, others: pa.Table) -> pa.Table:
    """Return both tables' rows; `feature` is null in the rows of a table without vectors."""
    dim = dim_of(rows) or dim_of(others)
    return pa.concat_tables([with_feature_column(rows, dim), with_feature_column(others, dim)])


def with_feature_column(rows: pa.Table, dim: int) -> pa.Table:
    """Return the rows in the columns of pin_features, with null as vector if they have none."""
    if dim and "feature" not in rows.column_names:
        rows = rows.append_column("feature", pa.nulls(rows.num_rows, pa.list_(pa.float32(), dim)))
    has_feature = rows["feature"].is_valid() if dim else pa.repeat(False, rows.num_rows)
    if "has_feature" in rows.column_names:
        rows = rows.drop_columns(["has_feature"])
    rows = rows.append_column("has_feature", has_feature)
    id_type: IdType = "int" if pa.types.is_integer(rows.schema.field("pin_id").type) else "string"
    schema = pin_features_schema(id_type, dim)
    return rows.select(schema.names).cast(schema)
