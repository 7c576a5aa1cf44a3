"""The time left: a formula for what waits, the stages' own rates for what runs."""

import time

import pytest

from pf_assets.cli.run_log import Amount
from pf_assets.cli.stage import Stage
from pf_assets.cli.time_left import FASTEST, SLOWEST, Size, expected_seconds, seconds_left

EXPECTED = {"raw_actions": 10.0, "user_timelines": 20.0, "release": 5.0}


def test_what_waits_takes_what_is_expected() -> None:
    assert seconds_left([Stage(name) for name in EXPECTED], EXPECTED) == 10 + 20 + 5


def test_the_first_stages_show_how_fast_the_machine_is() -> None:
    stages = [Stage("raw_actions", "done", seconds=30.0), Stage("user_timelines"), Stage("release")]
    assert seconds_left(stages, EXPECTED) == 30 / 10 * (20 + 5)


@pytest.mark.parametrize(("took_s", "factor"), [(10_000.0, SLOWEST), (0.001, FASTEST)])
def test_one_odd_stage_does_not_decide(took_s: float, factor: float) -> None:
    stages = [Stage("raw_actions", "done", seconds=took_s), Stage("release")]
    assert seconds_left(stages, EXPECTED) == pytest.approx(factor * 5)


def test_what_was_there_already_says_nothing_about_the_machine() -> None:
    assert seconds_left([Stage("raw_actions", "done"), Stage("release")], EXPECTED) == 5


def test_a_running_stage_with_a_rate_takes_what_is_left_of_it() -> None:
    since = time.monotonic() - 10.0
    stage = Stage("raw_actions", "running", started=since, amount=Amount(50, 200, "steps"), first=(0, since))
    assert seconds_left([stage, Stage("release")], EXPECTED) == pytest.approx(150 / 5 + 5, rel=0.05)


def test_a_running_stage_without_a_rate_takes_what_is_left_of_the_expectation() -> None:
    stage = Stage("user_timelines", "running", started=time.monotonic() - 5.0)
    assert seconds_left([stage], EXPECTED) == pytest.approx(20 - 5, abs=1)
    late = Stage("user_timelines", "running", started=time.monotonic() - 500.0)
    assert seconds_left([late], EXPECTED) == 1.0


def test_nothing_is_left_when_all_has_ended() -> None:
    assert seconds_left([Stage("release", "done", seconds=1.0), Stage("x", "failed", seconds=1.0)], EXPECTED) is None


def test_more_actions_and_pins_take_longer() -> None:
    small, large = (expected_seconds(Size(30, actions, actions // 20)) for actions in (10_000, 10_000_000))
    assert all(large[name] >= small[name] for name in small)
    assert large["pinnerformer_model"] > 2 * small["pinnerformer_model"]
