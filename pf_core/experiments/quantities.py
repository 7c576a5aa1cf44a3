"""The arithmetic of claims: metrics of recipes, and quantities computed from them.

A `Quantity` is a formula without data: its metrics, its text, and its function. It is evaluated on arrays that hold the
estimate and its bootstrap draws, so that every quantity has an interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pf_core.config.serving import Frequency
from pf_core.printable import printable

MetricName = Literal["recall", "coverage", "entropy"]
"""Recall@10, P90 Coverage@10, Interest Entropy@50 (section 4.1)."""

ALL = "all"
"""The task that counts every positive; others are named after their action type."""

MAX_TASK_CHARS = 30
"""Longer names of tasks are cut where they are shown."""


@dataclass(frozen=True)
class Metric:
    """One number of one recipe."""

    name: MetricName
    recipe: str
    frequency: Frequency = "once"
    task: str = ALL

    @property
    def text(self) -> str:
        frequency = f", {self.frequency}" if self.frequency != "once" else ""
        task = f", on {printable(self.task, max_chars=MAX_TASK_CHARS)}" if self.task != ALL else ""
        return f"{self.name}({self.recipe}{frequency}{task})"


Values = Mapping[Metric, np.ndarray]
"""The estimate and the draws of each metric, in arrays of one length."""


@dataclass(frozen=True, eq=False)
class Quantity:
    metrics: frozenset[Metric]
    text: str
    of: Callable[[Values], np.ndarray]

    def __sub__(self, other: "Quantity") -> "Quantity":
        text = f"({other.text})" if " − " in other.text else other.text
        return Quantity(
            self.metrics | other.metrics, f"{self.text} − {text}", lambda values: self.of(values) - other.of(values)
        )

    def __rmul__(self, factor: float) -> "Quantity":
        return Quantity(self.metrics, f"{factor:g} · {self.text}", lambda values: factor * self.of(values))


def recall(recipe: str, frequency: Frequency = "once", task: str = ALL) -> Quantity:
    return _of_metric(Metric("recall", recipe, frequency, task))


def coverage(recipe: str, frequency: Frequency = "once") -> Quantity:
    return _of_metric(Metric("coverage", recipe, frequency))


def entropy(recipe: str) -> Quantity:
    return _of_metric(Metric("entropy", recipe))


def _of_metric(metric: Metric) -> Quantity:
    return Quantity(frozenset([metric]), metric.text, lambda values: values[metric])


def drop(before: Quantity, after: Quantity) -> Quantity:
    """1 - after / before: the share of `before` that is lost; NaN if `before` is 0."""

    def evaluate(values: Values) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return 1 - after.of(values) / before.of(values)

    return Quantity(before.metrics | after.metrics, f"1 − {after.text} / {before.text}", evaluate)


def mean(quantities: Sequence[Quantity]) -> Quantity:
    return Quantity(
        frozenset[Metric]().union(*(quantity.metrics for quantity in quantities)),
        f"mean({', '.join(quantity.text for quantity in quantities)})",
        lambda values: np.mean([quantity.of(values) for quantity in quantities], axis=0),
    )


def slope(points: Mapping[int, Quantity]) -> Quantity:
    """Least-squares gain for each doubling of the key: the slope over log2 of the key."""
    sizes = sorted(points)
    x = np.log2(sizes) - np.log2(sizes).mean()
    return Quantity(
        frozenset[Metric]().union(*(quantity.metrics for quantity in points.values())),
        f"slope({', '.join(points[size].text for size in sizes)})",
        lambda values: np.tensordot(x / (x @ x), [points[size].of(values) for size in sizes], 1),
    )


def gain_per_doubling(points: Mapping[int, Quantity], small: int, large: int) -> Quantity:
    """(points[large] - points[small]) / log2(large / small)."""
    difference, doublings = points[large] - points[small], float(np.log2(large / small))
    return Quantity(
        difference.metrics, f"({difference.text}) / {doublings:g}", lambda values: difference.of(values) / doublings
    )
