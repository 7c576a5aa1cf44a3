"""The other side of `bench_evaluation.py`: how long faiss' flat index takes for the same search.

Runs inside an environment of its own, in which faiss is installed and our packages are not; prints one line of JSON,
and leaves the rows that it found beside the vectors. What is in its favour: adding the vectors to the index and a
first search of some queries are not timed, and it looks for the nearest alone, where ours counts rivals too.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import faiss
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="holds index.npy and query.npy")
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    arguments = parser.parse_args()
    faiss.omp_set_num_threads(arguments.num_threads)
    pins, queries = np.load(arguments.folder / "index.npy"), np.load(arguments.folder / "query.npy")
    index = faiss.IndexFlatIP(pins.shape[1])
    index.add(pins)
    del pins
    index.search(queries[:64], arguments.k)
    started = time.perf_counter()
    _, rows = index.search(queries, arguments.k)
    seconds = time.perf_counter() - started
    np.save(arguments.folder / "faiss_rows.npy", rows)
    said = {
        "seconds": seconds,
        "threads": faiss.omp_get_max_threads(),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "faiss": faiss.__version__,
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
