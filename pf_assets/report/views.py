"""The content of the report, for HTML and Markdown: numbers as text, intervals as places on a line, figures as PNG."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pf_core.experiments.bootstrap import MARGIN, ClaimVerdict, Interval, PartVerdict, Resampled, Verdict
from pf_core.experiments.quantities import ALL
from pf_core.experiments.recipe import BASE
from pf_core.experiments.tables import ENTROPY, RECALL, Column, Row, Section

NOT_EXPLAINED = "not yet explained"

NOT_RUN = "not run"

FAILED: tuple[Verdict, ...] = ("contradicted", "not distinguishable")

MARKS: dict[Verdict, str] = {"reproduced": "✓", "not distinguishable": "≈", "contradicted": "✗", "not run": "·"}


@dataclass(frozen=True)
class Cell:
    text: str
    interval: str = ""
    is_papers: bool = False


@dataclass(frozen=True)
class Table:
    groups: list[tuple[str, int]]
    """Headings over the columns, with the number of columns that each spans."""
    columns: list[str]
    rows: list[tuple[str, bool, list[Cell]]]
    """Label, whether the row is the base, cells."""


@dataclass(frozen=True)
class Whisker:
    """An interval, its estimate, zero and the margin as places on a line from 0 to 100."""

    low: float
    high: float
    at: float
    zero: float
    margin: tuple[float, float] | None


@dataclass(frozen=True)
class StatisticView:
    text: str
    verdict: Verdict
    estimate: str
    interval: str
    whisker: Whisker


@dataclass(frozen=True)
class ClaimView:
    id: str
    says: str
    where: str
    section: str
    verdict: Verdict
    mark: str
    statistics: list[StatisticView]
    missing: str
    explanation: str | None
    """Why the claim does not hold; None if it holds or was not run."""
    is_ours: bool


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    text: str
    png: bytes

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class SectionView:
    name: str
    title: str
    where: str
    note: str
    table: Table | None
    pictures: list[Picture]
    claims: list[ClaimView]


@dataclass(frozen=True)
class Report:
    origin: str
    """Commit and training code of the models; empty if nothing is known of them."""
    counts: dict[Verdict, int]
    """Number of the paper's claims with each verdict."""
    num_claims: int
    facts: list[tuple[str, str]]
    rule: list[str]
    sections: list[SectionView]
    runs: list[tuple[str, str, str, str, str]]
    """Recipe, seeds, minutes, parameters, MLflow address."""
    left_out: list[str]

    def share(self, verdict: Verdict) -> str:
        return f"{self.counts[verdict] / self.num_claims:.0%}".replace("%", " %")

    @property
    def claims(self) -> list[ClaimView]:
        return [claim for section in self.sections for claim in section.claims]

    @property
    def failed(self) -> list[ClaimView]:
        return [claim for verdict in FAILED for claim in self.claims if claim.verdict == verdict]


def view_table(section: Section, resampled: Resampled) -> Table:
    """Return a section's table: for each column the paper's numbers, if any, and ours; recall also as a change."""
    whose = ["paper", "ours"] if any(row.paper for row in section.rows if row.recipe != BASE) else ["ours"]
    against = "realtime" if section.drawing == "frequencies" else "PinnerFormer"
    groups: list[str] = []
    cells: list[list[Cell]] = [[] for _ in section.rows]
    for column in section.columns:
        groups.append(column.label)
        for row, shown in zip(section.rows, cells, strict=True):
            shown += [_paper_cell(row, column), _our_cell(row, column, resampled)]
        if column == RECALL:
            groups.append(f"Recall against {against}")
            for row, shown in zip(section.rows, cells, strict=True):
                shown += _change_cells(row, section.reference(row), resampled)
    rows = zip(section.rows, cells, strict=True)
    return Table(
        groups=[(label, len(whose)) for label in groups],
        columns=whose * len(groups),
        rows=[
            (row.label, row.recipe == BASE, [cell for cell in shown if len(whose) > 1 or not cell.is_papers])
            for row, shown in rows
        ],
    )


def _paper_cell(row: Row, column: Column) -> Cell:
    """Return the paper's number with as many digits as the paper prints: 0.040, not 0.04."""
    if column not in row.paper:
        return Cell("–", is_papers=True)
    text = f"{row.paper[column]:.{2 if column == ENTROPY or column.task != ALL else 3}f}"
    return Cell(max(text, f"{row.paper[column]:g}", key=len), is_papers=True)


def _our_cell(row: Row, column: Column, resampled: Resampled) -> Cell:
    metric = row.metric(column)
    if not resampled.has(metric):
        return Cell(NOT_RUN)
    value = resampled.interval_of(metric)
    form = "{:.2f}" if column == ENTROPY else "{:.4f}"
    return Cell(form.format(value.estimate), f"{form.format(value.low)} – {form.format(value.high)}")


def _change_cells(row: Row, reference: Row | None, resampled: Resampled) -> list[Cell]:
    paper, ours = "–", Cell("–")
    if reference is not None and reference != row:
        if RECALL in row.paper and RECALL in reference.paper:
            paper = _percent(row.paper[RECALL] / reference.paper[RECALL] - 1)
        ours = Cell(NOT_RUN)
        if resampled.has(row.metric(RECALL)) and resampled.has(reference.metric(RECALL)):
            ratio = resampled.ratio(row.metric(RECALL), reference.metric(RECALL))
            interval = f"{_percent(ratio.low - 1)} to {_percent(ratio.high - 1)}"
            ours = Cell(_percent(ratio.estimate - 1), interval)
    return [Cell(paper, is_papers=True), ours]


def view_claim(assessed: ClaimVerdict, explanations: Mapping[str, str]) -> ClaimView:
    claim = assessed.claim
    is_failed = assessed.verdict in FAILED
    return ClaimView(
        id=claim.id,
        says=claim.says,
        where=claim.where,
        section=claim.section,
        verdict=assessed.verdict,
        mark=MARKS[assessed.verdict],
        statistics=[_view_statistic(part) for part in assessed.parts],
        missing=", ".join(assessed.missing),
        explanation=explanations.get(claim.id, NOT_EXPLAINED) if is_failed else None,
        is_ours=claim.is_ours,
    )


def _view_statistic(assessed: PartVerdict) -> StatisticView:
    interval, kind = assessed.interval, assessed.part.kind
    form = _percent if assessed.part.reference is not None else _points
    goal = {"greater": "> 0", "alike": f"within ±{100 * MARGIN:g} %", "no_better": f"< +{100 * MARGIN:g} %"}[kind]
    margin = {"greater": None, "alike": (-MARGIN, MARGIN), "no_better": (-math.inf, MARGIN)}[kind]
    return StatisticView(
        text=f"{assessed.part.quantity.text} {goal}",
        verdict=assessed.verdict,
        estimate=form(interval.estimate),
        interval=f"{form(interval.low)} to {form(interval.high)}",
        whisker=_whisker(interval, margin),
    )


def _whisker(interval: Interval, margin: tuple[float, float] | None) -> Whisker:
    shown = [
        0.0,
        *(bound for bound in (interval.low, interval.high, interval.estimate, *(margin or ())) if math.isfinite(bound)),
    ]
    first, last = min(shown), max(shown)
    pad = 0.08 * (last - first) or 1.0

    def place(value: float) -> float:
        inside = min(max(value, first - pad), last + pad) if not math.isnan(value) else 0.0
        return round(100 * (inside - first + pad) / (last - first + 2 * pad), 1)

    return Whisker(
        low=place(interval.low),
        high=place(interval.high),
        at=place(interval.estimate),
        zero=place(0.0),
        margin=None if margin is None else (place(margin[0]), place(margin[1])),
    )


def _percent(share: float) -> str:
    return f"{100 * share:+.{1 if abs(share) < 0.1 else 0}f} %".replace("-", "−")


def _points(share: float) -> str:
    return f"{100 * share:+.1f} pp".replace("-", "−")
