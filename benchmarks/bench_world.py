"""The synthetic site: how fast it writes its logs on one core, in how much memory.

Twenty days of the demo preset, as Parquet and as gzipped CSV. The yardstick is measured in the same run: numpy
merely draws as many random rows of the same columns, and pyarrow writes them in as many parts. What the world
costs beyond that is its sessions, recommenders and engagement model. Bars:

- at least 100,000 actions for each second of one core, written as Parquet;
- four times the users add less than a tenth to the peak memory, because chunks are streamed.

Every run has a process of its own, with one worker. Seconds are processor time of the call, world building included
and imports not: a busy machine hardly moves them. The world and the yardstick take turns, and the best run of each
counts. Memory is the high-water mark that the kernel keeps, because short peaks escape a sampler.
"""

import argparse
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import measure, report, say, working_directory

from pf_core.world.config import WorldConfig, demo, large, tiny
from pf_core.world.ids import PIN_BITS, USER_BITS, spell_pins
from pf_core.world.log_defects import EVENTS, LOG_COLUMNS, SURFACE_NAMES
from pf_core.world.logs import FileFormat, write_logs

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Written:
    num_rows: int
    cpu_s: float
    peak_gb: float


def write_world(config: WorldConfig, out: Path, file_format: FileFormat, num_days: int) -> Written:
    started = time.process_time()
    num_rows = write_logs(config, out, file_format=file_format, days=config.dates[:num_days]).num_rows
    return written(num_rows, started)


def written(num_rows: int, started: float) -> Written:
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Written(num_rows=num_rows, cpu_s=time.process_time() - started, peak_gb=peak_kb / 1e6)


def write_random_rows(out: Path, num_rows: int, num_parts: int) -> Written:
    """The log's columns, at random."""
    started = time.process_time()
    rng = np.random.default_rng(0)
    out.mkdir(parents=True)
    events, surfaces = pa.array(EVENTS), pa.array(list(SURFACE_NAMES.values()))
    for part in range(num_parts):
        num = num_rows // num_parts
        columns = [
            np.sort(rng.integers(1_767_225_600_000, 1_767_312_000_000, num)),
            rng.integers(0, 1 << USER_BITS, num),
            spell_pins(rng.integers(0, 1 << PIN_BITS, num)),
            events.take(pa.array(rng.integers(0, len(EVENTS), num))),
            surfaces.take(pa.array(rng.integers(0, len(surfaces), num))),
            pa.array(np.exp(rng.normal(9, 1, num)).astype(np.int64), mask=rng.random(num) < 0.02),
        ]
        pq.write_table(
            pa.table(dict(zip(LOG_COLUMNS, columns, strict=True))),
            out / f"part-{part:05d}.parquet",
            compression="zstd",
            use_dictionary=["event", "surface"],
            store_schema=False,
        )
    return written(num_rows, started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny world, as a smoke test")
    arguments = parser.parse_args()
    config, num_days = (tiny(), 5) if arguments.quick else (demo(), 20)
    crowd = large(num_users=2_000 if arguments.quick else 50_000, num_days=30, num_pins=20_000)
    crowd = replace(crowd, users_per_chunk=crowd.num_users // 6)

    with working_directory(None) as folder:
        cpu_s: dict[str, list[float]] = {"parquet": [], "csv.gz": [], "random": []}
        num_rows = 0
        for number in range(1 if arguments.quick else ROUNDS):
            for file_format in ("parquet", "csv.gz"):
                world = measure(write_world, config, folder / f"{file_format}-{number}", file_format, num_days).outcome
                cpu_s[file_format].append(world.cpu_s)
                num_rows = world.num_rows
            num_parts = num_days * config.num_chunks
            yardstick = measure(write_random_rows, folder / f"random-{number}", num_rows, num_parts).outcome
            cpu_s["random"].append(yardstick.cpu_s)
        best = {name: min(times) for name, times in cpu_s.items()}
        say(f"{num_rows:,} actions of {config.num_users:,} users in {num_days} days, {config.num_pins:,} pins")
        report("world_parquet_speed", num_rows / best["parquet"], "actions/cpu_s", bar=">= 100000")
        report("world_csv_speed", num_rows / best["csv.gz"], "actions/cpu_s")
        report("world_time_over_random_rows", best["parquet"] / best["random"], "x")

        small = measure(write_world, crowd, folder / "small", "parquet", 2).outcome
        crowds = replace(crowd, num_users=4 * crowd.num_users)
        big = measure(write_world, crowds, folder / "big", "parquet", 2).outcome
        say(f"{small.num_rows:,} actions of {crowd.num_users:,} users; {big.num_rows:,} of {crowds.num_users:,}")
        report("world_peak_memory", big.peak_gb, "GB")
        report("world_memory_growth_at_4x_users", big.peak_gb / small.peak_gb, "x", bar="<= 1.1")


if __name__ == "__main__":
    main()
