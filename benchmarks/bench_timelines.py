"""Timelines from raw logs: 20M actions of 500k users, and three times that.

The full build is `ingest_days` for every day and `build_timelines(rebuild=True)` for the last one, with 2 workers:
validate, de-duplicate, shuffle, assemble, write. Four bars:

- at most 2.5 x the time in which DuckDB merely sorts the same Parquet by (user, time) and writes it;
- at least 5 x faster than pandas `sort_values` + `groupby(user).agg(list)`;
- peak memory under 4 GB;
- from 20M to 60M actions, peak memory grows less than threefold.

The logs are those of the synthetic world's `large` preset over 30 days, with fewer sessions a user than its
default, so that 500k users are active. The 60M set is the 20M set three times with shifted user ids, because the
world takes minutes to make as much. Buckets hold about 30k users at either size, and the shuffle gets 1 GB.

Every run has a process of its own and starts from an empty site; its time includes starting the worker pool. The
build, DuckDB and pandas take turns, and the fastest run of each counts, because a shared machine drifts. On a machine
that is busy with other things, trust the ratio of processor time, which is printed too: waiting distorts the other.
pandas gets a tenth of the users (their rows alone, in one file), and its time is scaled linearly, which favours it:
sorting is not linear. `--full-pandas` runs it on everything (about 13 GB of memory).

With `--data` the logs stay, and a second run is quick. Otherwise everything is removed; about 4 GB of disk.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measuring import (
    MEMORY_MB,
    NUM_WORKERS,
    Measured,
    measure,
    num_buckets_for,
    report,
    say,
    working_directory,
    world_site,
)

from pf_core.engine.local import LocalEngine
from pf_core.logs.ingest import ingest_days
from pf_core.timelines.build import build_timelines
from pf_core.world.config import WorldConfig, large
from pf_core.world.ids import USER_BITS
from pf_core.world.logs import write_logs

NUM_COPIES = 3
PANDAS_SHARE = 10
"""pandas gets one of this many users."""


def full_world() -> WorldConfig:
    """About 23 actions a user in 30 days, 60 % of the users active: 39 actions an active user. 26 files a day."""
    preset = large(num_users=850_000, num_days=30, num_pins=200_000)
    return replace(preset, sessions_per_day=0.05, users_per_chunk=32_768)


def quick_world() -> WorldConfig:
    return large(num_users=2_000, num_days=10, num_pins=20_000)


@dataclass(frozen=True, kw_only=True)
class Logs:
    root: Path
    days: list[str]
    num_rows: int
    num_users: int

    @property
    def files(self) -> str:
        return str(self.root / "actions" / "*" / "*.parquet")


def make_logs(config: WorldConfig, folder: Path) -> Logs:
    root = folder / f"logs-{config.fingerprint()}"
    started = time.perf_counter()
    write_logs(config, root, workers=NUM_WORKERS)
    return _count(root, config.dates, started)


def copy_logs(logs: Logs, folder: Path) -> Logs:
    """The same log `NUM_COPIES` times, each copy with users of its own."""
    root = folder / f"{logs.root.name}-x{NUM_COPIES}"
    started = time.perf_counter()
    for ds in logs.days:
        target = root / "actions" / ds
        if target.exists():
            continue
        draft = root / "writing"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for part in sorted((logs.root / "actions" / ds).glob("*.parquet")):
            rows = pq.read_table(part)
            index = rows.schema.get_field_index("user")
            for copy in range(NUM_COPIES):
                users = pc.add(rows["user"], pa.scalar(copy << USER_BITS, pa.int64()))
                copied = rows.set_column(index, "user", users)
                pq.write_table(copied, draft / f"{copy}-{part.name}", compression="zstd")
        target.parent.mkdir(exist_ok=True)
        os.replace(draft, target)
    return _count(root, logs.days, started)


def sample_logs(logs: Logs, folder: Path) -> Path:
    """All rows of one user in PANDAS_SHARE, in one file."""
    path = folder / f"{logs.root.name}-sample.parquet"
    if not path.exists():
        query = f"SELECT * FROM read_parquet('{logs.files}') WHERE user % {PANDAS_SHARE} = 0"
        draft = path.with_suffix(".writing")
        duckdb.sql(f"COPY ({query}) TO '{draft}' (FORMAT parquet)")
        os.replace(draft, path)
    return path


def _count(root: Path, days: list[str], started: float) -> Logs:
    counted = root / "counted.json"
    if counted.exists():
        num_rows, num_users = json.loads(counted.read_text())
    else:
        query = f"SELECT count(*), count(DISTINCT user) FROM read_parquet('{root}/actions/*/*.parquet')"
        num_rows, num_users = duckdb.sql(query).fetchall()[0]
        counted.write_text(json.dumps([num_rows, num_users]))
    say(f"logs: {num_rows:,} rows of {num_users:,} users, ready in {time.perf_counter() - started:.0f} s")
    return Logs(root=root, days=days, num_rows=num_rows, num_users=num_users)


# What is measured; each runs in a process of its own.


def full_build(logs: Logs, out: Path) -> str:
    nobody = pa.array([], pa.int64())
    site = world_site(
        logs=logs.root,
        data_dir=out,
        start_ds=logs.days[0],
        end_ds=logs.days[-1],
        num_buckets=num_buckets_for(logs.num_users),
    )
    started = time.perf_counter()
    with LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=out / "spill") as engine:
        days = list(ingest_days(site, logs.days, engine=engine, forgotten=nobody, progress=_quiet))
        ingest_s = time.perf_counter() - started
        [timelines] = build_timelines(
            site, logs.days[-1:], engine=engine, forgotten=nobody, rebuild=True, progress=_quiet
        )
    num_kept = sum(day["counts"]["kept"] for day in days)
    if timelines["counts"]["actions"] != num_kept:
        raise RuntimeError(f"{num_kept:,} actions were ingested, and {timelines['counts']['actions']:,} assembled")
    return f"{num_kept:,} actions of {timelines['counts']['users']:,} users, ingestion {ingest_s:.1f} s"


def duckdb_sort(logs: Logs, out: Path) -> None:
    connection = duckdb.connect(
        config={"threads": NUM_WORKERS, "memory_limit": "3GB", "temp_directory": str(out / "spill")}
    )
    connection.execute("SET enable_progress_bar = false")
    sort = f"SELECT * FROM read_parquet('{logs.files}') ORDER BY user, event_time_ms"
    connection.execute(f"COPY ({sort}) TO '{out / 'sorted.parquet'}' (FORMAT parquet)")


def pandas_lists(parquet: Path, _: Path) -> str:
    import pandas as pd  # here, so that the other runs do not carry it in memory

    timelines = pd.read_parquet(parquet).sort_values(["user", "event_time_ms"]).groupby("user").agg(list)
    return f"{len(timelines):,} users"


def _quiet(_: str) -> None:
    pass


def run(name: str, folder: Path, function: Callable[..., str | None], data: Logs | Path) -> Measured[str | None]:
    """Measure `function(data, out)`; `out` is an empty directory to write to, removed afterwards."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        measured = measure(function, data, out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    say(
        f"{name}: {measured.seconds:.1f} s ({measured.cpu_s:.1f} s of processor), peak {measured.peak_gb:.2f} GB"
        + ("" if measured.outcome is None else f"; {measured.outcome}")
    )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small logs, one repeat")
    parser.add_argument("--data", type=Path, help="keep the logs in this directory and use those that are there")
    parser.add_argument("--repeats", type=int, default=2, help="runs of the build, DuckDB and pandas, taking turns")
    parser.add_argument("--full-pandas", action="store_true", help="pandas on all users instead of a tenth")
    arguments = parser.parse_args()

    with working_directory(arguments.data) as folder:
        logs = make_logs(quick_world() if arguments.quick else full_world(), folder)
        scale, parquet = 1.0, logs.root / "actions"
        if not arguments.full_pandas:
            parquet = sample_logs(logs, folder)
            scale = logs.num_rows / pq.read_metadata(parquet).num_rows
            say(f"pandas gets a sample of the users; its seconds below count {scale:.2f} times")
        sorts, builds, frames = [], [], []
        for _ in range(1 if arguments.quick else arguments.repeats):
            sorts.append(run("DuckDB sort", folder, duckdb_sort, logs))
            builds.append(run("full build", folder, full_build, logs))
            frames.append(run("pandas", folder, pandas_lists, parquet))
        build_s, sort_s = min(one.seconds for one in builds), min(one.seconds for one in sorts)
        pandas_s = scale * min(one.seconds for one in frames)
        cpu_ratio = min(one.cpu_s for one in builds) / min(one.cpu_s for one in sorts)
        peak_gb = max(one.peak_gb for one in builds)

        logs_x3 = copy_logs(logs, folder)
        large_build = run("full build, three times the users", folder, full_build, logs_x3)

    report("timelines_build", build_s, "s")
    report("timelines_duckdb_sort", sort_s, "s")
    report("timelines_build_over_duckdb_sort", build_s / sort_s, "x", bar="<= 2.5")
    report("timelines_build_over_duckdb_sort_cpu", cpu_ratio, "x")
    report("timelines_pandas_over_build", pandas_s / build_s, "x", bar=">= 5")
    report("timelines_peak_memory", peak_gb, "GB", bar="< 4")
    report("timelines_build_3x_data", large_build.seconds, "s")
    report("timelines_peak_memory_3x_data", large_build.peak_gb, "GB")
    report("timelines_peak_memory_growth_3x_data", large_build.peak_gb / peak_gb, "x", bar="< 3")


if __name__ == "__main__":
    main()
