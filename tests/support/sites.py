"""A small site made from a list of actions, so that a test can say exactly what the logs hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.serving import ServingConfig
from pf_core.config.site import Site
from pf_core.days import ds_start
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import bucket_files
from pf_core.timelines.build import build_timelines, read_bucket, timeline_state

Row = tuple[Any, str, float, str]  # user, pin, seconds since the start of the first day, event
START = "2026-01-01"


@dataclass
class SmallSite:
    """Writes foreign logs, runs the pipeline on them in this process, and reads the results as plain Python."""

    root: Path
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.root / "forget.txt").touch()
        serving = ServingConfig.model_validate(self.options.get("serving", {}))
        # Not part of the site file: tests choose retentions that are too short for its late rows.
        self.site = Site.model_validate(self._config()).model_copy(update={"serving": serving})
        self.engine: Engine = LocalEngine(num_workers=1, memory_mb=256, temp_dir=self.root / "tmp")

    def _config(self) -> dict[str, Any]:
        id_type = self.options.get("id_type", "int")
        pin_id = {"column": "pin", "type": self.options.get("pin_id_type", "string")}
        timelines = {"num_buckets": 2, "window_days": 365, "max_actions": 1000, "retention_days": 60}
        engine = {"num_workers": 1, "memory_mb": self.options.get("memory_mb", 256)}
        actions: dict[str, Any] = {
            "path": self.options.get("path", "logs/{ds}.parquet"),
            "user_id": {"column": "user", "type": id_type},
            "pin_id": pin_id,
            "ts": {"column": "time_us", "unit": "us"},
            "action_type": {"column": "event", "values": {"save": "repin", "look": "closeup", "go": "click"}},
            "surface": {"column": "place", "values": {"home": "homefeed", "find": "search"}},
            "duration_s": {"column": "dwell_s"},
            "late_days": self.options.get("late_days", 1),
            "early_days": self.options.get("early_days", 0),
        } | self.options.get("actions", {})
        return {
            "name": "small",
            "start_ds": START,
            "end_ds": self.options.get("end_ds"),
            "data_dir": str(self.root / "data"),
            "deletion_list": str(self.root / "forget.txt"),
            "engine": engine | self.options.get("engine", {}),
            "timelines": timelines | self.options.get("timelines", {}),
            "quality": self.options.get("quality", {}),
            "source": {
                "root": str(self.root),
                "actions": actions,
                "pins": {
                    "catalogue": {"path": "pins/{ds}.parquet"},
                    "pin_id": pin_id,
                    "vectors": "vector",
                },
            },
        }

    def write_log(self, ds: str, rows: Sequence[Row]) -> Path:
        """One Parquet file for the day of arrival `ds`; every row is a 20 s look at the home surface."""
        start_us = int(ds_start(START).timestamp()) * 1_000_000
        id_type = pa.int64() if self.options.get("id_type", "int") == "int" else pa.string()
        users = [row[0] if id_type == pa.int64() or row[0] is None else str(row[0]) for row in rows]
        table = pa.table(
            {
                "user": pa.array(users, id_type),
                "pin": pa.array([row[1] for row in rows], pa.string()),
                "time_us": pa.array([start_us + round(row[2] * 1e6) for row in rows], pa.int64()),
                "event": pa.array([row[3] for row in rows], pa.string()),
                "place": pa.array(["home"] * len(rows), pa.string()),
                "dwell_s": pa.array([20.0] * len(rows), pa.float64()),
            }
        )
        path = self.root / self.site.source.actions.path.replace("{ds}", ds)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        return path

    def ingest(self, days: Sequence[str]) -> list[dict[str, Any]]:
        forgotten = read_deletion_list(self.site)
        return list(ingest_days(self.site, days, engine=self.engine, forgotten=forgotten, progress=_silent))

    def build(self, days: Sequence[str], *, rebuild: bool = False) -> list[dict[str, Any]]:
        return list(build_timelines(self.site, days, engine=self.engine, rebuild=rebuild, progress=_silent))

    def actions(self, ds: str) -> list[tuple[Any, ...]]:
        """The partition's rows, all buckets, in file order."""
        paths = [path for _, path in sorted(bucket_files(self.site, ds).items())]
        return [tuple(row.values()) for path in paths for row in pq.read_table(path).to_pylist()]

    def timelines(self, ds: str) -> dict[Any, list[tuple[datetime, str, str, str, float]]]:
        """Every user's timeline as of ds: (ts, pin_id, action_type, surface, duration_s)."""
        result = {}
        for bucket in range(self.site.timelines.num_buckets):
            for row in read_bucket(timeline_state(self.site), ds, bucket).to_pylist():
                assert row["user_id"] not in result
                columns = ("ts", "pin_id", "action_type", "surface", "duration_s")
                result[row["user_id"]] = list(zip(*(row[name] for name in columns), strict=True))
        return result


def make_site(root: Path, **options: Any) -> Site:
    """The site of a SmallSite with these options, for tests that need no logs and no engine of its own."""
    root.mkdir(parents=True, exist_ok=True)
    return SmallSite(root, options).site


def _silent(message: str) -> None:
    pass
