"""pin_features: reading catalogues and matrices, adding up days, and no knowledge of the future."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pf_core.config.site import Site
from pf_core.config.source import NpyVectors, PinsSource
from pf_core.days import ds_range
from pf_core.engine.daily_state import Manifest
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import read_manifest
from pf_core.pins.catalogue import BOOLEANS, Catalogue, read_catalogue, read_matrix
from pf_core.pins.checks import judge_coverage
from pf_core.pins.features import build_pin_features, feature_coverage, pin_state, read_pin_features
from pf_core.schemas import pin_features_schema

DAYS = ds_range("2026-01-01", "2026-01-06")


def pins_source(**fields: Any) -> PinsSource:
    plain = {"pin_id": "id", "catalogue": {"path": "pins.parquet"}, "vectors": "vector"}
    return PinsSource.model_validate(plain | fields)


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def features(catalogue: Catalogue) -> dict[Any, list[float] | None]:
    return {row["pin_id"]: row["feature"] for row in catalogue.rows.to_pylist()}


def rejects(catalogue: Catalogue) -> dict[int, str]:
    """Reasons by row number, of a catalogue in one file."""
    assert len({number for _, number, _, _ in catalogue.quarantined}) == len(catalogue.quarantined)
    return {number: reason for _, number, reason, _ in catalogue.quarantined}


# Catalogue files


def test_good_rows_are_contract_rows_by_pin_id(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "pins.parquet",
        id=[9, 3],
        vector=[[1.0, 2.0], [3.0, 4.0]],
        topic=["art", "food"],
        shown=[True, False],
    )
    catalogue = read_catalogue(pins_source(interest="topic", is_candidate="shown"), [path], dim=None)
    assert catalogue.quarantined == []
    columns = ["pin_id", "feature", "interest", "is_candidate"]
    expected = pin_features_schema("int", 2)
    assert catalogue.rows.select(columns).schema == pa.schema([expected.field(name) for name in columns])
    assert sorted(catalogue.rows.column_names) == ["feature", "interest", "is_candidate", "pin_id"]
    assert catalogue.rows.to_pylist() == [
        {"pin_id": 3, "feature": [3.0, 4.0], "interest": "food", "is_candidate": False},
        {"pin_id": 9, "feature": [1.0, 2.0], "interest": "art", "is_candidate": True},
    ]


def test_what_the_catalogue_does_not_say(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=["b", "a", "c"], vector=[[1.0]] * 3, topic=["art", None, ""])
    source = pins_source(pin_id={"column": "id", "type": "string"}, interest="topic")
    rows = read_catalogue(source, [path], dim=None).rows.to_pylist()
    assert [(row["pin_id"], row["interest"]) for row in rows] == [("a", "unknown"), ("b", "art"), ("c", "unknown")]
    assert all(row["is_candidate"] for row in rows)


def test_unusable_rows_have_a_reason_each(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "pins.parquet",
        id=[1, 2, None, 3, 1, 4, 5, 6],
        vector=[[1.0, 2.0], [3.0], [1.0, 1.0], [math.nan, 1.0], [9.0, 9.0], None, [1.0, None], [1.0, math.inf]],
    )
    catalogue = read_catalogue(pins_source(), [path], dim=None)
    assert features(catalogue) == {1: [1.0, 2.0], 4: None}  # pin 4 has no vector
    assert rejects(catalogue) == {
        2: "feature: not 2 numbers, like the first",
        3: "pin_id: missing (column id)",
        4: "feature: a value is missing or not finite",
        5: "pin_id: a second row of this pin",
        7: "feature: a value is missing or not finite",
        8: "feature: a value is missing or not finite",
    }
    assert {file for file, _, _, _ in catalogue.quarantined} == {str(path)}
    raw = {number: text for _, number, _, text in catalogue.quarantined}
    assert json.loads(raw[2]) == {"id": 2, "vector": [3.0]}


def test_candidates_are_true_or_false(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[1, 2, 3, 4], vector=[[1.0]] * 4, shown=["true", "0", "perhaps", None])
    catalogue = read_catalogue(pins_source(is_candidate="shown"), [path], dim=None)
    assert {row["pin_id"]: row["is_candidate"] for row in catalogue.rows.to_pylist()} == {1: True, 2: False}
    assert rejects(catalogue) == dict.fromkeys([3, 4], f"is_candidate: not {BOOLEANS} (column shown)")


def test_vectors_of_json_lines(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "pins.jsonl",
        {"id": 1, "vector": [1, 2.5]},
        "[]\n",
        {"id": 2, "vector": [1, "x"]},
        {"id": 3, "vector": 7},
        {"id": 4},
        {"id": 5, "vector": [3e0, -4]},
    )
    catalogue = read_catalogue(pins_source(catalogue={"path": "pins.jsonl"}), [path], dim=None)
    assert features(catalogue) == {1: [1.0, 2.5], 4: None, 5: [3.0, -4.0]}
    assert rejects(catalogue) == {
        2: "malformed: not a JSON object",
        3: "feature: a value is missing or not finite",
        4: "feature: not a list of numbers (column vector)",
    }


def test_a_catalogue_without_any_vector_has_no_column_of_them(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[2, 1], vector=pa.nulls(2, pa.list_(pa.float32())))
    catalogue = read_catalogue(pins_source(), [path], dim=None)
    assert catalogue.rows.to_pylist() == [
        {"pin_id": pin_id, "interest": "unknown", "is_candidate": True} for pin_id in (1, 2)
    ]
    given = read_catalogue(pins_source(), [path], dim=3)
    assert given.rows.schema.field("feature").type == pa.list_(pa.float32(), 3)
    assert features(given) == {1: None, 2: None}


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float64()),
        pa.list_(pa.float32(), 2),
        pa.large_list(pa.float32()),
        pa.list_(pa.int32()),
        pa.list_(pa.float16()),
        pa.list_(pa.float16(), 2),
    ],
)
def test_vectors_of_any_list_type(tmp_path: Path, kind: pa.DataType) -> None:
    numbers = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2)).cast(kind)
    path = parquet(tmp_path / "pins.parquet", id=[1, 2], vector=numbers)
    assert features(read_catalogue(pins_source(), [path], dim=None)) == {1: [1.0, 2.0], 2: [3.0, 4.0]}


def test_the_number_of_dimensions_may_be_known_before(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[1, 2], vector=[[1.0, 2.0], [1.0, 2.0, 3.0]])
    catalogue = read_catalogue(pins_source(), [path], dim=3)
    assert features(catalogue) == {2: [1.0, 2.0, 3.0]}
    assert rejects(catalogue) == {1: "feature: not 3 numbers, like the first"}


def test_the_first_row_of_a_pin_counts_across_files(tmp_path: Path) -> None:
    first = parquet(tmp_path / "a.parquet", id=[1, 2], vector=[[1.0], [2.0]])
    second = parquet(tmp_path / "b.parquet", id=[3, 2], vector=[[3.0], [9.0]])
    catalogue = read_catalogue(pins_source(), [first, second], dim=None)
    assert features(catalogue) == {1: [1.0], 2: [2.0], 3: [3.0]}
    assert catalogue.quarantined == [(str(second), 2, "pin_id: a second row of this pin", "2")]


@pytest.mark.parametrize("ids", [[], [None]])
def test_a_file_without_usable_rows_leaves_the_others_alone(tmp_path: Path, ids: list[None]) -> None:
    useless = parquet(
        tmp_path / "a.parquet",
        id=pa.array(ids, pa.int64()),
        vector=pa.array([[1.0, 2.0]] * len(ids), pa.list_(pa.float64())),
    )
    good = parquet(tmp_path / "b.parquet", id=[1], vector=[[1.0, 2.0]])
    for files in ([useless, good], [good, useless]):
        catalogue = read_catalogue(pins_source(), files, dim=None)
        assert features(catalogue) == {1: [1.0, 2.0]}
        assert len(catalogue.quarantined) == len(ids)


def test_an_empty_vector_costs_one_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[1, 2], vector=[[], [3.0, 4.0]])
    catalogue = read_catalogue(pins_source(), [path], dim=None)
    assert features(catalogue) == {2: [3.0, 4.0]}
    assert list(rejects(catalogue)) == [1]


def test_metadata_of_a_csv_has_no_vectors(tmp_path: Path) -> None:
    path = lines(tmp_path / "pins.csv", "pin,topic\n", "7,art\n", "x,food\n", "broken\n", '3,"a, b"\n')
    source = pins_source(
        pin_id="pin", catalogue={"path": "pins.csv"}, vectors={"npy": "v.npy", "ids": "i.npy"}, interest="topic"
    )
    catalogue = read_catalogue(source, [path], dim=None)
    assert catalogue.rows.to_pylist() == [
        {"pin_id": 3, "interest": "a, b", "is_candidate": True},
        {"pin_id": 7, "interest": "art", "is_candidate": True},
    ]
    assert rejects(catalogue) == {
        3: "pin_id: not an integer (column pin); ids that are text need `pin_id: {column: pin, type: string}` in the "
        "site file",
        4: "malformed: 1 fields instead of 2",
    }


def test_a_catalogue_may_use_our_names_for_its_columns(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "pins.parquet",
        feature=[1, 2],
        pin_id=[[1.0], [2.0]],
        is_candidate=["a", "b"],
        interest=[True, False],
    )
    source = pins_source(pin_id="feature", vectors="pin_id", interest="is_candidate", is_candidate="interest")
    assert read_catalogue(source, [path], dim=None).rows.to_pylist() == [
        {"pin_id": 1, "feature": [1.0], "interest": "a", "is_candidate": True},
        {"pin_id": 2, "feature": [2.0], "interest": "b", "is_candidate": False},
    ]


def test_columns_that_differ_in_case_only(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[1], ID=["art"], vector=[[1.0]])
    rows = read_catalogue(pins_source(interest="ID"), [path], dim=None).rows.to_pylist()
    assert [row["interest"] for row in rows] == ["art"]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins.parquet", id=[1], vector=[[1.0]])
    with pytest.raises(PipelineError, match=r"pins\.parquet has no column 'topic'"):
        read_catalogue(pins_source(interest="topic"), [path], dim=None)


ROW = st.tuples(
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=1, max_size=3)),
)


def has_norm(vector: list[float]) -> bool:
    """Whether a vector of float32 has a norm that is not 0 and at most the largest float16."""
    squares = np.float32(0)
    with np.errstate(over="ignore", under="ignore"):
        for value in vector:
            squares += np.float32(value) * np.float32(value)
    return bool(0 < np.sqrt(squares) <= 65_504)


@settings(max_examples=15, deadline=None, database=None)
@given(table=st.lists(ROW, min_size=1, max_size=12))
def test_every_row_is_a_pin_or_a_reject(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[int | None, list[float | None] | None]]
) -> None:
    dim = 2
    path = parquet(
        tmp_path_factory.mktemp("rows") / "pins.parquet",
        id=pa.array([pin_id for pin_id, _ in table], pa.int64()),
        vector=pa.array([vector for _, vector in table], pa.list_(pa.float32())),
    )
    catalogue = read_catalogue(pins_source(), [path], dim=dim)
    expected: dict[int, list[float | None] | None] = {}
    for pin_id, vector in table:
        is_usable = vector is None or (len(vector) == dim and all(v is not None for v in vector) and has_norm(vector))
        if pin_id is not None and is_usable:
            expected.setdefault(pin_id, vector)
    assert features(catalogue) == expected
    assert list(features(catalogue)) == sorted(expected)
    assert len(rejects(catalogue)) == len(table) - len(expected)
    assert set(rejects(catalogue)) <= set(range(1, len(table) + 1))


# Matrices


MATRIX = NpyVectors(npy="vectors.npy", ids="ids.npy")


def matrix_source(id_type: str = "int") -> PinsSource:
    return pins_source(pin_id={"column": "id", "type": id_type}, catalogue=None, vectors=MATRIX.model_dump())


def saved_matrix(root: Path, vectors: Any, ids: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / MATRIX.npy, np.array(vectors))
    np.save(root / MATRIX.ids, np.array(ids))
    return root


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_a_matrix_and_its_ids(tmp_path: Path, dtype: type) -> None:
    saved_matrix(tmp_path, np.array([[1, 2, 3], [4, 5, 6]], dtype), [9, 3])
    table = read_matrix(MATRIX, tmp_path, matrix_source()).rows
    assert table.to_pylist() == [{"pin_id": 9, "feature": [1.0, 2.0, 3.0]}, {"pin_id": 3, "feature": [4.0, 5.0, 6.0]}]
    assert table.schema.field("feature").type == pa.list_(pa.float32(), 3)


@pytest.mark.parametrize("ids", [["b", "a"], [b"b", b"a"]])
def test_a_matrix_with_string_ids(tmp_path: Path, ids: list[Any]) -> None:
    saved_matrix(tmp_path, [[1.0], [2.0]], ids)
    table = read_matrix(MATRIX, tmp_path, matrix_source("string")).rows
    assert table["pin_id"].to_pylist() == ["b", "a"]
    assert table.schema.field("pin_id").type == pa.string()


UNUSABLE = {
    "NaN": [math.nan, 1.0],
    "infinite": [1.0, -math.inf],
    "beyond float64": [1e200, 1e200],
    "beyond float32": [1e30, 0.0],
    "squares beyond float32": [2e19, 0.0],
    "beyond float16": [65_504.0, 1.0e3],
    "zeros": [0.0, 0.0],
    "squares below float32": [1e-30, 0.0],
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_vector_that_no_model_can_read_is_quarantined(tmp_path: Path, what: str) -> None:
    """One such pin must not stop a release; the reason says what is wrong with it, for a matrix as for a column."""
    vectors = [[1.0, 2.0], UNUSABLE[what], [65_504.0, 0.0], [1e-15, 0.0]]
    reason = {
        **dict.fromkeys(("NaN", "infinite", "beyond float64"), "feature: a value is missing or not finite"),
        **dict.fromkeys(("zeros", "squares below float32"), "feature: all zeros, or too small to have a direction"),
    }.get(what, "feature: its norm is above 65,504")
    saved_matrix(tmp_path, vectors, [9, 7, 5, 3])
    matrix = read_matrix(MATRIX, tmp_path, matrix_source())
    assert matrix.rows["pin_id"].to_pylist() == [9, 5, 3]
    [(file, number, found, raw)] = matrix.quarantined
    assert (file, number, found) == (str(tmp_path / MATRIX.npy), 2, reason)
    assert json.loads(raw)["pin_id"] == 7
    path = parquet(tmp_path / "pins.parquet", id=[9, 7, 5, 3], vector=pa.array(vectors, pa.list_(pa.float64())))
    catalogue = read_catalogue(pins_source(), [path], dim=None)
    assert list(features(catalogue)) == [3, 5, 9]
    assert rejects(catalogue) == {2: reason}


@pytest.mark.parametrize(
    ("vectors", "ids", "complaint"),
    [
        ([[1.0], [2.0]], [1], r"vectors\.npy has shape \(2, 1\) and .*ids\.npy \(1,\)"),
        ([1.0, 2.0], [1, 2], r"must be \(pins, dim\) and \(pins,\)"),
        ([[1.0], [2.0]], [[1], [2]], r"must be \(pins, dim\) and \(pins,\)"),
        ([[1.0], [2.0]], [7, 7], r"ids\.npy names a pin twice"),
        ([[1.0], [2.0]], ["a", "b"], r"ids\.npy"),
        ([[1.0], [2.0]], [1.5, 2.0], r"ids\.npy"),
        ([["a"], ["b"]], [1, 2], r"vectors\.npy"),
        ([[math.nan], [0.0]], [1, 2], r"vectors\.npy: not one vector can be used; row 1: feature: a value is missing"),
    ],
)
def test_a_matrix_that_cannot_be(tmp_path: Path, vectors: Any, ids: Any, complaint: str) -> None:
    saved_matrix(tmp_path, vectors, ids)
    with pytest.raises(PipelineError, match=complaint):
        read_matrix(MATRIX, tmp_path, matrix_source())


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy"])
def test_a_missing_matrix_is_named(tmp_path: Path, name: str) -> None:
    (saved_matrix(tmp_path, [[1.0]], [1]) / name).unlink()
    with pytest.raises(PipelineError, match=rf"no file at .*{name}"):
        read_matrix(MATRIX, tmp_path, matrix_source())


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 130])
def test_a_truncated_matrix_is_named(tmp_path: Path, num_bytes: int) -> None:
    path = saved_matrix(tmp_path, np.zeros((10, 8)), np.arange(10)) / "vectors.npy"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(PipelineError, match=r"vectors\.npy cannot be read as \.npy"):
        read_matrix(MATRIX, tmp_path, matrix_source())


# The asset


ACTIONS: dict[str, Any] = {
    "path": "actions.csv",
    "user_id": "user",
    "pin_id": "pin",
    "ts": {"column": "at", "unit": "iso"},
    "action_type": {"constant": "repin"},
    "surface": {"constant": "homefeed"},
}
INCREMENTAL = {"catalogue": {"path": "pins/{ds}.parquet"}}


def site_with(root: Path, pins: PinsSource, **timelines: int) -> Site:
    return Site.model_validate(
        {
            "name": "shop",
            "start_ds": DAYS[0],
            "end_ds": DAYS[-1],
            "data_dir": str(root / "data"),
            "source": {"root": str(root), "actions": ACTIONS, "pins": pins},
            "timelines": {"num_buckets": 2, **timelines},
        }
    )


def ingest(site: Site, *days: str) -> None:
    engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=site.directory / "temp")
    forgotten = pa.array([], pa.int64())
    list(ingest_days(site, days, engine=engine, forgotten=forgotten, progress=lambda message: None))


def build(site: Site, *days: str) -> list[Manifest]:
    """Build the days; a day of raw_actions that is missing gets a log without actions."""
    if not (site.log_root / "actions.csv").exists():
        lines(site.log_root / "actions.csv", "user,pin,at\n")
    missing = [ds for ds in ds_range(DAYS[0], days[-1]) if read_manifest(site, ds) is None]
    if missing:
        ingest(site, *missing)
    engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=site.directory / "temp")
    return list(build_pin_features(site, days, engine=engine, progress=lambda message: None))


def pins_of(site: Site, ds: str) -> dict[Any, dict[str, Any]]:
    rows = read_pin_features(site, ds).to_pylist()
    assert all(row["has_feature"] == (row.get("feature") is not None) for row in rows)
    left_out = ("pin_id", "has_feature")
    pins = {row["pin_id"]: {name: value for name, value in row.items() if name not in left_out} for row in rows}
    assert len(pins) == len(rows)
    return pins


def planted_days(root: Path, num_days: int) -> list[dict[int, list[float]]]:
    """Each day's catalogue: three pins that stay, and one that the next day's catalogue revises."""
    days = []
    for index in range(num_days):
        pins = {10 * index + offset: [float(index), float(offset)] for offset in (1, 2, 3)}
        pins[10 * (index - 1) + 3] = [float(index), -1.0]
        parquet(root / "pins" / f"{DAYS[index]}.parquet", id=list(pins), vector=list(pins.values()))
        days.append(pins)
    return days


def union_until(days: Sequence[dict[int, list[float]]], last: int) -> dict[int, list[float]]:
    union: dict[int, list[float]] = {}
    for pins in days[: last + 1]:
        union |= pins
    return union


@pytest.mark.parametrize("compact_after_fragments", [2, 24])
def test_each_day_is_the_union_of_the_catalogues_until_then(tmp_path: Path, compact_after_fragments: int) -> None:
    days = planted_days(tmp_path, 5)
    site = site_with(tmp_path, pins_source(**INCREMENTAL), compact_after_fragments=compact_after_fragments)
    manifests = build(site, *DAYS[:5])
    for index, (ds, manifest) in enumerate(zip(DAYS, manifests, strict=False)):
        expected = union_until(days, index)
        assert {pin_id: pin["feature"] for pin_id, pin in pins_of(site, ds).items()} == expected
        assert manifest["ds"] == ds
        assert manifest["dim"] == 2
        assert manifest["counts"]["pins"] == len(expected) == 3 * (index + 1) + 1
        assert manifest["counts"]["new"] == (3 if index else 3 + 1)
        assert manifest["counts"]["updated"] == (1 if index else 0)
        assert manifest["counts"]["candidates"] == len(expected)


def test_days_one_by_one_equal_days_as_a_range(tmp_path: Path) -> None:
    for root in (tmp_path / "range", tmp_path / "single"):
        planted_days(root, 3)
    pins = pins_source(**INCREMENTAL)
    as_range, single = site_with(tmp_path / "range", pins), site_with(tmp_path / "single", pins)
    build(as_range, *DAYS[:3])
    for ds in DAYS[:3]:
        build(single, ds)
    for ds in DAYS[:3]:
        assert pins_of(as_range, ds) == pins_of(single, ds)


def test_a_gap_is_an_error_with_the_command_that_closes_it(tmp_path: Path) -> None:
    planted_days(tmp_path, 4)
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    with pytest.raises(PipelineError, match=rf"--select pin_features --partition-range {DAYS[0]}\.\.\.{DAYS[3]} "):
        build(site, DAYS[3])
    build(site, DAYS[0])
    with pytest.raises(PipelineError, match=rf"builds on {DAYS[2]}, .*--partition-range {DAYS[1]}\.\.\.{DAYS[3]} "):
        build(site, DAYS[3])
    assert pin_state(site).days() == [DAYS[0]]


@pytest.mark.parametrize("repaired", [0, 1, 2])
def test_a_re_run_of_a_day_changes_no_other_day(tmp_path: Path, repaired: int) -> None:
    days = planted_days(tmp_path, 3)
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    build(site, *DAYS[:3])
    before = {ds: pins_of(site, ds) for ds in DAYS[:3]}
    parquet(tmp_path / "pins" / f"{DAYS[repaired]}.parquet", id=[1, 99], vector=[[7.0, 7.0], [8.0, 8.0]])
    build(site, DAYS[repaired])
    expected = union_until([*days[:repaired], {1: [7.0, 7.0], 99: [8.0, 8.0]}], repaired)
    for ds in DAYS[:3]:
        if ds == DAYS[repaired]:
            assert {pin_id: pin["feature"] for pin_id, pin in pins_of(site, ds).items()} == expected
        else:
            assert pins_of(site, ds) == before[ds]


def test_a_re_run_without_change_gives_the_same_pins(tmp_path: Path) -> None:
    planted_days(tmp_path, 2)
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    build(site, *DAYS[:2])
    before = pins_of(site, DAYS[1])
    (again,) = build(site, DAYS[1])
    assert pins_of(site, DAYS[1]) == before
    assert (again["counts"]["new"], again["counts"]["updated"]) == (3, 1)


def test_a_day_without_new_pins(tmp_path: Path) -> None:
    planted_days(tmp_path, 1)
    parquet(
        tmp_path / "pins" / f"{DAYS[1]}.parquet",
        id=pa.array([], pa.int64()),
        vector=pa.array([], pa.list_(pa.float64())),
    )
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    first, second = build(site, *DAYS[:2])
    assert pins_of(site, DAYS[1]) == pins_of(site, DAYS[0])
    assert second["versions"] == first["versions"]
    assert second["counts"]["new"] == 0


def test_an_empty_json_lines_file_is_a_day_without_new_pins(tmp_path: Path) -> None:
    """The error for a missing file says to put one there."""
    lines(tmp_path / f"{DAYS[0]}.jsonl", {"id": 1, "vector": [1.0]})
    site = site_with(tmp_path, pins_source(catalogue={"path": "{ds}.jsonl"}))
    build(site, DAYS[0])
    with pytest.raises(PipelineError, match="put a catalogue without rows there"):
        build(site, DAYS[1])
    lines(tmp_path / f"{DAYS[1]}.jsonl")
    build(site, DAYS[1])
    assert pins_of(site, DAYS[1]) == pins_of(site, DAYS[0])


def test_a_missing_catalogue_is_an_error_that_names_it(tmp_path: Path) -> None:
    planted_days(tmp_path, 1)
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    build(site, DAYS[0])
    with pytest.raises(PipelineError, match=rf"no pin catalogue for {DAYS[1]}: .*pins/{DAYS[1]}\.parquet"):
        build(site, DAYS[1])
    assert pin_state(site).days() == [DAYS[0]]


def test_a_first_day_without_any_usable_pin_is_an_error(tmp_path: Path) -> None:
    parquet(tmp_path / "pins" / f"{DAYS[0]}.parquet", id=["x", "y"], vector=[[1.0], [2.0]])
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    with pytest.raises(PipelineError, match=rf"{DAYS[0]}\.parquet, row 1: pin_id: not an integer \(column id\)"):
        build(site, DAYS[0])
    assert pin_state(site).days() == []


def test_the_quarantine_lists_the_rejects_until_they_are_fixed(tmp_path: Path) -> None:
    path = parquet(tmp_path / "pins" / f"{DAYS[0]}.parquet", id=[1, None, 1], vector=[[1.0], [2.0], [3.0]])
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    (manifest,) = build(site, DAYS[0])
    reasons = {2: "pin_id: missing (column id)", 3: "pin_id: a second row of this pin"}
    assert manifest["counts"]["quarantined"] == 2
    assert manifest["quarantined_by_reason"] == dict.fromkeys(reasons.values(), 1)
    quarantine = pin_state(site).root / "quarantine" / f"{DAYS[0]}.parquet"
    assert {row["row_number"]: row["reason"] for row in pq.read_table(quarantine).to_pylist()} == reasons
    parquet(path, id=[1, 2, 3], vector=[[1.0], [2.0], [3.0]])
    (manifest,) = build(site, DAYS[0])
    assert manifest["counts"]["quarantined"] == 0
    assert not quarantine.exists()


def test_vectors_of_another_length_are_quarantined_on_later_days(tmp_path: Path) -> None:
    days = planted_days(tmp_path, 1)
    parquet(tmp_path / "pins" / f"{DAYS[1]}.parquet", id=[50, 51], vector=[[1.0, 2.0, 3.0], [5.0, 1.0]])
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    _, second = build(site, *DAYS[:2])
    assert set(pins_of(site, DAYS[1])) == {*days[0], 51}
    assert second["quarantined_by_reason"] == {"feature: not 2 numbers, like the first": 1}


# Whole inputs


def described_matrix(root: Path) -> PinsSource:
    saved_matrix(root, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [3, 1, 2])
    lines(root / "pins.csv", "pin,topic,shown\n", "1,art,true\n", "2,food,false\n", "8,art,true\n")
    return pins_source(
        pin_id="pin",
        catalogue={"path": "pins.csv"},
        vectors=MATRIX.model_dump(),
        interest="topic",
        is_candidate="shown",
    )


def test_a_csv_describes_the_pins_of_a_matrix(tmp_path: Path) -> None:
    site = site_with(tmp_path, described_matrix(tmp_path))
    (manifest,) = build(site, DAYS[0])
    assert pins_of(site, DAYS[0]) == {
        1: {"feature": [0.0, 1.0], "interest": "art", "is_candidate": True},
        2: {"feature": [1.0, 1.0], "interest": "food", "is_candidate": False},
        3: {"feature": [1.0, 0.0], "interest": "unknown", "is_candidate": False},  # known by its vector alone
        8: {"feature": None, "interest": "art", "is_candidate": True},
    }
    assert manifest["counts"]["pins"] == 4
    assert manifest["counts"]["with_feature"] == 3
    assert manifest["counts"]["candidates"] == 2


def test_a_matrix_alone(tmp_path: Path) -> None:
    saved_matrix(tmp_path, [[1.0], [2.0]], [5, 6])
    site = site_with(tmp_path, matrix_source())
    build(site, DAYS[0])
    assert pins_of(site, DAYS[0])[6] == {"feature": [2.0], "interest": "unknown", "is_candidate": True}


def test_days_with_unchanged_inputs_share_a_version(tmp_path: Path) -> None:
    site = site_with(tmp_path, described_matrix(tmp_path))
    manifests = build(site, *DAYS[:3])
    assert len({manifest["versions"][0] for manifest in manifests}) == 1
    assert [manifest["counts"]["new"] for manifest in manifests] == [4, 0, 0]
    assert [manifest["counts"]["pins"] for manifest in manifests] == [4, 4, 4]
    assert pins_of(site, DAYS[0]) == pins_of(site, DAYS[2])


def test_changed_inputs_change_the_days_built_after_them(tmp_path: Path) -> None:
    site = site_with(tmp_path, described_matrix(tmp_path))
    (first,) = build(site, DAYS[0])
    before = pins_of(site, DAYS[0])
    lines(tmp_path / "pins.csv", "pin,topic,shown\n", "1,food,true\n", "3,food,true\n")
    (second,) = build(site, DAYS[1])
    assert second["versions"] != first["versions"]
    assert second["counts"]["candidates"] == 2
    assert pins_of(site, DAYS[1])[1]["interest"] == "food"
    assert pins_of(site, DAYS[0]) == before


def test_a_whole_catalogue_with_vectors(tmp_path: Path) -> None:
    path = lines(tmp_path / "pins.jsonl", {"id": 1, "vector": [1, 2]}, {"id": 2, "vector": [1]})
    site = site_with(tmp_path, pins_source(catalogue={"path": "pins.jsonl"}))
    first, second = build(site, *DAYS[:2])
    assert set(pins_of(site, DAYS[1])) == {1}
    assert first["counts"]["quarantined"] == second["counts"]["quarantined"] == 1
    assert first["versions"] == second["versions"]
    status = path.stat()
    lines(path, {"id": 1, "vector": [1, 2]}, {"id": 2, "vector": [3, 4]})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a copy that keeps times, of another size
    build(site, DAYS[2])
    assert set(pins_of(site, DAYS[2])) == {1, 2}


@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy", "pins.csv"])
def test_a_missing_input_is_named(tmp_path: Path, name: str) -> None:
    site = site_with(tmp_path, described_matrix(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(PipelineError, match=name):
        build(site, DAYS[0])


# Coverage


def test_coverage_is_the_share_of_actions_whose_pin_has_a_feature(tmp_path: Path) -> None:
    saved_matrix(tmp_path, [[1.0], [2.0]], [1, 2])
    pins = {DAYS[0]: [1, 1, 2, 7], DAYS[1]: [7, 8], DAYS[2]: [2]}
    rows = [
        f"{user},{pin},{ds}T10:00:00Z\n" for ds, pins_of_day in pins.items() for user, pin in enumerate(pins_of_day)
    ]
    lines(tmp_path / "actions.csv", "user,pin,at\n", *rows)
    site = site_with(tmp_path, matrix_source())
    ingest(site, *DAYS[:4])
    build(site, *DAYS[:4])
    assert feature_coverage(site, DAYS[0]) == 3 / 4
    assert feature_coverage(site, DAYS[1]) == 0 / 2
    assert feature_coverage(site, DAYS[2]) == 1 / 1
    assert math.isnan(feature_coverage(site, DAYS[3]))  # no actions
    results = [judge_coverage(site, ds) for ds in DAYS[:4]]
    assert [result.passed for result in results] == [False, False, True, True]
    assert results[0].reason == "75.00% of the day's actions have a pin with a content vector, expected are 90%"


def test_coverage_looks_at_the_pins_of_the_same_day(tmp_path: Path) -> None:
    for index, ds in enumerate(DAYS[:2]):
        parquet(tmp_path / "pins" / f"{ds}.parquet", id=[index], vector=[[1.0]])
    lines(tmp_path / "actions.csv", "user,pin,at\n", *[f"5,{pin},{ds}\n" for ds in DAYS[:2] for pin in (0, 1)])
    site = site_with(tmp_path, pins_source(**INCREMENTAL))
    ingest(site, *DAYS[:2])
    build(site, *DAYS[:2])
    assert [feature_coverage(site, ds) for ds in DAYS[:2]] == [1 / 2, 2 / 2]


def test_coverage_of_a_day_that_is_not_built(tmp_path: Path) -> None:
    saved_matrix(tmp_path, [[1.0]], [1])
    with pytest.raises(PipelineError, match=rf"pin_features has no partition {DAYS[0]}; make it with: "):
        feature_coverage(site_with(tmp_path, matrix_source()), DAYS[0])
