"""The site file's mapping, compiled to one SQL statement for DuckDB.

The statement selects the columns of the contract and, for each row, the first reason to reject it. What a column's
values can be depends on its type, so that a statement is compiled for each set of columns and types.
"""

import pyarrow as pa

from pf_core.config.fields import CategoryField, Condition, IdField, Rule, TimeField
from pf_core.config.source import ActionsSource
from pf_core.config.training_section import AnswerColumn, AnswerValue
from pf_core.logs.parquet_columns import within_calendar
from pf_core.schemas import ANSWER

EARLIEST_US = 946_684_800_000_000  # 2000-01-01; a time outside these two has a wrong unit

LATEST_US = 4_102_444_800_000_000  # 2100-01-01

SKIPPED = "\x00skip"
"""Stands for a reason: a rule leaves the row out."""

SKIPPED_CODE = -1


WORDS = {True: ("yes", "on", "true"), False: ("no", "off", "false")}
"""What YAML reads as true and false without quotes."""


def statement(source: ActionsSource, schema: pa.Schema, answers: AnswerColumn | None = None) -> str:
    """Return the SQL that selects the contract's columns and the reason to reject each row (NULL if there is none).

    With `answers` it selects one more column: whether the row says that its user may be learned from.
    """
    user, pin, ts = source.user_id, source.pin_id, source.ts
    kind_of_time = f" in unit {ts.unit}" if ts.unit else f" of format {ts.format}" if ts.format else ""
    columns_of_time = f"column{'s' if ts.time_of_day else ''} {' and '.join(ts.columns)}"
    checks = [
        *_skip_checks("action_type", source.action_type),
        *_skip_checks("surface", source.surface),
        *id_checks("user_id", user, schema),
        *id_checks("pin_id", pin, schema),
        *((is_missing(column, schema), f"ts: missing (column {column})") for column in ts.columns),
        ("ts_us IS NULL", f"ts: not a time{kind_of_time} ({columns_of_time})"),
        (
            f"ts_us NOT BETWEEN {EARLIEST_US} AND {LATEST_US}",
            f"ts: outside 2000-2100{f', is unit {ts.unit} right?' if ts.unit else ''} ({columns_of_time})",
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
    answer = "" if answers is None else f", {_agrees(answers, schema)} AS {ANSWER}"
    return f"""
        SELECT user_id, ts_us, pin_id, action_type, surface, duration_s, CASE {cases} END AS reason{answer}
        FROM (SELECT *, {id_value(user, schema)} AS user_id, {id_value(pin, schema)} AS pin_id,
                     {time_us(source.ts, schema)} AS ts_us, {_category(source.action_type, schema)} AS action_type,
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
    kind = value_type(column, schema)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def value_type(column: str, schema: pa.Schema) -> pa.DataType:
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
    kind = value_type(field.column, schema)
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
            is_integer = str(pa.types.is_integer(value_type(field.column, schema))).lower()
        checks += [
            (
                f"{name} IS NULL AND {is_integer}",
                f"{name}: an integer beyond 64 bits: give it `type: string` (column {field.column})",
            ),
            (
                f"{name} IS NULL",
                f"{name}: not an integer (column {field.column}); ids that are text need `{name}: "
                f"{{column: {field.column}, type: string}}` in the site file",
            ),
        ]
    return checks


def time_us(ts: TimeField, schema: pa.Schema) -> str:
    """Return the SQL expression of the time in microseconds, NULL where it is not a time.

    The connection's time zone is that of times without one.
    """
    column, kind = raw_column(ts.column), schema.field(ts.column).type
    if ts.time_of_day is not None:
        is_text = ts.format is not None and _is_text(ts.column, schema)
        day = f"{column}::VARCHAR" if is_text else f"TRY_CAST({column} AS DATE)::VARCHAR"
        both = f"({day} || ' ' || {raw_column(ts.time_of_day)}::VARCHAR)"
        time = f"try_strptime({both}, {sql_text(ts.format)})" if ts.format is not None else both
        return f"epoch_us(TRY_CAST({time} AS TIMESTAMPTZ))"
    if ts.format is not None and not pa.types.is_timestamp(kind):
        return f"epoch_us(TRY_CAST(try_strptime({column}::VARCHAR, {sql_text(ts.format)}) AS TIMESTAMPTZ))"
    if pa.types.is_timestamp(kind) or ts.unit in ("iso", None):
        return f"epoch_us(TRY_CAST({column} AS TIMESTAMPTZ))"
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1}[ts.unit]
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
        outcomes = [SKIPPED_CODE if rule.value is None else codes[rule.value] for rule in field.rules]
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
    return [(f"{name} = {SKIPPED_CODE}", SKIPPED)] if any(rule.skip for rule in field.rules) else []


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


def _agrees(answers: AnswerColumn, schema: pa.Schema) -> str:
    """Return the SQL condition that a row has one of the values that mean yes; a missing value is none."""
    text = f"{raw_column(answers.column)}::VARCHAR"

    def equals(value: AnswerValue) -> str:
        if isinstance(value, bool):
            return f"lower({text}) IN ({', '.join(map(sql_text, WORDS[value]))})"
        if isinstance(value, str):
            return f"{text} = {sql_text(value)}"
        return f"{_number(answers.column, schema)} = {float(value)}"

    return f"coalesce({' OR '.join(equals(value) for value in answers.values)}, false)"


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
        if pa.types.is_floating(value_type(column, schema)):  # NaN, as pandas has it
            is_absent = f"({is_absent} OR isnan({raw_column(column)}))"
        tests.append(is_absent if condition.missing else f"NOT {is_absent}")
    return [f"coalesce({test}, false)" for test in tests]
