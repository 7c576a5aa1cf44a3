"""P90 coverage by hand, and exact search against sorting."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pf_core.diversity import p90_coverage, top_k


def test_everybody_sees_the_same() -> None:
    """Of ten pins, each a tenth of the results, nine are 90 %."""
    top_UK = torch.arange(10).repeat(500, 1)
    assert p90_coverage(top_UK, index_size=1000) == 9 / 1000


def test_everybody_sees_something_else() -> None:
    """100 users with 2 pins of their own each: 180 of the 200 results are 90 %."""
    top_UK = torch.arange(200).view(100, 2)
    assert p90_coverage(top_UK, index_size=1000) == 180 / 1000


def test_the_most_retrieved_pins_come_first() -> None:
    """Pin 7 has 8 of 10 results, pins 1 and 2 have one each: two pins hold 9 of 10, one pin only 8."""
    top_UK = torch.tensor([[7]] * 8 + [[1], [2]])
    assert p90_coverage(top_UK, index_size=20) == 2 / 20
    assert p90_coverage(top_UK, index_size=20, share=0.8) == 1 / 20
    assert p90_coverage(top_UK, index_size=20, share=0.81) == 2 / 20
    assert p90_coverage(top_UK, index_size=20, share=1.0) == 3 / 20


def test_an_index_that_is_used_evenly_gives_the_share() -> None:
    assert p90_coverage(torch.arange(50).view(5, 10), index_size=50) == 45 / 50
    assert p90_coverage(torch.arange(7).view(7, 1), index_size=7) == 7 / 7  # 6.3 pins are not enough with 6


def test_the_share_is_exact() -> None:
    """0.07 * 100 is more than 7 in floats."""
    assert p90_coverage(torch.arange(100)[:, None], index_size=100, share=0.07) == 7 / 100


def test_without_results_it_is_undefined() -> None:
    assert math.isnan(p90_coverage(torch.zeros(0, 10, dtype=torch.int64), index_size=100))


def unit(*shape: int, seed: int) -> Tensor:
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(vectors, dim=-1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9), st.integers(1, 30), st.integers(1, 12), st.integers(1, 4), st.integers(0, 10_000))
def test_the_nearest_are_those_of_a_full_sort(users: int, pins: int, k: int, chunk_users: int, seed: int) -> None:
    user_UD, index_ND = unit(users, 4, seed=seed), unit(pins, 4, seed=seed + 1)
    expected = (user_UD @ index_ND.T).argsort(dim=1, descending=True)[:, :k]
    assert top_k(user_UD, index_ND, k=k, chunk_users=chunk_users).tolist() == expected.tolist()
