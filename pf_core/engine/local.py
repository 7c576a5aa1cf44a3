"""The data plane's two verbs (shuffle, map_buckets): what an engine is, and the one on one machine.

`shuffle` brings a stream of actions into groups; `map_buckets` runs a pure function once for each bucket. Memory is
bounded by configuration: the shuffle has a budget, and a bucket is what one worker holds. The same per-bucket functions
run on any engine.
"""

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType

from pf_core.engine.base import Result, Task
from pf_core.engine.shuffle import Shuffle
from pf_core.progress import report_to_queue, reporting_to

REPORT_EVERY_S = 0.5


class LocalEngine:
    """Threads of libraries for one bucket, a pool of processes for many. Use it as a context manager."""

    spans_machines = False

    def __init__(self, *, num_workers: int, memory_mb: int, temp_dir: Path) -> None:
        self.num_workers = num_workers
        self._memory_bytes = memory_mb << 20
        self._temp_dir = temp_dir
        self._pool: ProcessPoolExecutor | None = None
        self._messages: SimpleQueue[str]

    @contextlib.contextmanager
    def shuffle(self) -> Iterator[Shuffle]:
        """Brings a stream of actions into groups: `add` rows, then `finish` groups."""
        self._temp_dir.mkdir(parents=True, exist_ok=True)
        spill_dir = Path(tempfile.mkdtemp(prefix="shuffle-", dir=self._temp_dir))
        try:
            yield Shuffle(memory_bytes=self._memory_bytes, spill_dir=spill_dir)
        finally:
            shutil.rmtree(spill_dir, ignore_errors=True)

    def map_buckets(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[Result]:
        """`function(task)` for every task, results in the order of completion; the first failure is raised.

        What the function says with `report` reaches `progress` while it runs.
        """
        if self.num_workers == 1 or len(tasks) == 1:
            for task in tasks:
                with reporting_to(progress):
                    result = function(task)
                yield result
            return
        if self._pool is None:
            # Lance and DuckDB run threads: a forked copy of them deadlocks, so workers start afresh.
            context = multiprocessing.get_context("spawn")
            # Every thread of Lance's would have an arena of its own, and a worker a seventh more memory.
            os.environ.setdefault("MALLOC_ARENA_MAX", "2")
            self._messages = context.SimpleQueue()
            self._pool = ProcessPoolExecutor(
                self.num_workers, mp_context=context, initializer=report_to_queue, initargs=(self._messages,)
            )
        pending = {self._pool.submit(function, task) for task in tasks}
        try:
            while pending:
                done, pending = self._wait(pending, progress)
                for future in done:
                    yield future.result()
        finally:
            pending = {future for future in pending if not future.cancel()}
            while pending:  # those that run already; a worker that nobody listens to would block
                _, pending = self._wait(pending, progress)

    def _wait(
        self, pending: "set[Future[Result]]", progress: Callable[[str], None] | None
    ) -> "tuple[set[Future[Result]], set[Future[Result]]]":
        done, pending = wait(pending, timeout=REPORT_EVERY_S, return_when=FIRST_COMPLETED)
        while not self._messages.empty():
            message = self._messages.get()
            if progress is not None:
                progress(message)
        return done, pending

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
