"""Preset auto: what is chosen from a training set, and the reasons."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pf_core.config.training import auto
from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.timelines.arrays import Timelines
from pf_core.training import auto as auto_module
from pf_core.training.auto import Choice, count_repeats, describe_choice, resolve_auto
from pf_core.training.plan import resolve_config
from pf_core.training.training_set import TrainingSet, open_training_set
from tests.support.planted import FEATURE_DIM, NUM_DAYS, START_US, write_planted_set

MakeSet = Callable[..., TrainingSet]

CUT_US = START_US + NUM_DAYS * DAY_US


@pytest.fixture
def make_set(tmp_path: Path) -> MakeSet:
    def make(
        *,
        users: int = 1000,
        positives: int = 4000,
        pins: int = 1000,
        days: int = NUM_DAYS,
        feature_dim: int = FEATURE_DIM,
    ) -> TrainingSet:
        """The planted set with other counts in its manifest."""
        path = write_planted_set(tmp_path / "set")
        manifest = json.loads((path / "training_set.json").read_text())
        manifest["counts"] = {"train": {"users": users, "actions": 2 * positives, "positives": positives}, "pins": pins}
        manifest |= {"feature_dim": feature_dim, "time_origin_us": CUT_US - days * DAY_US + 1}
        (path / "training_set.json").write_text(json.dumps(manifest))
        return open_training_set(path)

    return make


def timelines(*users: list[tuple[float, int, bool]]) -> Timelines:
    """Timelines of actions, each a number of days before the cut, a pin, and whether it is positive."""
    actions = [action for user in users for action in user]
    return Timelines(
        offsets=np.cumsum([0, *map(len, users)]),
        pin=np.array([pin for _, pin, _ in actions], np.int32),
        ts=np.array([CUT_US - round(days * DAY_US) for days, _, _ in actions]),
        action_type=np.zeros(len(actions), np.int16),
        surface=np.zeros(len(actions), np.int16),
        duration=np.zeros(len(actions), np.float32),
        is_positive=np.array([positive for _, _, positive in actions], bool),
    )


def repeating(num_targets: int, num_repeats: int) -> Timelines:
    """One target for each user, the pin 0; the first users had acted on it before the window."""
    new, again = [(1.0, 0, True)], [(30.0, 0, False), (1.0, 0, True)]
    return timelines(*([again] * num_repeats + [new] * (num_targets - num_repeats)))


def choice_of(setting: str, chosen: list[Choice]) -> Choice:
    (found,) = [choice for choice in chosen if choice["setting"] == setting]
    return found


def test_repeats_are_counted_by_hand() -> None:
    known = timelines(
        # 7 twice and 8, both positive in the window; 7 was seen before it, not positive: 2 targets, 1 repeat
        [(20, 7, False), (3, 7, True), (2, 7, True), (1, 8, True)],
        # 7 was seen within the window only; 9 is not positive: 1 target
        [(13.9, 7, False), (5, 7, True), (1, 9, False)],
        # another user's past counts for nothing; at the very start of the window an action belongs to it: 1 target
        [(30, 8, True), (14, 7, True)],
        # 2 targets, 2 repeats
        [(60, 1, True), (50, 2, True), (1, 1, True), (1, 2, True)],
    )
    assert count_repeats(known, cut_us=CUT_US, window_days=14) == {"targets": 2 + 1 + 1 + 2, "repeats": 1 + 2}
    assert count_repeats(known, cut_us=CUT_US, window_days=1) == {"targets": 1 + 2, "repeats": 2}
    assert count_repeats(timelines(), cut_us=CUT_US, window_days=14) == {"targets": 0, "repeats": 0}


def test_repeats_are_the_same_in_small_blocks(make_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    train = make_set().train
    known = count_repeats(train, cut_us=CUT_US, window_days=14)
    assert 0 < known["repeats"] < known["targets"]
    monkeypatch.setattr(auto_module, "ACTIONS_AT_ONCE", 100)
    assert count_repeats(train, cut_us=CUT_US, window_days=14) == known


def test_many_users_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_module, "SAMPLED_USERS", 4)
    found = count_repeats(repeating(9, 6), cut_us=CUT_US, window_days=14)
    assert found == {"targets": 3, "repeats": 2}  # users 0, 3 and 6 of 9


@pytest.mark.parametrize(("num_repeats", "is_on"), [(0, False), (1, False), (2, True), (100, True)])
def test_memory_needs_two_percent_of_repeats(make_set: MakeSet, num_repeats: int, is_on: bool) -> None:
    data = replace(make_set(), train=repeating(100, num_repeats))
    config, chosen = resolve_auto(data, {})
    assert config.parts is not None
    assert config.parts.memory == choice_of("parts.memory", chosen)["value"] == is_on
    assert f"{num_repeats}.0 % of the 100 targets in the last 14 days" in choice_of("parts.memory", chosen)["reason"]


@pytest.mark.parametrize(("days", "window", "least"), [(364, 14, 7), (42, 14, 7), (41, 13, 6), (10, 3, 1), (2, 1, 1)])
def test_the_window_is_a_third_of_a_short_log(make_set: MakeSet, days: int, window: int, least: int) -> None:
    parts = resolve_auto(make_set(days=days), {})[0].parts
    assert parts is not None
    assert (parts.window_days, parts.min_window_days) == (window, least)


@pytest.mark.parametrize(("users", "pins", "dim"), [(10**6, 10**6, 64), (256, 256, 64), (200, 900, 50), (900, 41, 10)])
def test_factors_have_at_most_a_quarter_of_the_users_and_pins(
    make_set: MakeSet, users: int, pins: int, dim: int
) -> None:
    parts = resolve_auto(make_set(users=users, positives=100 * users, pins=pins), {})[0].parts
    assert parts is not None
    assert parts.factor_dim == dim


@pytest.mark.parametrize(
    ("positives", "feature_dim", "dim"),
    [(0, 0, 32), (2, 0, 32), (2.1, 0, 64), (8, 0, 128), (16, 0, 256), (900, 0, 256), (900, 16, 64), (2, 16, 32)],
)
def test_factors_are_longer_where_users_have_more_positives(
    make_set: MakeSet, positives: float, feature_dim: int, dim: int
) -> None:
    """16 dimensions for each positive of a user, up to 256; up to 64 beside content vectors."""
    users = 10_000
    data = make_set(users=users, positives=round(users * positives), pins=10**6, feature_dim=feature_dim)
    parts = resolve_auto(data, {})[0].parts
    assert parts is not None
    assert parts.factor_dim == dim


@pytest.mark.parametrize("feature_dim", [0, 16])
def test_content_is_on_where_pins_have_vectors(make_set: MakeSet, feature_dim: int) -> None:
    parts = resolve_auto(make_set(feature_dim=feature_dim), {})[0].parts
    assert parts is not None
    assert parts.content == (feature_dim > 0)
    assert parts.heads == (4 if feature_dim else 2)


def test_the_rest_is_the_same_on_all_logs(make_set: MakeSet) -> None:
    config, chosen = resolve_auto(make_set(), {})
    assert config == auto().model_copy(update={"parts": config.parts})
    assert (config.batch_users, config.log_every, config.evaluate_every, config.checkpoint_every) == (256, 10, 25, 100)
    optimizer = config.optimizer
    assert (optimizer.num_steps, optimizer.learning_rate, optimizer.warmup_steps) == (200, 3e-3, 20)
    assert (optimizer.decay, optimizer.weight_decay) == ("cosine", 0.01)
    assert config.parts is not None
    assert config.parts.transformer_layers == 0
    for choice in chosen:
        value: Any = config.model_dump()
        for key in choice["setting"].split("."):
            value = value[key]
        assert value == choice["value"], choice
        assert describe_choice(choice) == f"auto: {choice['setting']} = {value}: {choice['reason']}"
        assert choice["reason"]
    assert json.loads(json.dumps(chosen)) == chosen


def test_changes_win_and_their_reasons_say_so(make_set: MakeSet) -> None:
    data = replace(make_set(), train=repeating(100, 50))
    changes = {"parts": {"memory": False, "trend_dim": 4, "window_days": 6}, "optimizer": {"num_steps": 20}, "seed": 3}
    config, chosen = resolve_auto(data, changes)
    assert config.parts is not None
    assert (config.parts.memory, config.parts.trend_dim, config.parts.window_days) == (False, 4, 6)
    assert config.parts.min_window_days == 6 // 2  # follows the window of the change
    assert (config.optimizer.num_steps, config.optimizer.learning_rate, config.seed) == (20, 3e-3, 3)
    memory = choice_of("parts.memory", chosen)
    assert memory["value"] is False
    assert memory["reason"].startswith("training.changes; auto would choose True: 50.0 % of the 100 targets")
    assert choice_of("parts.trend_dim", chosen) == {
        "setting": "parts.trend_dim",
        "value": 4,
        "reason": "training.changes",
    }
    assert len({choice["setting"] for choice in chosen}) == len(chosen)
    with pytest.raises(PipelineError, match=r"set training\.preset to demo or paper"):
        resolve_auto(data, {"model": {"num_layers": 2}})


def test_only_auto_chooses(make_set: MakeSet) -> None:
    path = make_set().path
    config, chosen = resolve_config(path, "tiny", {"seed": 5})
    assert (config.parts, config.seed, chosen) == (None, 5, [])
    config, chosen = resolve_config(path, "auto", {"seed": 5})
    assert config.parts is not None
    assert choice_of("seed", chosen)["value"] == 5
