"""What an engine is: the data plane's two verbs, shuffle and map_buckets.

`shuffle` groups a stream of actions by day and user bucket; `map_buckets` runs a pure function once for each bucket.
Memory is bounded by configuration: the shuffle has a budget, and one worker holds one bucket at a time. The same
per-bucket functions run on every engine.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from pf_core.engine.shuffle import ShuffleShare
from pf_core.progress import Progress

Task = TypeVar("Task")

Result = TypeVar("Result")


class Engine(Protocol):
    """What a stage needs of an engine, wherever it runs. Use it as a context manager."""

    @property
    def num_workers(self) -> int:
        """Number of tasks that run at the same time."""
        ...

    @property
    def spans_machines(self) -> bool:
        """Whether workers have no more in common than a disk or an object store.

        Then one task never takes work that only a whole machine could do: a day is routed by many tasks, and its
        buckets are gathered by many.
        """
        ...

    def shuffle(self, num_tasks: int) -> ShuffleShare:
        """The share of one of `num_tasks` tasks that shuffle together; it is given to each of them."""
        ...

    def map_buckets(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress | None = None
    ) -> Iterator[Result]:
        """Run `function(task)` once for every task, in any order; the first failure is raised."""
        ...

    def __enter__(self) -> "Engine": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
