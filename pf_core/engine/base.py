"""What an engine is: the data plane's two verbs, shuffle and map_buckets."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

Task = TypeVar("Task")

Result = TypeVar("Result")


class Engine(Protocol):
    """What a stage needs of an engine, wherever it runs. Use it as a context manager."""

    @property
    def num_workers(self) -> int:
        """Tasks that run at a time."""
        ...

    @property
    def spans_machines(self) -> bool:
        """Whether tasks share a disk only: then work that is too large for one machine is shared out in more steps."""
        ...

    def map_buckets(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[Result]:
        """`function(task)` once for every task, in any order; the first failure is raised."""
        ...

    def __enter__(self) -> "Engine": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
