"""Stages and commands at once, at random, on one day whose log and model change, with readers in a loop.

What is read is always whole and of one model, and true of what it says that it is made of: it is one of the results of
undisturbed runs, of either log by either model. Whatever cannot run says so in a sentence.
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.chaos_site import AGAIN, DAYS
from tests.chaos.chaos_stages import DAILY
from tests.chaos.command_line import CommandLine, materialize, open_command_line, pf
from tests.chaos.lanes import Answer, Lane, open_lanes
from tests.chaos.stress_calls import COMMANDS, Seen
from tests.support.tried import Tried

VARIANTS, MODELS = (0, 1), ("A", "B")


def whole_day(lane: Lane, root: Path, variant: int, model: str) -> None:
    lane.must("change_log", root, variant)
    for stage in DAILY:
        lane.must("stage", root, stage, AGAIN, model=model)


def undisturbed(lane: Lane, root: Path) -> dict[str, list[Any]]:
    """Run the day with either log and by either model; return what may be seen of each asset, and of the release."""
    expected: dict[str, list[Any]] = {}

    def note(seen: Seen) -> None:
        for name, value in seen.items():
            if value not in expected.setdefault(name, []):
                expected[name].append(value)

    lane.must("stage", root, "rollback", AGAIN)
    note({"release": lane.must("observe", root)["release"]})  # of the day before
    for variant in VARIANTS:
        for model in MODELS:
            whole_day(lane, root, variant, model)
            note(lane.must("observe", root))
    return expected


def faults_of(seen: Seen, expected: dict[str, list[Any]]) -> list[str]:
    """Return what was seen that no undisturbed run gives."""
    faults = [f"{name}: {value}" for name, value in seen.items() if name != "release" and value not in expected[name]]
    if "release" in seen:
        # Users and pins are of days that were built at different times, and so maybe of different logs; never of
        # different models.
        users, pins, popular, ds, model = seen["release"]
        parts = (("users", 0, users), ("pins", 1, pins), ("popular", 2, popular))
        for name, place, digest in parts:
            of_one_model = [each[place] for each in expected["release"] if each[3:] == [ds, model]]
            possible = [each[place] for each in expected["release"]] if name == "popular" else of_one_model
            if digest not in possible:
                faults.append(f"{name} of release {ds} of {model}: {digest}")
    return faults


@dataclass
class Log:
    """What ran, and what went wrong; shared by threads."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, answer: Answer) -> None:
        with self.lock:
            self.outcomes["refused" if answer.refused else "failed" if answer.error else "completed"] += 1
            if answer.refused:
                self.refusals[f"{what}: {answer.refused[:100]}"] += 1
            if answer.error or answer.is_killed:
                self.faults.append(f"{what}: {answer.error or 'its process ended'}")


def one_at_random(rng: random.Random, lane: Lane, root: Path) -> tuple[str, Answer]:
    """Run a stage or a command."""
    kind = rng.random()
    if kind < 0.1:
        return "change_log", lane.call("change_log", root, rng.choice(VARIANTS))
    if kind < 0.75:
        stage, model = rng.choice([*DAILY, "rollback", "training_set"]), rng.choice(MODELS)
        return f"{stage} by {model}", lane.call("stage", root, stage, AGAIN, model=model)
    name = rng.choice(list(COMMANDS))
    return name, lane.call("command", root, name)


def stress(root: Path, lanes: list[Lane], expected: dict[str, list[Any]], minutes: float, log: Log) -> int:
    """Run on all lanes until the time is over: one serves, one looks at every asset, the others run what comes.

    Return the number of looks.
    """
    seconds = 60 * minutes
    until, num_looks = time.monotonic() + seconds, 0

    def serve() -> None:
        nonlocal num_looks
        answer = lanes[0].call("serve", root, seconds)
        log.note("serve", answer)
        for seen, number in answer.result or []:
            num_looks += number
            log.faults.extend(faults_of({"release": seen}, expected))

    def look() -> None:
        nonlocal num_looks
        while time.monotonic() < until:
            answer = lanes[1].call("observe", root)
            log.note("observe", answer)
            num_looks += 1
            log.faults.extend(faults_of(answer.result or {}, expected))

    def run(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            log.note(*one_at_random(rng, lanes[number], root))

    together: list[Callable[[], None]] = [serve, look, *(lambda n=n: run(n) for n in range(2, len(lanes)))]
    with ThreadPoolExecutor(len(together)) as threads:
        for future in [threads.submit(each) for each in together]:
            future.result()
    return num_looks


def finish(lane: Lane, root: Path, expected: dict[str, list[Any]]) -> None:
    """Afterwards, the day is built as ever."""
    whole_day(lane, root, 1, "B")
    seen = lane.must("observe", root)
    assert seen["user_timelines"] == expected["user_timelines"][1]
    assert seen["release"] == expected["release"][-1]


def test_runs_at_once_leave_only_whole_results_of_one_model(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    root, log = tmp_path / "site", Log()
    with open_lanes(4) as lanes:
        root.mkdir()
        lanes[0].must("base", root, False)
        expected = undisturbed(lanes[0], root)
        assert len(expected["release"]) == 1 + 4
        num_looks = stress(root, lanes, expected, pytestconfig.getoption("--minutes"), log)
        finish(lanes[0], root, expected)
    tried.count("stages and commands at once", sum(log.outcomes.values()), len(log.faults))
    tried.count("looks of readers meanwhile", num_looks)
    print(dict(log.outcomes), *log.refusals.most_common(20), sep="\n")
    assert log.faults == []
    assert log.outcomes["completed"] > log.outcomes["refused"] > 0


def test_what_no_undisturbed_run_gives_is_found() -> None:
    releases = [[f"users of {model}", f"pins of {model}", "popular", AGAIN, model] for model in MODELS]
    expected: dict[str, list[Any]] = {"user_timelines": [["rows 0", "log 0"], ["rows 1", "log 1"]], "release": releases}
    assert faults_of({"user_timelines": ["rows 1", "log 1"], "release": releases[0]}, expected) == []
    assert faults_of({"user_timelines": ["rows 0", "log 1"]}, expected) == ["user_timelines: ['rows 0', 'log 1']"]
    mixed = ["users of A", "pins of B", "popular", AGAIN, "A"]
    assert faults_of({"release": mixed}, expected) == [f"pins of release {AGAIN} of A: pins of B"]
    assert is_told(1, "pf_core.errors.PipelineError: another run is writing", materialize("release", AGAIN))
    assert is_told(1, "\npf_core.storage.locks.LockedError: another run is writing", materialize("release", AGAIN))
    assert not is_told(1, "OSError: not found", materialize("release", AGAIN))
    assert not is_told(1, "Traceback (most recent call last)", pf("rollback"))
    assert is_told(1, "error: there is no earlier release", pf("rollback"))


@pytest.mark.chaos
def test_commands_beside_stages(tmp_path: Path, pytestconfig: pytest.Config, tried: Tried) -> None:
    """`pf` and `dagster asset materialize` bypass Dagster's queue, two at a time, while stages run, too."""
    log, num_commands = Log(), Counter[str]()
    with open_lanes(3) as lanes:
        (tmp_path / "base").mkdir()
        lanes[0].must("base", tmp_path / "base", False)
        shell = open_command_line(tmp_path / "shared", tmp_path / "base", tmp_path / "site")
        expected = undisturbed(lanes[0], shell.root)
        until = time.monotonic() + 60 * pytestconfig.getoption("--minutes")

        def run(number: int) -> None:
            rng = random.Random(100 + number)
            while time.monotonic() < until:
                command = some_command(rng, shell)
                code, output = shell.run(*command)
                with log.lock:
                    num_commands["completed" if code == 0 else "refused"] += 1
                    if not is_told(code, output, command):
                        log.faults.append(f"{' '.join(command)}: {output[-3000:]}")

        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(run, number) for number in range(2)]
            num_looks = stress(shell.root, lanes, expected, pytestconfig.getoption("--minutes"), log)
            for each in running:
                each.result()
        finish(lanes[0], shell.root, expected)
    tried.count("commands beside stages", num_commands.total() + sum(log.outcomes.values()), len(log.faults))
    tried.count("looks of readers meanwhile", num_looks)
    print(dict(num_commands), dict(log.outcomes), *log.refusals.most_common(20), sep="\n")
    assert log.faults == []
    assert num_commands["completed"]


def some_command(rng: random.Random, shell: CommandLine) -> tuple[str, ...]:
    if rng.random() < 0.6:
        return materialize(rng.choice(DAILY), AGAIN)
    out = str(shell.root / "aside" / f"out-{rng.randrange(1 << 30)}")
    return rng.choice(
        [
            pf("status"),
            pf("releases"),
            pf("rollback"),
            pf("recommend", str(rng.randrange(60))),
            pf("export", "pins", out, "--ds", AGAIN),
            pf("repair", "--since", DAYS[3], "--dry-run"),
        ]
    )


def is_told(code: int, output: str, command: tuple[str, ...]) -> bool:
    """Whether a command completed, or said in a sentence why it could not."""
    if command[0] == "dagster":
        ours = re.search(r"^pf_core[.\w]+Error: ", output, re.MULTILINE)
        return code == 0 or ours is not None or "DagsterAssetCheckFailedError" in output
    return "Traceback" not in output and (code == 0 or "error: " in output or command[1] == "status")
