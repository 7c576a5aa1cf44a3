"""What a person sees of Dagster runs: one row for each stage, with a bar, a rate and the time left, and its result.

On a terminal the rows are drawn again as they change (`stage_rows.py`). Elsewhere each stage is one line when it is
done. Every line of the runs goes to a log file, whose path is printed first; `verbose` prints the lines instead of the
rows.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pf_assets.cli.output import NAME_CHARS, duration, show
from pf_assets.cli.run_log import Said, amount_of, is_noise
from pf_assets.cli.stage import Stage, State
from pf_assets.cli.stage_rows import StageRows
from pf_core.printable import printable
from pf_core.storage.disk import disk_errors
from pf_core.storage.privacy import private

LOGS = "pf_logs"
"""Folder of a Dagster home with the log files. Dagster has a folder `logs` there, and empties it."""

KEPT_LOGS = 30

FRAMES_PER_S = 8


class StagesView:
    """Rows of stages, and the log file. Use it as a context; `during` a run its lines come in through `receive`."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        home: Path,
        verbose: bool = False,
        there: Collection[str] = (),
        result_of: Callable[[str], str] = lambda name: "",
        seconds_left: Callable[[Sequence[Stage]], float | None] = lambda stages: None,
        console: Console | None = None,
        to_stderr: bool = False,
    ) -> None:
        """`there` names the stages that are complete, and will probably not be run."""
        self.stages = {name: Stage(name) for name in names}
        for name in there:
            self.stages[name].state, self.stages[name].text = "done", result_of(name)
        self.log = log_file(home)
        self._home, self._verbose = home, verbose
        self._result_of = result_of
        self._to_stderr = to_stderr
        self._console = console or Console(highlight=False, stderr=to_stderr)
        self._rows = StageRows(self.stages, seconds_left)
        self._live: Live | None = None
        self._is_interrupted = False
        self._last: Stage | None = None
        """The stage that spoke last: a line without a step, as in a traceback, is its."""

    def __enter__(self) -> "StagesView":
        with self._log_errors(), private(self.log.parent):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            _drop_old(self.log.parent)
            self._file = self.log.open("a", buffering=1, encoding="utf-8", errors="replace")
        self._show(f"full log: {self.log}")
        if self._console.is_terminal and not self._verbose:
            self._live = Live(self._rows, console=self._console, refresh_per_second=FRAMES_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._finish_all("done" if kind is None else "interrupted" if is_interrupt else "failed")
        self._rows.is_over = True
        if self._live is not None:
            self._live.stop()
        with contextlib.suppress(OSError) if kind is not None else self._log_errors():
            self._file.close()

    def say(self, text: str) -> None:
        """Print a line that belongs to no stage."""
        self._log(text)
        if self._live is not None:
            self._live.console.print(Text(printable(text)))
        else:
            self._show(text)

    def interrupt(self) -> None:
        """Note that a person ends the runs: a stage that ends from now on has not failed by itself."""
        self._is_interrupted = True

    def start(self, assets: Sequence[str], *, row: str | None = None) -> None:
        """Begin a run of assets, or of a row that is a run as a whole; several of the latter can be at work."""
        first = next((name for name in ([row] if row else assets) if name in self.stages), None)
        if first is not None:
            self._begin(self.stages[first])
            self.stages[first].text = "starting Dagster"

    def receive(self, line: str, said: Said, *, days: Sequence[str] = (), row: str | None = None) -> None:
        """Take a line of a run; `row` names the stage of a run that is one stage as a whole."""
        self._log(line)
        if is_noise(line):
            return
        if self._verbose:
            self._show(line)
        name = row or self._stage_of(said.step)
        if name is None and said.kind == "other" and not said.run_id:  # what a process of the run prints
            name = None if self._last is None else self._last.name
        if name is None:
            return
        stage = self._last = self.stages[name]
        match said.kind:
            case "message":
                self._hear(stage, said, days)
            case "failed":
                self._finish(stage, "failed")
            case "other" if not said.run_id and stage.state == "running":
                stage.lines.append(said.text)  # not the traceback after a failure: its sentence is printed
            case "started" if row is None:
                self._begin(stage, is_asset=said.step == stage.name)
                stage.open_steps.add(said.step)
            case "succeeded" if row is None:
                stage.open_steps.discard(said.step)
                if not stage.open_steps:
                    self._finish(stage, "done")

    def finish(self, *, is_good: bool, row: str | None = None) -> None:
        """End what is at work, because its run has ended."""
        if row is None:
            self._finish_all("done" if is_good else "failed")
        else:
            self._finish(self.stages[row], "done" if is_good else "failed")

    def last_lines(self, row: str | None = None) -> list[str]:
        """Return the newest log lines of the stage that failed."""
        stages = self.stages.values() if row is None else [self.stages[row]]
        return [line for stage in stages if stage.state == "failed" for line in stage.lines]

    def _log(self, line: str) -> None:
        with self._log_errors():
            self._file.write(f"{line}\n")

    def _log_errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self.log.parent, "the log of pf")

    def _stage_of(self, step: str) -> str | None:
        """Return the stage of a step: its asset; the steps of an asset's checks have its name first."""
        names = [name for name in self.stages if step == name or step.startswith(f"{name}_")]
        return max(names, key=len, default=None)

    def _hear(self, stage: Stage, said: Said, days: Sequence[str]) -> None:
        if stage.state != "running":  # after a failure, which steps are left out
            return
        stage.lines.append(said.text)
        stage.text = said.text
        amount = amount_of(said.text, days)
        if amount is None:
            return
        if stage.amount is None or (stage.amount.total, stage.amount.unit) != (amount.total, amount.unit):
            stage.first = (amount.done, time.monotonic())
        elif amount.done < stage.amount.done:  # several workers, whose messages come in any order
            return
        stage.amount = amount

    def _begin(self, stage: Stage, *, is_asset: bool = True) -> None:
        if stage.state != "running":
            stage.state, stage.started = "running", time.monotonic()
            stage.open_steps.clear()
        stage.amount, stage.first, stage.text = None, None, ""
        self._last = stage
        if is_asset:
            stage.is_told = False

    def _finish_all(self, state: State) -> None:
        for stage in self.stages.values():
            self._finish(stage, state)

    def _finish(self, stage: Stage, state: State) -> None:
        if stage.state != "running":
            return
        if state == "failed" and self._is_interrupted:
            state = "interrupted"
        stage.seconds, stage.state = stage.elapsed(), state
        stage.text = self._result_of(stage.name) if state == "done" else state
        is_news = state != "done" or not stage.is_told  # the checks of an asset come after its line
        if self._live is None and not self._verbose and is_news:
            colour = "red" if state == "failed" else None
            self._show(f"{stage.name:<{NAME_CHARS}}{duration(stage.seconds):>10}  {stage.text}".rstrip(), fg=colour)
        stage.is_told = True

    def _show(self, text: str, *, fg: str | None = None) -> None:
        show(text, err=self._to_stderr, fg=fg)


def log_file(home: Path) -> Path:
    """Return the path of a new log file in a Dagster home."""
    return home / LOGS / f"pf-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"


def _drop_old(folder: Path) -> None:
    for path in sorted(folder.glob("pf-*.log"))[: -KEPT_LOGS + 1]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@contextlib.contextmanager
def showing(
    view: StagesView | None, names: Sequence[str], *, home: Path, verbose: bool = False
) -> Iterator[StagesView]:
    """Yield the view that is there, or a new one with these stages for one run."""
    if view is not None:
        yield view
        return
    with StagesView(names, home=home, verbose=verbose) as own:
        yield own
