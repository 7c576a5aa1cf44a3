"""The daily increment: 50k active users with 200k actions, on a state of 500k users.

The increment is `build_timelines(site, [day], rebuild=False)`. Its bar: at most 4 x the time of merely reading and
writing the rows that it changes, which is the baseline: for every bucket, find the active users' newest segments, take
them from the previous day's version, and write them as a fresh Lance dataset, with the same pool. And it is to grow
with the active users, not with the idle ones: the same day is run on 100k, 500k and 2M users, and at 500k with a tenth
of the active users. We read "not with the idle ones" as: less than twice the time on 20 x the users.

A state is made in bulk from synthetic logs of about 40 actions a user over 10 days; every active user is known to
it. Re-running a day gives the same day, so increment and baseline take turns with a warm pool of 2 workers, and the
fastest run of each counts. Ingesting the day's log is timed apart.

The number of buckets is fixed for the life of a site, so all three sizes have the 17 that 500k users want (30k users
a bucket). A bucket has a cost of its own, to open, commit and tag its dataset: the 500k users are run once more in
four times the buckets, to show it.

With `--data` the states stay, and a second run is quick. Otherwise a state is removed before the next one is made;
about 8 GB of disk.
"""

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import MEMORY_MB, NUM_WORKERS, num_buckets_for, report, say, working_directory, world_site

from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.engine.local import LocalEngine
from pf_core.hashing import bucket_of
from pf_core.logs.ingest import ingest_days
from pf_core.schemas import TIMELINE_LISTS
from pf_core.timelines.build import build_timelines, timeline_state
from pf_core.timelines.segments import read_rows, read_segments

START_DS = "2026-01-01"
NUM_DAYS = 10
ACTIONS_PER_USER = 40
ACTIONS_PER_ACTIVE_USER = 4
NUM_PINS = 200_000
NOBODY = pa.array([], pa.int64())


@dataclass(frozen=True, kw_only=True)
class Timing:
    increment_s: float
    baseline_s: float
    ingest_s: float


# Logs


def user_ids(num_users: int) -> np.ndarray:
    """Distinct, neither dense nor in order."""
    return np.arange(num_users, dtype=np.int64) * 2_654_435_761 % (1 << 52)


def write_day(folder: Path, ds: str, users: np.ndarray, rng: np.random.Generator) -> None:
    """One action for each entry of `users`, at random times of the day, in the order of time."""
    num = len(users)
    ms = ds_start_us(ds) // 1000 + np.sort(rng.integers(0, 86_400_000, num))
    pins = pa.array([f"pin{number:06d}" for number in range(NUM_PINS)])
    events = pa.array(["save", "closeup", "click", "hide"])
    surfaces = pa.array(["home", "search", "related"])
    table = pa.table(
        {
            "event_time_ms": ms,
            "user": rng.permutation(users),
            "pin": pins.take(pa.array(rng.integers(0, NUM_PINS, num))),
            "event": events.take(pa.array(rng.integers(0, 4, num))),
            "surface": surfaces.take(pa.array(rng.integers(0, 3, num))),
            "dwell_ms": rng.integers(0, 60_000, num),
        }
    )
    path = folder / "actions" / ds
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path / "part-0.parquet", row_group_size=1 << 20)


def write_active_day(folder: Path, ds: str, num_users: int, num_active: int) -> np.ndarray:
    """The day to be added; returns its users."""
    rng = np.random.default_rng([num_users, num_active])
    active = rng.choice(user_ids(num_users), num_active, replace=False)
    write_day(folder, ds, np.repeat(active, ACTIONS_PER_ACTIVE_USER), rng)
    return active


# State


def make_state(folder: Path, num_users: int, num_buckets: int, engine: LocalEngine) -> Site:
    """A site with timelines as of its day NUM_DAYS, built in bulk unless they are there."""
    site = world_site(
        logs=folder / "logs",
        data_dir=folder,
        start_ds=START_DS,
        end_ds=shift_ds(START_DS, NUM_DAYS),
        num_buckets=num_buckets,
    )
    base_ds = shift_ds(START_DS, NUM_DAYS - 1)
    if timeline_state(site).manifest(base_ds) is not None:
        return site
    started = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(num_users)
    days = ds_range(START_DS, base_ds)
    for ds in days:
        users = user_ids(num_users)[rng.integers(0, num_users, num_users * ACTIONS_PER_USER // NUM_DAYS)]
        write_day(folder / "logs", ds, users, rng)
    for _ in ingest_days(site, days, engine=engine, forgotten=NOBODY, progress=_quiet):
        pass
    shutil.rmtree(folder / "logs")
    [manifest] = build_timelines(site, [base_ds], engine=engine, forgotten=NOBODY, rebuild=True, progress=_quiet)
    shutil.rmtree(site.directory / "raw_actions")
    counts = manifest["counts"]
    say(
        f"state of {counts['users']:,} users, {counts['actions']:,} actions in {num_buckets} buckets: "
        f"made in {time.perf_counter() - started:.0f} s"
    )
    return site


def _quiet(_: str) -> None:
    pass


# What is measured


def time_increment(site: Site, num_users: int, num_active: int, engine: LocalEngine, *, repeats: int) -> Timing:
    ds = shift_ds(START_DS, NUM_DAYS)
    active = write_active_day(site.log_root, ds, num_users, num_active)
    ingestions, increments, baselines = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        [_] = ingest_days(site, [ds], engine=engine, forgotten=NOBODY, progress=_quiet)
        ingestions.append(time.perf_counter() - started)
        baselines.append(time_baseline(site, shift_ds(ds, -1), active, engine))
        started = time.perf_counter()
        [manifest] = build_timelines(site, [ds], engine=engine, forgotten=NOBODY, rebuild=False, progress=_quiet)
        increments.append(time.perf_counter() - started)
    if manifest["counts"]["active_users"] != num_active:
        raise RuntimeError(f"{manifest['counts']['active_users']:,} users were active instead of {num_active:,}")
    timing = Timing(increment_s=min(increments), baseline_s=min(baselines), ingest_s=min(ingestions))
    say(
        f"{num_users:,} users in {site.timelines.num_buckets} buckets, {num_active:,} active: "
        f"increment {timing.increment_s:.2f} s, read and write {timing.baseline_s:.2f} s, "
        f"ratio {timing.increment_s / timing.baseline_s:.2f}; ingestion {timing.ingest_s:.2f} s; "
        f"all increments {', '.join(f'{seconds:.2f}' for seconds in increments)}"
    )
    return timing


@dataclass(frozen=True, kw_only=True)
class _Copy:
    source: Path
    version: int
    target: Path
    user_ids: pa.Array


def time_baseline(site: Site, base_ds: str, active: np.ndarray, engine: LocalEngine) -> float:
    """Seconds of reading these users' newest segments, to which their actions would be added, and of writing them."""
    state = timeline_state(site)
    versions = state.require(base_ds)["versions"]
    folder = site.directory / "baseline"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    bucket = bucket_of(pa.array(active), state.num_buckets)
    tasks = [
        _Copy(
            source=state.bucket_path(number),
            version=versions[number],
            target=folder / f"{number}.lance",
            user_ids=pa.array(active[bucket == number]),
        )
        for number in range(state.num_buckets)
    ]
    started = time.perf_counter()
    list(engine.map_buckets(_copy_rows, tasks))
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def _copy_rows(task: _Copy) -> int:
    dataset = lance.dataset(task.source, version=task.version)
    segments = read_segments(dataset, of=task.user_ids)
    rows = read_rows(dataset, segments.where(segments.is_newest), ["user_id", *TIMELINE_LISTS])
    lance.write_dataset(rows, task.target)
    return rows.num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small states, two repeats")
    parser.add_argument("--data", type=Path, help="keep the states in this directory and use those that are there")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the increment and of the baseline")
    arguments = parser.parse_args()
    scale, repeats = (250, 2) if arguments.quick else (1, arguments.repeats)
    small, medium, big, active = 100_000 // scale, 500_000 // scale, 2_000_000 // scale, 50_000 // scale
    buckets = 2 if arguments.quick else num_buckets_for(medium)

    timings: dict[tuple[int, int, int], Timing] = {}
    with working_directory(arguments.data) as root:
        with LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=root / "spill") as engine:
            for num_users, num_buckets, numbers_active in (
                (small, buckets, [active]),
                (medium, buckets, [active // 10, active]),
                (medium, 4 * buckets, [active]),
                (big, buckets, [active]),
            ):
                folder = root / f"state-{num_users}-{num_buckets}"
                site = make_state(folder, num_users, num_buckets, engine)
                for num_active in numbers_active:
                    key = (num_users, num_buckets, num_active)
                    timings[key] = time_increment(site, num_users, num_active, engine, repeats=repeats)
                if arguments.data is None:
                    shutil.rmtree(folder)

    at_small, at_medium, at_big = (timings[num_users, buckets, active] for num_users in (small, medium, big))
    few_active, more_buckets = timings[medium, buckets, active // 10], timings[medium, 4 * buckets, active]
    report("increment_500k_users", at_medium.increment_s, "s")
    report("increment_500k_users_ingestion", at_medium.ingest_s, "s")
    report("increment_500k_users_over_read_write", at_medium.increment_s / at_medium.baseline_s, "x", bar="<= 4")
    report("increment_100k_users_over_read_write", at_small.increment_s / at_small.baseline_s, "x")
    report("increment_2m_users_over_read_write", at_big.increment_s / at_big.baseline_s, "x")
    report("increment_growth_100k_to_500k_users", at_medium.increment_s / at_small.increment_s, "x")
    report("increment_growth_100k_to_2m_users", at_big.increment_s / at_small.increment_s, "x", bar="< 2")
    report("increment_growth_500k_users_in_4x_buckets", more_buckets.increment_s / at_medium.increment_s, "x")
    report("increment_growth_5k_to_50k_active_users", at_medium.increment_s / few_active.increment_s, "x")


if __name__ == "__main__":
    main()
