"""The report's figures. Where the paper gives numbers, they are drawn next to ours: relative to PinnerFormer if the
table compares models, in a panel of their own if the table has two dimensions. Whiskers are 95 % intervals.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pf_core.experiments.bootstrap import Interval, Resampled
from pf_core.experiments.families import HIDDEN_DIMS, LAYERS
from pf_core.experiments.paper_tables import PAPER_HIDDEN_DIMS, PAPER_LAYERS
from pf_core.experiments.quantities import Metric
from pf_core.experiments.recipe import BASE
from pf_core.experiments.tables import RECALL, Column, Row, Section

OURS, PAPER, SECOND = "#bd081c", "#6b6b6b", "#0a6b77"

COLORS = (OURS, SECOND, "#c77700", "#5b4aa3", "#2f7d32", "#8a5a44", "#b0467f", "#4f4f4f")

LOG_FROM = 10.0
"""An axis is logarithmic if its largest value is this many times the smallest."""


@dataclass(frozen=True)
class Point:
    """A model in the figure of cost against quality."""

    family: str
    label: str
    mflops: float
    recall: Interval


def plot_section(section: Section, resampled: Resampled) -> Figure | None:
    """Draw a section; return None if nothing of it was run, or there is no base to compare with."""
    if not any(_has(resampled, row, section.columns[0]) for row in section.rows if row.recipe != BASE):
        return None
    if section.drawing == "relative" and not resampled.has(Metric("recall", BASE)):
        return None
    plot = {
        "relative": _plot_relative,
        "frequencies": _plot_frequencies,
        "grid": _plot_grid,
        "curves": _plot_curves,
        "capacity": _plot_capacity,
    }[section.drawing]
    return plot(section, resampled)


def _plot_relative(section: Section, resampled: Resampled) -> Figure:
    """One panel for each metric: rows as shares of PinnerFormer, hollow markers for the paper, filled ones for ours."""
    rows = [row for row in section.rows if row.paper or _has(resampled, row, section.columns[0])]
    has_paper = any(row.paper for row in rows if row.recipe != BASE)
    apart = 0.14 if has_paper else 0.0
    base = next(row for row in section.rows if row.recipe == BASE)
    figure = Figure(figsize=(9, 1.3 + 0.36 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(section.columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, section.columns, strict=True):
        shown = []
        for place, row in enumerate(reversed(rows)):
            if has_paper and column in row.paper and column in base.paper:
                value = 100 * row.paper[column] / base.paper[column]
                axes.plot(value, place + apart, "D", color=PAPER, markerfacecolor="white", markersize=6)
                shown.append(value)
            if _has(resampled, row, column):
                ratio = resampled.ratio(row.metric(column), base.metric(column)).scaled(100)
                _whisker(axes, ratio, place - apart, horizontal=True)
                shown.append(ratio.estimate)
        axes.axvline(100, color="#cccccc", linewidth=1, zorder=0)
        positive = [value for value in shown if value > 0]
        if positive and max(positive) > LOG_FROM * min(positive):
            _logarithmic(axes)
        else:
            axes.set_xlim(0, 1.04 * max(axes.get_xlim()))
        axes.set_title(column.label, fontsize=10)
        axes.set_xlabel("% of PinnerFormer")
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.grid(axis="y", color="#eeeeee")
        _clean(axes)
    panels[0].set_yticks(range(len(rows)), [row.label for row in reversed(rows)])
    _legend(figure, has_paper=has_paper)
    return figure


def _plot_frequencies(section: Section, resampled: Resampled) -> Figure:
    frequencies = list(dict.fromkeys(row.frequency for row in section.rows))
    names = {row.recipe: row.label.split(": ")[1] for row in section.rows}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    paper, ours = figure.subplots(1, 2)
    for (recipe, name), color in zip(names.items(), (SECOND, OURS), strict=True):
        theirs = [row for row in section.rows if row.recipe == recipe]
        values = [row.paper[RECALL] for row in theirs]
        paper.plot(range(3), values, "o-", color=color, label=name)
        points = [
            (frequencies.index(row.frequency), resampled.interval_of(row.metric(RECALL)))
            for row in theirs
            if _has(resampled, row, RECALL)
        ]
        _curve(ours, points, color=color, label=name)
    for axes, title in ((paper, "Paper"), (ours, "Ours")):
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(3), [frequency.capitalize() for frequency in frequencies])
        axes.set_ylabel("Recall@10")
        _from_zero(axes)
        axes.legend(frameon=False, loc="lower right", fontsize=9)
        _clean(axes)
    return figure


def _plot_grid(section: Section, resampled: Resampled) -> Figure:
    """Tasks by models: the colour is the share of the best value of the column."""
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(section.rows)), layout="constrained")
    panels = figure.subplots(1, 2)
    paper = [[row.paper.get(column) for column in section.columns] for row in section.rows]
    ours = [
        [
            resampled.interval_of(row.metric(column)).estimate if _has(resampled, row, column) else None
            for column in section.columns
        ]
        for row in section.rows
    ]
    for axes, title, values, form in ((panels[0], "Paper", paper, "{:.2f}"), (panels[1], "Ours", ours, "{:.4f}")):
        bests = [max((row[place] or 0.0 for row in values), default=0.0) for place in range(len(section.columns))]
        shares = [[(value or 0.0) / (best or 1.0) for value, best in zip(row, bests, strict=True)] for row in values]
        axes.imshow(shares, cmap="Reds", vmin=0, vmax=2, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                is_best = value is not None and value == bests[x]
                text, weight = "–" if value is None else form.format(value), "bold" if is_best else "normal"
                axes.text(x, y, text, ha="center", va="center", fontsize=9, fontweight=weight)
        axes.set_title(title, fontsize=10)
        names = [column.label for column in section.columns], [row.label for row in section.rows]
        axes.set_xticks(range(len(section.columns)), names[0], parse_math=False)  # action types, with $ as they are
        axes.set_yticks(range(len(section.rows)), names[1], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[1].set_yticklabels([])
    return figure


def _plot_curves(section: Section, resampled: Resampled) -> Figure:
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    panels = figure.subplots(1, len(section.columns))
    for axes, column in zip(panels, section.columns, strict=True):
        points = [
            (float(row.size or 0), resampled.interval_of(row.metric(column)))
            for row in section.rows
            if _has(resampled, row, column)
        ]
        _curve(axes, points, color=OURS, label=column.label)
        sizes = [row.size or 0 for row in section.rows]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_title(column.label, fontsize=10)
        axes.set_xlabel(section.title.lower())
        _from_zero(axes)
        _clean(axes)
    return figure


def _plot_capacity(section: Section, resampled: Resampled) -> Figure:
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    paper, ours = figure.subplots(1, 2)
    width = len(HIDDEN_DIMS)
    for depth, (layers, paper_layers) in enumerate(zip(LAYERS, PAPER_LAYERS, strict=True)):
        rows = section.rows[depth * width : (depth + 1) * width]
        paper.plot(
            range(width), [row.paper[RECALL] for row in rows], "o-", color=COLORS[depth], label=f"{paper_layers} layers"
        )
        points = [
            (place + 0.06 * (depth - 1), resampled.interval_of(row.metric(RECALL)))
            for place, row in enumerate(rows)
            if _has(resampled, row, RECALL)
        ]
        _curve(ours, points, color=COLORS[depth], label=f"{layers} layer{'s' * (layers > 1)}")
    for axes, title, sizes in ((paper, "Paper", PAPER_HIDDEN_DIMS), (ours, "Ours", HIDDEN_DIMS)):
        axes.set_title(f"{title} (the axis does not start at 0)", fontsize=10)
        axes.set_xticks(range(width), [str(size) for size in sizes])
        axes.set_xlabel("hidden dimension")
        axes.set_ylabel("Recall@10")
        axes.legend(frameon=False, loc="lower right", fontsize=9)
        _clean(axes)
    return figure


def plot_staleness(curves: Mapping[str, Sequence[Interval]]) -> Figure:
    """Recall of embeddings made once, as a share of those made in realtime, by the day of the positive."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        days = range(1, len(curve) + 1)
        is_main = name in (BASE, "sasrec")
        estimates, style = [100 * day.estimate for day in curve], "o-" if is_main else "-"
        axes.plot(days, estimates, style, color=color, label=name, linewidth=2 if is_main else 1, markersize=4)
        if is_main:
            lows, highs = [100 * day.low for day in curve], [100 * day.high for day in curve]
            axes.fill_between(days, lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.axhline(100, color="#cccccc", linewidth=1, zorder=0)
    axes.set_xlabel("days after the cut")
    axes.set_ylabel("recall, % of realtime")
    _from_zero(axes)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    _clean(axes)
    return figure


def plot_density(panels: Mapping[str, Mapping[str, Mapping[str, Mapping[int, Interval]]]]) -> Figure:
    """Recall by the number of pins in the index, on logarithmic axes, by row, column and name of the embedder."""
    num_rows, num_columns = len(panels), max(map(len, panels.values()))
    figure = Figure(figsize=(9, 1.2 + 3 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey="row", squeeze=False)
    names = list(dict.fromkeys(name for row in panels.values() for curves in row.values() for name in curves))
    color_of = dict(zip(names, COLORS, strict=False))
    for axes_of_row, (row, columns) in zip(grid, panels.items(), strict=True):
        for axes, (column, curves) in zip(axes_of_row, columns.items(), strict=False):
            for name, curve in curves.items():
                width = 2 if name == BASE else 1
                _density_curve(axes, curve, color=color_of.get(name, "gray"), label=name, width=width)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            sizes = sorted({size for curve in curves.values() for size in curve})
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if num_columns > 1 else 0)
            axes.set_title(column, fontsize=9)
            _clean(axes)
        axes_of_row[0].set_ylabel(f"Recall@10\n{row}".strip(), fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("pins in the index", fontsize=9)
    handles = grid[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=5, frameon=False, fontsize=8)
    return figure


def _density_curve(axes: Axes, curve: Mapping[int, Interval], *, color: str, label: str, width: float) -> None:
    sizes = sorted(curve)
    estimates = [curve[size].estimate for size in sizes]
    below = [curve[size].estimate - curve[size].low for size in sizes]
    above = [curve[size].high - curve[size].estimate for size in sizes]
    axes.errorbar(sizes, estimates, (below, above), color=color, label=label, linewidth=width, marker="o", markersize=4)


def plot_cost(points: Iterable[Point]) -> Figure:
    """Quality against the cost of one embedding; lines join models that differ in one respect."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.family, []).append(point)
    for (family, members), color in zip(families.items(), COLORS, strict=False):
        members.sort(key=lambda member: member.mflops)
        style, shifts = ("o", [(-8, 11), (-8, -17)]) if family == "capacity" else ("o-", [(6, -9), (6, -9)])
        _curve(axes, [(member.mflops, member.recall) for member in members], color=color, label=family, style=style)
        for number, member in enumerate(members):  # labels of neighbours alternate above and below
            place = (member.mflops, member.recall.estimate)
            axes.annotate(member.label, place, shifts[number % 2], textcoords="offset points", fontsize=7, color=color)
    _logarithmic(axes)
    axes.set_xlabel("million multiplications and additions for one user embedding")
    axes.set_ylabel("Recall@10")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    _clean(axes)
    return figure


def _has(resampled: Resampled, row: Row, column: Column) -> bool:
    return resampled.has(row.metric(column))


def _curve(axes: Axes, points: Sequence[tuple[float, Interval]], *, color: str, label: str, style: str = "o-") -> None:
    if not points:
        return
    axes.plot([x for x, _ in points], [value.estimate for _, value in points], style, color=color, label=label)
    for x, value in points:
        _whisker(axes, value, x, color=color)


def _whisker(axes: Axes, value: Interval, place: float, *, horizontal: bool = False, color: str = OURS) -> None:
    span, places = [value.low, value.high], [place, place]
    x, y = (span, places) if horizontal else (places, span)
    axes.plot(x, y, "-", color=color, linewidth=1.6, solid_capstyle="butt")
    if horizontal:
        axes.plot(value.estimate, place, "o", color=color, markersize=5.5)


def _legend(figure: Figure, *, has_paper: bool) -> None:
    axes = figure.axes[0]
    handles = [axes.plot([], [], "o-", color=OURS, label="ours, 95 % interval")[0]]
    if has_paper:
        handles.append(axes.plot([], [], "D", color=PAPER, markerfacecolor="white", label="paper")[0])
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=8)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _from_zero(axes: Axes) -> None:
    """Start the vertical axis at 0, with room above the highest marker."""
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])


def _clean(axes: Axes) -> None:
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
