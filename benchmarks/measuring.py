"""What the benchmarks share: peak memory, runs in processes of their own, RESULT lines, and the site they run on.

A result is one line, `RESULT <name> <value> <unit> [bar <op> <number>]`; `run_all.py` collects them.
"""

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import psutil
import pyarrow as pa

from pf_core.benchmark.peers import environments
from pf_core.config.site import Site
from pf_core.errors import PipelineError

Outcome = TypeVar("Outcome")

SAMPLES_PER_S = 20
USERS_PER_BUCKET = 30_000
"""What we advise: a bucket's timelines then take tens of megabytes, and a worker holds one bucket."""
NUM_WORKERS = 2
MEMORY_MB = 1024


@dataclass(frozen=True, kw_only=True)
class Measured(Generic[Outcome]):
    seconds: float
    cpu_s: float
    """Processor time of the process and its children, starting included: steadier than `seconds` on a busy machine."""
    peak_gb: float
    outcome: Outcome


def measure(function: Callable[..., Outcome], *arguments: Any) -> Measured[Outcome]:
    """Run a function in a fresh process; time the call alone, and watch the memory of the process and its children.

    Memory is the proportional set size: a page that several processes share is counted once. It includes the
    interpreters and libraries; it does not include the kernel's page cache.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_call, args=(sender, function, arguments))
    cpu_before = _cpu_of_children_s()
    process.start()
    sender.close()
    assert process.pid is not None
    try:
        with PeakMemory(process.pid) as peak:
            try:
                seconds, outcome = receiver.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"{function.__name__} failed with exit code {process.exitcode}") from None
        process.join()
    finally:
        _end(process.pid)
    cpu_s = _cpu_of_children_s() - cpu_before
    return Measured(seconds=seconds, cpu_s=cpu_s, peak_gb=peak.bytes / 1e9, outcome=outcome)


def _call(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    started = time.perf_counter()
    outcome = function(*arguments)
    sender.send((time.perf_counter() - started, outcome))


def _cpu_of_children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def family_of(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_so_far_s() -> float:
    """Processor time of this process and of those that it has started and that live."""
    times = [process.cpu_times() for process in family_of(os.getpid())]
    return sum(one.user + one.system for one in times)


def _end(pid: int) -> None:
    for process in family_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class PeakMemory:
    """Samples the memory of a process and its children in a thread; `bytes` is the largest sum seen.

    Use it as a context manager. The process may be the one that it runs in.
    """

    def __init__(self, pid: int, *, samples_per_s: float = SAMPLES_PER_S) -> None:
        self.bytes = 0
        self._pid, self._samples_per_s = pid, samples_per_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        is_over = False
        while not is_over:  # at least once, however short it is
            is_over = self._ended.wait(1 / self._samples_per_s)
            total = 0
            for process in family_of(self._pid):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two calls
                    total += process.memory_full_info().pss
            self.bytes = max(self.bytes, total)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def report(name: str, value: float, unit: str, *, bar: str | None = None) -> None:
    """Print a result; `bar` is such as `<= 2.5`."""
    figure = f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    print(f"RESULT {name} {figure} {unit}" + (f" bar {bar}" if bar else ""), flush=True)


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def working_directory(data: Path | None) -> Iterator[Path]:
    """The directory given, which stays; or a temporary one (under PF_BENCH_DIR if that is set), removed at the end."""
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
        yield data.resolve()
        return
    root = os.environ.get("PF_BENCH_DIR")
    if root is not None:
        Path(root).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pf-bench-", dir=root))
    try:
        yield folder.resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def record_lists(pin_ids: pa.Array, *, num_memory: np.ndarray, num_seen: np.ndarray, seed: int = 0) -> list[pa.Array]:
    """The list columns of users' records, in the order of the schema: distinct pins, as many for each user."""
    first = np.random.default_rng(seed).integers(0, len(pin_ids), (2, len(num_seen)))

    def pins(start: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        rows = (np.repeat(start - ends[:-1], lengths) + np.arange(ends[-1])) % len(pin_ids)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pin_ids.take(pa.array(rows)))

    memory, seen = pins(first[0], num_memory), pins(first[1], num_seen)
    increments = pa.array(np.linspace(1, 0, len(memory.values), dtype=np.float32))
    is_complete = pa.array(np.zeros(len(num_seen), bool))
    return [memory, pa.ListArray.from_arrays(memory.offsets, increments), seen, is_complete]


def num_buckets_for(num_users: int) -> int:
    return max(1, round(num_users / USERS_PER_BUCKET))


def world_site(*, logs: Path, data_dir: Path, start_ds: str, end_ds: str, num_buckets: int) -> Site:
    """A site whose Parquet logs have the synthetic world's columns, mapped as `pf_assets/demo.yaml` maps them."""
    same = ("closeup", "click", "short_click", "hide", "reaction", "comment")
    return Site.model_validate(
        {
            "name": "bench",
            "start_ds": start_ds,
            "end_ds": end_ds,
            "data_dir": str(data_dir),
            "source": {
                "root": str(logs),
                "actions": {
                    "path": "actions/{ds}/*.parquet",
                    "user_id": "user",
                    "pin_id": {"column": "pin", "type": "string"},
                    "ts": {"column": "event_time_ms", "unit": "ms"},
                    "action_type": {"column": "event", "values": {"save": "repin", **{name: name for name in same}}},
                    "surface": {
                        "column": "surface",
                        "values": {"home": "homefeed", "search": "search", "related": "related_pins"},
                    },
                    "duration_s": {"column": "dwell_ms", "unit": "ms"},
                    "late_days": 2,
                },
                "pins": {
                    "catalogue": {"path": "pins/{ds}.parquet"},
                    "pin_id": {"column": "pin", "type": "string"},
                    "vectors": "vector",
                },
            },
            "timelines": {"num_buckets": num_buckets},
            "engine": {"num_workers": NUM_WORKERS, "memory_mb": MEMORY_MB},
        }
    )


def ensure_environment(name: str, requirements: Sequence[str]) -> Path | None:
    """The Python of an environment of its own, in PF_BENCH_DIR or the temporary directory; made if it is missing.

    None, and a line, if it cannot be made.
    """
    cache = Path(os.environ.get("PF_BENCH_DIR") or tempfile.gettempdir()) / f"pf-bench-environments-{os.getuid()}"
    try:
        return environments.ensure_environment(requirements, name=name, cache=cache, progress=say)
    except PipelineError as error:
        say(f"{name} is left out, because it cannot be installed: {error.what}")
        return None
