"""Mapping of foreign rows to raw_actions rows: the site file's mapping, compiled to one SQL statement for DuckDB.

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

from pf_core.config.source import ActionsSource, CategoryField, Condition, IdField, Rule
from pf_core.errors import PipelineError
from pf_core.logs.parquet_columns import raw_json, within_calendar
from pf_core.logs.readers import RawBatch
from pf_core.schemas import TIMESTAMP, id_arrow_type

EARLIEST_US = 946_684_800_000_000  # 2000-01-01; a time outside these two has a wrong unit

LATEST_US = 4_102_444_800_000_000  # 2100-01-01

MAX_CATEGORIES = 2**15

_SKIPPED = "\x00skip"

_SKIPPED_CODE = -1


@dataclass(frozen=True, kw_only=True)
class MappedBatch:
    """The mapped rows; the position of every input row is in exactly one of `kept`, `skipped` and `rejected`."""

    actions: pa.Table
    """The kept rows, in the columns of the contract."""
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

    def __init__(self, source: ActionsSource, *, num_threads: int = 1) -> None:
        self._source = source
        self._connection = duckdb.connect(config={"threads": num_threads})
        self._connection.execute("SET enable_progress_bar = false")
        self._connection.execute("SET TimeZone = ?", [source.ts.timezone])
        self._statements: dict[tuple[tuple[str, pa.DataType], ...], str] = {}

    def map(self, raw: pa.Table) -> MappedBatch:
        """Map a table of foreign rows that has all columns of the mapping."""
        if raw.num_rows:  # without rows, the columns have no types of their own
            _check_types(self._source, raw.schema)
        statement = self._statement_for(raw.schema)
        raw = as_raw(raw)
        try:
            mapped = self._connection.sql(statement).to_arrow_table()
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
        is_skipped = texts == _SKIPPED
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
            self._statements[columns] = _statement(self._source, schema)
        return self._statements[columns]


def rejected_rows(
    batches: list[RawBatch], raw: pa.Table, positions: np.ndarray, reasons: list[str]
) -> Iterator[tuple[Path, int, str, str]]:
    """Yield (file, row number, reason, content) of the malformed rows and of the rows at `positions` in `raw`.

    `raw` is the concatenation of the batches. The order is that of the files and their rows, so that it does not
    depend on which batches were joined.
    """
    rejects = [(index, *row) for index, batch in enumerate(batches) for row in batch.malformed]
    ends = np.cumsum([len(batch.row_number) for batch in batches])
    for position, reason, text in zip(positions, reasons, raw_json(raw, positions), strict=True):
        index = int(np.searchsorted(ends, position, side="right"))
        number = batches[index].row_number[position - ends[index]]  # negative: counts from the batch's end
        rejects.append((index, int(number), reason, text))
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


def _check_types(source: ActionsSource, schema: pa.Schema) -> None:
    """Raise a PipelineError if a column has a type that the mapping cannot read."""
    named = {"user_id": {source.user_id.column}, "pin_id": {source.pin_id.column}, "ts": {source.ts.column}}
    named |= {"action_type": source.action_type.columns, "surface": source.surface.columns}
    if source.duration_s is not None:
        named["duration_s"] = {source.duration_s.column}
    for key, columns in named.items():
        for column in sorted(columns):
            kind = _value_type(column, schema)
            if pa.types.is_nested(kind) or pa.types.is_decimal256(kind):
                raise PipelineError(
                    f"column {column!r} of {source.path} holds {kind}, not plain values",
                    f"name another column under `source.actions.{key}` in the site file, or write its parts as columns",
                )
    ts, kind = source.ts, schema.field(source.ts.column).type
    if ts.unit is None and not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_null(kind)):
        raise PipelineError(
            f"column {ts.column!r} of {source.path} holds {kind}, not timestamps",
            "give its unit in the site file: `source.actions.ts.unit` is s, ms, us or iso",
        )


def _statement(source: ActionsSource, schema: pa.Schema) -> str:
    """Return the SQL that selects the contract's columns and the reason to reject each row (NULL if there is none)."""
    user, pin, ts = source.user_id, source.pin_id, source.ts
    checks = [
        *_skip_checks("action_type", source.action_type),
        *_skip_checks("surface", source.surface),
        *id_checks("user_id", user, schema),
        *id_checks("pin_id", pin, schema),
        (f"{is_missing(ts.column, schema)}", f"ts: missing (column {ts.column})"),
        ("ts_us IS NULL", f"ts: not a time{f' in unit {ts.unit}' if ts.unit else ''} (column {ts.column})"),
        (
            f"ts_us NOT BETWEEN {EARLIEST_US} AND {LATEST_US}",
            f"ts: outside 2000-2100{f', is unit {ts.unit} right?' if ts.unit else ''} (column {ts.column})",
        ),
        *_category_checks("action_type", source.action_type, schema),
        *_category_checks("surface", source.surface, schema),
    ]
    duration = "0.0::FLOAT"
    if source.duration_s is not None:
        column = source.duration_s.column
        scale = 1000.0 if source.duration_s.unit == "ms" else 1.0
        number = _number(column, schema)
        if not pa.types.is_integer(schema.field(column).type):
            number = f"CASE WHEN isnan({number}) THEN 0 ELSE {number} END"
        duration = f"TRY_CAST(coalesce({number}, 0) / {scale} AS FLOAT)"
        checks += [
            (
                f"NOT ({is_missing(column, schema)}) AND {_number(column, schema)} IS NULL",
                f"duration_s: not a number (column {column})",
            ),
            (
                "duration_s IS NULL OR duration_s < 0 OR isinf(duration_s)",
                f"duration_s: negative or infinite (column {column})",
            ),
        ]
    cases = "\n".join(f"WHEN {test} THEN {sql_text(reason)}" for test, reason in checks)
    return f"""
        SELECT user_id, ts_us, pin_id, action_type, surface, duration_s, CASE {cases} END AS reason
        FROM (SELECT *, {id_value(user, schema)} AS user_id, {id_value(pin, schema)} AS pin_id,
                     {_time(source, schema)} AS ts_us, {_category(source.action_type, schema)} AS action_type,
                     {_category(source.surface, schema)} AS surface, {duration} AS duration_s
              FROM raw)
    """


def raw_column(column: str) -> str:
    """Return the SQL name of a foreign column.

    It never equals a name of ours, nor the name of a column that differs in case only: SQL ignores case.
    """
    return "raw_" + column.encode().hex()


def as_raw(table: pa.Table) -> pa.Table:
    """Rename the columns by `raw_column`, with values that DuckDB can hold."""
    return pa.table({raw_column(name): within_calendar(table[name]) for name in table.column_names})


def sql_text(value: str) -> str:
    """Return a value as SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def _is_text(column: str, schema: pa.Schema) -> bool:
    kind = _value_type(column, schema)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _value_type(column: str, schema: pa.Schema) -> pa.DataType:
    kind = schema.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_missing(column: str, schema: pa.Schema) -> str:
    """Return the SQL condition that a value is NULL or an empty text."""
    if _is_text(column, schema):
        return f"({raw_column(column)} IS NULL OR {raw_column(column)} = '')"
    return f"{raw_column(column)} IS NULL"


def _number(column: str, schema: pa.Schema) -> str:
    """Return the SQL expression of a column as DOUBLE, NULL where it is not a number."""
    kind = schema.field(column).type
    if pa.types.is_boolean(kind):
        return f"{raw_column(column)}::INTEGER::DOUBLE"
    if pa.types.is_integer(kind):
        return f"{raw_column(column)}::DOUBLE"
    return f"TRY_CAST({raw_column(column)} AS DOUBLE)"


def id_value(field: IdField, schema: pa.Schema) -> str:
    """Return the SQL expression of an id, NULL where an integer id is not an integer."""
    column = raw_column(field.column)
    kind = _value_type(field.column, schema)
    if field.type == "string":
        return f"{column}::VARCHAR"
    if _is_text(field.column, schema):
        return f"CASE WHEN regexp_full_match({column}, '-?[0-9]+') THEN TRY_CAST({column} AS BIGINT) END"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return f"CASE WHEN {column} = floor({column}) THEN TRY_CAST({column} AS BIGINT) END"
    return f"TRY_CAST({column} AS BIGINT)"


def id_checks(name: str, field: IdField, schema: pa.Schema) -> list[tuple[str, str]]:
    """Return (SQL condition, reason) pairs that reject a row for its id."""
    checks = [(is_missing(field.column, schema), f"{name}: missing (column {field.column})")]
    if field.type == "int":
        if _is_text(field.column, schema):
            checks.append(
                (
                    f"{name} IS NULL AND regexp_full_match({raw_column(field.column)}, '-?[0-9]+[.]0*')",
                    f"{name}: a float like 17850.0 is not an integer: write the column as integers, or give it "
                    f"`type: string` (column {field.column})",
                )
            )
            is_integer = f"regexp_full_match({raw_column(field.column)}, '-?[0-9]+')"
        else:
            is_integer = str(pa.types.is_integer(_value_type(field.column, schema))).lower()
        checks += [
            (
                f"{name} IS NULL AND {is_integer}",
                f"{name}: an integer beyond 64 bits: give it `type: string` (column {field.column})",
            ),
            (f"{name} IS NULL", f"{name}: not an integer (column {field.column})"),
        ]
    return checks


def _time(source: ActionsSource, schema: pa.Schema) -> str:
    """Return the SQL expression of the time in microseconds, NULL where it is not a time."""
    column, kind = raw_column(source.ts.column), schema.field(source.ts.column).type
    if pa.types.is_timestamp(kind) or source.ts.unit in ("iso", None):
        return f"epoch_us(TRY_CAST({column} AS TIMESTAMPTZ))"
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1}[source.ts.unit]
    if pa.types.is_integer(kind):
        bound = 2**62 // factor
        return f"CASE WHEN {column} BETWEEN {-bound} AND {bound} THEN {column}::BIGINT * {factor} END"
    return f"TRY_CAST(TRY(round(TRY_CAST({column} AS DECIMAL(30, 9)) * {factor})) AS BIGINT)"


def _category(field: CategoryField, schema: pa.Schema) -> str:
    """Return the SQL expression of a category: its code in the field's vocabulary, or its text if there is none."""
    codes = {name: code for code, name in enumerate(field.vocabulary or ())}
    if field.constant is not None:
        return str(codes[field.constant])
    if field.rules:
        outcomes = [_SKIPPED_CODE if rule.value is None else codes[rule.value] for rule in field.rules]
        cases = [f"WHEN {_holds(rule, schema)} THEN {code}" for rule, code in zip(field.rules, outcomes, strict=True)]
        return f"CASE {' '.join(cases)} END"
    assert field.column is not None
    text = f"{raw_column(field.column)}::VARCHAR"
    if field.values is None:
        return f"nullif({text}, '')"
    cases = [f"WHEN {sql_text(foreign)} THEN {codes[ours]}" for foreign, ours in field.values.items()]
    return f"CASE {text} {' '.join(cases)} END"


def _skip_checks(name: str, field: CategoryField) -> list[tuple[str, str]]:
    """Return the (SQL condition, reason) pair that skips a row by a rule of a category, if a rule skips rows."""
    return [(f"{name} = {_SKIPPED_CODE}", _SKIPPED)] if any(rule.skip for rule in field.rules) else []


def _category_checks(name: str, field: CategoryField, schema: pa.Schema) -> list[tuple[str, str]]:
    """Return (SQL condition, reason) pairs that reject a row for its category."""
    checks = []
    if field.column is not None:
        checks.append((is_missing(field.column, schema), f"{name}: missing (column {field.column})"))
        if field.values is not None:
            checks.append((f"{name} IS NULL", f"{name}: unknown value (column {field.column})"))
    elif field.rules:
        checks.append((f"{name} IS NULL", f"{name}: no rule applies (columns {', '.join(sorted(field.columns))})"))
    return checks


def _holds(rule: Rule, schema: pa.Schema) -> str:
    """Return the SQL condition that a rule applies."""
    tests = [test for column, condition in rule.when.items() for test in _tests(column, condition, schema)]
    return " AND ".join(tests) if tests else "true"


def _tests(column: str, condition: Condition, schema: pa.Schema) -> list[str]:
    """Return the SQL conditions of one column; a missing value meets none of them but `missing: true`."""
    number = _number(column, schema)

    def equals(value: str | int | float | bool) -> str:
        if isinstance(value, str):
            return f"{raw_column(column)}::VARCHAR = {sql_text(value)}"
        if isinstance(value, bool) and _is_text(column, schema):
            return f"TRY_CAST({raw_column(column)} AS BOOLEAN) = {value}"
        if isinstance(value, int) and pa.types.is_integer(schema.field(column).type):
            return f"{raw_column(column)} = {int(value)}"
        return f"{number} = {float(value)}"

    bounds = {">": condition.above, ">=": condition.at_least, "<": condition.below, "<=": condition.at_most}
    tests = [
        f"({number} {operator} {bound} AND NOT isnan({number}))"
        for operator, bound in bounds.items()
        if bound is not None
    ]
    if condition.equals is not None:
        tests.append(equals(condition.equals))
    if condition.any_of is not None:
        tests.append("(" + " OR ".join(equals(value) for value in condition.any_of) + ")")
    if condition.missing is not None:
        is_absent = is_missing(column, schema)
        if pa.types.is_floating(_value_type(column, schema)):  # NaN, as pandas has it
            is_absent = f"({is_absent} OR isnan({raw_column(column)}))"
        tests.append(is_absent if condition.missing else f"NOT {is_absent}")
    return [f"coalesce({test}, false)" for test in tests]
