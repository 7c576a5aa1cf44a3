"""The engine on one machine: a pool of processes."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType

from pf_core.engine.base import Result, Task
from pf_core.engine.shuffle import ShuffleShare
from pf_core.parent_process import end_with_parent
from pf_core.progress import Progress, report_to_queue, reporting_to

POLL_S = 0.5
"""Seconds between two looks at the messages of the workers."""


class LocalEngine:
    """Runs a single task in this process and many in a pool of processes. Use it as a context manager."""

    spans_machines = False

    def __init__(self, *, num_workers: int, memory_mb: int, temp_dir: Path) -> None:
        self.num_workers = num_workers
        self._memory_bytes = memory_mb << 20
        self._temp_dir = temp_dir
        self._pool: ProcessPoolExecutor | None = None
        self._messages: SimpleQueue[str]

    def shuffle(self, num_tasks: int) -> ShuffleShare:
        """Divide the memory among the tasks that run at the same time."""
        num_at_a_time = max(1, min(self.num_workers, num_tasks))
        return ShuffleShare(memory_bytes=self._memory_bytes // num_at_a_time, temp_dir=self._temp_dir)

    def map_buckets(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress | None = None
    ) -> Iterator[Result]:
        """Run `function(task)` for every task; results come in the order of completion, the first failure is raised.

        What the function sends with `report` reaches `progress` while it runs.
        """
        if self.num_workers == 1 or len(tasks) == 1:
            for task in tasks:
                with reporting_to(progress):
                    result = function(task)
                yield result
            return
        if self._pool is None:
            # Lance and DuckDB run threads: a forked copy of them deadlocks, so workers are spawned.
            context = multiprocessing.get_context("spawn")
            # Otherwise every thread of Lance has an arena of its own, and a worker needs a seventh more memory.
            os.environ.setdefault("MALLOC_ARENA_MAX", "2")
            self._messages = context.SimpleQueue()
            self._pool = ProcessPoolExecutor(
                self.num_workers, mp_context=context, initializer=_start_worker, initargs=(self._messages,)
            )
        pending = {self._pool.submit(function, task) for task in tasks}
        try:
            while pending:
                done, pending = self._wait(pending, progress)
                for future in done:
                    yield future.result()
        finally:
            pending = {future for future in pending if not future.cancel()}
            while pending:  # these run already; a worker whose messages are not read would block
                _, pending = self._wait(pending, progress)

    def _wait(
        self, pending: "set[Future[Result]]", progress: Progress | None
    ) -> "tuple[set[Future[Result]], set[Future[Result]]]":
        """Wait for a task to end or for POLL_S, and pass messages on; returns the tasks that ended and the others."""
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
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


def _start_worker(messages: "SimpleQueue[str]") -> None:
    end_with_parent()
    report_to_queue(messages)
