"""What the engine `spark` costs on top of the work: the same site on it and on `local`.

A standalone master and two workers of one core run on loopback, against a pool of two processes: the same machine,
the same per-bucket functions, the same files. So this is overhead, not speed: a cluster is for what one machine cannot.
Raw logs, timelines day by day, embeddings and snapshot of 30k users with 1M actions in 10 days and 8 buckets. Both
engines are warm; what a session takes to start is shown apart, and so is a `map_buckets` over tasks that do nothing.

Needs PySpark and Java 17 (`pip install 'pinnerformer[spark]'`), and says so without them.
"""

import argparse
import importlib.util
import shutil
import statistics
import sys
import time
from pathlib import Path

from measuring import MEMORY_MB, NUM_WORKERS, report, say, working_directory
from scale_site import Run, Size, do_nothing, make_site, run_stage, wake_pool, write_logs, write_model

from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.engine.spark import SparkEngine

REPOSITORY = Path(__file__).resolve().parents[1]
FULL = Size(num_users=30_000, num_actions=1_000_000, num_pins=5_000, num_days=10)
QUICK = Size(num_users=500, num_actions=10_000, num_pins=1_000, num_days=2)
NUM_BUCKETS = 8
STAGES = ("raw_actions", "pin_features", "user_timelines", "user_embeddings", "user_embedding_snapshot")
NUM_EMPTY = 5
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executorEnv.PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'benchmarks'}",
}


def time_stages(folder: Path, size: Size, engine: Engine) -> dict[str, float]:
    """Seconds of each stage, and of an empty map."""
    started = time.perf_counter()
    wake_pool(engine)
    seconds = {"start": time.perf_counter() - started}
    empty = []
    for _ in range(NUM_EMPTY):
        started = time.perf_counter()
        list(engine.map_buckets(do_nothing, range(NUM_BUCKETS)))
        empty.append(time.perf_counter() - started)
    seconds["empty_map"] = statistics.median(empty)
    run = Run(site=make_site(folder, size, num_buckets=NUM_BUCKETS), days=size.days, served=write_model(folder))
    for name in STAGES:
        seconds[name], counts = run_stage(name, run, engine)
        say(f"  {name}: {seconds[name]:.2f} s, {counts}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: a small site")
    size = QUICK if parser.parse_args().quick else FULL
    missing = [name for name in ("pyspark", "pytest") if importlib.util.find_spec(name) is None]
    if shutil.which("java") is None:
        missing.append("java")
    if missing:
        say(
            f"left out, because {' and '.join(missing)} cannot be found: pip install 'pinnerformer[dev,spark]', Java 17"
        )
        report("spark_benchmarks_left_out", 1, "benchmark")
        return
    sys.path.insert(0, str(REPOSITORY))
    from tests.scale.servers import SparkCluster

    with working_directory(None) as root:
        for name in ("local", "spark"):
            write_logs(root / name / "logs", size)
        say("local")
        with LocalEngine(num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, temp_dir=root / "spill") as engine:
            local = time_stages(root / "local", size, engine)
        say("spark")
        (root / "cluster").mkdir()
        cluster = SparkCluster(root / "cluster", num_workers=NUM_WORKERS)
        try:
            cluster.wait()
            with SparkEngine(
                master=cluster.master, num_workers=NUM_WORKERS, memory_mb=MEMORY_MB, settings=SETTINGS
            ) as engine:
                spark = time_stages(root / "spark", size, engine)
        finally:
            cluster.stop()
    for name in ("start", "empty_map"):
        report(f"spark_{name}", spark[name], "s")
        report(f"spark_{name}_local", local[name], "s")
    for name in STAGES:
        report(f"spark_{name}_over_local", spark[name] / local[name], "x")
    totals = [sum(seconds[name] for name in STAGES) for seconds in (spark, local)]
    report("spark_stages", totals[0], "s")
    report("spark_stages_local", totals[1], "s")
    report("spark_stages_over_local", totals[0] / totals[1], "x")


if __name__ == "__main__":
    main()
