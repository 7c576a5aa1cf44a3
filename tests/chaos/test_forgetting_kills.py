"""`pf forget`, killed at many moments: a second request completes it, and gives what an undisturbed one gives."""

import dataclasses
from pathlib import Path

import pytest

from tests.chaos.chain import read_link, shared_chain
from tests.chaos.killing import copied, moments
from tests.chaos.lanes import Lane
from tests.support.tried import Tried

USER = 7

KIND = "kills of forgetting"


def kill_forgetting(lane: Lane, folder: Path, tmp_path: Path, number: int, *, trains: bool) -> int:
    name = "all" if trains else "daily"
    scenarios = {} if trains else {"scenarios": ["again"]}
    chain = shared_chain(folder / name, lane, trains=trains, **scenarios)
    link = read_link(chain, "again", "export")  # the site has releases by then
    whole = copied(link, tmp_path / "whole")
    assert lane.must("remains", whole, USER).keys() >= {"raw_actions", "stores of releases"}
    answer = lane.call("forget", whole, USER, counts=True)
    assert (answer.error, answer.refused) == (None, None)
    wanted, left = lane.must("content", whole), lane.must("remains", whole, USER)
    assert not left.keys() & {"raw_actions", "quarantine", "stores of releases"}
    link = dataclasses.replace(link, counts=answer.counts, seconds=answer.seconds)
    num_kills = 0
    for moment in moments(link, number):
        work = copied(link, tmp_path / "work")
        num_kills += lane.call("forget", work, USER, **moment).is_killed
        lane.must("forget", work, USER)
        assert lane.must("content", work) == wanted, moment
        assert lane.must("remains", work, USER) == left, moment
    return num_kills


def test_forgetting_that_is_killed_twice(lane: Lane, folder: Path, tmp_path: Path, tried: Tried) -> None:
    num_kills = kill_forgetting(lane, folder, tmp_path, 3, trains=False)
    tried.count(KIND, num_kills)
    assert num_kills >= 2


@pytest.mark.chaos
def test_forgetting_that_is_killed(
    lane: Lane, folder: Path, tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    tried.count(KIND, kill_forgetting(lane, folder, tmp_path, pytestconfig.getoption("--kills"), trains=True))
