"""What a person sees of Dagster runs: one row for each stage, with a bar, a rate and the time left, and its result.

On a terminal the rows are drawn again as they change (rich). Elsewhere each stage is one line when it is done. Every
line of the runs goes to a log file, whose path is printed first; `verbose` prints the lines instead of the rows.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pf_assets.cli.output import show
from pf_assets.cli.run_log import Amount, Said, amount_of
from pf_core.printable import printable
from pf_core.storage.privacy import private

LOGS = "logs"
"""Folder of a Dagster home with the log files."""

KEPT_LOGS = 30

SHOWN_LINES = 20
"""Number of lines of a failed stage's log that are printed."""

FRAMES_PER_S = 8

State = Literal["waiting", "running", "done", "failed"]

MARKS: dict[State, tuple[str, str]] = {"waiting": ("·", "dim"), "done": ("✓", "green"), "failed": ("✗", "red")}


@dataclass
class Stage:
    """One row."""

    name: str
    state: State = "waiting"
    seconds: float = 0.0
    """Of the times before the current one."""
    started: float = 0.0
    amount: Amount | None = None
    first: tuple[int, float] | None = None
    """The first amount of the current unit, and when it was reached: rates are counted from there."""
    text: str = ""
    """The last message, or the result."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_LINES))

    def elapsed(self) -> float:
        return self.seconds + (time.monotonic() - self.started if self.state == "running" else 0.0)

    def share(self) -> float | None:
        """How much of the stage is done; None if it does not say."""
        return None if self.amount is None else self.amount.done / self.amount.total

    def rate(self) -> float | None:
        """Units in a second; None before there are two amounts."""
        if self.amount is None or self.first is None:
            return None
        done, since = self.amount.done - self.first[0], time.monotonic() - self.first[1]
        return done / since if done > 0 and since > 1.0 else None


class StagesView:
    """Rows of stages, and the log file. Use it as a context; `during` a run its lines come in through `receive`."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        home: Path,
        verbose: bool = False,
        result_of: Callable[[str], str] = lambda name: "",
        seconds_left: Callable[[Sequence[Stage]], float | None] = lambda stages: None,
        console: Console | None = None,
    ) -> None:
        self.stages = {name: Stage(name) for name in names}
        self.log = log_file(home)
        self._home, self._verbose = home, verbose
        self._result_of, self._seconds_left = result_of, seconds_left
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._current: Stage | None = None

    def __enter__(self) -> "StagesView":
        with private(self.log.parent):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            _drop_old(self.log.parent)
            self._file = self.log.open("a", buffering=1, encoding="utf-8", errors="replace")
        show(f"full log: {self.log}")
        if self._console.is_terminal and not self._verbose:
            self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=FRAMES_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish_current("done" if kind is None else "failed")
        if self._live is not None:
            self._live.stop()
        self._file.close()

    def say(self, text: str) -> None:
        """Print a line that belongs to no stage."""
        self._file.write(f"{text}\n")
        if self._live is not None:
            self._live.console.print(Text(printable(text)))
        else:
            show(text)

    def receive(self, line: str, said: Said, *, days: Sequence[str], row: str | None = None) -> None:
        """Take a line of a run; `row` names the stage of a run that is one stage as a whole."""
        self._file.write(f"{line}\n")
        if self._verbose:
            show(line)
        name = row or self._stage_of(said.step)
        if name is None:
            if self._current is not None and said.kind == "other":
                self._current.lines.append(said.text)
            return
        stage = self.stages[name]
        if said.kind == "started" and row is None and stage.state != "running":
            self._finish_current("done")
            self._current = stage
            self._begin(stage)
        elif said.kind == "message":
            self._hear(stage, said, days)
        elif said.kind == "failed":
            stage.lines.append(said.text)
            self._finish(stage, "failed")

    def start_row(self, row: str) -> None:
        """Begin a stage that is a run of its own; several can be at work at once."""
        self._begin(self.stages[row])

    def finish(self, *, is_good: bool, row: str | None = None) -> None:
        """End what is at work, because its run has ended."""
        state: State = "done" if is_good else "failed"
        if row is None:
            self._finish_current(state)
        else:
            self._finish(self.stages[row], state)

    def last_lines(self) -> list[str]:
        """Return the newest log lines of the stage that failed."""
        failed = [stage for stage in self.stages.values() if stage.state == "failed"]
        return [line for stage in failed for line in stage.lines]

    def _stage_of(self, step: str) -> str | None:
        """Return the stage of a step: its asset; the steps of an asset's checks have its name first."""
        names = [name for name in self.stages if step == name or step.startswith(f"{name}_")]
        return max(names, key=len, default=None)

    def _hear(self, stage: Stage, said: Said, days: Sequence[str]) -> None:
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

    def _begin(self, stage: Stage) -> None:
        stage.state, stage.started, stage.amount, stage.first, stage.text = "running", time.monotonic(), None, None, ""

    def _finish_current(self, state: State) -> None:
        if self._current is not None:
            self._finish(self._current, state)
        self._current = None

    def _finish(self, stage: Stage, state: State) -> None:
        if stage.state != "running":
            return
        stage.seconds, stage.state = stage.elapsed(), state
        stage.text = self._result_of(stage.name) if state == "done" else "failed"
        if self._live is None and not self._verbose:
            show(f"{stage.name:<24}{duration(stage.seconds):>8}  {stage.text}", fg="red" if state == "failed" else None)

    # Drawing

    def _draw(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for stage in self.stages.values():
            table.add_row(*self._row(stage))
        table.expand = True
        left = self._seconds_left(list(self.stages.values()))
        return table if left is None else Group(table, Text(f"  about {duration(left)} left", style="dim"))

    def _row(self, stage: Stage) -> tuple[RenderableType, ...]:
        if stage.state != "running":
            mark, style = MARKS[stage.state]
            took = duration(stage.seconds) if stage.seconds else ""
            return Text(mark, style), Text(stage.name, style), Text(printable(stage.text), style="dim"), Text(took)
        if not hasattr(self, "_spinner"):
            self._spinner = Spinner("dots", style="cyan")
        share, rate = stage.share(), stage.rate()
        if stage.amount is None or share is None:
            return self._spinner, Text(stage.name, "cyan"), Text(printable(stage.text)), Text(duration(stage.elapsed()))
        bar = Table.grid(padding=(0, 1))
        bar.add_column(width=24)
        bar.add_column(no_wrap=True)
        figures = f"{stage.amount.done:,} of {stage.amount.total:,} {stage.amount.unit}"
        if rate is not None:
            figures += f", {rate:,.3g}/s, {duration((stage.amount.total - stage.amount.done) / rate)} left"
        bar.add_row(ProgressBar(total=1.0, completed=share, width=24), Text(figures))
        return self._spinner, Text(stage.name, "cyan"), bar, Text(duration(stage.elapsed()))


def duration(seconds: float) -> str:
    """Return a duration as 8 s, 3 min 20 s, or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


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
