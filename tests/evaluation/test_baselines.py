"""The baselines that learn nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pf_core.evaluation import embedders as baselines
from pf_core.evaluation.embedders import MeanOfRecent, Popularity
from pf_core.model.sequences import Sequences
from pf_core.training.training_set import TrainingSet, open_training_set
from tests.support.planted import DAY_US, write_planted_set


@pytest.fixture
def planted(tmp_path: Path) -> TrainingSet:
    return open_training_set(write_planted_set(tmp_path / "set"))


def test_the_mean_counts_the_newest_unit_vectors_alone(planted: TrainingSet) -> None:
    feature = torch.tensor([[[9.0, 0], [0, 2], [3, 0], [0, 0]]])  # the last one is padding
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    actions = Sequences(feature, zeros, zeros, zeros.float(), zeros, torch.tensor([3]))
    user = MeanOfRecent(data=planted, num_actions=2).users(actions)
    torch.testing.assert_close(user, torch.tensor([[0.5**0.5, 0.5**0.5]]))


@pytest.mark.parametrize("at_once", [1 << 22, 100])
def test_popularity_counts_positives_of_the_last_days(
    planted: TrainingSet, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "ACTIONS_AT_ONCE", at_once)
    train = planted.train
    recent = train.is_positive & (train.ts >= planted.cut_us - 10 * DAY_US)
    expected = [int((train.pin[recent] == pin).sum()) for pin in range(5)]
    assert Popularity.of(planted, num_days=10).pins(np.arange(5)).squeeze(1).tolist() == expected
