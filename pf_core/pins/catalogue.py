"""Readers of a site's pins: catalogue files and vector matrices to contract rows, with a reason for every reject."""

import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.source import ColumnVectors, NpyVectors, PinsSource
from pf_core.errors import PipelineError
from pf_core.logs.mapping_sql import as_raw, id_checks, id_value, is_missing, raw_column, sql_text
from pf_core.logs.parquet_columns import raw_json
from pf_core.logs.readers import read_file
from pf_core.pins.content import vector_reasons
from pf_core.schemas import id_arrow_type, pin_features_schema
from pf_core.storage.cache import fetched

UNKNOWN_INTEREST = "unknown"

BOOLEANS = "true or false, t or f, yes or no, y or n, 1 or 0"
"""The words that DuckDB casts to a boolean, in small or capital letters."""

UNREADABLE = (ValueError, EOFError, OSError, OverflowError, MemoryError, SyntaxError, TypeError, tokenize.TokenError)
"""What numpy raises for a damaged .npy file: its header is an expression of Python."""

QuarantinedRow = tuple[str, int, str, str]
"""Source file, row number, reason, content."""


@dataclass(frozen=True)
class Catalogue:
    """The usable and the rejected rows of the catalogue files."""

    rows: pa.Table
    """pin_id (ascending), interest, is_candidate; and `feature`, null where a pin has none, unless no row has one."""
    quarantined: list[QuarantinedRow]


def read_catalogue(pins: PinsSource, files: Sequence[Path], *, dim: int | None) -> Catalogue:
    """Read all rows of the files. The first row of a pin counts, later ones are rejects.

    `dim` is the required length of the vectors; None: the length of the first usable one. A pin may have no vector.
    """
    assert pins.catalogue is not None
    vector = pins.vectors.column if isinstance(pins.vectors, ColumnVectors) else None
    tables: list[pa.Table] = []
    quarantined: list[QuarantinedRow] = []
    connection = duckdb.connect(config={"threads": 1})
    for file in files:
        for batch in read_file(file, pins.catalogue, pins.mapped_columns):
            readable = _without_halves(batch.rows)
            raw = as_raw(readable)  # noqa: F841 (the statement reads it by name)
            try:
                mapped = connection.sql(_statement(pins, vector, readable.schema)).to_arrow_table()
            except duckdb.Error as error:
                problem = str(error).splitlines()[0]  # without DuckDB's stack
                raise PipelineError(f"the columns of {file} cannot be read as pins: {problem}") from error
            reasons = np.array(mapped["reason"].fill_null("").to_pylist(), object)  # "": usable
            if vector is not None:
                dim = dim or _first_length(mapped["feature"], reasons)
                reasons = _check_vectors(mapped["feature"], reasons, dim)
            is_good = reasons == ""
            bad = np.flatnonzero(~is_good)
            rejects = zip(batch.row_number[bad].tolist(), reasons[bad], raw_json(batch.rows, bad), strict=True)
            quarantined += [(str(file), *reject) for reject in (*batch.malformed, *rejects)]
            rows = mapped.drop_columns(["reason"]).filter(pa.array(is_good))
            origin = [f"{file}\n{number}" for number in batch.row_number[is_good]]
            tables.append(rows.append_column("origin", pa.array(origin, pa.string())))
    rows, repeated = _first_of_each(pa.concat_tables(tables))
    return Catalogue(_typed(rows, pins, dim), quarantined + repeated)


def nothing_usable(ds: str, quarantined: Sequence[QuarantinedRow]) -> PipelineError:
    """Return the error of a day whose catalogue has rows, none of which is a pin."""
    file, number, reason, _ = quarantined[0]
    return PipelineError(
        f"pin_features {ds}: no pin of the catalogue could be used. {file}, row {number}: {reason}",
        "fix `pins` in the site file",
    )


def _without_halves(rows: pa.Table) -> pa.Table:
    """Cast lists of float16 to float32: DuckDB has no float16."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_nested(field.type) and getattr(field.type, "value_type", None) == pa.float16():
            rows = rows.set_column(index, field.name, rows[index].cast(pa.list_(pa.float32())))
    return rows


def read_matrix(vectors: NpyVectors, root: Path, pins: PinsSource) -> Catalogue:
    """Read pin_id and feature from two .npy files; a row whose vector is not usable is a reject, numbered from 1."""
    matrix, ids = (_load(root / name) for name in (vectors.npy, vectors.ids))
    if matrix.ndim != 2 or ids.ndim != 1 or len(matrix) != len(ids):
        raise PipelineError(
            f"{root / vectors.npy} has shape {matrix.shape} and {root / vectors.ids} {ids.shape}; "
            "they must be (pins, dim) and (pins,)"
        )
    try:
        pin_id = pa.array(ids).cast(id_arrow_type(pins.pin_id.type))
    except pa.ArrowException as error:
        raise PipelineError(f"{root / vectors.ids}: not all are {pins.pin_id.type} ids: {error}") from error
    if matrix.dtype.kind not in "iuf":
        raise PipelineError(f"{root / vectors.npy} holds {matrix.dtype}, not numbers")
    if len(pin_id.unique()) != len(pin_id):
        raise PipelineError(f"{root / vectors.ids} names a pin twice")
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(matrix, np.float32)
    feature = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1])
    rows = pa.table({"pin_id": pin_id, "feature": feature})
    reasons = vector_reasons(features)
    bad = np.flatnonzero(reasons != "")
    if len(bad) == len(rows) > 0:
        raise PipelineError(f"{root / vectors.npy}: not one vector can be used; row 1: {reasons[0]}")
    rejects = zip((bad + 1).tolist(), reasons[bad], raw_json(rows, bad), strict=True)
    usable = rows.filter(pa.array(reasons == "")) if len(bad) else rows  # a filter copies the matrix
    return Catalogue(usable, [(str(root / vectors.npy), *reject) for reject in rejects])


def _load(path: Path) -> np.ndarray:
    if not path.is_file():
        raise PipelineError(f"no file at {path}", "fix `pins.vectors` in the site file")
    try:
        return np.load(fetched(path), mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise PipelineError(f"{path} cannot be read as .npy: {error}", "write the file again") from error


def _statement(pins: PinsSource, vector: str | None, schema: pa.Schema) -> str:
    """Return the SQL that selects the contract's columns and the reason to reject each row (NULL if there is none)."""
    checks = id_checks("pin_id", pins.pin_id, schema)
    interest, candidate = sql_text(UNKNOWN_INTEREST), "true"
    if pins.interest is not None:
        interest = f"coalesce(nullif({raw_column(pins.interest)}::VARCHAR, ''), {interest})"
    if pins.is_candidate is not None:
        candidate = f"TRY_CAST({raw_column(pins.is_candidate)} AS BOOLEAN)"
        checks.append(("is_candidate IS NULL", f"is_candidate: not {BOOLEANS} (column {pins.is_candidate})"))
    feature = ""
    if vector is not None:
        feature = f", TRY_CAST({raw_column(vector)} AS FLOAT[]) AS feature"
        no_list = f"feature IS NULL AND NOT {is_missing(vector, schema)}"
        checks.append((no_list, f"feature: not a list of numbers (column {vector})"))
    cases = " ".join(f"WHEN {test} THEN {sql_text(reason)}" for test, reason in checks)
    return f"""
        SELECT pin_id, interest, is_candidate {", feature" if vector else ""}, CASE {cases} END AS reason
        FROM (SELECT *, {id_value(pins.pin_id, schema)} AS pin_id, {interest} AS interest,
                     {candidate} AS is_candidate {feature}
              FROM raw)
    """


def _first_length(feature: pa.ChunkedArray, reasons: np.ndarray) -> int | None:
    """Return the length of the first vector that is not empty, of rows without a reason; None if there is none."""
    lengths = pc.list_value_length(feature).fill_null(0).to_numpy()
    good = np.flatnonzero((reasons == "") & (lengths > 0))
    return int(lengths[good[0]]) if len(good) else None


def _check_vectors(feature: pa.ChunkedArray, reasons: np.ndarray, dim: int | None) -> np.ndarray:
    """Return the reasons, with new ones for vectors of another length or that are not usable; a missing one is none."""
    reasons = reasons.copy()
    lengths, is_given = pc.list_value_length(feature).fill_null(-1).to_numpy(), feature.is_valid().to_numpy()
    expected = "an empty list" if dim is None else f"not {dim} numbers, like the first"
    reasons[(reasons == "") & is_given & (lengths != dim)] = f"feature: {expected}"
    good = np.flatnonzero((reasons == "") & is_given)
    if len(good):
        reasons[good] = vector_reasons(pc.list_flatten(feature.take(pa.array(good))).to_numpy().reshape(len(good), -1))
    return reasons


def _typed(mapped: pa.Table, pins: PinsSource, dim: int | None) -> pa.Table:
    if dim is None and "feature" in mapped.column_names:
        mapped = mapped.drop_columns(["feature"])
    schema = pin_features_schema(pins.pin_id.type, dim or 0)
    return mapped.cast(pa.schema([schema.field(name) for name in mapped.column_names]))


def _first_of_each(rows: pa.Table) -> tuple[pa.Table, list[QuarantinedRow]]:
    """Return the first row of each pin, in ascending order of pin_id, and the later rows as rejects."""
    numbered = rows.append_column("position", pa.array(np.arange(rows.num_rows)))
    rows = rows.take(pc.sort_indices(numbered, [("pin_id", "ascending"), ("position", "ascending")]))
    ids = rows["pin_id"].combine_chunks()
    again = np.zeros(rows.num_rows, bool)
    again[1:] = pc.equal(ids[1:], ids[: max(len(ids) - 1, 0)]).to_numpy(zero_copy_only=False)
    repeated: list[QuarantinedRow] = []
    for row in rows.filter(pa.array(again)).select(["origin", "pin_id"]).to_pylist():
        file, number = row["origin"].split("\n")
        repeated.append((file, int(number), "pin_id: a second row of this pin", str(row["pin_id"])))
    return rows.filter(pa.array(~again)).drop_columns(["origin"]), repeated
