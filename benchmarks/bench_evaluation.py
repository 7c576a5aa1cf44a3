"""Exact search of an evaluation: 10k users against 1M pins in 256 dimensions, with 100k positives; and PinnerSage.

Bars: at least half of the floating-point operations a second that `torch.matmul` reaches at its best (a product of two
square matrices), counting those of the scores alone; at most 1.2 x the time of faiss' IndexFlatIP, for the 50 nearest;
and under 4 GB of memory, the index included. Ours also counts the rivals of 10 positives a user, which faiss is not
asked for. Both have two threads; they and the matrix product take turns, each in a process of its own, and the fastest
run of each counts. The two must find the same pins.

faiss lives in an environment of its own, made once under PF_BENCH_DIR (or the system's temporary directory) and kept;
`faiss_flat.py` runs in it. Where it cannot be installed, a line says why, and it is left out.

Vectors are random unit vectors: exact search takes as long on any.

PinnerSage clusters users of 100 actions each, on ten interests, in one thread: bar 1 ms a user of the fastest hundred.
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Measured, ensure_environment, measure, report, say, working_directory

from pf_core.days import DAY_US
from pf_core.evaluation.pinnersage import PinnerSage, cluster_users
from pf_core.metrics.exact_search import search
from pf_core.timelines.arrays import Timelines

REQUIREMENTS = ("faiss-cpu==1.15.1", "numpy>=2,<3")
DIM, K, POSITIVES_PER_USER = 256, 50, 10
NUM_THREADS = 2
SQUARE, PRODUCTS = 4096, 5
SAME_SHARE = 0.9999
"""Least share of equal results: two ways to sum a score may exchange the last result with the next."""
CHUNK_ROWS = 10_000


def write_vectors(path: Path, num: int, *, seed: int) -> None:
    """Unit vectors, a chunk at a time."""
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num, DIM))
    for start in range(0, num, CHUNK_ROWS):
        chunk = np.random.default_rng([seed, start]).standard_normal((min(CHUNK_ROWS, num - start), DIM), np.float32)
        vectors[start : start + len(chunk)] = chunk / np.linalg.norm(chunk, axis=1, keepdims=True)
    vectors.flush()


# What is measured


def multiply_squares(size: int) -> float:
    """Floating-point operations a second of the fastest of some products."""
    torch.set_num_threads(NUM_THREADS)
    left, right, result = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    seconds = []
    for _ in range(PRODUCTS):
        started = time.perf_counter()
        torch.matmul(left, right, out=result)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def search_ours(folder: Path) -> float:
    """Seconds; leaves the rows that it found in the folder."""
    torch.set_num_threads(NUM_THREADS)
    index_ND, query_QD = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("index", "query"))
    rng = np.random.default_rng(0)
    positive_query_P = torch.arange(len(query_QD)).repeat_interleave(POSITIVES_PER_USER)
    positive_pin_P = torch.from_numpy(rng.integers(len(index_ND), size=len(positive_query_P)))
    job: dict[str, Any] = {
        "index_pin_N": torch.arange(len(index_ND)),
        "positive_query_P": positive_query_P,
        "positive_pin_P": positive_pin_P,
        "positive_PD": index_ND[positive_pin_P],
        "k": K,
    }
    multiply_squares(256)  # starts the threads
    started = time.perf_counter()
    found = search(query_QD, index_ND, **job)
    seconds = time.perf_counter() - started
    np.save(folder / "our_rows.npy", found.top_QK.numpy())
    return seconds


def search_faiss(python: Path, folder: Path) -> dict[str, Any]:
    """What `faiss_flat.py` prints."""
    script = Path(__file__).with_name("faiss_flat.py")
    options = ["--folder", str(folder), "--k", str(K), "--num-threads", str(NUM_THREADS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = str(NUM_THREADS)
    process = subprocess.run(
        [str(python), str(script), *options], capture_output=True, text=True, env=environment, check=False
    )
    if process.returncode != 0:
        raise RuntimeError(f"{script.name} failed with exit code {process.returncode}:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def share_found_by_both(folder: Path) -> float:
    ours, theirs = np.load(folder / "our_rows.npy"), np.load(folder / "faiss_rows.npy")
    return float(np.mean([np.isin(left, right).mean() for left, right in zip(ours, theirs, strict=True)]))


def cluster_users_of_100(num_hundreds: int) -> float:
    """Milliseconds a user, of the fastest hundred users."""
    rng, num_actions, num_interests = np.random.default_rng(0), 100, 10
    center = rng.standard_normal((num_interests, DIM)) / DIM**0.5
    interest = np.arange(10_000) % num_interests
    feature = (center[interest] + rng.standard_normal((len(interest), DIM)) / DIM**0.5).astype(np.float32)
    total = num_hundreds * 100 * num_actions
    nothing = np.zeros(total, np.int16)
    timelines = Timelines(
        offsets=np.arange(0, total + 1, num_actions),
        pin=rng.integers(len(feature), size=total).astype(np.int32),
        ts=np.tile(np.arange(num_actions) * (DAY_US // 2), total // num_actions),
        action_type=nothing,
        surface=nothing,
        duration=nothing.astype(np.float32),
        is_positive=nothing.astype(bool),
    )
    at_us, seconds = num_actions * (DAY_US // 2), []
    for users in np.arange(timelines.num_users).reshape(num_hundreds, 100):
        started = time.perf_counter()
        first, last = timelines.offsets[users], timelines.offsets[users + 1] - 1
        cluster_users(timelines, feature, first, last, at_us, PinnerSage())
        seconds.append(time.perf_counter() - started)
    return min(seconds) / 100 * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few users and pins")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    arguments = parser.parse_args()
    num_users, num_pins, square = (200, 20_000, 512) if arguments.quick else (10_000, 1_000_000, SQUARE)
    python = ensure_environment("faiss", REQUIREMENTS)

    peak_flops, ours_s, faiss_s, peaks = [], [], [], []
    with working_directory(None) as folder:
        write_vectors(folder / "index.npy", num_pins, seed=0)
        write_vectors(folder / "query.npy", num_users, seed=1)
        for number in range(arguments.repeats):
            peak_flops.append(measure(multiply_squares, square).outcome)
            ours: Measured[float] = measure(search_ours, folder)
            ours_s.append(ours.outcome)
            peaks.append(ours.peak_gb)
            line = f"run {number + 1}: matmul {peak_flops[-1] / 1e9:.0f} GFLOP/s, search {ours_s[-1]:.2f} s"
            if python is not None:
                theirs = search_faiss(python, folder)
                faiss_s.append(theirs["seconds"])
                line += f", faiss {theirs['faiss']} {faiss_s[-1]:.2f} s ({theirs['peak_gb']:.1f} GB)"
                if (same := share_found_by_both(folder)) < SAME_SHARE:
                    raise RuntimeError(f"of the pins that ours found, faiss found a share of only {same:.5f}")
            say(line)

    flops = 2 * num_users * num_pins * DIM / min(ours_s)
    report("evaluation_10k_x_1m_search", min(ours_s), "s")
    report("evaluation_search_over_matmul_peak", flops / max(peak_flops), "share", bar=">= 0.5")
    if faiss_s:
        report("evaluation_search_over_faiss_flat", min(ours_s) / min(faiss_s), "x", bar="<= 1.2")
    report("evaluation_search_peak_memory", max(peaks), "GB", bar="< 4")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy reads it as it is loaded, which the new process does
    clustered = measure(cluster_users_of_100, 2 if arguments.quick else 20)
    report("pinnersage_100_actions", clustered.outcome, "ms", bar="< 1")


if __name__ == "__main__":
    main()
