"""Exact search against sorting everything, on vectors whose scores are exact in float32 and often equal."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pf_core.metrics import exact_search as module
from pf_core.metrics.exact_search import GROUP, Found, Pairs, search

NO_POSITIVES: dict[str, Any] = {
    "positive_query_P": torch.zeros(0, dtype=torch.int64),
    "positive_pin_P": torch.zeros(0, dtype=torch.int64),
}


def find(query_QD: Tensor, index_ND: Tensor, *, k: int, chunk_queries: int | None = None) -> list[list[int]]:
    found = search(
        query_QD,
        index_ND,
        index_pin_N=torch.arange(len(index_ND)),
        positive_PD=torch.zeros(0, index_ND.shape[1]),
        k=k,
        chunk_queries=chunk_queries,
        **NO_POSITIVES,
    )
    assert found.rivals_P.tolist() == []
    return found.top_QK.tolist()


def sort_all(query_QD: Tensor, index_ND: Tensor, k: int) -> list[list[int]]:
    """By (score, lower row), in Python."""
    return [
        sorted(range(len(scores)), key=lambda row, scores=scores: (-scores[row], row))[:k]  # type: ignore[misc]
        for scores in (query_QD @ index_ND.T).tolist()
    ]


def small_integers(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(-2, 3, shape).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_queries=st.integers(0, 7),
    num_pins=st.one_of(st.integers(0, 20), st.integers(0, 12 * GROUP)),
    dim=st.integers(1, 3),
    k=st.sampled_from([1, 2, 5, 10, 40]),
    chunk_queries=st.sampled_from([None, 1, 3]),
)
def test_the_nearest_are_those_of_a_full_sort(
    seed: int, num_queries: int, num_pins: int, dim: int, k: int, chunk_queries: int | None
) -> None:
    rng = np.random.default_rng(seed)
    query_QD, index_ND = small_integers(rng, num_queries, dim), small_integers(rng, num_pins, dim)
    expected = sort_all(query_QD, index_ND, k)
    assert find(query_QD, index_ND, k=k, chunk_queries=chunk_queries) == expected


@pytest.mark.parametrize("num_pins", [5 * GROUP - 1, 5 * GROUP, 5 * GROUP + 1, 40 * GROUP + 77])
def test_real_numbers_too(num_pins: int) -> None:
    torch.manual_seed(num_pins)
    query_QD, index_ND = torch.randn(30, 16), torch.randn(num_pins, 16)
    score_QN = query_QD @ index_ND.T
    rows = torch.tensor(find(query_QD, index_ND, k=10))
    torch.testing.assert_close(score_QN.gather(1, rows), score_QN.topk(10).values)


def test_of_equal_scores_the_lower_row_comes_first() -> None:
    """Everything scores the same, in many groups; then rows 700, 300 and 900 are nearer, the last two equally."""
    index_ND = torch.ones(10 * GROUP, 1)
    assert find(torch.ones(1, 1), index_ND, k=4) == [[0, 1, 2, 3]]
    index_ND[[700, 300, 900], 0] = torch.tensor([3.0, 2.0, 2.0])
    assert find(torch.ones(1, 1), index_ND, k=5) == [[700, 300, 900, 0, 1]]
    assert find(-torch.ones(1, 1), index_ND, k=3) == [[0, 1, 2]]


def test_zero_has_no_sign() -> None:
    """Scores are 0, -0, 0, -1, -0, 1."""
    assert find(torch.ones(1, 1), torch.tensor([[0.0], [-0.0], [0.0], [-1.0], [-0.0], [1.0]]), k=6) == [
        [5, 0, 1, 2, 4, 3]
    ]


def test_all_of_an_index_that_is_smaller_than_k() -> None:
    index_ND = torch.tensor([[1.0], [3.0], [-2.0]])
    assert find(torch.tensor([[1.0], [-1.0]]), index_ND, k=50) == [[1, 0, 2], [2, 0, 1]]
    assert find(torch.tensor([[1.0]]), index_ND[:0], k=50) == [[]]


def test_no_queries() -> None:
    assert find(torch.zeros(0, 4), torch.ones(3, 4), k=2) == []
    assert find(torch.zeros(0, 4), torch.ones(0, 4), k=2) == []


@pytest.mark.parametrize("groups_at_once", [1, 2, 9, 10, 11])
@pytest.mark.parametrize("k", [5, 2 * GROUP])
def test_the_index_is_multiplied_in_blocks(groups_at_once: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers are often equal, within a block and across blocks; real numbers are not."""
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", groups_at_once)
    sizes: list[int] = []
    score = module._score

    def watch(index_BD: Tensor, query_CD: Tensor, score_BC: Tensor) -> None:
        sizes.append(score_BC.numel())
        score(index_BD, query_CD, score_BC)

    monkeypatch.setattr(module, "_score", watch)
    rng = np.random.default_rng(groups_at_once)
    query_QD, index_ND = small_integers(rng, 9, 3), small_integers(rng, 9 * GROUP + 5, 3)
    assert find(query_QD, index_ND, k=k, chunk_queries=4) == sort_all(query_QD, index_ND, k)
    assert max(sizes) == 4 * GROUP * min(10, max(groups_at_once, -(-(k + 1) // GROUP)))
    query_QD, index_ND = (
        torch.from_numpy(rng.standard_normal((9, 3))),
        torch.from_numpy(rng.standard_normal((9 * GROUP + 5, 3))),
    )
    query_QD, index_ND = query_QD.float(), index_ND.float()
    assert find(query_QD, index_ND, k=k) == sort_all(query_QD, index_ND, k)


def test_the_nearest_may_all_be_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores ascend, so that every block brings nothing but nearer pins."""
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", 1)
    num = 4 * GROUP + 3
    assert find(torch.ones(1, 1), torch.arange(num).float()[:, None], k=3) == [[num - 1, num - 2, num - 3]]
    assert find(-torch.ones(1, 1), torch.arange(num).float()[:, None], k=3) == [[0, 1, 2]]


def test_vectors_may_require_a_gradient() -> None:
    assert find(torch.ones(1, 1, requires_grad=True), torch.tensor([[1.0], [2.0]], requires_grad=True), k=1) == [[1]]


# Rivals


def random_job(seed: int, *, num_pins: int, dim: int, k: int, device: str = "cpu") -> tuple[dict[str, Any], Found]:
    """Pins 0 to 99 may be positives; the index holds other pins too, and some of those."""
    rng = np.random.default_rng(seed)
    feature = small_integers(rng, 100 + num_pins, dim)
    index_pin_N = torch.from_numpy(rng.permutation(100 + num_pins)[:num_pins])
    job = {
        "query_QD": small_integers(rng, 6, dim),
        "index_ND": feature[index_pin_N],
        "index_pin_N": index_pin_N,
        "positive_query_P": torch.from_numpy(rng.integers(0, 6, 40)),
        "positive_pin_P": torch.from_numpy(rng.integers(0, 100, 40)),
    }
    job["positive_PD"] = feature[job["positive_pin_P"]]
    job = {name: value.to(device) for name, value in job.items()}
    return job, search(**job, k=k, chunk_queries=int(rng.integers(1, 8)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 6 * GROUP), st.integers(1, 3), st.sampled_from([1, 2, 5, 50]))
def test_rivals_are_all_that_score_as_much(seed: int, num_pins: int, dim: int, k: int) -> None:
    job, found = random_job(seed, num_pins=num_pins, dim=dim, k=k)
    assert found.top_QK.tolist() == sort_all(job["query_QD"], job["index_ND"], k)
    score_QN = (job["query_QD"] @ job["index_ND"].T).tolist()
    pins = job["index_pin_N"].tolist()
    for number, (query, pin) in enumerate(
        zip(job["positive_query_P"].tolist(), job["positive_pin_P"].tolist(), strict=True)
    ):
        own = float(job["query_QD"][query] @ job["positive_PD"][number])
        expected = sum(other != pin and score >= own for other, score in zip(pins, score_QN[query], strict=True))
        got = int(found.rivals_P[number])
        assert got == expected if expected < k else k <= got <= k + 1


def test_rivals_by_hand() -> None:
    """Scores of the index are 5, 4, 4, 3, 1; pins 12 and 14 are in it."""
    index = {10: 5.0, 11: 4.0, 12: 4.0, 13: 3.0, 14: 1.0}
    positives = {99: 6.0, 98: 4.5, 97: 4.0, 12: 4.0, 14: 1.0, 96: 0.0}
    found = search(
        torch.ones(1, 1),
        torch.tensor(list(index.values()))[:, None],
        index_pin_N=torch.tensor(list(index)),
        positive_query_P=torch.zeros(6, dtype=torch.int64),
        positive_pin_P=torch.tensor(list(positives)),
        positive_PD=torch.tensor(list(positives.values()))[:, None],
        k=4,
    )
    assert dict(zip(positives, found.rivals_P.tolist(), strict=True)) == {
        99: 0,
        98: 1,  # 10
        97: 3,  # 10, and 11 and 12 as near as itself
        12: 2,  # 10 and 11, not itself
        14: 4,  # all but itself
        96: 5,  # all: five nearest were looked at
    }
    assert found.top_QK.tolist() == [[0, 1, 2, 3]]


def test_as_many_groups_as_nearest_pins_are_looked_into() -> None:
    """Three pins score the same, each in a group of its own, and the first is the positive: it has two rivals."""
    index_ND = -torch.ones(10 * GROUP, 1)
    index_ND[[0, GROUP, 2 * GROUP]] = 5.0
    found = search(
        torch.ones(1, 1),
        index_ND,
        index_pin_N=torch.arange(10 * GROUP),
        positive_query_P=torch.tensor([0]),
        positive_pin_P=torch.tensor([0]),
        positive_PD=torch.tensor([[5.0]]),
        k=2,
    )
    assert found.rivals_P.tolist() == [2]


def test_many_positives_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven at a time with 14 numbers for k = 2; every third one is nearer than the index."""
    monkeypatch.setattr(module, "POSITIVE_NUMBERS_AT_ONCE", 14)
    num = 30
    own = torch.tensor([3.0, 1.0, 0.0]).repeat(num // 3)
    found = search(
        torch.ones(1, 1),
        torch.tensor([[2.0], [1.0]]),
        index_pin_N=torch.tensor([7, 8]),
        positive_query_P=torch.zeros(num, dtype=torch.int64),
        positive_pin_P=torch.full((num,), 9),
        positive_PD=own[:, None],
        k=2,
    )
    assert found.rivals_P.tolist() == [0, 2, 2] * (num // 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_finds_the_same() -> None:
    _, found = random_job(1, num_pins=5 * GROUP, dim=3, k=10)
    _, on_cuda = random_job(1, num_pins=5 * GROUP, dim=3, k=10, device="cuda")
    assert on_cuda.top_QK.tolist() == found.top_QK.tolist()
    assert on_cuda.rivals_P.tolist() == found.rivals_P.tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_queries=st.integers(1, 7),
    num_pins=st.one_of(st.integers(1, 20), st.integers(1, 40 * GROUP)),
    k=st.sampled_from([1, 2, 10, 40]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    chunk_queries=st.sampled_from([None, 1, 3]),
)
def test_increments_and_exclusions_are_those_of_a_full_sort(
    seed: int, num_queries: int, num_pins: int, k: int, share: float, chunk_queries: int | None
) -> None:
    rng = np.random.default_rng(seed)
    query_QD, index_ND = small_integers(rng, num_queries, 2), small_integers(rng, num_pins, 2)
    increment_QN = np.where(rng.random((num_queries, num_pins)) < share, rng.integers(1, 5, (num_queries, num_pins)), 0)
    is_excluded_QN = rng.random((num_queries, num_pins)) < share
    query_P, pin_P = rng.integers(num_queries, size=30), rng.integers(num_pins, size=30)
    shuffled = rng.permutation(np.argwhere(increment_QN))
    added = Pairs(*(torch.from_numpy(each) for each in (*shuffled.T, increment_QN[*shuffled.T].astype(np.float32))))
    excluded = Pairs(*(torch.from_numpy(each) for each in rng.permutation(np.argwhere(is_excluded_QN)).T))
    found = search(
        query_QD,
        index_ND,
        index_pin_N=torch.arange(num_pins),
        positive_query_P=torch.from_numpy(query_P),
        positive_pin_P=torch.from_numpy(pin_P),
        positive_PD=index_ND[pin_P],
        k=k,
        increments=added,
        positive_increment_P=torch.from_numpy(increment_QN[query_P, pin_P]).float(),
        excluded=excluded,
        chunk_queries=chunk_queries,
    )
    score_QN = (query_QD @ index_ND.T).numpy() + increment_QN
    top_QK = np.argsort(-score_QN, axis=1, kind="stable")[:, :k]
    assert found.top_QK.tolist() == top_QK.tolist()
    assert found.score_QK.tolist() == np.take_along_axis(score_QN, top_QK, 1).tolist()
    for query, pin, rivals, left in zip(query_P, pin_P, found.rivals_P, found.rivals_left_P, strict=True):
        is_rival_N = (score_QN[query] >= score_QN[query, pin]) & (np.arange(num_pins) != pin)
        assert min(int(rivals), k) == min(is_rival_N.sum(), k)
        assert min(int(left), k) == min((is_rival_N & ~is_excluded_QN[query]).sum(), k)


def test_without_exclusions_the_rivals_are_counted_once() -> None:
    one = torch.ones(1, dtype=torch.int64)
    found = search(
        torch.ones(2, 1),
        torch.ones(9, 1),
        index_pin_N=torch.arange(9),
        positive_query_P=one,
        positive_pin_P=one,
        positive_PD=torch.ones(1, 1),
        k=20,
    )
    assert found.rivals_P.tolist() == [8]
    assert found.rivals_left_P is found.rivals_P
