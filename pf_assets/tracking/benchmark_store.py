"""Benchmarks in MLflow: one run for each table, with the figures of every contender, in the experiment `benchmark`."""

import re
from pathlib import Path

from pf_assets.tracking.runs import RUN_FILE, RunStore, TrackedRun
from pf_core.benchmark.table import Table
from pf_core.config.site import Site

METRICS = (
    "recall_at_10",
    "recall_at_50",
    "askable_recall_at_10",
    "discovery_at_10",
    "discovery_at_50",
    "cold_at_10",
    "p90_coverage_at_10",
)

NOT_IN_A_NAME = re.compile(r"[^\w.\-]+")


class BenchmarkStore(RunStore):
    """The MLflow store of the site's models, with an experiment for the tables of all logs."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.name = "benchmark"

    def keep_table(self, table: Table, folder: Path) -> TrackedRun:
        """Log a table as a run of its own; `folder` has table.md and table.json."""
        (folder / RUN_FILE).unlink(missing_ok=True)  # of an earlier benchmark with the same folder
        run_facts = {name: str(value) for name, value in table["run"].items()}
        params = {name: value for name, value in table["log"].items() if name != "notes"} | run_facts
        tags = {"mlflow.source.name": run_facts["command"], "mlflow.source.git.commit": run_facts["commit"]}
        run = self.start(folder, name=table["log"]["name"], params=params, tags=tags)
        with self.watching(run):
            self.measure(run, [{"step": 0, **table_metrics(table)}])
            self.keep(run, [folder / "table.md", folder / "table.json"])
        return run


def table_metrics(table: Table) -> dict[str, float]:
    """Return the figures of each contender as `contender.metric`, without those that are not defined."""
    metrics: dict[str, float] = {}
    for row in table["rows"]:
        prefix = NOT_IN_A_NAME.sub("_", row["name"]).strip("_")
        values = {name: row["summary"][name] for name in METRICS} if "summary" in row else {}  # type: ignore[literal-required]
        values["seconds"] = row["seconds"]
        metrics |= {f"{prefix}.{name}": value for name, value in values.items() if value is not None}
    return metrics
