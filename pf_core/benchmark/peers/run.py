"""Run a peer: install its libraries, choose a setting on the tuning log, train on all of `log.train`, rank once.

A peer never stops the benchmark: whatever goes wrong is the note of its row. UniSRec is left out: it needs content
vectors, which a BenchmarkLog does not carry.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pf_core.benchmark.files import read_lists, write_log
from pf_core.benchmark.log import BenchmarkLog, RankedLists
from pf_core.benchmark.peers.environments import cache_folder, ensure_environment, requirements_of
from pf_core.benchmark.peers.tuning import PEERS, Budget, Peer, Settings
from pf_core.benchmark.scoring import score
from pf_core.errors import PipelineError
from pf_core.metrics.bootstrap import mean
from pf_core.parent_process import tied
from pf_core.progress import Progress, Throttle

SCRIPTS = Path(__file__).parent / "scripts"
MIN_TUNING_SHARE = 1 / 3
"""Least share of the time for tuning that a setting is given: a slow peer tries fewer settings, not hopeless ones."""
MAX_ERROR_CHARS = 200
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting that was tried on the tuning log."""

    settings: Settings
    recall_at_10: float | None
    """None if it gave no lists."""
    seconds: float
    note: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerResult:
    name: str
    lists: RankedLists | None
    note: str
    """Why there are no lists, or what was limited; empty if nothing was."""
    settings: Settings | None = None
    """The chosen setting."""
    tried: tuple[Trial, ...] = ()
    seconds: float = 0.0
    """Time of all runs, without installing."""
    final_seconds: float = 0.0
    peak_gb: float = 0.0
    """Largest memory of a run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of its libraries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answer:
    """Outcome of one process."""

    lists: RankedLists | None
    note: str
    seconds: float
    peak_gb: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)


def run_peer(
    name: str,
    log: BenchmarkLog,
    tuning_log: BenchmarkLog | None,
    *,
    budget: Budget,
    folder: Path,
    progress: Progress,
    python: Path | None = None,
) -> PeerResult:
    """Tune the peer, train it on all of `log.train`, and return its lists for the test users.

    Without a tuning log, where the training users cannot be divided, the first setting is used. `folder` takes the
    files that the processes exchange. `python` replaces the environment of the peer's family.
    """
    peer = PEERS[name]
    try:
        if python is None:
            python = ensure_environment(
                requirements_of(peer.family), name=peer.family, cache=cache_folder(), progress=progress
            )
    except (PipelineError, OSError) as error:
        return PeerResult(name=name, lists=None, note=f"not run: {getattr(error, 'what', error)}")
    write_log(log, folder / "log")
    run = _Run(name, peer, python, budget, folder, progress)
    trials: tuple[Trial, ...] = ()
    chosen, limits = peer.settings[0], ["not tuned: the training users cannot be divided"]
    if tuning_log is not None:
        write_log(tuning_log, folder / "tuning_log")
        trials = run.tune(tuning_log)
        finished = [trial for trial in trials if trial.recall_at_10 is not None]
        if not finished:
            return PeerResult(
                name=name, lists=None, note=f"not run: {trials[0].note}", tried=trials, seconds=run.seconds
            )
        chosen = max(finished, key=lambda trial: trial.recall_at_10 or 0.0).settings  # the first of equals
        num_settings = min(budget.num_settings, len(distinct_settings(peer, tuning_log)))
        limits = [f"{len(finished)} of {num_settings} settings finished"] if len(finished) < num_settings else []
    left = run.seconds_left
    final = {**chosen, **({"max_order": budget.max_order} if "max_order" in peer.tuning_overrides else {})}
    answer = run.ask(log, folder / "log", final, left, left, "final")
    if answer.note:
        limits = [answer.note, *limits]
    return PeerResult(
        name=name,
        lists=answer.lists,
        note="; ".join(limits),
        settings=chosen,
        tried=trials,
        seconds=run.seconds,
        final_seconds=answer.seconds,
        peak_gb=max(run.peak_gb, answer.peak_gb),
        versions=answer.versions,
    )


def distinct_settings(peer: Peer, log: BenchmarkLog) -> list[Settings]:
    """Settings of a peer without those that repeat an earlier one, as `all` does where every action is positive."""
    distinct: list[Settings] = []
    for settings in peer.settings:
        if settings.get("actions") == "all" and log.train.is_positive.all() and log.past.is_positive.all():
            settings = {**settings, "actions": "positive"}
        if settings not in distinct:
            distinct.append(settings)
    return distinct


class _Run:
    """A peer's processes on a log, and the time that they have used."""

    def __init__(self, name: str, peer: Peer, python: Path, budget: Budget, folder: Path, progress: Progress) -> None:
        self.name, self.peer, self.python, self.budget, self.folder = name, peer, python, budget, folder
        self.progress = progress
        self.started_at = time.monotonic()
        self.peak_gb = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def seconds_left(self) -> float:
        return self.budget.seconds - self.seconds

    def tune(self, log: BenchmarkLog) -> tuple[Trial, ...]:
        """Try settings in their order, until they or the time for tuning are used up."""
        settings = distinct_settings(self.peer, log)[: self.budget.num_settings]
        trials: list[Trial] = []
        for number, chosen in enumerate(settings):
            left = self.budget.tuning_s - self.seconds
            least = self.budget.tuning_s * MIN_TUNING_SHARE
            if trials and left < min(trials[-1].seconds, least):
                break
            slot = min(left, max(left / (len(settings) - number), least))
            what = f"setting {number + 1} of {len(settings)}"
            tried = {**chosen, **self.peer.tuning_overrides}
            answer = self.ask(log, self.folder / "tuning_log", tried, slot, left, what)
            recall = None if answer.lists is None else mean(score(log, answer.lists).recall_at_10_U)
            trials.append(Trial(settings=chosen, recall_at_10=recall, seconds=answer.seconds, note=answer.note))
        return tuple(trials)

    def ask(
        self, log: BenchmarkLog, log_folder: Path, settings: Settings, budget_s: float, limit_s: float, what: str
    ) -> _Answer:
        """Run the script once. It plans for `budget_s`, and is killed after `limit_s`."""
        out = self.folder / self.name / f"{what.replace(' ', '_')}.parquet"
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in (out, out.with_suffix(".json")):
            path.unlink(missing_ok=True)
        command = [str(self.python), str(SCRIPTS / self.peer.script), str(log_folder)]
        command += ["--settings", json.dumps(settings), "--budget-s", f"{budget_s:.1f}", "--out", str(out)]
        command += ["--memory-gb", f"{self.budget.memory_gb:g}", "--started-at", f"{time.time():.3f}"]
        started = time.monotonic()
        code, errors = self._wait(command, limit_s, what)
        seconds = time.monotonic() - started
        if code is None:
            return _Answer(lists=None, note=f"ran out of its budget of {limit_s:.0f} s ({what})", seconds=seconds)
        if code != 0:
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
            return _Answer(lists=None, note=f"exit code {code}: {last[:MAX_ERROR_CHARS]}", seconds=seconds)
        report: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
        self.peak_gb = max(self.peak_gb, report["peak_gb"])
        try:
            lists = read_lists(out, log)
        except PipelineError as error:
            return _Answer(lists=None, note=error.what, seconds=seconds)
        return _Answer(
            lists=lists,
            note=report["note"],
            seconds=seconds,
            peak_gb=report["peak_gb"],
            versions=report["versions"],
        )

    def _wait(self, command: list[str], limit_s: float, what: str) -> tuple[int | None, str]:
        """Return the exit code and the errors of a process; None for a code if its time was over."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(self.budget.num_threads)
        say = Throttle(self.progress)
        ends_at = time.monotonic() + limit_s
        errors = self.folder / self.name / "errors.txt"
        with errors.open("w") as file:
            process = subprocess.Popen(
                tied(command), stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                while process.poll() is None and time.monotonic() < ends_at:
                    say(lambda: f"{self.peer.label}: {what}, at most {ends_at - time.monotonic():.0f} s left for it")
                    time.sleep(POLL_S)
            finally:
                code = process.poll()
                if code is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with the loaders that it started
                    process.wait()
        return code, errors.read_text(errors="replace")
