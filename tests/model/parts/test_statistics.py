"""Statistics of pins against hand-worked values."""

from math import log, sqrt

import numpy as np
import pytest
import torch

from pf_core.model.parts import statistics
from pf_core.model.parts.statistics import STATISTICS, WINDOWS_DAYS, DayCounts, centered, raw_statistics, scale_of
from pf_core.pins import counts as pin_counts
from tests.support.parts import own_pins_of, pin_inputs, random_model


def counts(*user_days: list[int], age: list[int], num_days: int) -> DayCounts:
    return DayCounts(np.array(user_days), np.array(age), num_days)


def test_windows_are_those_of_the_counts_of_days() -> None:
    assert statistics.WINDOWS_DAYS == pin_counts.WINDOWS_DAYS == (1, 7, 28, 91, 364)


def test_rates_are_per_day_of_the_log() -> None:
    day = counts([1, 14, 20, 20, 20], [0, 0, 0, 0, 0], age=[10, 0], num_days=10)
    assert day.is_known().tolist() == [True, False]
    np.testing.assert_allclose(day.rates(), [[1 / 1, 14 / 7, 20 / 10, 20 / 10, 20 / 10], [0] * 5], rtol=1e-6)
    long = counts([1, 14, 20, 182, 728], age=[400], num_days=500)
    np.testing.assert_allclose(long.rates(), [[1 / 1, 14 / 7, 20 / 28, 182 / 91, 728 / 364]], rtol=1e-6)


def test_raw_statistics() -> None:
    day = counts([2, 14, 28, 91, 364], [0, 0, 0, 0, 3], [0] * 5, age=[3, 100, 0], num_days=1000)
    raw_NF = raw_statistics(day, np.array([0.7, 0.2, 0.0]))
    assert raw_NF.dtype == np.float32
    used = [log(2 + 0.5), log(2 + 0.5 / 7), log(1 + 0.5 / 28), log(1 + 0.5 / 91), log(364 + 0.5), log(3), 0.7]
    never = [log(0.5), log(0.5 / 7), log(0.5 / 28), log(0.5 / 91)]
    assert raw_NF[0].tolist() == pytest.approx(used, rel=1e-5)
    assert raw_NF[1].tolist() == pytest.approx([*never, log(3 + 0.5), log(28), 0.2], rel=1e-5)  # ages end with 28 days
    assert raw_NF[2].tolist() == pytest.approx([*never, log(0.5), log(1), 0.0], rel=1e-5)
    assert len(STATISTICS) == 7


def test_the_mean_and_the_scale_are_those_of_the_known_pins() -> None:
    """Known are 1 and 5: mean 3, standard deviation 2; the second statistic is constant."""
    raw_NF = np.array([[1, 4], [5, 4], [9, 9]], np.float32)
    is_known_N = np.array([True, True, False])
    assert scale_of(raw_NF, is_known_N).tolist() == pytest.approx([sqrt((2**2 + 2**2) / 2), 0.1])
    found = centered(raw_NF, is_known_N)
    assert found.tolist() == [[1 - 3, 0], [5 - 3, 0], [9 - 3, 9 - 4]]
    assert found.dtype == np.float32


def test_a_day_before_any_use() -> None:
    raw_NF, nobody = np.array([[1, 4]], np.float32), np.array([False])
    assert scale_of(raw_NF, nobody).tolist() == [1, 1]
    assert centered(raw_NF, nobody).tolist() == [[1, 4]]


def test_the_model_divides_by_the_scale() -> None:
    model, pins = random_model(factor_dim=2), pin_inputs(factor=[[0.6, 0.8], [1.0, 0.0]])
    pins = pins._replace(statistics_MF=torch.randn(2, len(STATISTICS)))
    own, rates = own_pins_of([0, 1]), (torch.ones(2, len(WINDOWS_DAYS)), torch.ones(len(WINDOWS_DAYS)))
    expected = model.embed_users(own, pins), model.embed_pins(pins, *rates)
    model.statistics_scale_F.fill_(4.0)
    scaled = pins._replace(statistics_MF=pins.statistics_MF * 4)
    assert torch.equal(model.embed_users(own, scaled).vector_BV, expected[0].vector_BV)
    assert torch.equal(model.embed_users(own, scaled).strength_P, expected[0].strength_P)
    assert torch.equal(model.embed_pins(scaled, *rates), expected[1])
