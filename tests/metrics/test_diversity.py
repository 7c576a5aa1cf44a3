"""P90 coverage and interest entropy by hand."""

import math

import torch

from pf_core.metrics.diversity import interest_entropy, p90_coverage


def test_everybody_sees_the_same() -> None:
    """Nine of ten pins with a tenth of the results each account for 90 %."""
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
    assert math.isnan(p90_coverage(torch.full((3, 10), -1), index_size=100))


def test_a_place_without_a_result_does_not_count() -> None:
    """Nine results of pin 0 and one of pin 1, among ten empty places: pin 0 is 90 %."""
    top_UK = torch.tensor([[0] * 9 + [1], [-1] * 10])
    assert p90_coverage(top_UK, index_size=50) == 1 / 50


# Interest entropy: pins 0 to 3 have interest 7, pins 4 and 5 interest 8, pin 6 interest 9, pins 7 and 8 none known.
INTEREST_N = torch.tensor([7, 7, 7, 7, 8, 8, 9, -1, -1], dtype=torch.int32)


def entropy(*top: list[int]) -> list[float]:
    return interest_entropy(torch.tensor(top), INTEREST_N).tolist()


def test_one_interest_has_no_entropy() -> None:
    assert entropy([0, 1, 2, 3], [3, 3, 3, 3]) == [0, 0]
    assert str(entropy([6])[0]) == "0.0"


def test_entropy_by_hand() -> None:
    """Halves; three quarters and a quarter; four equal ones, the unknown among them."""
    halves = -(1 / 2 * math.log(1 / 2) + 1 / 2 * math.log(1 / 2))
    three = -(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4))
    expected = [halves, three, math.log(4)]
    torch.testing.assert_close(entropy([0, 4, 1, 5], [2, 0, 6, 1], [7, 6, 4, 0]), expected)


def test_unknown_interests_are_one() -> None:
    torch.testing.assert_close(entropy([7, 8, 0, 1]), [math.log(2)])
    assert entropy([7, 8, 7, 8]) == [0]


def test_entropy_is_over_the_results_that_there_are() -> None:
    result = entropy([0, 4, -1, -1], [7, 0, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1])
    torch.testing.assert_close(result[:3], [math.log(2), math.log(2), 0.0])
    assert math.isnan(result[3])


def test_entropy_of_nobody() -> None:
    assert interest_entropy(torch.zeros(0, 50, dtype=torch.int64), INTEREST_N).tolist() == []
