"""What a table of the report is: rows are recipes, columns are metrics, and each cell may have the paper's number."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pf_core.config.serving import Frequency
from pf_core.experiments.quantities import ALL, Metric, MetricName
from pf_core.experiments.recipe import BASE, Set

Drawing = Literal["relative", "frequencies", "grid", "curves", "capacity"]


@dataclass(frozen=True)
class Column:
    label: str
    name: MetricName
    task: str = ALL


RECALL = Column("Recall@10", "recall")

COVERAGE = Column("P90 Coverage@10", "coverage")

ENTROPY = Column("Interest Entropy@50", "entropy")


@dataclass(frozen=True)
class Row:
    label: str
    recipe: str
    paper: Mapping[Column, float] = field(default_factory=dict)
    frequency: Frequency = "once"
    size: int | None = None
    """Place on the horizontal axis of a figure."""

    def metric(self, column: Column) -> Metric:
        return Metric(column.name, self.recipe, self.frequency, column.task)


@dataclass(frozen=True, kw_only=True)
class Section:
    name: Set
    title: str
    where: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    drawing: Drawing
    note: str = ""
    """Differences between the paper's numbers and ours that a reader must know."""

    def reference(self, row: Row) -> Row | None:
        """Return the row that a row's recall is compared with: PinnerFormer, or the same model in realtime."""
        recipe, frequency = (row.recipe, "realtime") if self.drawing == "frequencies" else (BASE, "once")
        return next((other for other in self.rows if (other.recipe, other.frequency) == (recipe, frequency)), None)
