"""An engine that says that it spans machines, in one process: tasks come late, twice and from elsewhere."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from pf_core.engine.shuffle import ShuffleShare

Task = TypeVar("Task")
Result = TypeVar("Result")


class ScatteredEngine:
    """Tasks run in reverse order; each travels as bytes, there and back; every second one runs twice.

    An attempt that raises `LostError` is a machine that died: its task is started again.
    """

    spans_machines = True

    def __init__(self, *, num_workers: int = 2, memory_mb: int = 256) -> None:
        self.num_workers = num_workers
        self._memory_bytes = memory_mb << 20
        self.num_tasks: list[int] = []
        self.num_lost = 0

    def shuffle(self, num_tasks: int) -> ShuffleShare:
        return ShuffleShare(memory_bytes=self._memory_bytes // self.num_workers)

    def map_buckets(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[Result]:
        self.num_tasks.append(len(tasks))
        for number, task in reversed(list(enumerate(tasks))):
            packed = pickle.dumps((function, task))
            for _ in range(1 + number % 2):
                result = self._attempt(packed)
            yield pickle.loads(result)

    def _attempt(self, packed: bytes) -> bytes:
        function, task = pickle.loads(packed)
        try:
            return pickle.dumps(function(task))
        except LostError:
            self.num_lost += 1
            return self._attempt(packed)

    def __enter__(self) -> "ScatteredEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LostError(Exception):
    """A machine died."""
