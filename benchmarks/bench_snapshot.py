"""Merging a day's embeddings into the snapshot of all users: 100k active users, a state of 2M users x 256 float16.

Each user has seen 16 pins, and has no memory.

- **Merge.** `merge_days(site, [day])` on the day after a full build; checks, manifest and retention included. The bar:
  at most 4 x the time of writing the delta alone, which is the same rows as as many fresh Lance datasets in the same
  pool (the time within the writing calls, divided by the workers). Re-running a day gives the same day, so the two take
  turns, and the fastest run of each counts. Then the same on 0.5M and 5M users in the same buckets (their number is
  fixed for the life of a site), to show that it grows with the active users and not with the idle ones. Of 0.5M users
  every fifth is active, so that their buckets are rewritten.
- **Full build.** A day on which everyone is embedded, against `cp` of the same bytes: both end with an fsync of every
  file. Peak memory is the largest of all builds and merges, with 2 workers.
- **Ageing.** 500k users, 25k active a day, 90 days one by one, drawn evenly, which is the worst case: real users come
  back. What a day of the last 30 costs on average, the rewriting of worn buckets and the removal of old days included;
  and how long yesterday takes to open and scan, against the same rows freshly written.

The pool is warm in all of it. About 9 GB of disk at a time.
"""

import argparse
import datetime
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from measuring import (
    MEMORY_MB,
    NUM_WORKERS,
    Measured,
    measure,
    num_buckets_for,
    record_lists,
    report,
    say,
    working_directory,
    world_site,
)

from pf_core.config.site import Site
from pf_core.days import ds_start_us, shift_ds
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.tables import embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of
from pf_core.engine.daily_state import DailyState, Manifest, create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.hashing import bucket_of
from pf_core.schemas import INPUT_HASH, TIMESTAMP, user_embeddings_schema

START_DS = "2026-01-01"
DIM = 256
NUM_TURNS = 5
NUM_SCANS = 12
MODEL_VERSION = "0123456789abcdef"
NOBODY = pa.array([], pa.int64())
NUM_SEEN = 16
PINS = pa.array([f"pin{number:07d}" for number in range(10_000)])


# Deltas


def user_ids(num_users: int) -> np.ndarray:
    """Distinct, neither dense nor in order."""
    return np.arange(num_users, dtype=np.int64) * 2_654_435_761 % (1 << 52)


@dataclass(frozen=True, kw_only=True)
class _DeltaTask:
    path: Path
    user_ids: np.ndarray
    ds: str


def _write_bucket(task: _DeltaTask) -> tuple[Path, int]:
    num = len(task.user_ids)
    rng = np.random.default_rng([num, *task.ds.encode()])
    vector_ND = rng.integers(-127, 128, (num, DIM), np.int8).astype(np.float32)
    vector_ND /= np.linalg.norm(vector_ND, axis=1, keepdims=True)
    rows = pa.table(
        [
            pa.array(np.sort(task.user_ids)),
            column_of(vector_ND),
            pa.array([MODEL_VERSION] * num, pa.string()),
            pa.array([datetime.date.fromisoformat(task.ds)] * num, pa.date32()),
            pa.array(ds_start_us(task.ds) + rng.integers(0, 86_400_000_000, num)).cast(TIMESTAMP),
            pa.array(rng.integers(1, 256, num), pa.int32()),
            *record_lists(PINS, num_memory=np.zeros(num, int), num_seen=np.full(num, NUM_SEEN)),
            pa.array(rng.integers(0, 1 << 62, num)),
        ],
        schema=user_embeddings_schema("int", "string", DIM).append(INPUT_HASH),
    )
    return task.path, create_bucket(task.path, rows).version


def write_delta(site: Site, ds: str, users: np.ndarray, engine: LocalEngine, *, mode: str) -> None:
    """user_embeddings[ds] with a row for each of these users."""
    state = embedding_state(site)
    bucket = bucket_of(pa.array(users), state.num_buckets)
    paths = [state.bucket_path(number) for number in range(state.num_buckets)]
    tasks = [_DeltaTask(path=path, user_ids=users[bucket == number], ds=ds) for number, path in enumerate(paths)]
    version = dict(engine.map_buckets(_write_bucket, tasks))
    state.publish(
        ds,
        [version[path] for path in paths],
        {
            "model_version": MODEL_VERSION,
            "embedding_dim": DIM,
            "slices": {"embedding": [0, DIM]},
            "mode": mode,
            "digest": f"{ds}-{len(users)}",
            "counts": {"users": len(users)},
        },
    )


def make_site(folder: Path, num_buckets: int) -> Site:
    end_ds = shift_ds(START_DS, 365)
    return world_site(logs=folder / "logs", data_dir=folder, start_ds=START_DS, end_ds=end_ds, num_buckets=num_buckets)


def _engine(site: Site) -> LocalEngine:
    return LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=site.directory / "spill")


def _merge(site: Site, ds: str, engine: LocalEngine) -> tuple[Manifest, float]:
    started = time.perf_counter()
    [manifest] = merge_days(site, [ds], engine=engine, forgotten=NOBODY, progress=lambda _: None)
    return manifest, time.perf_counter() - started


# The full build


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _wake(_: int) -> None:
    """Make a worker import everything; slow enough that every worker gets one such task."""
    time.sleep(0.1)


def _build(site: Site) -> float:
    with _engine(site) as engine:
        list(engine.map_buckets(_wake, range(4 * NUM_WORKERS)))
        started = time.perf_counter()
        _merge(site, START_DS, engine)
        _sync(snapshot_state(site).root)
        return time.perf_counter() - started


def _copy(site: Site) -> float:
    target = site.directory / "copy"
    started = time.perf_counter()
    subprocess.run(["cp", "-r", embedding_state(site).root, target], check=True)
    _sync(target)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


# The merge


def _write_alone(task: tuple[DailyState, str, int, Path]) -> float:
    state, ds, bucket, target = task
    names = [name for name in state.open_bucket(ds, bucket).schema.names if name != INPUT_HASH.name]
    rows = state.open_bucket(ds, bucket).to_table(columns=names)
    started = time.perf_counter()
    create_bucket(target / f"{bucket}.lance", rows)
    return time.perf_counter() - started


def _write_all_alone(site: Site, ds: str, engine: LocalEngine) -> float:
    state, target = embedding_state(site), site.directory / "alone"
    tasks = [(state, ds, bucket, target) for bucket in range(state.num_buckets)]
    seconds = sum(engine.map_buckets(_write_alone, tasks)) / NUM_WORKERS
    shutil.rmtree(target)
    return seconds


def _take_turns(site: Site, ds: str) -> tuple[Manifest, float, float]:
    """The fastest merge of the day, and the fastest writing of its delta alone."""
    merges, baselines = [], []
    with _engine(site) as engine:
        for _ in range(NUM_TURNS):
            baselines.append(_write_all_alone(site, ds, engine))
            manifest, seconds = _merge(site, ds, engine)
            merges.append(seconds)
    return manifest, min(merges), min(baselines)


@dataclass(frozen=True, kw_only=True)
class Timing:
    merge_s: float
    alone_s: float
    peak_gb: float


def time_merge(site: Site, num_users: int, num_active: int) -> Timing:
    ds = shift_ds(START_DS, 1)
    active = np.random.default_rng([num_users, num_active]).choice(user_ids(num_users), num_active, replace=False)
    with _engine(site) as engine:
        write_delta(site, ds, active, engine, mode="active")
    measured = measure(_take_turns, site, ds)
    manifest, merge_s, alone_s = measured.outcome
    counts = manifest["counts"]
    if (counts["users"], counts["refreshed"]) != (num_users, num_active):
        raise RuntimeError(f"{counts} after merging {num_active:,} of {num_users:,} users")
    say(
        f"{num_users:,} users in {site.timelines.num_buckets} buckets, {num_active:,} active: "
        f"merged in {merge_s:.2f} s, delta alone written in {alone_s:.2f} s, ratio {merge_s / alone_s:.2f}; "
        f"peak {measured.peak_gb:.2f} GB"
    )
    return Timing(merge_s=merge_s, alone_s=alone_s, peak_gb=measured.peak_gb)


# Ageing


def _scan(task: tuple[Path, int]) -> int:
    path, version = task
    return sum(batch.num_rows for batch in lance.dataset(path, version=version).to_batches())


def _scan_all(datasets: list[tuple[Path, int]], engine: LocalEngine) -> float:
    started = time.perf_counter()
    sum(engine.map_buckets(_scan, datasets))
    return time.perf_counter() - started


def age(site: Site, num_users: int, num_active: int, num_days: int) -> tuple[float, float]:
    """(mean merge over mean baseline in the last third of the days, scan of yesterday over scan of a fresh copy)."""
    rng = np.random.default_rng(num_users)
    state, merges, baselines = snapshot_state(site), [], []
    with _engine(site) as engine:
        write_delta(site, START_DS, user_ids(num_users), engine, mode="everyone")
        _merge(site, START_DS, engine)
        for number in range(1, num_days + 1):
            ds = shift_ds(START_DS, number)
            active = rng.choice(user_ids(num_users), num_active, replace=False)
            write_delta(site, ds, active, engine, mode="active")
            manifest, seconds = _merge(site, ds, engine)
            if number > num_days * 2 // 3:
                merges.append(seconds)
                baselines.append(_write_all_alone(site, ds, engine))
        yesterday = shift_ds(START_DS, num_days - 1)
        worn = [
            (state.bucket_path(bucket), version) for bucket, version in enumerate(state.require(yesterday)["versions"])
        ]
        fresh = []
        for bucket, (path, version) in enumerate(worn):
            rows = lance.dataset(path, version=version).to_table()
            fresh.append((site.directory / "fresh" / f"{bucket}.lance", 1))
            create_bucket(fresh[-1][0], rows)
        scans = [(_scan_all(worn, engine), _scan_all(fresh, engine)) for _ in range(NUM_SCANS)]
    worn_s, fresh_s = (min(times) for times in zip(*scans, strict=True))
    disk = sum(path.stat().st_size for path in state.root.rglob("*") if path.is_file())
    say(
        f"{num_users:,} users after {num_days} merges of {num_active:,}: {np.mean(merges):.2f} s a day on average, "
        f"{max(merges):.2f} s at most, delta alone {np.mean(baselines):.2f} s; yesterday is scanned in {worn_s:.3f} s, "
        f"freshly written in {fresh_s:.3f} s; {manifest['counts']['fragments']} fragments; "
        f"{len(state.days())} days take {disk / 1e9:.2f} GB, one alone {num_users * (DIM * 2 + 24) / 1e9:.2f} GB"
    )
    return float(np.mean(merges) / np.mean(baselines)), worn_s / fresh_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small states")
    arguments = parser.parse_args()
    scale = 500 if arguments.quick else 1
    small, medium, big = (num_users // scale for num_users in (500_000, 2_000_000, 5_000_000))
    few, active = 25_000 // scale, 100_000 // scale
    num_buckets = 3 if arguments.quick else num_buckets_for(medium)

    timings: dict[tuple[int, int], Timing] = {}
    builds: dict[int, Measured[float]] = {}
    with working_directory(None) as root:
        for num_users, numbers_active in ((small, [active]), (medium, [few, active]), (big, [active])):
            site = make_site(root / f"state-{num_users}", num_buckets)
            with _engine(site) as engine:
                write_delta(site, START_DS, user_ids(num_users), engine, mode="everyone")
            _sync(embedding_state(site).root)
            if num_users == medium:
                copy_s = _copy(site)
            builds[num_users] = measure(_build, site)
            say(f"{num_users:,} users: full build in {builds[num_users].outcome:.1f} s")
            for num_active in numbers_active:
                timings[num_users, num_active] = time_merge(site, num_users, num_active)
            shutil.rmtree(root / f"state-{num_users}")
        site = make_site(root / "ageing", max(1, num_buckets // 4))
        steady, scan = age(site, small, few, 12 if arguments.quick else 90)

    at_small, at_medium, at_big = (timings[num_users, active] for num_users in (small, medium, big))
    build_s = builds[medium].outcome
    peak_gb = max(run.peak_gb for run in (*builds.values(), *timings.values()))
    report("snapshot_merge_2m_users", at_medium.merge_s, "s")
    report("snapshot_merge_over_writing_the_delta", at_medium.merge_s / at_medium.alone_s, "x", bar="<= 4")
    report("snapshot_merge_growth_500k_to_2m_users", at_medium.merge_s / at_small.merge_s, "x")
    report("snapshot_merge_growth_500k_to_5m_users", at_big.merge_s / at_small.merge_s, "x")
    report("snapshot_merge_growth_25k_to_100k_active", at_medium.merge_s / timings[medium, few].merge_s, "x")
    report("snapshot_full_build_2m_users", build_s, "s")
    report("snapshot_full_build_over_cp", build_s / copy_s, "x", bar="<= 4")
    report("snapshot_peak_memory", peak_gb, "GB", bar="< 1")
    report("snapshot_merge_after_90_days_over_writing_the_delta", steady, "x")
    report("snapshot_scan_after_90_merges_over_fresh", scan, "x", bar="<= 1.5")


if __name__ == "__main__":
    main()
