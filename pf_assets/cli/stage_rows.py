"""The rows of stages as a terminal shows them: as many as its height has room for."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pf_assets.cli.output import duration, rough_duration
from pf_assets.cli.stage import Stage, State
from pf_core.printable import printable

MARKS: dict[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "done": ("✓", "green"),
    "failed": ("✗", "red"),
    "interrupted": ("–", "yellow"),
}

WIDE_CHARS = 100
"""Width of a terminal from which on bars are long."""

LONG_BAR, SHORT_BAR = 20, 6

OTHER_LINES = 3
"""Lines of the screen that are no rows: the time left, what is left out, and the cursor's."""


class StageRows:
    """Renderable of rich; it is drawn anew for every frame."""

    def __init__(
        self, stages: Mapping[str, Stage], seconds_left: Callable[[Sequence[Stage]], float | None] = lambda stages: None
    ) -> None:
        self._stages, self._seconds_left = stages, seconds_left
        self._spinner = Spinner("dots", style="cyan")
        self.is_over = False
        """Whether nothing will change any more: then every row is drawn, and no time is left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stages = list(self._stages.values())
        shown = stages if self.is_over else visible(stages, max(console.height - OTHER_LINES, 1))
        table = Table.grid(padding=(0, 1), expand=True)
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for stage in shown:
            table.add_row(*self._row(stage, LONG_BAR if options.max_width >= WIDE_CHARS else SHORT_BAR))
        yield table
        if len(shown) < len(stages):
            num_done = sum(stage.state == "done" for stage in stages)
            yield Text(f"  {num_done} of {len(stages)} are done", style="dim")
        left = self._seconds_left(stages)
        if left is not None and not self.is_over:
            yield Text(f"  about {rough_duration(left)} left", style="dim")

    def _row(self, stage: Stage, bar_chars: int) -> tuple[Text | Spinner | Table, ...]:
        if stage.state != "running":
            mark, style = MARKS[stage.state]
            took = duration(stage.seconds) if stage.seconds else ""
            return Text(mark, style), Text(stage.name, style), Text(printable(stage.text), style="dim"), Text(took)
        share = stage.share()
        name, took = Text(stage.name, "cyan"), duration(stage.elapsed())
        if stage.amount is None or share is None:
            return self._spinner, name, Text(printable(stage.text)), Text(took)
        bar = Table.grid(padding=(0, 1))
        bar.add_column(width=bar_chars)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_row(ProgressBar(total=1.0, completed=share, width=bar_chars), Text(figures(stage)))
        return self._spinner, name, bar, Text(took)


def figures(stage: Stage) -> str:
    """Return how far a stage is: `120 of 200 steps, 4.5/s, 18 s left`."""
    if stage.amount is None:
        return ""
    rate, left = stage.rate(), stage.units_left_s()
    counted = f"{stage.amount.done:,} of {stage.amount.total:,} {stage.amount.unit}"
    return counted if rate is None or left is None else f"{counted}, {rate:,.3g}/s, {rough_duration(left)} left"


def visible(stages: Sequence[Stage], num_rows: int) -> list[Stage]:
    """Return the stages for which there is room, in their order: first those at work or failed, then those that wait,
    then those that ended last."""
    if len(stages) <= num_rows:
        return list(stages)
    ranks = {"running": 0, "failed": 0, "interrupted": 0, "waiting": 1, "done": 2}

    def urgency(place: int) -> tuple[int, int]:
        state = stages[place].state
        return ranks[state], -place if state == "done" else place

    chosen = sorted(range(len(stages)), key=urgency)
    return [stages[place] for place in sorted(chosen[:num_rows])]
