"""The data plane on a Spark cluster: the same per-bucket functions, one Spark task for each.

What a task says and returns is small, because data goes through files: the site's folders must be reachable by every
machine under the same path. Executors run the Python of the same path, too (or PYSPARK_PYTHON), with this package.

Spark starts a lost task again on another machine. Functions are pure, and write under names of their own, so that this
changes nothing; what they raise on purpose (PipelineError) would be raised again, and is not tried twice.
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
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from pf_core.errors import PipelineError
from pf_core.progress import reporting_to

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Task = TypeVar("Task")

Result = TypeVar("Result")

POLL_S = 1.0

SCHEMA = "number long, content binary"

SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.speculation": "false",  # two attempts at once would meet in the same bucket
    "spark.ui.showConsoleProgress": "false",
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}


class SparkEngine:
    """Use it as a context manager: the cluster's resources are held between."""

    spans_machines = True

    def __init__(self, *, master: str, num_workers: int, settings: Mapping[str, str]) -> None:
        self.num_workers = num_workers
        self._master, self._settings = master, settings
        self._session: SparkSession | None = None

    def map_buckets(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[Result]:
        """`function(task)` for every task; results come when all are done, and the first failure is raised."""
        if not tasks:
            return
        session = self._start()
        content = [(number, pickle.dumps((function, task))) for number, task in enumerate(tasks)]
        frame = session.createDataFrame(session.sparkContext.parallelize(content, len(content)), SCHEMA)
        with _telling(session, len(tasks), progress):
            results = frame.mapInArrow(_run_tasks, SCHEMA).toArrow()
        for packed in results["content"].to_pylist():
            result = pickle.loads(packed)
            if isinstance(result, _Refusal):
                raise PipelineError(result.message)
            yield result

    def _start(self) -> "SparkSession":
        if self._session is None:
            try:
                from pyspark.sql import SparkSession
            except ImportError as error:
                raise PipelineError(
                    "engine.kind is spark, and PySpark is not installed: pip install 'pinnerformer[spark]'"
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


class _Refusal:
    """A PipelineError on its way from a worker."""

    def __init__(self, message: str) -> None:
        self.message = message


def _run_tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """On a worker."""
    for batch in batches:
        for number, content in zip(*batch.to_pydict().values(), strict=True):
            function, task = pickle.loads(content)
            result: Any
            try:
                with reporting_to(lambda message: print(message, file=sys.stderr, flush=True)):
                    result = function(task)
            except PipelineError as error:
                result = _Refusal(str(error))
            yield pa.RecordBatch.from_pydict({"number": [number], "content": [pickle.dumps(result)]})


@contextlib.contextmanager
def _telling(session: "SparkSession", num_tasks: int, progress: Callable[[str], None] | None) -> Iterator[None]:
    """Says how many tasks are done, as often as that changes."""
    if progress is None:
        yield
        return
    is_done, told = threading.Event(), 0
    tracker = session.sparkContext.statusTracker()

    def watch() -> None:
        nonlocal told
        while not is_done.wait(POLL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            num_done = max((stage.numCompletedTasks for stage in stages if stage is not None), default=0)
            if num_done > told:
                told = num_done
                progress(f"{num_done} of {num_tasks} tasks are done on the cluster")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
