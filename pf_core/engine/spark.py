"""The engine on a Spark cluster: the same per-bucket functions, one Spark task for each bucket.

Tasks and their results are small, because data goes through files: every machine must reach the site's folders under
the same path. Executors also run Python from the same path (or PYSPARK_PYTHON), with this package.

Spark starts a lost task again on another machine. This changes nothing, because functions are pure and write under
names of their own. A PipelineError is deliberate, would only be raised again, and is not retried.
"""

import contextlib
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pf_core.engine.base import Result, Task
from pf_core.engine.shuffle import ShuffleShare
from pf_core.errors import PipelineError
from pf_core.progress import Progress, reporting_to

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 1.0
"""Seconds between two looks at the number of finished tasks."""

SCHEMA = "number long, content binary"

SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.speculation": "false",  # two attempts at once would meet in the same bucket
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}


class SparkEngine:
    """Use it as a context manager: it holds the cluster's resources from the first task to the end."""

    spans_machines = True

    def __init__(self, *, master: str, num_workers: int, memory_mb: int, settings: Mapping[str, str]) -> None:
        self.num_workers = num_workers
        self._memory_bytes = memory_mb << 20
        self._master, self._settings = master, settings
        self._session: SparkSession | None = None

    def shuffle(self, num_tasks: int) -> ShuffleShare:
        """Give every task a worker's share of the memory, however few tasks there are: executors share no memory."""
        return ShuffleShare(memory_bytes=self._memory_bytes // self.num_workers)

    def map_buckets(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], progress: Progress | None = None
    ) -> Iterator[Result]:
        """Run `function(task)` for every task; results come when all tasks are done, the first failure is raised."""
        if not tasks:
            return
        session = self._start()
        content = [(number, pickle.dumps((function, task))) for number, task in enumerate(tasks)]
        frame = session.createDataFrame(session.sparkContext.parallelize(content, len(content)), SCHEMA)
        with _counting(session, len(tasks), progress):
            results = frame.mapInArrow(_run_tasks, SCHEMA).toArrow()
        for packed in results["content"].to_pylist():
            result = pickle.loads(packed)
            if isinstance(result, PipelineError):
                raise result
            yield result

    def _start(self) -> "SparkSession":
        if self._session is None:
            try:
                from pyspark.sql import SparkSession
            except ImportError as error:
                raise PipelineError(
                    "engine.kind is spark, but PySpark is not installed",
                    "install it with: pip install 'pinnerformer[spark]'",
                ) from error
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")  # nothing here uses pandas
            builder = SparkSession.builder.appName("pinnerformer").master(self._master)
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            for name, value in {**SETTINGS, **self._settings}.items():
                builder = builder.config(name, value)
            self._session = builder.getOrCreate()
        return self._session

    def __enter__(self) -> "SparkEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None


def _run_tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the tasks of one partition of the frame, on a worker. A PipelineError is returned instead of raised."""
    for batch in batches:
        for number, content in zip(*batch.to_pydict().values(), strict=True):
            function, task = pickle.loads(content)
            result: Any
            try:
                with reporting_to(lambda message: print(message, file=sys.stderr, flush=True)):
                    result = function(task)
            except PipelineError as error:
                result = error
            yield pa.RecordBatch.from_pydict({"number": [number], "content": [pickle.dumps(result)]})


@contextlib.contextmanager
def _counting(session: "SparkSession", num_tasks: int, progress: Progress | None) -> Iterator[None]:
    """Report how many tasks are done, each time that the number grows."""
    if progress is None:
        yield
        return
    is_done, num_reported = threading.Event(), 0
    tracker = session.sparkContext.statusTracker()

    def watch() -> None:
        nonlocal num_reported
        while not is_done.wait(POLL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            num_done = max((stage.numCompletedTasks for stage in stages if stage is not None), default=0)
            if num_done > num_reported:
                num_reported = num_done
                progress(f"{num_done} of {num_tasks} tasks are done on the cluster")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
