"""Every stage, killed at many moments: at changes of files, between calls, and after a time."""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.chain import Link, Scenario, read_link, shared_chain
from tests.chaos.chaos_stages import STAGES
from tests.chaos.killing import after_the_kill, copied, kill_stage, mixed
from tests.chaos.lanes import Lane
from tests.support.tried import Tried

KIND = "kills of stages"

QUICK = ("user_timelines", "user_embeddings", "release")
"""Stages that `make test` kills, too."""

SLOW_S = 2.0
"""A stage that takes longer is killed half as often."""


@pytest.mark.chaos
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scenario", ["again", "next"])
def test_a_stage_that_is_killed(
    scenario: Scenario, stage: str, lane: Lane, folder: Path, tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    link = read_link(shared_chain(folder / "all", lane), scenario, stage)
    if link.before == link.after:
        pytest.skip("there is nothing for it to do in this scenario")
    number = pytestconfig.getoption("--kills") // (2 if link.seconds > SLOW_S else 1)
    num_kills, faults = kill_stage(lane, link, tmp_path / "work", number)
    tried.count(KIND, num_kills, len(faults))
    assert faults == []


@pytest.mark.parametrize("stage", QUICK)
def test_a_stage_that_is_killed_twice(stage: str, lane: Lane, folder: Path, tmp_path: Path, tried: Tried) -> None:
    link = read_link(shared_chain(folder / "daily", lane, scenarios=["again"], trains=False), "again", stage)
    num_kills, faults = kill_stage(lane, link, tmp_path / "work", 3)
    tried.count(KIND, num_kills, len(faults))
    assert faults == []
    assert num_kills >= 2


@pytest.mark.chaos
def test_a_stage_with_workers_whose_own_process_is_killed(
    lane: Lane, folder: Path, tmp_path: Path, tried: Tried
) -> None:
    """The workers end with it, and so do their locks: the re-run begins at once."""
    link = read_link(shared_chain(folder / "all", lane), "again", "user_embeddings")
    whole = lane.call("stage", copied(link, tmp_path / "whole"), *link.arguments, model=link.model, num_workers=2)
    assert whole.error is None
    for share in (0.3, 0.6, 0.8):
        work = copied(link, tmp_path / "work")
        moment = {"kill_after_s": whole.seconds * share}
        answer = lane.call("stage", work, *link.arguments, model=link.model, num_workers=2, **moment)
        tried.count(KIND, answer.is_killed)
        assert left_of_session(answer.pid) == []
        assert list(after_the_kill(lane, link, work, answer)) == []


def left_of_session(session: int) -> list[str]:
    """Return the processes of a session that still run some seconds after its first one was killed."""
    deadline = time.monotonic() + 60  # on a loaded machine a worker may still be importing
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.mark.chaos
def test_a_stage_that_writes_in_place_is_found(lane: Lane, folder: Path, tmp_path: Path) -> None:
    """The test can fail: a manifest that is written in two steps is half there after some kill."""
    link = read_link(shared_chain(folder / "all", lane), "again", "user_timelines")
    changes = range(1, link.counts["change"] + 2)
    faults = []
    for change in changes:
        work = copied(link, tmp_path / "work")
        kill_at = ("change", change)
        answer = lane.call("stage", work, *link.arguments, model=link.model, plant="in place", kill_at=kill_at)
        faults += after_the_kill(lane, link, work, answer)
    assert any("is damaged" in fault for fault in faults), faults


def test_what_never_was_is_found() -> None:
    link = Link(
        scenario="again",
        stage="release",
        folder=Path(),
        before={"release": "old", "release hits": "old", "raw_actions": "same"},
        after={"release": "new", "release hits": "new", "raw_actions": "same"},
        counts={},
        seconds=1,
    )
    assert list(mixed(link, link.before)) == list(mixed(link, link.after)) == []
    assert list(mixed(link, {**link.after, "raw_actions": "half"})) == [
        "readers see something of raw_actions that never was"
    ]
    assert list(mixed(link, {**link.after, "release hits": "old"})) == ["readers see a release of two"]
    assert len(list(mixed(link, {"release": "old", "release hits": "old"}))) == 1
