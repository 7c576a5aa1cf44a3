"""A user's pins: the index's best merged with memory, and new pins only, against arithmetic and exact search."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.hashing import bucket_of
from pf_core.serving.index import PINS, PinIndex, shard_path, used_shards
from pf_core.serving.ranking import Ranked, rank_new, rank_with_memory
from pf_core.serving.values import PinLists
from pf_core.storage.files import write_json

USER = np.array([1.0, 0.0], np.float32)
FIVE = {"a": [1.0, 0.0], "b": [0.8, 0.6], "c": [0.6, 0.8], "d": [0.0, 1.0], "e": [-1.0, 0.0]}
"""Pins by name; the first coordinate is the cosine with USER."""


def make_index(
    folder: Path, ids: Sequence[Any], vectors: np.ndarray, *, ef: int = 10_000, num_shards: int = 1
) -> PinIndex:
    """An index of these pins, which are sorted by id."""
    folder.mkdir(parents=True, exist_ok=True)
    assert list(ids) == sorted(ids)
    pins = pa.table({"pin_id": ids, "interest": [f"interest of {pin}" for pin in ids]})
    with pa.ipc.new_file(folder / PINS, pins.schema) as writer:
        writer.write_table(pins, max_chunksize=7)
    shard = bucket_of(pins["pin_id"], num_shards)
    pins_of_shard = np.bincount(shard, minlength=num_shards).tolist()
    for number in used_shards(pins_of_shard):
        graph = hnswlib.Index(space="ip", dim=vectors.shape[1])
        graph.init_index(pins_of_shard[number], M=16, ef_construction=200, random_seed=1)
        graph.add_items(vectors[shard == number], np.flatnonzero(shard == number), num_threads=1)
        graph.save_index(str(shard_path(folder, number)))
    described = {"embedding_dim": vectors.shape[1], "ef": ef, "num_shards": num_shards, "pins_of_shard": pins_of_shard}
    write_json(folder / "index.json", described)
    return PinIndex.open(folder)


def lists_of(memory: dict[Any, float], seen: Sequence[Any] = (), *, type_: pa.DataType | None = None) -> PinLists:
    id_type = type_ or pa.string()
    increments = np.array(list(memory.values()), np.float32)
    return PinLists(pa.array(list(memory), id_type), increments, pa.array(list(seen), id_type), True)


def named(index: PinIndex, ranked: Ranked) -> list[tuple[Any, float, bool]]:
    ids = index.ids_of(ranked.label_K).to_pylist()
    return list(zip(ids, ranked.score_K.tolist(), ranked.is_memory_K.tolist(), strict=True))


@pytest.fixture
def five(tmp_path: Path) -> PinIndex:
    return make_index(tmp_path / "index", list(FIVE), np.array(list(FIVE.values()), np.float32))


def test_a_memory_of_three_pins_is_merged_by_hand(five: PinIndex) -> None:
    memory = {"gone": 5.0, "d": 0.9, "b": 0.05}  # `gone` is not in the index
    ranked = named(five, rank_with_memory(five, USER, lists_of(memory), 4))
    assert [(pin, is_memory) for pin, _, is_memory in ranked] == [("a", False), ("d", True), ("b", True), ("c", False)]
    assert [score for _, score, _ in ranked] == pytest.approx([1.0, 0.0 + 0.9, 0.8 + 0.05, 0.6])
    assert [pin for pin, *_ in named(five, rank_with_memory(five, USER, lists_of(memory), 2))] == ["a", "d"]
    everything = named(five, rank_with_memory(five, USER, lists_of(memory), 100))
    assert [pin for pin, *_ in everything] == ["a", "d", "b", "c", "e"]  # each once


def test_memory_may_lift_a_pin_above_all_others_and_push_one_below(five: PinIndex) -> None:
    assert named(five, rank_with_memory(five, USER, lists_of({"e": 2.5}), 1)) == [("e", -1.0 + 2.5, True)]
    lowered = named(five, rank_with_memory(five, USER, lists_of({"a": -0.5}), 2))
    assert [pin for pin, *_ in lowered] == ["b", "c"]
    assert [score for _, score, _ in lowered] == pytest.approx([0.8, 0.6])  # a has 1 - 0.5


def test_equal_scores_are_in_the_order_of_the_index(five: PinIndex) -> None:
    ranked = named(five, rank_with_memory(five, USER, lists_of({"d": 1.0, "e": 2.0}), 3))
    assert ranked == [("a", 1.0, False), ("d", 1.0, True), ("e", 1.0, True)]


def test_new_pins_are_neither_seen_nor_in_memory(five: PinIndex) -> None:
    lists = lists_of({"c": 3.0}, ["a", "gone"])
    assert [pin for pin, *_ in named(five, rank_new(five, USER, lists, 2))] == ["b", "d"]
    assert [pin for pin, *_ in named(five, rank_new(five, USER, lists, 10))] == ["b", "d", "e"]
    assert not rank_new(five, USER, lists, 10).is_memory_K.any()
    assert named(five, rank_new(five, USER, lists_of({}, list(FIVE)), 3)) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 60),
    num_pins=st.integers(1, 50),
    num_memory=st.integers(0, 20),
    num_seen=st.integers(0, 40),
    num_shards=st.sampled_from([1, 3]),
    is_string=st.booleans(),
    least=st.sampled_from([-2.0, 0.0]),
)
def test_what_is_ranked_is_exact_search_with_increments(
    tmp_path: Path,
    seed: int,
    k: int,
    num_pins: int,
    num_memory: int,
    num_seen: int,
    num_shards: int,
    is_string: bool,
    least: float,
) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.sort(rng.choice(200, num_pins, replace=False) - 100).tolist()
    known = sorted(f"pin ä{number}" for number in numbers) if is_string else numbers
    others = [f"other {number}" if is_string else 1000 + number for number in range(30)]
    id_type = pa.string() if is_string else pa.int64()
    vector_ND = rng.standard_normal((num_pins, 4)).astype(np.float32)
    vector_ND /= np.linalg.norm(vector_ND, axis=1, keepdims=True)
    user_D = (vector_ND[0] + rng.standard_normal(4).astype(np.float32)) / 2
    name = hashlib.sha256(repr((seed, num_pins, num_shards, is_string)).encode()).hexdigest()
    index = make_index(tmp_path / name, known, vector_ND, num_shards=num_shards)
    pool = rng.permutation(np.array([*known, *others], object)).tolist()
    memory = {pin: float(np.float32(rng.uniform(least, 2))) for pin in pool[:num_memory]}
    seen = rng.permutation(np.array(pool, object)).tolist()[:num_seen]
    lists = lists_of(memory, seen, type_=id_type)

    cosine = dict(zip(known, (vector_ND @ user_D).tolist(), strict=True))
    score = {pin: cosine[pin] + memory.get(pin, 0.0) for pin in known}
    best = sorted(known, key=lambda pin: -score[pin])[:k]
    ranked = named(index, rank_with_memory(index, user_D, lists, k))
    assert [pin for pin, *_ in ranked] == best
    assert [value for _, value, _ in ranked] == pytest.approx([score[pin] for pin in best], abs=1e-5)
    assert [is_memory for *_, is_memory in ranked] == [pin in memory for pin in best]

    new = sorted((pin for pin in known if pin not in memory and pin not in seen), key=lambda pin: -cosine[pin])[:k]
    found = named(index, rank_new(index, user_D, lists, k))
    assert [pin for pin, *_ in found] == new
    assert [value for _, value, _ in found] == pytest.approx([cosine[pin] for pin in new], abs=1e-5)


def test_the_graph_is_searched_further_until_enough_new_pins_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vector_ND = rng.standard_normal((3000, 8)).astype(np.float32)
    vector_ND /= np.linalg.norm(vector_ND, axis=1, keepdims=True)
    index = make_index(tmp_path / "index", list(range(3000)), vector_ND, ef=20)
    cosine_N = vector_ND @ vector_ND[5]
    nearest = np.argsort(-cosine_N).tolist()
    lists = lists_of({}, nearest[:700], type_=pa.int64())
    ranked = rank_new(index, vector_ND[5], lists, 10)
    assert len(ranked.label_K) == 10
    assert not set(ranked.label_K.tolist()) & set(nearest[:700])
    assert len(set(ranked.label_K.tolist()) & set(nearest[700:710])) >= 9  # a graph finds nearly all of them
    np.testing.assert_allclose(ranked.score_K, cosine_N[ranked.label_K], atol=1e-6)


@pytest.mark.parametrize("ids", [list(range(-60, 60, 3)), sorted(f"{n} ä" for n in range(40))], ids=["int", "string"])
def test_pins_are_looked_up_together(tmp_path: Path, ids: list[Any]) -> None:
    for num in (1, 2, 3, 7, 8, 9, 40):
        index = make_index(tmp_path / str(num), ids[:num], np.ones((num, 2), np.float32))
        wanted = [*ids, *([2, 10**12, -(10**12)] if ids[0] == -60 else ["", "zzz", "5"])]
        found = index.rows_of(pa.array(wanted))
        assert found.tolist() == [ids[:num].index(pin) if pin in ids[:num] else -1 for pin in wanted]
        assert index.ids_of(np.arange(num)).to_pylist() == ids[:num]
    assert index.rows_of(pa.array([], index.pin_ids.type)).tolist() == []
