"""What tests tried, and what of it failed: `pytest --table` prints a line for each kind of trial."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PROPERTY = "tried"
"""Name of the user property of a test report."""


class Tried:
    """Counts the trials of a test by kind."""

    def __init__(self, record_property: Callable[[str, object], None]) -> None:
        self._record = record_property
        self._started = time.monotonic()

    def each(self, kind: str, number: int) -> Iterator[int]:
        """Yield 0, 1, …; all are counted when the last one has passed. A test that fails counts as one failure."""
        yield from range(number)
        self.count(kind, number)

    def count(self, kind: str, num_tried: int, num_failed: int = 0) -> None:
        """Count trials, and how many of them failed."""
        seconds, self._started = time.monotonic() - self._started, time.monotonic()
        entry = {"kind": kind, "tried": num_tried, "failed": num_failed, "seconds": seconds}
        self._record(PROPERTY, json.dumps(entry))


def table_of(reports: Sequence[Any]) -> list[str]:
    """Return the lines of the table of all that was tried in these test reports."""
    totals: dict[str, Counter[str]] = {}
    calls = [report for report in reports if report.when == "call"]
    for report in calls:
        for name, value in report.user_properties:
            if name == PROPERTY:
                entry = json.loads(value)
                totals.setdefault(entry.pop("kind"), Counter()).update(entry)
    num_failed = sum(report.outcome == "failed" for report in reports)
    totals["tests"] = Counter(tried=len(calls), failed=num_failed, seconds=sum(report.duration for report in calls))
    width = max(map(len, totals))
    lines = [f"{'tried':<{width}}  {'number':>9}  {'failed':>6}  {'minutes':>7}"]
    for kind, numbers in sorted(totals.items()):
        minutes = numbers["seconds"] / 60
        lines.append(f"{kind:<{width}}  {numbers['tried']:>9,}  {numbers['failed']:>6}  {minutes:>7.1f}")
    return lines
