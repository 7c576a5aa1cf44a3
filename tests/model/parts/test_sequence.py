"""The newest actions of users, hand-worked, and the transformer over them."""

import numpy as np
import pytest
import torch

from pf_core.config.parts import PartsConfig
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.sequence import NewestActions, newest_actions
from pf_core.timelines.arrays import Timelines
from tests.support.parts import own_pins_of, pin_inputs, random_model, timelines_of

USERS = timelines_of(
    [(10.25, 5, 0, True), (10.5, 7, 1, True), (12.5, 5, 2, True)],
    [],
    [(3.75, 7, 1, False)],
)
PINS = np.array([5, 7])


def newest(timelines: Timelines, num_steps: int) -> NewestActions:
    return newest_actions(timelines, timelines.offsets[:-1], timelines.offsets[1:], PINS, num_steps=num_steps)


def test_the_newest_actions_by_hand() -> None:
    """Ages count from the beginning of day 13 and of day 4; the oldest action has no gap."""
    found = newest(USERS, 4)
    assert found.pin_BS.tolist() == [[0, 1, 0, 0], [0] * 4, [1, 0, 0, 0]]
    assert found.age_BS.tolist() == [[2.75, 2.5, 0.5, 0], [0] * 4, [0.25, 0, 0, 0]]
    assert found.gap_BS.tolist() == [[0, 0.25, 2, 0], [0] * 4, [0] * 4]
    assert found.action_type_BS.tolist() == [[0, 1, 2, 0], [0] * 4, [1, 0, 0, 0]]
    assert found.length_B.tolist() == [3, 1, 1]


def test_older_actions_are_left_out() -> None:
    found = newest(USERS, 2)
    assert found.pin_BS.tolist() == [[1, 0], [0, 0], [1, 0]]
    assert found.age_BS.tolist() == [[2.5, 0.5], [0, 0], [0.25, 0]]
    assert found.gap_BS.tolist() == [[0, 2], [0, 0], [0, 0]]
    assert found.length_B.tolist() == [2, 1, 1]


def test_training_starts_without_the_transformer() -> None:
    pins, own = pin_inputs(factor=[[0.6, 0.8], [1.0, 0.0]]), own_pins_of([0, 1], [], [1])
    torch.manual_seed(0)
    config = PartsConfig(factor_dim=2, trend_dim=2, transformer_layers=1, transformer_dim=16)
    model = PartsModel(config, content_dim=0, num_action_types=3).eval()
    with_it = model.embed_users(own, pins, newest(USERS, 4)).vector_BV
    model.sequence = None
    assert torch.equal(with_it, model.embed_users(own, pins).vector_BV)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_is_not_read(num_layers: int) -> None:
    model = random_model(factor_dim=2, transformer_layers=num_layers, transformer_dim=16)
    pins, own = pin_inputs(factor=[[0.6, 0.8], [1.0, 0.0]]), own_pins_of([0, 1], [], [1])
    short = model.embed_users(own, pins, newest(USERS, 3)).vector_BV
    torch.testing.assert_close(model.embed_users(own, pins, newest(USERS, 9)).vector_BV, short, atol=1e-5, rtol=1e-5)
    changed = newest(USERS, 3)
    changed.age_BS[0, 1] += 1
    assert not torch.allclose(model.embed_users(own, pins, changed).vector_BV[0], short[0], atol=1e-5)
