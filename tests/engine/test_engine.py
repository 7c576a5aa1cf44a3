"""The engine: hashing into buckets, sorting, shuffling in bounded memory, and running tasks in processes."""

import pickle
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.engine.shuffle import Shuffle, ShuffleShare, merge_parts, rank_ids, sort_actions
from pf_core.engine.spark import SparkEngine, _run_tasks
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.progress import report
from pf_core.schemas import ACTION_COLUMNS, CATEGORY, TIMESTAMP

T0 = datetime(2026, 1, 1, tzinfo=UTC)
Row = tuple[Any, ...]


def actions_table(rows: list[Row]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    users = pa.array(columns[0], pa.string() if columns[0] and isinstance(columns[0][0], str) else pa.int64())
    return pa.table(
        {
            "user_id": users,
            "ts": pa.array(columns[1], TIMESTAMP),
            "pin_id": pa.array(columns[2], pa.string()),
            "action_type": pa.array(columns[3], pa.string()).cast(CATEGORY),
            "surface": pa.array(columns[4], pa.string()).cast(CATEGORY),
            "duration_s": pa.array(columns[5], pa.float32()),
        }
    )


def test_the_bucket_of_a_user_never_changes() -> None:
    # Reference values: splitmix64(1) = 0x910A2DEC89025CC1, splitmix64(2) = 0x975835DE1C9756CE (Vigna's reference).
    assert bucket_of(pa.array([1, 2]), 1000).tolist() == [0x910A2DEC89025CC1 % 1000, 0x975835DE1C9756CE % 1000]
    # `printf a | b2sum -l 64` prints 40f89e395b66422f, and for abc d8bb14d833d59559.
    expected = [
        int.from_bytes(bytes.fromhex(digest), "little") % 1000 for digest in ("40f89e395b66422f", "d8bb14d833d59559")
    ]
    assert bucket_of(pa.array(["a", "abc", "a"]), 1000).tolist() == [*expected, expected[0]]


@pytest.mark.parametrize("ids", [pa.array(range(-5000, 5000)), pa.array([f"user-{n}" for n in range(10_000)])])
def test_buckets_are_even(ids: pa.Array) -> None:
    counts = np.bincount(bucket_of(ids, 8), minlength=8)
    expected, deviation = 10_000 / 8, np.sqrt(10_000 * 1 / 8 * 7 / 8)
    assert abs(counts - expected).max() < 5 * deviation


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_rank_of_ints(ids: list[int]) -> None:
    order = {value: rank for rank, value in enumerate(sorted(set(ids)))}
    assert rank_ids(pa.array(ids, pa.int64())).tolist() == [order[value] for value in ids]


@given(st.lists(st.text(max_size=4), min_size=1))
def test_rank_of_strings(ids: list[str]) -> None:
    order = {value: rank for rank, value in enumerate(sorted(set(ids), key=str.encode))}
    assert rank_ids(pa.array(ids)).tolist() == [order[value] for value in ids]


@st.composite
def action_rows(draw: st.DrawFn) -> list[Row]:
    """Few values, so that ties and exact duplicates are frequent."""
    users: list[Any] = draw(st.sampled_from([[1, 2, 10**15], ["a", "ab", "ä"]]))
    row = st.tuples(
        st.sampled_from(users),
        st.integers(0, 3).map(lambda s: T0 + timedelta(seconds=s)),
        st.sampled_from(["p", "q"]),
        st.sampled_from(["repin", "click", "hide"]),
        st.sampled_from(["search", "homefeed"]),
        st.sampled_from([0.0, 1.5]),
    )
    return draw(st.lists(row, min_size=1, max_size=40))


@settings(max_examples=200)
@given(action_rows())
def test_sorting_equals_pythons_sorting_of_distinct_rows(rows: list[Row]) -> None:
    expected = sorted(
        set(rows), key=lambda row: (str(row[0]).encode() if isinstance(row[0], str) else row[0], *row[1:])
    )
    table, num_duplicates = sort_actions(actions_table(rows))
    assert table.column_names == list(ACTION_COLUMNS)
    assert [tuple(row.values()) for row in table.to_pylist()] == expected
    assert num_duplicates == len(rows) - len(expected)


def shuffled(
    engine: LocalEngine, batches: list[tuple[pa.Table, np.ndarray]]
) -> dict[int, tuple[list[dict[str, Any]], int]]:
    with engine.shuffle(1).open() as shuffle:
        for rows, group in batches:
            shuffle.add(rows, group)
        return {group: (rows.to_pylist(), duplicates) for group, rows, duplicates in shuffle.finish(below=4)}


def test_spilling_does_not_change_the_result(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(5):
        n = 4000
        moments = [T0 + timedelta(seconds=int(s)) for s in rng.integers(0, 50, n)]
        kinds = rng.choice(["repin", "click", "hide"], n)
        table = actions_table(
            list(
                zip(rng.integers(0, 40, n).tolist(), moments, ["p"] * n, kinds, ["search"] * n, [0.0] * n, strict=True)
            )
        )
        batches.append((table, bucket_of(table["user_id"], 4)))
    roomy = shuffled(LocalEngine(num_workers=1, memory_mb=512, temp_dir=tmp_path), batches)
    tight_engine = LocalEngine(num_workers=1, memory_mb=512, temp_dir=tmp_path)
    tight_engine._memory_bytes = 3 * 150_000  # about one batch: the spill files must carry the rest
    assert shuffled(tight_engine, batches) == roomy
    assert len(roomy) == 4
    assert sum(duplicates for _, duplicates in roomy.values()) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory_bytes", [1, 10**9])
def test_groups_can_be_finished_as_they_become_complete(memory_bytes: int, tmp_path: Path) -> None:
    engine = LocalEngine(num_workers=1, memory_mb=1, temp_dir=tmp_path)
    engine._memory_bytes = memory_bytes

    def rows(*users: int) -> pa.Table:
        return actions_table([(user, T0, "p", "click", "search", 0.0) for user in users])

    def users(shuffle: Shuffle, below: int) -> list[tuple[int, list[int]]]:
        return [(group, table["user_id"].to_pylist()) for group, table, _ in shuffle.finish(below=below)]

    with engine.shuffle(1).open() as shuffle:
        shuffle.add(rows(5, 6, 7), np.array([2, 0, 1]))
        shuffle.add(rows(3), np.array([0]))
        assert users(shuffle, 1) == [(0, [3, 6])]
        shuffle.add(rows(1), np.array([1]))
        assert users(shuffle, 2) == [(1, [1, 7])]
        assert users(shuffle, 2) == []
        assert users(shuffle, 9) == [(2, [5])]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=action_rows(), num_tasks=st.integers(1, 4), memory_bytes=st.sampled_from([1, 10**9]))
def test_merged_parts_of_many_tasks_equal_one_shuffle(
    rows: list[Row], num_tasks: int, memory_bytes: int, tmp_path: Path
) -> None:
    table = actions_table(rows)
    group = bucket_of(table["user_id"], 4)
    expected = shuffled(LocalEngine(num_workers=1, memory_mb=1, temp_dir=tmp_path), [(table, group)])
    parts: list[Path] = []
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        for number in range(num_tasks):
            spill_dir = Path(folder) / str(number)
            spill_dir.mkdir()
            shuffle = ShuffleShare(memory_bytes=memory_bytes).fill(spill_dir)
            for row in range(number, len(rows), num_tasks):
                shuffle.add(table.slice(row, 1), group[row : row + 1])
            shuffle.flush()
            parts += shuffle.spilled
        merged = {number: (found.to_pylist(), repeats) for number, found, repeats in merge_parts(parts, range(4))}
    assert merged == expected
    assert memory_bytes == 1 or len(parts) <= num_tasks


@pytest.mark.parametrize(("num_tasks", "num_at_a_time"), [(0, 1), (1, 1), (3, 3), (20, 4)])
def test_tasks_that_run_at_the_same_time_divide_the_memory(num_tasks: int, num_at_a_time: int, tmp_path: Path) -> None:
    engine = LocalEngine(num_workers=4, memory_mb=12, temp_dir=tmp_path)
    assert engine.shuffle(num_tasks).memory_bytes == (12 << 20) // num_at_a_time


def test_a_task_on_a_cluster_gets_a_workers_memory_however_few_there_are() -> None:
    engine: Engine = SparkEngine(master="local", num_workers=4, memory_mb=12, settings={})
    assert [engine.shuffle(num_tasks).memory_bytes for num_tasks in (1, 20)] == [3 << 20, 3 << 20]


def test_spilled_rows_lie_in_the_folder_that_a_task_chooses(tmp_path: Path) -> None:
    rows = actions_table([(1, T0, "p", "click", "search", 0.0)])
    share = LocalEngine(num_workers=1, memory_mb=1, temp_dir=tmp_path / "engine").shuffle(1)
    assert pickle.loads(pickle.dumps(share)) == share
    with share.open(tmp_path / "task") as shuffle:
        shuffle.add(rows, np.array([0]))
        shuffle.flush()
        assert [path.parent.parent for path in shuffle.spilled] == [tmp_path / "task"]
    assert list((tmp_path / "task").iterdir()) == []
    assert not (tmp_path / "engine").exists()


def magnitude(number: Any) -> Any:
    return abs(number)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_map_buckets(num_workers: int, tmp_path: Path) -> None:
    with LocalEngine(num_workers=num_workers, memory_mb=64, temp_dir=tmp_path) as engine:
        assert sorted(engine.map_buckets(abs, [-3, 1, 2])) == [1, 2, 3]
        with pytest.raises(TypeError):
            list(engine.map_buckets(magnitude, [1, "not a number", 2]))


def announce(number: int) -> int:
    report(f"at {number}")
    return number


@pytest.mark.parametrize("num_workers", [1, 2])
def test_reports_of_a_function_reach_progress(num_workers: int, tmp_path: Path) -> None:
    heard: list[str] = []
    with LocalEngine(num_workers=num_workers, memory_mb=64, temp_dir=tmp_path) as engine:
        assert sorted(engine.map_buckets(announce, [1, 2, 3], heard.append)) == [1, 2, 3]
        assert sorted(heard) == ["at 1", "at 2", "at 3"]
        assert sorted(engine.map_buckets(announce, [4, 5])) == [4, 5]  # without a callback, messages are dropped
    assert len(heard) == 3


def chatter_or_fail(number: int) -> int:
    if number == 0:
        raise ValueError("the first one fails")
    for line in range(2000):  # more than a pipe holds
        report(f"{number}: line {line}, " + "x" * 80)
    return number


def test_a_failure_does_not_block_a_worker_that_reports(tmp_path: Path) -> None:
    with LocalEngine(num_workers=2, memory_mb=64, temp_dir=tmp_path) as engine:
        with pytest.raises(ValueError, match="the first one fails"):
            list(engine.map_buckets(chatter_or_fail, [0, 1]))


def refuse(number: int) -> int:
    if number == 1:
        raise PipelineError(f"bucket {number} is damaged", "rebuild it")
    return 10 * number


def test_a_spark_worker_returns_a_refusal_with_its_remedy() -> None:
    content = [pickle.dumps((refuse, number)) for number in (1, 2)]
    batch = pa.RecordBatch.from_pydict({"number": [0, 1], "content": content})
    [refused, result] = [pickle.loads(done["content"][0].as_py()) for done in _run_tasks(iter([batch]))]
    assert isinstance(refused, PipelineError)
    assert (refused.what, refused.remedy) == ("bucket 1 is damaged", "rebuild it")
    assert str(refused) == "bucket 1 is damaged; rebuild it"
    assert result == 20
