import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.engine.local import LocalEngine
from pf_core.engine.shuffle import Shuffle, merge_parts, rank_ids, sort_actions
from pf_core.hashing import bucket_of
from pf_core.progress import report
from pf_core.schemas import ACTION_COLUMNS, CATEGORY, TIMESTAMP

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def actions_table(rows: list[tuple[Any, ...]]) -> pa.Table:
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


def test_buckets_never_change() -> None:
    # Worked out apart: splitmix64(1) = 0x910A2DEC89025CC1, splitmix64(2) = 0x975835DE1C9756CE (Vigna's reference).
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
def action_rows(draw: st.DrawFn) -> list[tuple[Any, ...]]:
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
def test_sorting_is_pythons_sorting_of_distinct_rows(rows: list[tuple[Any, ...]]) -> None:
    expected = sorted(
        set(rows), key=lambda row: (str(row[0]).encode() if isinstance(row[0], str) else row[0], *row[1:])
    )
    table, num_duplicates = sort_actions(actions_table(rows))
    assert table.column_names == list(ACTION_COLUMNS)
    assert [tuple(row.values()) for row in table.to_pylist()] == expected
    assert num_duplicates == len(rows) - len(expected)


def shuffled(engine: LocalEngine, batches: list[tuple[pa.Table, np.ndarray]]) -> dict[int, tuple[list[Any], int]]:
    with engine.shuffle() as shuffle:
        for rows, group in batches:
            shuffle.add(rows, group)
        return {group: (rows.to_pylist(), duplicates) for group, rows, duplicates in shuffle.finish(below=4)}


def test_spilling_gives_what_memory_gives(tmp_path: Path) -> None:
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

    with engine.shuffle() as shuffle:
        shuffle.add(rows(5, 6, 7), np.array([2, 0, 1]))
        shuffle.add(rows(3), np.array([0]))
        assert users(shuffle, 1) == [(0, [3, 6])]
        shuffle.add(rows(1), np.array([1]))
        assert users(shuffle, 2) == [(1, [1, 7])]
        assert users(shuffle, 2) == []
        assert users(shuffle, 9) == [(2, [5])]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=action_rows(), num_tasks=st.integers(1, 4), memory_bytes=st.sampled_from([1, 10**9]))
def test_parts_of_many_are_what_one_would_have_shuffled(
    rows: list[tuple[Any, ...]], num_tasks: int, memory_bytes: int, tmp_path: Path
) -> None:
    table = actions_table(rows)
    group = bucket_of(table["user_id"], 4)
    expected = shuffled(LocalEngine(num_workers=1, memory_mb=1, temp_dir=tmp_path), [(table, group)])
    parts: list[Path] = []
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        for number in range(num_tasks):
            spill_dir = Path(folder) / str(number)
            spill_dir.mkdir()
            shuffle = Shuffle(memory_bytes=memory_bytes, spill_dir=spill_dir)
            for row in range(number, len(rows), num_tasks):
                shuffle.add(table.slice(row, 1), group[row : row + 1])
            shuffle.flush()
            parts += shuffle.spilled
        merged = {number: (found.to_pylist(), repeats) for number, found, repeats in merge_parts(parts, range(4))}
    assert merged == expected
    assert memory_bytes == 1 or len(parts) <= num_tasks


@pytest.mark.parametrize("num_workers", [1, 2])
def test_map_buckets(num_workers: int, tmp_path: Path) -> None:
    with LocalEngine(num_workers=num_workers, memory_mb=64, temp_dir=tmp_path) as engine:
        assert sorted(engine.map_buckets(abs, [-3, 1, 2])) == [1, 2, 3]
        with pytest.raises(TypeError):
            list(engine.map_buckets(abs, [1, cast(int, "not a number"), 2]))


def announce(number: int) -> int:
    report(f"at {number}")
    return number


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_function_reports_reaches_the_person_who_watches(num_workers: int, tmp_path: Path) -> None:
    heard: list[str] = []
    with LocalEngine(num_workers=num_workers, memory_mb=64, temp_dir=tmp_path) as engine:
        assert sorted(engine.map_buckets(announce, [1, 2, 3], heard.append)) == [1, 2, 3]
        assert sorted(heard) == ["at 1", "at 2", "at 3"]
        assert sorted(engine.map_buckets(announce, [4, 5])) == [4, 5]  # nobody listens
    assert len(heard) == 3


def chatter_or_fail(number: int) -> int:
    if number == 0:
        raise ValueError("the first one fails")
    for line in range(2000):  # more than a pipe holds
        report(f"{number}: line {line}, " + "x" * 80)
    return number


def test_a_failure_does_not_leave_a_talking_worker_behind(tmp_path: Path) -> None:
    with LocalEngine(num_workers=2, memory_mb=64, temp_dir=tmp_path) as engine:
        with pytest.raises(ValueError, match="the first one fails"):
            list(engine.map_buckets(chatter_or_fail, [0, 1]))
