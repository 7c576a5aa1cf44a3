"""The undisturbed runs that killed ones are compared with: the site before each stage, and its content afterwards.

In the scenario `again`, the log of the newest day has changed, another model embeds it, and every stage runs for it
again; in the scenario `next`, every stage runs for the day after it.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.chaos.chaos_site import AGAIN, NEXT
from tests.chaos.chaos_stages import MAKES_A_MODEL, STAGES
from tests.chaos.kill_points import Kind
from tests.chaos.lanes import Lane

Scenario = Literal["again", "next"]

SCENARIOS: dict[Scenario, tuple[str, str]] = {"again": (AGAIN, "B"), "next": (NEXT, "A")}
"""Day and model of the stages."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A stage that nothing disturbed."""

    scenario: Scenario
    stage: str
    folder: Path
    """The site before it."""
    before: dict[str, str]
    """Content before it (`chaos_site.content_of`)."""
    after: dict[str, str]
    counts: dict[Kind, int]
    """Number of moments of each kind at which it can be killed."""
    seconds: float

    @property
    def arguments(self) -> tuple[str, str]:
        return self.stage, SCENARIOS[self.scenario][0]

    @property
    def model(self) -> str:
        return SCENARIOS[self.scenario][1]


def make_chain(folder: Path, lane: Lane, *, scenarios: Sequence[Scenario], trains: bool) -> None:
    """Run every stage once in each scenario, in the order of the pipeline."""
    base = folder / "base"
    base.mkdir(parents=True)
    lane.must("base", base, trains)
    at_first = lane.must("content", base)
    for scenario in scenarios:
        site, before = folder / scenario / "site", dict(at_first)
        shutil.copytree(base, site)
        if scenario == "again":
            lane.must("change_log", site, 1)
        for stage in STAGES:
            if stage in MAKES_A_MODEL and not trains:
                continue
            shutil.copytree(site, folder / scenario / stage)
            ds, model = SCENARIOS[scenario]
            answer = lane.call("stage", site, stage, ds, model=model, counts=True)
            assert answer.error is None, answer.error
            assert answer.refused is None, answer.refused
            after = lane.must("content", site)
            link = {"before": before, "after": after, "counts": answer.counts, "seconds": answer.seconds}
            (folder / scenario / f"{stage}.json").write_text(json.dumps(link))
            before = after


def read_link(folder: Path, scenario: Scenario, stage: str) -> Link:
    content = json.loads((folder / scenario / f"{stage}.json").read_text())
    return Link(scenario=scenario, stage=stage, folder=folder / scenario / stage, **content)


def shared_chain(
    folder: Path, lane: Lane, *, scenarios: Sequence[Scenario] = ("again", "next"), trains: bool = True
) -> Path:
    """Return the folder of a chain, which the first worker of a test session makes while the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for leftover in folder.glob("[!.]*"):
                shutil.rmtree(leftover)
            make_chain(folder, lane, scenarios=scenarios, trains=trains)
            (folder / "complete").touch()
    return folder


def spread(first: int, last: int, number: int) -> Iterator[int]:
    """Yield so many different whole numbers between two, both included, as far apart as possible."""
    number = min(number, last - first + 1)
    seen: set[int] = set()
    for place in range(number):
        chosen = first + round(place * (last - first) / max(1, number - 1))
        if chosen not in seen:
            seen.add(chosen)
            yield chosen
