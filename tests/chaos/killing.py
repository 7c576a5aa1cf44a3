"""Kill a stage at many moments: after each, readers see the old partition or the new one, and a re-run completes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.chain import Link, spread
from tests.chaos.lanes import Answer, Lane

Moment = dict[str, Any]
"""Arguments of `Lane.call` that say when the process is killed."""


def moments(link: Link, number: int) -> Iterator[Moment]:
    """Choose moments: half of them at changes of files, a third at calls, the others after a time."""
    num_changes, num_calls = number - number // 2, number // 3
    for chosen in spread(1, link.counts["change"], num_changes):
        yield {"kill_at": ("change", chosen)}
    for chosen in spread(1, link.counts["call"], num_calls):
        yield {"kill_at": ("call", chosen)}
    for place in range(number - num_changes - num_calls):
        yield {"kill_after_s": link.seconds * (place + 1) / (number - num_changes - num_calls + 1)}


def kill_stage(lane: Lane, link: Link, work: Path, number: int) -> tuple[int, list[str]]:
    """Kill a stage at so many moments, each time from the start; return the number of kills, and what went wrong."""
    num_kills, faults = 0, []
    for moment in moments(link, number):
        answer = lane.call("stage", copied(link, work), *link.arguments, model=link.model, **moment)
        num_kills += answer.is_killed
        what = f"{link.scenario} {link.stage}, killed at {moment}"
        faults += [f"{what}: {fault}" for fault in after_the_kill(lane, link, work, answer)]
    shutil.rmtree(work, ignore_errors=True)
    return num_kills, faults


def copied(link: Link, work: Path) -> Path:
    """Make a copy of the site as it was before the stage; return it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(link.folder, work)
    return work


def after_the_kill(lane: Lane, link: Link, work: Path, killed: Answer) -> Iterator[str]:
    """Read the site as services do, run the stage again, and yield what is wrong."""
    if killed.error is not None or killed.refused is not None:
        yield f"it failed: {killed.error or killed.refused}"
        return
    found = lane.call("content", work)
    if found.error is not None or found.refused is not None:
        yield f"readers fail: {found.error or found.refused}"
        return
    yield from mixed(link, found.result)
    if link.stage == "rollback" and found.result == link.after:
        return  # a second one would go back further
    again = lane.call("stage", work, *link.arguments, model=link.model)
    if again.error is not None or again.refused is not None:
        yield f"the re-run fails: {again.error or again.refused}"
        return
    content = lane.must("content", work)
    if content != link.after:
        differ = [name for name in link.after.keys() | content.keys() if content.get(name) != link.after.get(name)]
        yield f"the re-run gives another content of {', '.join(sorted(differ))}"


def mixed(link: Link, content: dict[str, str]) -> Iterator[str]:
    """Yield what is neither as it was nor as it shall be."""
    for name in sorted(link.before.keys() | link.after.keys() | content.keys()):
        if content.get(name) not in (link.before.get(name), link.after.get(name)):
            yield f"readers see something of {name} that never was"
    parts = [name for name in link.after if name.startswith("release")]
    seen = {name: content.get(name) for name in parts}
    if seen not in ({name: link.before.get(name) for name in parts}, {name: link.after[name] for name in parts}):
        yield "readers see a release of two"
