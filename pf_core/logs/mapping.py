"""Mapping of foreign rows to raw_actions rows, by the statement that `mapping_sql.py` compiles.

A row is skipped by a rule, quarantined with the first reason that applies, or kept; the reason names the contract
field and the foreign column. Rules that skip come first, so that a site can leave out its rows without a user. A
missing duration is 0; a duration that is not a number is a reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.fields import CategoryField
from pf_core.config.source import ActionsSource
from pf_core.config.training_section import AnswerColumn
from pf_core.errors import PipelineError
from pf_core.logs.mapping_sql import EARLIEST_US, LATEST_US, SKIPPED, as_raw, statement, value_type
from pf_core.logs.parquet_columns import raw_json
from pf_core.logs.quarantine import REDACTED
from pf_core.logs.raw_batch import RawBatch
from pf_core.schemas import ANSWER, TIMESTAMP, id_arrow_type

MAX_CATEGORIES = 2**15


@dataclass(frozen=True, kw_only=True)
class MappedBatch:
    """The mapped rows; the position of every input row is in exactly one of `kept`, `skipped` and `rejected`."""

    actions: pa.Table
    """The kept rows, in the columns of the contract, and ANSWER if the mapper was given a column of answers."""
    kept: np.ndarray
    skipped: np.ndarray
    rejected: np.ndarray
    reasons: list[str]
    """Reason for each rejected row."""
    rejected_users: pa.Array
    """User id of each rejected row, null where it has none."""
    ts_us: np.ndarray
    """Time of every input row; -1 where it has no valid time."""


class ActionMapper:
    """Maps batches of rows. The mapping is compiled once for each set of columns and types."""

    def __init__(self, source: ActionsSource, answers: AnswerColumn | None = None, *, num_threads: int = 1) -> None:
        self._source, self._answers = source, answers
        self._connection = duckdb.connect(config={"threads": num_threads})
        self._connection.execute("SET enable_progress_bar = false")
        self._connection.execute("SET TimeZone = ?", [source.ts.timezone])
        self._statements: dict[tuple[tuple[str, pa.DataType], ...], str] = {}

    def map(self, raw: pa.Table) -> MappedBatch:
        """Map a table of foreign rows that has all columns of the mapping."""
        if raw.num_rows:  # without rows, the columns have no types of their own
            _check_types(self._source, self._answers, raw.schema)
        compiled = self._statement_for(raw.schema)
        raw = as_raw(raw)
        try:
            mapped = self._connection.sql(compiled).to_arrow_table()
        except duckdb.Error as error:
            problem = str(error).splitlines()[0]  # without DuckDB's stack
            raise PipelineError(f"the columns of {self._source.path} cannot be mapped: {problem}") from error
        reason = mapped["reason"].combine_chunks()
        ts_us = mapped["ts_us"].fill_null(-1).to_numpy()
        ts_us = np.where((ts_us < EARLIEST_US) | (ts_us > LATEST_US), -1, ts_us)
        users = mapped["user_id"].cast(id_arrow_type(self._source.user_id.type))
        if reason.null_count == len(reason):
            kept, bad = np.arange(len(reason)), np.empty(0, np.int64)
        else:
            is_good = reason.is_null().to_numpy(zero_copy_only=False)
            kept, bad = np.flatnonzero(is_good), np.flatnonzero(~is_good)
            mapped = mapped.filter(pa.array(is_good))
        texts = np.array(reason.take(pa.array(bad)).to_pylist(), object)
        is_skipped = texts == SKIPPED
        return MappedBatch(
            actions=_typed(mapped, self._source),
            kept=kept,
            skipped=bad[is_skipped],
            rejected=bad[~is_skipped],
            reasons=list(texts[~is_skipped]),
            rejected_users=users.take(pa.array(bad[~is_skipped])).combine_chunks(),
            ts_us=ts_us,
        )

    def _statement_for(self, schema: pa.Schema) -> str:
        # Not keyed by the schema: its hash covers the metadata, which differs between files of the same columns.
        columns = tuple(zip(schema.names, schema.types, strict=True))
        if columns not in self._statements:
            self._statements[columns] = statement(self._source, schema, self._answers)
        return self._statements[columns]


def rejected_rows(
    batches: list[RawBatch],
    raw: pa.Table,
    positions: np.ndarray,
    reasons: list[str],
    *,
    is_redacted: np.ndarray,
    redact_malformed: bool,
) -> Iterator[tuple[Path, int, str, str]]:
    """Yield (file, row number, reason, content) of the malformed rows and of the rows at `positions` in `raw`.

    `raw` is the concatenation of the batches. The order is that of the files and their rows, so that it does not
    depend on which batches were joined. Redacted rows have REDACTED for their content.
    """
    rejects = [
        (index, number, reason, REDACTED if redact_malformed else text)
        for index, batch in enumerate(batches)
        for number, reason, text in batch.malformed
    ]
    ends = np.cumsum([len(batch.row_number) for batch in batches])
    texts = raw_json(raw, positions)
    for position, reason, text, redacted in zip(positions, reasons, texts, is_redacted, strict=True):
        index = int(np.searchsorted(ends, position, side="right"))
        number = batches[index].row_number[position - ends[index]]  # negative: counts from the batch's end
        rejects.append((index, int(number), reason, REDACTED if redacted else text))
    for index, number, reason, text in sorted(rejects):
        yield batches[index].file, number, reason, text


def _typed(mapped: pa.Table, source: ActionsSource) -> pa.Table:
    """Cast the statement's columns to the types of the contract."""
    columns: dict[str, Any] = {
        "user_id": mapped["user_id"].cast(id_arrow_type(source.user_id.type)),
        "ts": mapped["ts_us"].cast(pa.int64()).cast(TIMESTAMP),
        "pin_id": mapped["pin_id"].cast(id_arrow_type(source.pin_id.type)),
        "action_type": _encoded("action_type", mapped, source.action_type),
        "surface": _encoded("surface", mapped, source.surface),
        "duration_s": pc.cast(mapped["duration_s"], pa.float32()),
    }
    if ANSWER in mapped.column_names:
        columns[ANSWER] = mapped[ANSWER]
    return pa.table(columns)


def _encoded(name: str, mapped: pa.Table, field: CategoryField) -> pa.Array:
    """Return a category as dictionary array; the statement yields codes where the mapping fixes the values."""
    values = mapped[name].combine_chunks()
    if field.vocabulary is not None:
        return pa.DictionaryArray.from_arrays(values.cast(pa.int16()), pa.array(field.vocabulary, pa.string()))
    encoded = values.dictionary_encode()
    if len(encoded.dictionary) > MAX_CATEGORIES:
        raise PipelineError(
            f"{name} has {len(encoded.dictionary):,} different values (column {field.column}), more than the "
            f"{MAX_CATEGORIES:,} that are possible",
            f"check which column `source.actions.{name}` names in the site file",
        )
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(pa.int16()), encoded.dictionary.cast(pa.string()))


def read_columns(source: ActionsSource, answers: AnswerColumn | None) -> list[str]:
    """Return every column of the log that is read, sorted."""
    return sorted({*source.mapped_columns, *([] if answers is None else [answers.column])})


def _check_types(source: ActionsSource, answers: AnswerColumn | None, schema: pa.Schema) -> None:
    """Raise a PipelineError if a column has a type that the mapping cannot read."""
    single = {"user_id": source.user_id, "pin_id": source.pin_id, "duration_s": source.duration_s}
    named = {f"source.actions.{key}": {field.column} for key, field in single.items() if field is not None}
    named |= {
        "source.actions.ts": set(source.ts.columns),
        "source.actions.action_type": source.action_type.columns,
        "source.actions.surface": source.surface.columns,
    }
    if answers is not None:
        named["training.users.column"] = {answers.column}
    for key, columns in named.items():
        for column in sorted(columns):
            kind = value_type(column, schema)
            if pa.types.is_nested(kind) or pa.types.is_decimal256(kind):
                raise PipelineError(
                    f"column {column!r} of {source.path} holds {kind}, not plain values",
                    f"name another column under `{key}` in the site file, or write its parts as columns",
                )
    ts, kind = source.ts, schema.field(source.ts.column).type
    is_described = ts.unit is not None or ts.format is not None
    if not is_described and not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_null(kind)):
        raise PipelineError(
            f"column {ts.column!r} of {source.path} holds {kind}, not timestamps",
            "give its unit in the site file: `source.actions.ts.unit` is s, ms, us or iso; or its `format`",
        )
