"""Judging after the cut: what is asked, what cannot be, and what the baselines answer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pf_core.contracts import PipelineError, shift_ds
from pf_core.evaluation import Future, MeanOfRecent, Popularity, at_the_cut, read_future
from pf_core.hyperparameters import TrainingConfig
from pf_core.model import Sequences
from pf_core.packing import is_held_out
from pf_core.pin_features import build_pin_features
from pf_core.training_set import TrainingSet, build_training_set, latest_training_set, open_training_set
from tests.planted import PINS_PER_INTEREST, write_planted_set
from tests.sites import START, SmallSite

SECOND_DAY = shift_ds(START, 1)
DAY_S = 86_400.0


def write_pins(site: SmallSite, ds: str, pins: dict[str, list[float]]) -> None:
    path = site.root / "pins" / f"{ds}.parquet"
    path.parent.mkdir(exist_ok=True)
    vectors = pa.array(list(pins.values()), pa.list_(pa.float32()))
    pq.write_table(pa.table({"pin": pa.array(list(pins), pa.string()), "vector": vectors}), path)


def test_the_future_is_what_held_out_users_liked_after_the_cut(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    site.site = site.site.model_copy(update={"training": TrainingConfig(held_out_share=0.5, evaluation_days=1)})
    users = pa.array(range(100))
    judge, *_ = users.filter(pa.array(is_held_out(users, 0.5))).to_pylist()
    taught, newcomer, *_ = users.filter(pa.array(~is_held_out(users, 0.5))).to_pylist()
    write_pins(site, START, {"a": [1, 0], "b": [0, 1]})
    write_pins(site, SECOND_DAY, {"fresh": [1, 1]})
    site.write_log(START, [(judge, "a", 1, "look"), (taught, "b", 2, "look"), (taught, "a", 3, "look")])
    later = [(judge, "b", 5, "look"), (judge, "b", 9, "save"), (judge, "fresh", 6, "look")]
    later += [(taught, "a", 7, "look"), (newcomer, "a", 8, "look")]
    site.write_log(SECOND_DAY, [(user, pin, DAY_S + second, event) for user, pin, second, event in later])
    days = [START, SECOND_DAY]
    site.ingest(days)
    site.build(days)
    list(build_pin_features(site.site, days, engine=site.engine, progress=print))
    build_training_set(site.site, cut_ds=None, engine=site.engine, progress=print)
    data = open_training_set(latest_training_set(site.site))

    future = read_future(site.site, data, 1)
    assert future.user.tolist() == [0]
    assert future.pin.tolist() == [1]  # b, once; `fresh` had no feature at the cut
    assert (future.num_unknown_users, future.num_unknown_pins) == (1, 1)
    held_out = at_the_cut(data, future, sequence_length=8, num_pins=10, seed=0)
    assert (held_out.starts.tolist(), held_out.ends.tolist()) == ([0], [0])
    assert held_out.recall(MeanOfRecent(data=data, num_actions=8), k=1) == 0  # she looked at a, and a stands before b
    assert held_out.recall(MeanOfRecent(data=data, num_actions=8), k=2) == 1


@pytest.fixture
def planted(tmp_path: Path) -> TrainingSet:
    return open_training_set(write_planted_set(tmp_path / "set"))


def test_nobody_to_judge_by_is_said(planted: TrainingSet) -> None:
    nothing = np.zeros(0, np.int64)
    with pytest.raises(PipelineError, match="no held-out user has a positive action after 2026-03-01"):
        at_the_cut(planted, Future(nothing, nothing, 0, 0), sequence_length=8, num_pins=10, seed=0)


def test_a_sequence_ends_with_the_newest_action(planted: TrainingSet) -> None:
    future = Future(np.array([3]), np.array([0]), 0, 0)
    held_out = at_the_cut(planted, future, sequence_length=5, num_pins=50, seed=0)
    assert held_out.ends.tolist() == [planted.held_out.offsets[4] - 1]
    assert held_out.starts.tolist() == [planted.held_out.offsets[4] - 5]
    assert len(np.unique(held_out.index_pin)) == 50


def test_the_mean_of_recent_pins_finds_a_planted_interest(planted: TrainingSet) -> None:
    liked = planted.held_out.pin[planted.held_out.offsets[1:] - 1].astype(np.int64)
    future = Future(np.arange(len(liked)), liked, 0, 0)
    held_out = at_the_cut(planted, future, sequence_length=20, num_pins=1000, seed=0)
    assert held_out.recall(MeanOfRecent(data=planted, num_actions=20), k=PINS_PER_INTEREST) > 0.9


def test_the_mean_counts_the_newest_unit_vectors_alone(planted: TrainingSet) -> None:
    feature = torch.tensor([[[9.0, 0], [0, 2], [3, 0], [0, 0]]])  # the last one is padding
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    actions = Sequences(feature, zeros, zeros, zeros.float(), zeros, torch.tensor([3]))
    user = MeanOfRecent(data=planted, num_actions=2).users(actions)
    torch.testing.assert_close(user, torch.tensor([[0.5**0.5, 0.5**0.5]]))


def test_popularity_counts_positives_of_the_last_days(planted: TrainingSet) -> None:
    train = planted.train
    recent = train.is_positive & (train.ts >= planted.cut_us - 10 * 86_400_000_000)
    expected = [int((train.pin[recent] == pin).sum()) for pin in range(5)]
    assert Popularity.of(planted, num_days=10).pins(np.arange(5)).squeeze(1).tolist() == expected
