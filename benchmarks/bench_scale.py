"""The embedded engine end to end, at one size and at a tenth of it: raw Parquet logs to a published release.

A backfill of 30 days: raw_actions and user_timelines for the range in one run, each day built on the one before;
user_embeddings of everybody on the last day, their snapshot, pin embeddings, index, and the release with its LMDB
store. Then one morning more: the same for the day after, on which only the active users are touched. At last the
timelines of that morning are rebuilt from all the logs at once. The functions are those that the assets call, on a pool
of 2 workers that is warm: starting processes is not counted, nor is writing the logs. What the site and the model are
like is said in `scale_site.py`.

Bars: the seconds for an action, from raw logs to store, are at most 1.3 x those at a tenth of the size. The peak memory
of any stage, of this process and its pool together, is under 6 GB.

`make bench-scale` runs 60M actions of 1M users. `--json` keeps the figures, from which `capacity_plan.py` makes the
tables of docs/scale.md. Sizes run smallest first; each is removed before the next.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measuring import (
    MEMORY_MB,
    NUM_WORKERS,
    PeakMemory,
    cpu_so_far_s,
    family_of,
    measure,
    report,
    say,
    working_directory,
)
from scale_site import Run, Size, bytes_in, make_site, run_stage, wake_pool, write_logs, write_model

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.logs.partition import bucket_files
from pf_core.pins.lookup import find_pins
from pf_core.pins.packed import PIN_BATCH_ROWS
from pf_core.timelines.build import timeline_state
from pf_core.timelines.segments import read_segments

FULL = Size(num_users=100_000, num_actions=6_000_000, num_pins=20_000, num_days=30)
QUICK = Size(num_users=2_000, num_actions=60_000, num_pins=2_000, num_days=5)

BACKFILL = (
    *("raw_actions", "pin_features", "user_timelines", "user_embeddings", "user_embedding_snapshot"),
    *("pin_embeddings", "pin_index", "release"),
)
UNITS = {
    **dict.fromkeys(("raw_actions", "user_timelines", "rebuilt_timelines"), "action"),
    **dict.fromkeys(("user_embeddings", "user_embedding_snapshot", "release"), "user"),
    **dict.fromkeys(("pin_features", "pin_embeddings", "pin_index"), "pin"),
}
"""The unit in which the cost of a stage is counted."""
LOGS_TO_STORE = [name for name in BACKFILL if UNITS[name] != "pin"]
LOOKUP_PINS = (4_000_000, 32_000_000, 256_000_000)
QUICK_LOOKUP_PINS = (500_000, 1_000_000)
NUM_LOOKUPS = 3
LOOKUP_ACTIONS = 1_000_000
"""Actions of one bucket: 30k users with 32 actions each."""
WANTED_PINS = 500_000
"""Distinct pins of these actions, spread over the catalogue."""
SAMPLES_PER_S = 4
"""Memory samples per second: a sample reads all pages, which is slow for gigabytes."""
MAX_GROWTH = 1.3
MAX_MEMORY_GB = 6


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage took at one size."""

    phase: str
    name: str
    unit: str
    num_units: int
    seconds: float
    cpu_s: float
    peak_gb: float
    num_bytes: int
    """By which the site grew on disk."""
    written_bytes: int
    """What was handed to the system to write, and may be gone again."""
    counts: dict[str, int]


def written_bytes() -> int:
    """Bytes that this process and its pool have written so far."""
    return sum(process.io_counters().write_chars for process in family_of(os.getpid()))


def measure_stage(phase: str, name: str, run: Run, num_actions: int, engine: Engine) -> Stage:
    bytes_before, cpu_before, written_before = bytes_in(run.site.directory), cpu_so_far_s(), written_bytes()
    with PeakMemory(os.getpid(), samples_per_s=SAMPLES_PER_S) as peak:
        seconds, counts = run_stage(name, run, engine)
    used_s, written = cpu_so_far_s() - cpu_before, written_bytes() - written_before
    num_bytes = bytes_in(run.site.directory) - bytes_before
    if (phase, name) == ("morning", "user_timelines"):
        counts["rewritten_actions"] = num_rewritten(run.site, run.days[-1])
    if UNITS[name] == "action":
        num_units = num_actions
    elif phase == "morning" and name == "user_embedding_snapshot":
        num_units = counts["refreshed"] + counts["new"]
    else:
        num_units = counts[f"{UNITS[name]}s"]
    stage = Stage(
        phase=phase,
        name=name,
        unit=UNITS[name],
        num_units=num_units,
        seconds=seconds,
        cpu_s=used_s,
        peak_gb=peak.bytes / 1e9,
        num_bytes=num_bytes,
        written_bytes=written,
        counts=counts,
    )
    say(
        f"{phase:9}{name:25}{seconds:9.2f} s {1e6 * seconds / num_units:9.2f} µs a {stage.unit:7}"
        f"{num_units:>12,} {written / 1e6:10.1f} MB written, {num_bytes / 1e6:10.1f} MB more on disk, "
        f"{stage.peak_gb:6.2f} GB peak"
    )
    return stage


def num_rewritten(site: Site, ds: str) -> int:
    """Actions that a day's timelines write: its own, and those of the segments to which they are added."""
    total, day_before = 0, shift_ds(ds, -1)
    for bucket, path in bucket_files(site, ds).items():
        active = pq.read_table(path, columns=["user_id"])["user_id"]
        segments = read_segments(timeline_state(site).open_bucket(day_before, bucket), of=active.unique())
        is_growing = segments.is_newest & (segments.num_actions < site.timelines.segment_actions)
        total += len(active) + int(segments.num_actions[is_growing].sum())
    return total


def time_lookup(folder: Path, num_pins: int) -> float:
    """Processor seconds to find the pins of LOOKUP_ACTIONS actions among `num_pins` pins.

    At any size the actions are on as many different pins, which lie evenly in the catalogue.
    """
    path, schema = folder / "pin_id.arrow", pa.schema([("pin_id", pa.string())])
    with pa.ipc.new_file(path, schema) as writer:
        for start in range(0, num_pins, PIN_BATCH_ROWS):
            ids = _numbered_pins(np.arange(start, min(start + PIN_BATCH_ROWS, num_pins)))
            writer.write_batch(pa.record_batch([ids], schema=schema))
    rows = np.random.default_rng(0).integers(0, WANTED_PINS, LOOKUP_ACTIONS) * (num_pins // WANTED_PINS)
    wanted = _numbered_pins(rows)
    times = []
    for _ in range(NUM_LOOKUPS):
        started = time.process_time()
        found = find_pins(path, wanted)
        times.append(time.process_time() - started)
    path.unlink()
    if not np.array_equal(found, rows):
        raise RuntimeError(f"pins were not found among {num_pins:,}")
    say(f"pins of {LOOKUP_ACTIONS:,} actions found among {num_pins:,} in {min(times):.2f} core-s")
    return min(times)


def _numbered_pins(number: np.ndarray) -> pa.Array:
    digits = pc.utf8_lpad(pa.array(number).cast(pa.string()), width=9, padding="0")
    return pc.binary_join_element_wise("pin", digits, "")


def run_size(size: Size, folder: Path, engine: Engine) -> list[Stage]:
    logs_s = measure(write_logs, folder / "logs", size).seconds  # in a process of its own, which takes its memory along
    site, served = make_site(folder, size), write_model(folder)
    say(
        f"{size.num_actions:,} actions of {size.num_users:,} users in {size.num_days} days and "
        f"{site.timelines.num_buckets} buckets, {size.num_pins:,} pins; logs of "
        f"{bytes_in(folder / 'logs') / 1e6:,.0f} MB written in {logs_s:.0f} s"
    )
    backfill = Run(site=site, days=size.days, served=served)
    morning = Run(site=site, days=[size.morning], served=served)
    num_a_day = size.num_actions // size.num_days
    num_actions = num_a_day * size.num_days
    stages = [measure_stage("backfill", name, backfill, num_actions, engine) for name in BACKFILL]
    stages += [measure_stage("morning", name, morning, num_a_day, engine) for name in BACKFILL]
    stages.append(measure_stage("rebuild", "rebuilt_timelines", morning, num_actions + num_a_day, engine))
    counts = stages[0].counts
    if counts["actions"] < 0.99 * num_actions:  # a few are exact duplicates
        raise RuntimeError(f"{counts['actions']:,} actions were kept of {num_actions:,}")
    return stages


def us_per_action(stages: list[Stage]) -> float:
    """From the raw logs to the store, without the pins, which are as many as one likes."""
    seconds = sum(stage.seconds for stage in stages if stage.phase == "backfill" and stage.name in LOGS_TO_STORE)
    return 1e6 * seconds / stages[0].num_units


def report_growth(small: list[Stage], large: list[Stage]) -> None:
    for low, high in zip(small, large, strict=True):
        growth = (high.seconds / high.num_units) / (low.seconds / low.num_units)
        report(f"scale_{high.phase}_{high.name}", 1e6 * high.seconds / high.num_units, f"us/{high.unit}")
        report(f"scale_{high.phase}_{high.name}_growth", growth, "x")
    report("scale_logs_to_store", us_per_action(large), "us/action")
    growth = us_per_action(large) / us_per_action(small)
    report("scale_logs_to_store_growth_at_10x", growth, "x", bar=f"<= {MAX_GROWTH}")
    report("scale_peak_memory", max(stage.peak_gb for stage in large), "GB", bar=f"< {MAX_MEMORY_GB}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small sizes")
    parser.add_argument("--users", type=int, default=FULL.num_users)
    parser.add_argument("--actions", type=int, default=FULL.num_actions)
    parser.add_argument("--pins", type=int, default=FULL.num_pins)
    parser.add_argument("--days", type=int, default=FULL.num_days)
    parser.add_argument(
        "--divide", type=int, nargs="+", default=[10], help="also run the size divided by these; the first is compared"
    )
    parser.add_argument("--data", type=Path, help="where to work; nothing stays there")
    parser.add_argument("--json", type=Path, help="write all figures there, after every size")
    arguments = parser.parse_args()
    full = Size(
        num_users=arguments.users, num_actions=arguments.actions, num_pins=arguments.pins, num_days=arguments.days
    )
    full = QUICK if arguments.quick else full
    results: dict[int, list[Stage]] = {}
    with (
        working_directory(arguments.data) as root,
        LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=root / "spill") as engine,
    ):
        wake_pool(engine)
        lookups = [
            {"num_actions": LOOKUP_ACTIONS, "num_pins": num_pins, "cpu_s": time_lookup(root, num_pins)}
            for num_pins in (QUICK_LOOKUP_PINS if arguments.quick else LOOKUP_PINS)
        ]
        for divisor in sorted({1, *arguments.divide}, reverse=True):
            folder = Path(tempfile.mkdtemp(prefix="scale-", dir=root))
            try:
                results[divisor] = run_size(full.divided(divisor), folder, engine)
            finally:
                shutil.rmtree(folder)
            if arguments.json is not None:
                sizes: list[dict[str, Any]] = [
                    {"size": asdict(full.divided(done)), "stages": [asdict(stage) for stage in stages]}
                    for done, stages in results.items()
                ]
                arguments.json.write_text(json.dumps({"sizes": sizes, "pin_lookups": lookups}, indent=1))
    report_growth(results[arguments.divide[0]], results[1])
    for lookup in lookups:
        report(f"scale_pin_lookup_{lookup['num_pins']}", 1e6 * lookup["cpu_s"] / LOOKUP_ACTIONS, "core-us/action")


if __name__ == "__main__":
    main()
