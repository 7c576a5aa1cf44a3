"""Mapping of foreign rows to contract rows: expected values by hand, a reason for every reject, no row lost."""

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pf_core.config.source import ActionsSource
from pf_core.errors import PipelineError
from pf_core.logs import mapping, mapping_sql, readers
from pf_core.logs.mapping import ActionMapper, MappedBatch
from pf_core.logs.mapping_sql import EARLIEST_US, LATEST_US
from pf_core.logs.parquet_columns import raw_json
from pf_core.schemas import raw_actions_schema

NOT_AN_INTEGER = (
    "user_id: not an integer (column u); ids that are text need `user_id: {column: u, type: string}` in the site file"
)
NEW_YEAR_S = (56 * 365 + 14) * 86_400  # 2026-01-01T00:00:00Z: 56 years after 1970, 14 of them leap years
HOUR_S = 3_600


def source(**mapping: Any) -> ActionsSource:
    plain = {
        "path": "log.parquet",
        "user_id": "u",
        "pin_id": "p",
        "ts": {"column": "t", "unit": "s"},
        "action_type": {"constant": "repin"},
        "surface": {"constant": "homefeed"},
    }
    return ActionsSource.model_validate(plain | mapping)


def map_columns(columns: dict[str, Any], **mapping: Any) -> MappedBatch:
    """Map a table in which the columns that a test does not mention are all valid."""
    arrays = {name: column if isinstance(column, pa.Array) else pa.array(column) for name, column in columns.items()}
    num_rows = len(next(iter(arrays.values())))
    plain = {name: pa.array([value] * num_rows) for name, value in {"u": 1, "p": 2, "t": NEW_YEAR_S}.items()}
    mapped = ActionMapper(source(**mapping)).map(pa.table(plain | arrays))
    positions = np.concatenate([mapped.kept, mapped.skipped, mapped.rejected])
    assert sorted(positions.tolist()) == list(range(num_rows))
    assert len(mapped.reasons) == len(mapped.rejected)
    assert mapped.actions.num_rows == len(mapped.kept)
    return mapped


def values(mapped: MappedBatch, field: str) -> dict[int, Any]:
    """A field of the kept rows, by position in the input."""
    return dict(zip(mapped.kept.tolist(), mapped.actions[field].to_pylist(), strict=True))


def reasons(mapped: MappedBatch) -> dict[int, str]:
    return dict(zip(mapped.rejected.tolist(), mapped.reasons, strict=True))


def times_us(mapped: MappedBatch) -> dict[int, int]:
    return dict(zip(mapped.kept.tolist(), mapped.actions["ts"].cast(pa.int64()).to_pylist(), strict=True))


def test_the_result_has_the_contract_s_schema() -> None:
    mapped = map_columns({"u": ["x", "y"]}, user_id={"column": "u", "type": "string"})
    assert mapped.actions.schema == raw_actions_schema("string", "int")
    assert mapped.actions.to_pylist()[1] == {
        "user_id": "y",
        "ts": datetime(2026, 1, 1, tzinfo=UTC),
        "pin_id": 2,
        "action_type": "repin",
        "surface": "homefeed",
        "duration_s": 0.0,
    }


def test_no_rows_map_to_no_rows() -> None:
    empty = pa.table({name: pa.array([], pa.string()) for name in "upt"})
    mapped = ActionMapper(source()).map(empty)
    assert mapped.actions.schema == raw_actions_schema("int", "int")
    assert len(mapped.kept) == len(mapped.skipped) == len(mapped.rejected) == len(mapped.ts_us) == 0


def test_one_mapper_takes_batches_of_several_schemas() -> None:
    mapper = ActionMapper(source())
    for user in (pa.array([5]), pa.array(["5"]), pa.array([5.0])):
        table = pa.table({"u": user, "p": [2], "t": [NEW_YEAR_S]})
        assert mapper.map(table).actions["user_id"].to_pylist() == [5]


def test_the_statement_is_compiled_once_for_all_batches_of_the_same_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[pa.Schema] = []

    def counting(actions: ActionsSource, schema: pa.Schema, answers: None) -> str:
        compiled.append(schema)
        return compile_statement(actions, schema, answers)

    compile_statement = mapping_sql.statement
    monkeypatch.setattr(mapping, "statement", counting)
    monkeypatch.setattr(readers, "BATCH_ROWS", 4)
    ids = list(range(20))
    table = pa.table({"u": ids, "p": ids, "t": [NEW_YEAR_S] * 20})
    described = table.replace_schema_metadata({"pandas": "another writer"})
    mapper, num_batches = ActionMapper(source()), 0
    for name, content in (("plain", table), ("described", described)):
        pq.write_table(content, tmp_path / f"{name}.parquet")
        for batch in readers.read_file(tmp_path / f"{name}.parquet", source(), ["u", "p", "t"]):
            mapper.map(batch.rows)
            num_batches += 1
    assert num_batches >= 2 * 20 // 4
    assert len(compiled) == 1
    mapper.map(table.set_column(0, "u", pa.array([str(user) for user in ids])))
    assert len(compiled) == 2


# Ids


def test_integer_ids_from_text() -> None:
    texts = ["12", "-5", "007", "9223372036854775807", "-9223372036854775808"]
    mapped = map_columns({"u": texts})
    assert values(mapped, "user_id") == {0: 12, 1: -5, 2: 7, 3: 2**63 - 1, 4: -(2**63)}


@pytest.mark.parametrize("text", ["12.7", "1.0.0", "1e3", "x", " 12", "+12", "1_000", "0x1f", "٣"])
def test_text_that_is_no_integer_id(text: str) -> None:
    mapped = map_columns({"u": ["12", text]})
    assert values(mapped, "user_id") == {0: 12}
    assert reasons(mapped) == {1: NOT_AN_INTEGER}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_integer_ids_that_were_written_as_floats_are_explained(kind: pa.DataType) -> None:
    """pandas writes a column of integers as floats if one of them is missing."""
    mapped = map_columns({"u": pa.array(["17850", "17850.0", "-3.", "17850.5"]).cast(kind)})
    explained = "a float like 17850.0 is not an integer: write the column as integers, or give it `type: string`"
    assert values(mapped, "user_id") == {0: 17850}
    assert reasons(mapped) == {
        **dict.fromkeys([1, 2], f"user_id: {explained} (column u)"),
        3: NOT_AN_INTEGER,
    }


@pytest.mark.parametrize("missing", [None, ""])
@pytest.mark.parametrize("kind", ["int", "string"])
def test_a_missing_id(missing: str | None, kind: str) -> None:
    mapped = map_columns({"p": ["7", missing]}, pin_id={"column": "p", "type": kind})
    assert reasons(mapped) == {1: "pin_id: missing (column p)"}


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint64()])
def test_integer_ids_from_integer_columns(kind: pa.DataType) -> None:
    assert values(map_columns({"u": pa.array([12, 100], kind)}), "user_id") == {0: 12, 1: 100}


@pytest.mark.parametrize(
    "ids", [pa.array([2**63 - 1, 2**63], pa.uint64()), pa.array([str(2**63 - 1), str(2**63)]), ["9" * 18, "9" * 20]]
)
def test_an_id_beyond_int64(ids: Any) -> None:
    mapped = map_columns({"u": ids})
    assert values(mapped, "user_id") == {0: int(pa.array(ids)[0].as_py())}
    assert reasons(mapped) == {1: "user_id: an integer beyond 64 bits: give it `type: string` (column u)"}


def test_integer_ids_from_float_columns() -> None:
    mapped = map_columns({"u": [12.0, -3.0, 12.5, float("nan"), float("inf"), 2.0**63, None]})
    assert values(mapped, "user_id") == {0: 12, 1: -3}
    assert reasons(mapped) == {
        **dict.fromkeys([2, 3, 4, 5], NOT_AN_INTEGER),
        6: "user_id: missing (column u)",
    }


def test_integer_ids_from_decimal_columns() -> None:
    mapped = map_columns({"u": [Decimal("12.0"), Decimal("12.5")]})
    assert values(mapped, "user_id") == {0: 12}
    assert reasons(mapped) == {1: NOT_AN_INTEGER}


def test_string_ids_from_text_and_integers() -> None:
    texts = ["Ünïcode 🧶", "007", "it's", " padded "]
    mapped = map_columns({"u": texts}, user_id={"column": "u", "type": "string"})
    assert list(values(mapped, "user_id").values()) == texts
    mapped = map_columns({"u": [7, -7]}, user_id={"column": "u", "type": "string"})
    assert values(mapped, "user_id") == {0: "7", 1: "-7"}


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_other_kinds_of_text_are_text(kind: pa.DataType) -> None:
    mapped = map_columns({"u": pa.array(["12", "12.7", ""], kind)})
    assert values(mapped, "user_id") == {0: 12}
    assert reasons(mapped) == {1: NOT_AN_INTEGER, 2: "user_id: missing (column u)"}


def test_dictionary_encoded_text_is_text() -> None:
    """A pandas categorical, written to Parquet."""
    texts = pa.array(["12", "12.7", ""])
    plain = map_columns({"u": texts})
    encoded = map_columns({"u": texts.dictionary_encode()})
    assert values(encoded, "user_id") == values(plain, "user_id")
    assert reasons(encoded) == reasons(plain)


def test_dictionary_encoded_categories_are_never_null() -> None:
    events = pa.array(["save", "", None]).dictionary_encode()
    mapped = map_columns({"event": events}, action_type="event")
    assert values(mapped, "action_type") == {0: "save"}
    assert reasons(mapped) == dict.fromkeys([1, 2], "action_type: missing (column event)")


def test_columns_that_differ_in_case_only() -> None:
    mapped = map_columns({"ID": [1], "id": [2]}, user_id="ID", pin_id="id")
    assert values(mapped, "user_id") == {0: 1}
    assert values(mapped, "pin_id") == {0: 2}


# Times


@pytest.mark.parametrize(
    ("unit", "number", "expected_us"),
    [
        ("s", NEW_YEAR_S + 1, (NEW_YEAR_S + 1) * 1_000_000),
        ("ms", NEW_YEAR_S * 1_000 + 1, NEW_YEAR_S * 1_000_000 + 1_000),
        ("us", NEW_YEAR_S * 1_000_000 + 1, NEW_YEAR_S * 1_000_000 + 1),
    ],
)
def test_epoch_numbers(unit: str, number: int, expected_us: int) -> None:
    ts = {"column": "t", "unit": unit}
    assert times_us(map_columns({"t": [number]}, ts=ts)) == {0: expected_us}
    assert times_us(map_columns({"t": [str(number)]}, ts=ts)) == {0: expected_us}
    assert times_us(map_columns({"t": [float(number)]}, ts=ts)) == {0: expected_us}
    assert times_us(map_columns({"t": [Decimal(number)]}, ts=ts)) == {0: expected_us}


def test_fractions_are_rounded_to_microseconds() -> None:
    texts = [f"{NEW_YEAR_S}.5", f"{NEW_YEAR_S}.123456", f"{NEW_YEAR_S}.1234567", f"{NEW_YEAR_S}.9999999"]
    expected = [500_000, 123_456, 123_457, 1_000_000]
    mapped = map_columns({"t": texts})
    assert times_us(mapped) == {index: NEW_YEAR_S * 1_000_000 + us for index, us in enumerate(expected)}
    mapped = map_columns({"t": [f"{NEW_YEAR_S}000.25"]}, ts={"column": "t", "unit": "ms"})
    assert times_us(mapped) == {0: NEW_YEAR_S * 1_000_000 + 250}


@settings(max_examples=30, deadline=None, database=None)
@given(offset_us=st.integers(0, 10 * 365 * 86_400 * 1_000_000))
def test_float_seconds_keep_their_microseconds(offset_us: int) -> None:
    """A float64 of today's seconds is exact to a quarter of a microsecond."""
    expected_us = NEW_YEAR_S * 1_000_000 + offset_us
    table = pa.table({"u": [1], "p": [1], "t": [expected_us / 1_000_000]})
    assert FLOAT_SECONDS.map(table).ts_us.tolist() == [expected_us]


FLOAT_SECONDS = ActionMapper(source())


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("2026-01-01", 0),
        ("2026-01-01T01:00:00Z", HOUR_S),
        ("2026-01-01 01:00:00", HOUR_S),
        ("2026-01-01T01:00:00+02:00", -HOUR_S),
        ("2026-01-01T01:00:00-0530", 6.5 * HOUR_S),
        ("2026-01-01T00:00:00.25Z", 0.25),
    ],
)
def test_iso_text(text: str, expected_s: float) -> None:
    mapped = map_columns({"t": [text]}, ts={"column": "t", "unit": "iso"})
    assert times_us(mapped) == {0: round((NEW_YEAR_S + expected_s) * 1_000_000)}


def test_iso_text_without_zone_is_in_the_stated_one() -> None:
    ts = {"column": "t", "unit": "iso", "timezone": "America/New_York"}
    texts = ["2026-01-01T00:00:00", "2026-07-01T00:00:00", "2026-01-01T00:00:00Z"]
    to_july_s = (31 + 28 + 31 + 30 + 31 + 30) * 24 * HOUR_S
    expected_s = [5 * HOUR_S, to_july_s + 4 * HOUR_S, 0]  # winter, summer, and a zone of its own
    mapped = map_columns({"t": texts}, ts=ts)
    assert times_us(mapped) == {index: (NEW_YEAR_S + s) * 1_000_000 for index, s in enumerate(expected_s)}


@pytest.mark.parametrize("text", ["2026-02-30", "yesterday", "01/02/2026", "infinity", "1767225600", "now"])
def test_text_that_is_no_iso_time(text: str) -> None:
    mapped = map_columns({"t": [text]}, ts={"column": "t", "unit": "iso"})
    assert reasons(mapped) == {0: "ts: not a time in unit iso (column t)"}
    assert mapped.ts_us.tolist() == [-1]


@pytest.mark.parametrize(
    ("text", "form", "expected_s"),
    [
        ("1/1/2026 8:26", "%m/%d/%Y %H:%M", 8 * HOUR_S + 26 * 60),
        ("01.01.26 01:00:00,5", "%d.%m.%y %H:%M:%S,%f", HOUR_S + 0.5),
        ("Jan 1 2026 01:00 PM", "%b %d %Y %I:%M %p", 13 * HOUR_S),
        ("01/Jan/2026:01:00:00 +0200", "%d/%b/%Y:%H:%M:%S %z", -HOUR_S),
        (20260101, "%Y%m%d", 0),
    ],
)
def test_text_in_a_stated_format(text: str | int, form: str, expected_s: float) -> None:
    mapped = map_columns({"t": [text]}, ts={"column": "t", "format": form})
    assert times_us(mapped) == {0: round((NEW_YEAR_S + expected_s) * 1_000_000)}


def test_text_in_a_stated_format_is_in_the_stated_zone_unless_it_names_one() -> None:
    ts = {"column": "t", "format": "%d.%m.%Y %H:%M", "timezone": "Europe/Berlin"}
    assert times_us(map_columns({"t": ["01.01.2026 01:00"]}, ts=ts)) == {0: NEW_YEAR_S * 1_000_000}
    ts |= {"format": "%d.%m.%Y %H:%M %z"}
    assert times_us(map_columns({"t": ["01.01.2026 01:00 +0000"]}, ts=ts)) == {0: (NEW_YEAR_S + HOUR_S) * 1_000_000}


@pytest.mark.parametrize("text", ["30.02.2026", "yesterday", "1.1.2026 x", "2026-01-01"])
def test_text_in_another_format_is_no_time(text: str) -> None:
    mapped = map_columns({"t": [text]}, ts={"column": "t", "format": "%d.%m.%Y"})
    assert reasons(mapped) == {0: "ts: not a time of format %d.%m.%Y (column t)"}


@pytest.mark.parametrize(
    ("day", "clock", "form"),
    [
        ("2026-01-01", "1:00", None),
        ("2026-01-01 00:00:00", "01:00:00", None),  # as databases export a day
        (date(2026, 1, 1), "01:00:00.000", None),
        (datetime(2026, 1, 1), time(1), None),
        ("01.01.2026", "1:00", "%d.%m.%Y %H:%M"),
        (date(2026, 1, 1), "1:00:00 AM", "%Y-%m-%d %I:%M:%S %p"),
    ],
)
def test_day_and_time_of_day_in_two_columns(day: Any, clock: Any, form: str | None) -> None:
    ts = {"column": "d", "time_of_day": "t"} | ({"unit": "iso"} if form is None else {"format": form})
    mapped = map_columns({"d": [day], "t": [clock]}, ts=ts)
    assert times_us(mapped) == {0: (NEW_YEAR_S + HOUR_S) * 1_000_000}
    berlin = map_columns({"d": [day], "t": [clock]}, ts=ts | {"timezone": "Europe/Berlin"})
    assert times_us(berlin) == {0: NEW_YEAR_S * 1_000_000}


def test_a_row_needs_a_day_and_a_time_of_day() -> None:
    ts = {"column": "d", "unit": "iso", "time_of_day": "t"}
    days = ["2026-01-01", "", "2026-01-01", "2026-01-01", "2026-01-01", "today", "2026-01-01"]
    clocks = ["", "1:00", "25:00", "noon", "2026-01-02 1:00", "1:00", "1:00+01:00"]
    mapped = map_columns({"d": days, "t": clocks}, ts=ts)
    assert times_us(mapped) == {6: NEW_YEAR_S * 1_000_000}
    neither = "ts: not a time in unit iso (columns d and t)"
    assert reasons(mapped) == {
        0: "ts: missing (column t)",
        1: "ts: missing (column d)",
        **dict.fromkeys([2, 3, 4, 5], neither),
    }


@pytest.mark.parametrize("wrong", [{"unit": "s", "time_of_day": "t"}, {"unit": "iso", "time_of_day": "d"}])
def test_a_time_of_day_that_means_nothing_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="leave out `time_of_day`"):
        source(ts={"column": "d"} | wrong)


def test_a_format_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(PipelineError, match=r"the columns of log.parquet cannot be mapped: .*%Q"):
        map_columns({"t": ["1.1.2026"]}, ts={"column": "t", "format": "%d.%m.%Y %Q"})


@pytest.mark.parametrize("stated", ["s", "ms", "iso", None])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_native_timestamps_need_no_unit(stated: str, zone: str | None, unit: str, factor: int) -> None:
    times = pa.array([(NEW_YEAR_S + 1) * factor, None], pa.timestamp(unit, zone))
    mapped = map_columns({"t": times}, ts={"column": "t", "unit": stated})
    assert times_us(mapped) == {0: (NEW_YEAR_S + 1) * 1_000_000}
    assert reasons(mapped) == {1: "ts: missing (column t)"}


def test_native_dates_are_their_midnight() -> None:
    mapped = map_columns({"t": [date(2026, 1, 2)]}, ts={"column": "t", "unit": "iso"})
    assert times_us(mapped) == {0: (NEW_YEAR_S + 24 * HOUR_S) * 1_000_000}


def test_native_dates_need_no_unit() -> None:
    mapped = map_columns({"t": [date(2026, 1, 2), date(1999, 1, 1)]}, ts={"column": "t"})
    assert times_us(mapped) == {0: (NEW_YEAR_S + 24 * HOUR_S) * 1_000_000}
    assert reasons(mapped) == {1: "ts: outside 2000-2100 (column t)"}


@pytest.mark.parametrize("column", [[NEW_YEAR_S], [float(NEW_YEAR_S)], ["2026-01-01"]])
def test_a_column_that_is_no_timestamp_needs_a_unit(column: list[Any]) -> None:
    with pytest.raises(
        PipelineError, match=r"column 't' of log.parquet holds .*, not timestamps; .*`source.actions.ts"
    ):
        map_columns({"t": column}, ts={"column": "t"})


def test_no_rows_need_no_unit() -> None:
    """A file without rows has columns of text, whatever its format."""
    empty = pa.table({name: pa.array([], pa.string()) for name in "upt"})
    assert ActionMapper(source(ts={"column": "t"})).map(empty).actions.num_rows == 0
    nulls = map_columns({"t": pa.nulls(1)}, ts={"column": "t"})
    assert reasons(nulls) == {0: "ts: missing (column t)"}


def test_a_native_timestamp_beyond_all_calendars_costs_one_row() -> None:
    for zone in (None, "UTC"):
        mapped = map_columns({"t": pa.array([NEW_YEAR_S, 2**60], pa.timestamp("s", zone))})
        assert times_us(mapped) == {0: NEW_YEAR_S * 1_000_000}
        assert list(reasons(mapped)) == [1]


FAR = [2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, 2**62, -1, None]


@pytest.mark.parametrize("zone", [None, "UTC", "Mars/Base"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_that_no_calendar_has_cost_one_row_each(unit: str, zone: str | None) -> None:
    new_year = NEW_YEAR_S * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array([new_year, *FAR], pa.int64()).cast(pa.timestamp(unit, zone))
    mapped = map_columns({"t": times}, ts={"column": "t"})
    assert times_us(mapped) == {0: NEW_YEAR_S * 1_000_000}
    assert json.loads(raw_json(pa.table({"t": times}), np.array([3]))[0])["t"] is not None


def test_dates_that_no_calendar_has_cost_one_row_each() -> None:
    days = [NEW_YEAR_S // 86_400, 2**31 - 1, -(2**31), None]
    dates = pa.array(days, pa.int32()).cast(pa.date32())
    assert times_us(map_columns({"t": dates}, ts={"column": "t"})) == {0: NEW_YEAR_S * 1_000_000}
    shown = [json.loads(text)["t"] for text in raw_json(pa.table({"t": dates}), np.arange(4))]
    assert shown == ["2026-01-01", 2**31 - 1, -(2**31), None]


@pytest.mark.parametrize("kind", [pa.duration("s"), pa.duration("ns"), pa.time64("us"), pa.time64("ns")])
def test_times_of_day_and_durations_beyond_their_range_are_texts(kind: pa.DataType) -> None:
    column = pa.array(FAR[:-1], pa.int64()).cast(kind)
    mapped = map_columns({"c": column}, surface={"column": "c"})
    assert len(mapped.kept) == len(column)


def test_the_user_of_a_rejected_row_is_known_whatever_the_type_of_its_column() -> None:
    for column in ([7, None], ["7", "x"], [7.0, 7.5], pa.array([7, None]).dictionary_encode()):
        mapped = map_columns({"u": column, "t": [0, 0]})
        assert mapped.rejected_users.to_pylist() == [7, None]
    raw = map_columns({"u": pa.array([b"\xff", b"7"])})
    assert raw.rejected_users.to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("unit", "number"),
    [("s", NEW_YEAR_S * 1_000), ("ms", NEW_YEAR_S), ("us", NEW_YEAR_S * 1_000), ("s", 0), ("s", -1)],
)
def test_times_outside_the_century_ask_for_the_unit(unit: str, number: int) -> None:
    for column in ([number], [str(number)], [float(number)]):
        mapped = map_columns({"t": column}, ts={"column": "t", "unit": unit})
        assert reasons(mapped) == {0: f"ts: outside 2000-2100, is unit {unit} right? (column t)"}
        assert mapped.ts_us.tolist() == [-1]


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_times_beyond_int64_cost_one_row(number: int) -> None:
    for column in ([NEW_YEAR_S, number], [str(NEW_YEAR_S), str(number)], [float(NEW_YEAR_S), float(number)]):
        mapped = map_columns({"t": column})
        assert mapped.kept.tolist() == [0]
        assert "unit s" in reasons(mapped)[1]


def test_the_bounds_of_time_are_inside() -> None:
    ts = {"column": "t", "unit": "us"}
    mapped = map_columns({"t": [EARLIEST_US - 1, EARLIEST_US, LATEST_US, LATEST_US + 1]}, ts=ts)
    assert EARLIEST_US == (30 * 365 + 7) * 86_400 * 1_000_000  # 2000-01-01; 1972, …, 1996 were leap years
    assert mapped.kept.tolist() == [1, 2]


@pytest.mark.parametrize(
    "column", [["", None, "soon", "nan", "1.0000000000000001e+23", "1e400"], [float("nan"), float("inf"), None]]
)
def test_times_that_are_no_numbers(column: list[Any]) -> None:
    mapped = map_columns({"t": column})
    assert mapped.rejected.tolist() == list(range(len(column)))
    assert all(reason.startswith("ts: ") and "(column t)" in reason for reason in mapped.reasons)


def test_ts_us_is_known_for_rejects_too() -> None:
    """Ingestion sends a reject to the day on which it happened."""
    mapped = map_columns({"u": ["x", "1"], "t": [NEW_YEAR_S, -1]})
    assert len(mapped.kept) == 0
    assert mapped.ts_us.tolist() == [NEW_YEAR_S * 1_000_000, -1]


def test_a_column_of_a_wrong_type_is_rejected_row_by_row() -> None:
    mapped = map_columns({"t": [date(2026, 1, 1)]})
    assert reasons(mapped) == {0: "ts: not a time in unit s (column t)"}
    mapped = map_columns({"t": [NEW_YEAR_S]}, ts={"column": "t", "unit": "iso"})
    assert reasons(mapped) == {0: "ts: not a time in unit iso (column t)"}


# Action types and surfaces


def test_a_column_as_it_is() -> None:
    mapped = map_columns({"event": ["save", "", None, "Save "]}, action_type="event")
    assert values(mapped, "action_type") == {0: "save", 3: "Save "}
    assert reasons(mapped) == dict.fromkeys([1, 2], "action_type: missing (column event)")


def test_a_value_map() -> None:
    field = {"column": "event", "values": {"save": "repin", "open": "closeup", "look": "closeup"}}
    mapped = map_columns({"event": ["open", "save", "look", "SAVE", None]}, surface=field)
    assert values(mapped, "surface") == {0: "closeup", 1: "repin", 2: "closeup"}
    assert reasons(mapped) == {3: "surface: unknown value (column event)", 4: "surface: missing (column event)"}


@pytest.mark.parametrize("column", [[1, 2, 3], ["1", "2", "3"]])
def test_a_value_map_with_integer_keys(column: list[Any]) -> None:
    mapped = map_columns({"event": column}, action_type={"column": "event", "values": {1: "repin", 2: "hide"}})
    assert values(mapped, "action_type") == {0: "repin", 1: "hide"}
    assert reasons(mapped) == {2: "action_type: unknown value (column event)"}


@pytest.mark.parametrize("column", [[True, False], ["true", "false"]])
def test_a_value_map_with_boolean_keys(column: list[Any]) -> None:
    """YAML reads the keys of {true: repin, false: hide} as booleans."""
    mapped = map_columns({"saved": column}, action_type={"column": "saved", "values": {True: "repin", False: "hide"}})
    assert values(mapped, "action_type") == {0: "repin", 1: "hide"}


def test_a_constant_needs_no_column() -> None:
    mapped = map_columns({"u": [1]}, action_type={"constant": "it's; --"})
    assert values(mapped, "action_type") == {0: "it's; --"}


def test_a_wrong_column_with_countless_values_is_explained() -> None:
    """40,000 surfaces: somebody mapped the page's address."""
    num_rows = 40_000
    with pytest.raises(PipelineError, match=r"surface has 40,000 .*\(column url\).* 32,768 .*`source.actions.surface`"):
        map_columns({"url": [f"/page/{number}" for number in range(num_rows)]}, surface="url")


NESTED = [
    pa.array([{"a": 1}]),
    pa.array([[1]]),
    pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    pa.array([Decimal(7)], pa.decimal256(50, 0)),
]
FIELDS: dict[str, Any] = {
    "user_id": {"column": "x", "type": "string"},
    "pin_id": "x",
    "ts": {"column": "x"},
    "action_type": {"rules": [{"is": "seen", "when": {"x": 1}}]},
    "surface": "x",
    "duration_s": "x",
}


@pytest.mark.parametrize("column", NESTED, ids=str)
@pytest.mark.parametrize("field", FIELDS)
def test_a_column_without_plain_values_is_refused(column: pa.Array, field: str) -> None:
    with pytest.raises(
        PipelineError, match=rf"column 'x' of log.parquet holds .*, not plain.*`source.actions.{field}`"
    ):
        map_columns({"x": column}, **{field: FIELDS[field]})


def test_numbers_of_16_bits() -> None:
    halves = pa.array([7.0, 2.5], pa.float16())
    assert values(map_columns({"x": halves}, duration_s="x"), "duration_s") == {0: 7.0, 1: 2.5}
    assert values(map_columns({"x": halves}, user_id="x"), "user_id") == {0: 7}


def rules(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"rules": list(entries)}


def matches(column: Any, condition: Any) -> list[bool]:
    """Return for which values the condition holds."""
    field = rules({"is": "yes", "when": {"x": condition}}, {"is": "no"})
    mapped = map_columns({"x": column}, action_type=field)
    return [value == "yes" for value in mapped.actions["action_type"].to_pylist()]


def test_the_first_rule_that_holds_decides() -> None:
    field = rules(
        {"is": "like", "when": {"stars": {"at_least": 4}}},
        {"is": "seen", "when": {"stars": {"at_least": 1}}},
        {"skip": True, "when": {"stars": 0}},
    )
    mapped = map_columns({"stars": [5, 4, 3, 0, -1, None]}, action_type=field)
    assert values(mapped, "action_type") == {0: "like", 1: "like", 2: "seen"}
    assert mapped.skipped.tolist() == [3]
    assert reasons(mapped) == dict.fromkeys([4, 5], "action_type: no rule applies (columns stars)")


def test_a_rule_without_condition_always_holds() -> None:
    mapped = map_columns({"u": [1, 2]}, action_type=rules({"skip": True}))
    assert mapped.skipped.tolist() == [0, 1]
    assert mapped.actions.num_rows == 0


def test_all_conditions_of_a_rule_must_hold() -> None:
    field = rules({"is": "yes", "when": {"x": {"above": 1, "below": 5}, "y": "home"}}, {"is": "no"})
    mapped = map_columns({"x": [3, 3, 5, 1], "y": ["home", "shop", "home", "home"]}, action_type=field)
    assert values(mapped, "action_type") == {0: "yes", 1: "no", 2: "no", 3: "no"}


@pytest.mark.parametrize(
    "column", [[1, 2, 3, None], ["1", "2", "3", "x"], [1.0, 2.0, 3.0, None], ["1", "2.0", "3", ""]]
)
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"above": 2}, [False, False, True, False]),
        ({"at_least": 2}, [False, True, True, False]),
        ({"below": 2}, [True, False, False, False]),
        ({"at_most": 2}, [True, True, False, False]),
        ({"at_least": 1.5, "at_most": 2.5}, [False, True, False, False]),
        ({"any_of": [1, 3]}, [True, False, True, False]),
        (2, [False, True, False, False]),
        ({"equals": 2.0}, [False, True, False, False]),
    ],
)
def test_conditions_on_numbers(column: list[Any], condition: Any, expected: list[bool]) -> None:
    assert matches(column, condition) == expected


@pytest.mark.parametrize("bound", ["above", "at_least", "below", "at_most"])
@pytest.mark.parametrize("column", [[float("nan")], ["nan"], ["abc"], [""], pa.array([None], pa.float64())])
def test_what_is_no_number_fails_every_bound(bound: str, column: Any) -> None:
    assert matches(column, {bound: 10}) == [False]


def test_conditions_on_text() -> None:
    column = ["home", "HOME", "it's", "", None]
    assert matches(column, "home") == [True, False, False, False, False]
    assert matches(column, "it's") == [False, False, True, False, False]
    assert matches(column, {"any_of": ["home", "it's"]}) == [True, False, True, False, False]


def test_a_number_in_quotes_is_compared_as_text() -> None:
    assert matches(["1", "1.0", "01"], "1") == [True, False, False]
    assert matches([1, 2], "1") == [True, False]


@pytest.mark.parametrize("condition", [True, 1, "true", {"any_of": [True]}, {"at_least": 1}])
def test_conditions_on_boolean_columns(condition: Any) -> None:
    assert matches([True, False, None], condition) == [True, False, False]


def test_false_is_not_missing() -> None:
    assert matches([True, False, None], False) == [False, True, False]
    assert matches([1, 0, None], False) == [False, True, False]


@pytest.mark.parametrize("column", [["true", "false", ""], ["1", "0", None]])
def test_a_boolean_condition_on_text(column: list[str | None]) -> None:
    """CSV and JSON lines come as text; `when: {saved: true}` means the same there."""
    assert matches(column, True) == [True, False, False]
    assert matches(column, False) == [False, True, False]


def test_large_integers_are_not_confused() -> None:
    assert matches([2**53, 2**53 + 1], 2**53 + 1) == [False, True]


@pytest.mark.parametrize("field", ["action_type", "surface"])
def test_rows_that_a_rule_skips_need_no_ids_and_no_time(field: str) -> None:
    """The rows of a shop's visitors who are not logged in are skipped, not quarantined."""
    columns = {"u": [None, "x", "1", "1", None], "p": [2, 2, None, 2, 2], "t": [NEW_YEAR_S] * 3 + [-1, NEW_YEAR_S]}
    skipping = rules({"skip": True, "when": {"x": 1}}, {"is": "seen"})
    mapped = map_columns(columns | {"x": [1, 1, 1, 1, 0]}, **{field: skipping})
    assert mapped.skipped.tolist() == [0, 1, 2, 3]
    assert reasons(mapped) == {4: "user_id: missing (column u)"}


def test_a_skip_of_the_surface_comes_before_a_reason_of_the_action_type() -> None:
    mapped = map_columns({"x": [1, 2]}, action_type=rules({"is": "a", "when": {"x": 2}}), surface=rules({"skip": True}))
    assert mapped.skipped.tolist() == [0, 1]


@pytest.mark.parametrize(
    "users",
    [
        ["", None, "7", "x"],
        pa.array(["", None, "7", "x"]).dictionary_encode(),
        pa.array([float("nan"), None, 7.0, 7.5]),
        pa.array([None, None, 7, 2**63], pa.uint64()),
    ],
)
def test_rows_without_a_user_can_be_skipped(users: Any) -> None:
    field = rules({"skip": True, "when": {"u": {"missing": True}}}, {"is": "buy"})
    mapped = map_columns({"u": users}, action_type=field)
    assert mapped.skipped.tolist() == [0, 1]
    assert values(mapped, "user_id") == {2: 7}
    assert mapped.rejected.tolist() == [3]


def test_conditions_on_missing_values() -> None:
    assert matches(["a", "", None], {"missing": True}) == [False, True, True]
    assert matches(["a", "", None], {"missing": False}) == [True, False, False]
    assert matches([True, False, None], {"missing": True}) == [False, False, True]
    assert matches([1, 0, None], {"missing": False, "below": 1}) == [False, True, False]


def test_a_column_of_ids_in_a_rule_is_not_read_as_a_category() -> None:
    described = source(action_type=rules({"skip": True, "when": {"u": {"missing": True}, "x": 1}}))
    assert described.categories == ["x"]
    assert described.mapped_columns == ["p", "t", "u", "x"]


# Durations


def test_without_a_duration_field_all_durations_are_zero() -> None:
    assert values(map_columns({"u": [1, 2]}), "duration_s") == {0: 0.0, 1: 0.0}


def test_durations_in_seconds_and_milliseconds() -> None:
    assert values(map_columns({"d": [1.5, 2.0]}, duration_s="d"), "duration_s") == {0: 1.5, 1: 2.0}
    field = {"column": "d", "unit": "ms"}
    assert values(map_columns({"d": ["1500", "250"]}, duration_s=field), "duration_s") == {
        0: 1500 / 1000,
        1: 250 / 1000,
    }


def test_a_missing_duration_is_zero() -> None:
    assert values(map_columns({"d": ["", None, "nan"]}, duration_s="d"), "duration_s") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert values(map_columns({"d": [float("nan"), None]}, duration_s="d"), "duration_s") == {0: 0.0, 1: 0.0}


def test_durations_that_cannot_be() -> None:
    mapped = map_columns({"d": ["5", "abc", "-1", "inf", "-inf", "1:30"]}, duration_s="d")
    assert values(mapped, "duration_s") == {0: 5.0}
    assert reasons(mapped) == {
        1: "duration_s: not a number (column d)",
        2: "duration_s: negative or infinite (column d)",
        3: "duration_s: negative or infinite (column d)",
        4: "duration_s: negative or infinite (column d)",
        5: "duration_s: not a number (column d)",
    }


@pytest.mark.parametrize("column", [[5.0, 1e300], ["5", "1e300"], ["5", "1" + "0" * 39]])
def test_a_duration_beyond_float32_costs_one_row(column: list[Any]) -> None:
    mapped = map_columns({"d": column}, duration_s="d")
    assert values(mapped, "duration_s") == {0: 5.0}
    assert reasons(mapped)[1].startswith("duration_s: ")


# Names and texts that could be mistaken for ours


def test_a_log_may_use_our_names_for_its_columns() -> None:
    columns = {
        "pin_id": [8],  # … for their users
        "user_id": [9],  # … for their pins
        "ts": [str(NEW_YEAR_S)],
        "ts_us": [3.5],
        "reason": ["save"],
        "raw": ["home"],
    }
    mapped = map_columns(
        columns,
        user_id="pin_id",
        pin_id="user_id",
        ts={"column": "ts", "unit": "s"},
        action_type="reason",
        surface={"column": "raw", "values": {"home": "homefeed"}},
        duration_s="ts_us",
    )
    assert mapped.actions.to_pylist() == [
        {
            "user_id": 8,
            "ts": datetime(2026, 1, 1, tzinfo=UTC),
            "pin_id": 9,
            "action_type": "save",
            "surface": "homefeed",
            "duration_s": 3.5,
        }
    ]


@pytest.mark.parametrize(
    "name", ["user id", 'the "user"', "it's", "select", "ü; --", "a.b", "raw", "*", "{ds}", "%s", "?"]
)
def test_a_log_may_name_its_columns_as_it_likes(name: str) -> None:
    mapped = map_columns({name: ["7", "x"]}, user_id=name)
    assert values(mapped, "user_id") == {0: 7}
    shorthand = f"`user_id: {{column: {name}, type: string}}`"
    assert reasons(mapped) == {
        1: f"user_id: not an integer (column {name}); ids that are text need {shorthand} in the site file"
    }


HOSTILE = ["'; DROP TABLE raw; --", '" OR 1=1', "\\'", "$1", "?", "{}", "%s", "\x00skip", "' || user_id || '", "\n"]


def test_hostile_values_are_only_values() -> None:
    ids = {"user_id": {"column": "u", "type": "string"}, "pin_id": {"column": "p", "type": "string"}}
    mapped = map_columns({"u": HOSTILE, "p": HOSTILE, "event": HOSTILE}, **ids, action_type="event", surface="event")
    for field in ("user_id", "pin_id", "action_type", "surface"):
        assert list(values(mapped, field).values()) == HOSTILE


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_mappings_are_only_texts(text: str) -> None:
    mapped = map_columns({"event": [text, "other"]}, surface={"column": "event", "values": {text: text}})
    assert values(mapped, "surface") == {0: text}
    assert matches([text, "other"], text) == [True, False]
    assert matches([text, "other"], {"any_of": [text]}) == [True, False]


def test_quarantined_rows_are_shown_as_they_were() -> None:
    raw = pa.table({"u": ["x", "1", 'q"'], "t": [1.5, None, float("nan")], "day": [date(2026, 1, 1)] * 3})
    shown = [json.loads(text) for text in raw_json(raw, np.array([2, 0]))]
    assert shown[0]["u"] == 'q"'
    assert shown[1] == {"u": "x", "t": 1.5, "day": "2026-01-01"}


# Every row


ANYTHING = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from([str(NEW_YEAR_S), "1", "2", "3", "true", "", *HOSTILE]),
)
EVERYTHING = ActionMapper(
    source(
        action_type=rules(
            {"is": "like", "when": {"a": {"any_of": [1, "true"]}}},
            {"skip": True, "when": {"a": {"above": 2}}},
            {"is": "seen", "when": {"a": {"at_most": 2}}},
        ),
        surface={"column": "s", "values": {1: "homefeed", "2": "search", "": "nowhere"}},
        duration_s="d",
    )
)


@settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate, Phase.shrink])
@given(table=st.lists(st.tuples(*[ANYTHING] * 6), min_size=1, max_size=12))
def test_every_row_is_kept_or_skipped_or_rejected(table: list[tuple[str | None, ...]]) -> None:
    columns = {
        name: pa.array(column, pa.string()) for name, column in zip("uptasd", zip(*table, strict=True), strict=True)
    }
    mapped = EVERYTHING.map(pa.table(columns))
    positions = np.concatenate([mapped.kept, mapped.skipped, mapped.rejected])
    assert sorted(positions.tolist()) == list(range(len(table)))
    assert len(mapped.reasons) == len(mapped.rejected)
    assert all("(column" in reason for reason in mapped.reasons)
    assert mapped.actions.schema == raw_actions_schema("int", "int")
    assert all(mapped.actions[name].null_count == 0 for name in mapped.actions.column_names)
    assert len(mapped.ts_us) == len(table)
    assert mapped.ts_us[mapped.kept].tolist() == mapped.actions["ts"].cast(pa.int64()).to_pylist()
    assert mapped.actions["user_id"].to_pylist() == [int(table[index][0] or "") for index in mapped.kept]
    assert all(EARLIEST_US <= ts_us <= LATEST_US for ts_us in mapped.ts_us[mapped.kept])
    assert all(0 <= duration < float("inf") for duration in mapped.actions["duration_s"].to_pylist())
