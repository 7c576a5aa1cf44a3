"""Taste, content, trend and memory against hand-worked values; the MLPs start at 0, so that formulas remain."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from pf_core.config.parts import PartsConfig
from pf_core.model.parts.memory import Memory, increments
from pf_core.model.parts.model import USER_MEAN, USER_SCALE, PartsModel
from pf_core.model.parts.own_pins import LOG_AGE, LOG_DAYS, LOG_DECAYED
from pf_core.model.parts.statistics import STATISTICS, WINDOWS_DAYS
from pf_core.model.parts.trend import EPSILON, START_BETA, Trend
from tests.support.parts import own_pins_of, pin_inputs, random_model

AGE, DECAYED = f"x{LOG_AGE}", f"x{LOG_DECAYED}"


def model_of(*, content_dim: int = 0, **config: object) -> PartsModel:
    torch.manual_seed(0)
    return PartsModel(PartsConfig.model_validate(config), content_dim=content_dim, num_action_types=1).eval()


# Taste


def test_taste_of_a_user_is_a_weighted_sum() -> None:
    """Two heads: all pins alike, and age ** -0.7 with a tenth of the weight in the sum. Ages 1 and 4 days."""
    model = model_of(factor_dim=2, trend_dim=0, heads=2, memory=False)
    pins = pin_inputs(factor=[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], trust=[1.0, 0.5, 1.0])
    own = own_pins_of([0, 1], **{AGE: [0.0, log(4)]})
    alike = np.array([1.0, 0.5]) / sqrt(1 + 0.25)
    weight = 0.5 * 4**-0.7
    recent = np.array([1.0, weight]) / sqrt(1 + weight**2)
    vector = model.embed_users(own, pins).vector_BV
    assert vector.tolist() == [pytest.approx((alike + 0.1 * recent).tolist(), rel=1e-5)]


def test_many_alike_pins_make_a_longer_taste() -> None:
    model = model_of(factor_dim=2, trend_dim=0, heads=1, memory=False)
    pins = pin_inputs(factor=[[1.0, 0.0]] * 4 + [[0.0, 1.0]])
    vector = model.embed_users(own_pins_of([0], [0, 1, 2, 3], []), pins).vector_BV
    torch.testing.assert_close(vector, torch.tensor([[1.0, 0.0], [4 / sqrt(4), 0.0], [0.0, 0.0]]))


def test_taste_of_a_pin_is_its_factor_times_the_trust() -> None:
    model = model_of(factor_dim=2, trend_dim=0, memory=False)
    pins = pin_inputs(factor=[[0.6, 0.8], [0.0, 0.0]], trust=[0.5, 0.0])
    vector = model.embed_pins(pins, torch.zeros(2, len(WINDOWS_DAYS)), torch.ones(len(WINDOWS_DAYS)))
    torch.testing.assert_close(vector, torch.tensor([[0.3, 0.4], [0.0, 0.0]]))


def test_dropped_pins_leave_the_sums_and_stay_in_memory() -> None:
    model = random_model(factor_dim=2, trend_dim=0, content_dim=2)
    pins = pin_inputs(factor=[[1.0, 0.0], [0.6, 0.8]], content=[[1.0, 0.0], [0.0, 1.0]])
    own = own_pins_of([0, 1])
    all_dropped = model.embed_users(own, pins, keep_P=torch.zeros(2))
    assert all_dropped.vector_BV.abs().max() == 0
    kept = model.embed_users(own, pins)
    assert torch.equal(kept.strength_P, all_dropped.strength_P)
    assert torch.equal(model.embed_users(own, pins, keep_P=torch.ones(2)).vector_BV, kept.vector_BV)


# Content


def test_content_of_a_user_is_a_weighted_mean_of_the_pins_that_have_it() -> None:
    """One head: decayed_days ** 0.5. Pin 1 has no content vector and does not count."""
    model = model_of(content_dim=2, factor_dim=0, trend_dim=0, heads=1, memory=False)
    pins = pin_inputs(content=[[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    own = own_pins_of([0, 1, 2], [1], **{DECAYED: [log(4), log(9), 0.0, 0.0]})
    mean = np.array([2.0, 1.0]) / (2 + 1)
    vector = model.embed_users(own, pins).vector_BV
    np.testing.assert_allclose(vector[0].detach(), 3 * mean, rtol=1e-5)
    assert vector[1].tolist() == [0, 0]


def test_content_of_a_pin_without_any_action() -> None:
    model = model_of(content_dim=2, factor_dim=2, trend_dim=0)
    pins = pin_inputs(factor=[[0.0, 0.0]] * 2, trust=[0.0, 0.0], content=[[0.6, 0.8], [0.0, 0.0]])
    vector = model.embed_pins(pins, torch.zeros(2, len(WINDOWS_DAYS)), torch.ones(len(WINDOWS_DAYS)))
    torch.testing.assert_close(vector, torch.tensor([[0, 0, 0.6, 0.8], [0, 0, 0, 0]]))


# Trend


def test_the_log_share_is_linear_in_the_counts() -> None:
    trend = Trend(2, num_user_features=4)
    assert sum(START_BETA) == pytest.approx(1)
    rates_MW = torch.tensor([[2.0, 1.0, 0.5, 0.2, 0.1], [4.0, 2.0, 1.0, 0.4, 0.2], [0.0] * 5])
    mean_rate_W = rates_MW.mean(0)
    r = [0.05 * 2 + 0.6 * 1 + 0.25 * 0.5 + 0.07 * 0.2 + 0.03 * 0.1]
    r += [2 * r[0], 0.0]
    mean = sum(r) / 3
    expected = [log((each / mean + EPSILON) / (1 + EPSILON)) for each in r]
    share_M = trend.log_share(rates_MW, mean_rate_W)
    assert share_M.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)  # the first one is 0
    assert share_M.exp().sum().item() == pytest.approx(3, rel=1e-5)  # shares times the number of pins


def test_trend_is_the_first_coordinate_at_the_start() -> None:
    trend = Trend(3, num_user_features=4)
    trend.center.fill_(0.25)
    rates_MW = torch.tensor([[1.0] * 5, [2.0] * 5])
    pins = trend.of_pins(torch.randn(2, len(STATISTICS)), rates_MW, rates_MW[0])
    log_share = [0.0, log((2 + EPSILON) / (1 + EPSILON))]
    torch.testing.assert_close(pins, torch.tensor([[share - 0.25, 0, 0] for share in log_share]))
    assert trend.of_users(torch.randn(2, 4)).tolist() == [[1, 0, 0]] * 2


def test_a_day_without_any_use_has_finite_shares() -> None:
    nothing = torch.zeros(3, len(WINDOWS_DAYS))
    assert Trend(1, num_user_features=4).log_share(nothing, nothing[0]).isfinite().all()


def test_the_center_lies_between_the_extremes_and_memory_above_it() -> None:
    model = model_of(factor_dim=2)
    assert model.trend is not None
    assert model.memory is not None
    before = model.memory.b0.item()
    model.start(torch.tensor([-9.0, 1.0, 3.0]), num_pins=100)
    assert model.trend.center.item() == (-9 + 3) / 2
    assert model.memory.b0.item() == pytest.approx(before + log(100) - (-3))


# Memory


def test_memory_starts_as_own_frequency() -> None:
    """Where memory is far above the vector, own pins rank by their decayed days, and by nothing else."""
    model = model_of(factor_dim=2, trend_dim=0)
    pins = pin_inputs(factor=[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    days = [2.5, 0.9, 3.1]
    own = own_pins_of([0, 1, 2], **{DECAYED: [log(each) for each in days]})
    strength_P = model.embed_users(own, pins).strength_P
    assert strength_P.diff().tolist() == pytest.approx([log(0.9 / 2.5), log(3.1 / 0.9)], rel=1e-5)
    memory = Memory(num_inputs=3)
    assert memory(own, torch.randn(3, 3)).tolist() == pytest.approx([memory.b0.item() + log(each) for each in days])


def test_an_increment_mixes_memory_with_the_vector() -> None:
    """exp(logit + increment) = exp(logit) + exp(strength)."""
    strength, logit = [2.0, -1.0, 0.5], [1.0, 3.0, 0.5]
    increment_P = increments(torch.tensor(strength), torch.tensor(logit))
    expected = [log(exp(r) + exp(v)) - v for r, v in zip(strength, logit, strict=True)]
    assert increment_P.tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[2] == pytest.approx(log(2))
    assert (increments(torch.tensor([-50.0]), torch.tensor([50.0])) >= 0).all()


# Users and lengths


def test_features_of_users() -> None:
    """A trend that returns its input shows them: three own pins of 1, 2 and 5 days; a user without any."""
    model = model_of(factor_dim=0, trend_dim=4, memory=False)
    assert model.trend is not None
    model.trend.of_users = lambda user_BU: user_BU  # type: ignore[method-assign]
    pins = pin_inputs(num_pins=3)
    pins.statistics_MF[:, 1] = torch.tensor([1.0, 2.0, 6.0])
    pins.statistics_MF[:, 4] = torch.tensor([-1.0, 0.0, 4.0])
    own = own_pins_of([0, 1, 2], [], **{f"x{LOG_DAYS}": [0.0, log(2), log(5)]})
    sizes = [(log(1 + size) - mean) / scale for size, mean, scale in zip((3, 8), USER_MEAN, USER_SCALE, strict=True)]
    empty = [-mean / scale for mean, scale in zip(USER_MEAN, USER_SCALE, strict=True)]
    found = model.embed_users(own, pins).vector_BV.tolist()
    assert found == [pytest.approx([*sizes, (1 + 2 + 6) / 3, (-1 + 0 + 4) / 3]), pytest.approx([*empty, 0, 0])]


def test_slack_makes_unit_pins() -> None:
    model = model_of(factor_dim=2, trend_dim=0)
    model.pin_length.fill_(5.0)
    unit_MV, is_clipped_M = model.unit_pins(torch.tensor([[3.0, 4.0], [1.5, 2.0], [6.0, 8.0], [0.0, 0.0]]))
    expected = [[0.6, 0.8, 0], [0.3, 0.4, sqrt(1 - 0.25)], [0.6, 0.8, 0], [0, 0, 1]]
    torch.testing.assert_close(unit_MV, torch.tensor(expected), atol=1e-3, rtol=0)  # the root of a rounding error
    assert is_clipped_M.tolist() == [False, False, True, False]


def test_cosines_rank_as_logits() -> None:
    model = random_model(pin_length=7.0)
    generator = torch.Generator().manual_seed(0)
    pin_MV, user_BV = (torch.randn(num, 12, generator=generator, dtype=torch.float64) for num in (50, 20))
    unit_MV, is_clipped_M = model.unit_pins(pin_MV)
    unit_BV, scale_B = model.unit_users(user_BV)
    assert not is_clipped_M.any()
    torch.testing.assert_close(unit_MV.norm(dim=1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(unit_BV.norm(dim=1), torch.ones(20, dtype=torch.float64))
    cosine_BM, logit_BM = unit_BV @ unit_MV.T, user_BV @ pin_MV.T
    torch.testing.assert_close(cosine_BM * scale_B[:, None], logit_BM)
    assert torch.equal(cosine_BM.argsort(dim=1), logit_BM.argsort(dim=1))


def test_a_user_of_no_length_likes_the_longest_pins() -> None:
    """Own pins without a factor and without a content vector, and no trend: the vector is zero."""
    model = model_of(factor_dim=2, trend_dim=0, memory=False)
    model.pin_length.fill_(5.0)
    pins = pin_inputs(factor=[[0.0, 0.0]] * 2, trust=[0.0, 0.0])
    vector_BV = model.embed_users(own_pins_of([0, 1], [1]), pins).vector_BV
    unit_BV, scale_B = model.unit_users(torch.cat([vector_BV, torch.tensor([[3.0, 4.0]])]))
    torch.testing.assert_close(unit_BV, torch.tensor([[0.0, 0, -1], [0, 0, -1], [0.6, 0.8, 0]]))
    assert scale_B.tolist() == pytest.approx([1 * 5, 1 * 5, 5 * 5])
    unit_MV, _ = model.unit_pins(torch.tensor([[0.3, 0.4], [0.0, 0.0], [3.0, 4.0], [1.5, 2.0]]))
    assert (unit_MV @ unit_BV[0]).argsort(descending=True).tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("config", "content_dim", "expected"),
    [
        ({}, 16, {"taste": (0, 64), "content": (64, 80), "trend": (80, 88), "slack": (88, 89)}),
        ({"content": False}, 16, {"taste": (0, 64), "trend": (64, 72), "slack": (72, 73)}),
        ({"factor_dim": 0}, 0, {"trend": (0, 8), "slack": (8, 9)}),
        ({"factor_dim": 4, "trend_dim": 0}, 2, {"taste": (0, 4), "content": (4, 6), "slack": (6, 7)}),
    ],
)
def test_slices_cover_the_vector(config: dict[str, object], content_dim: int, expected: dict[str, object]) -> None:
    model = model_of(content_dim=content_dim, **config)
    assert model.slices == expected
    assert model.embedding_dim == model.slices["slack"][1]
    pins = pin_inputs(
        factor=[[0.0] * model.config.factor_dim] * 2 if model.config.factor_dim else (),
        content=[[0.0] * model.content_dim] * 2 if model.content_dim else (),
        num_pins=2,
    )
    vector_MV = model.embed_pins(pins, torch.zeros(2, len(WINDOWS_DAYS)), torch.ones(len(WINDOWS_DAYS)))
    assert model.unit_pins(vector_MV)[0].shape == (2, model.embedding_dim)
    users = model.embed_users(own_pins_of([0, 1], [0], []), pins)
    assert model.unit_users(users.vector_BV)[0].shape == (3, model.embedding_dim)
