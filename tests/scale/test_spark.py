"""The engine `spark` on a real standalone cluster: a master and two workers on loopback."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pf_core.contracts import PipelineError
from pf_core.engine import report
from pf_core.site import EngineConfig
from pf_core.spark_engine import SparkEngine
from tests.engine_contract import run_daily_path
from tests.scale.servers import SparkCluster, wait_until

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m", "spark.executor.cores": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    cluster = SparkCluster(tmp_path_factory.mktemp("spark"), num_workers=2)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.stop()


def start_engine(cluster: SparkCluster) -> SparkEngine:
    return SparkEngine(master=cluster.master, num_workers=2, settings=SETTINGS)


def square(task: int) -> int:
    report(f"squaring {task}")
    return task * task


def refuse(task: int) -> int:
    raise PipelineError(f"task {task} has no bucket")


def crash(task: int) -> int:
    raise ZeroDivisionError(f"task {task}")


def slow_square(task: tuple[int, str]) -> tuple[int, int]:
    """Leaves a trace of every attempt."""
    number, folder = task
    (Path(folder) / f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(2)
    return number, number * number


def test_tasks_are_mapped(cluster: SparkCluster) -> None:
    with start_engine(cluster) as engine:
        assert sorted(engine.map_buckets(square, list(range(20)))) == [number**2 for number in range(20)]
        assert list(engine.map_buckets(square, [])) == []


def test_a_refusal_is_told_in_its_own_words(cluster: SparkCluster) -> None:
    with start_engine(cluster) as engine:
        with pytest.raises(PipelineError, match=r"^task 3 has no bucket$"):
            list(engine.map_buckets(refuse, [3]))
        with pytest.raises(Exception, match="ZeroDivisionError: task 4"):
            list(engine.map_buckets(crash, [4]))


def test_progress_is_told(cluster: SparkCluster, tmp_path: Path) -> None:
    said: list[str] = []
    with start_engine(cluster) as engine:
        list(engine.map_buckets(slow_square, [(number, str(tmp_path)) for number in range(4)], said.append))
    assert any(line.endswith("of 4 tasks are done on the cluster") for line in said), said


def test_the_daily_path_gives_the_same(cluster: SparkCluster, tmp_path: Path) -> None:
    local = run_daily_path(tmp_path / "local", EngineConfig(num_workers=1, memory_mb=256))
    config = EngineConfig(kind="spark", master=cluster.master, num_workers=2, memory_mb=256, spark=SETTINGS)
    spark = run_daily_path(tmp_path / "spark", config)
    for asset, values in local.items():
        assert values, asset
        assert spark[asset] == values, asset


def test_a_lost_worker_changes_nothing(cluster: SparkCluster, tmp_path: Path) -> None:
    """SIGKILL to a worker and its executor while tasks run on both."""

    def kill_one() -> None:
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.1)
        for pid in family(cluster.workers[1].pid):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    with start_engine(cluster) as engine:
        killer.start()
        results = list(engine.map_buckets(slow_square, [(number, str(tmp_path)) for number in range(10)]))
        killer.join()
    assert sorted(results) == [(number, number**2) for number in range(10)]
    assert len(list(tmp_path.iterdir())) > 10, "a task was lost and started again"
    replacement = cluster.start_worker()
    wait_until(lambda: cluster.num_alive() == 2, replacement, "another worker")


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *(one for child in map(int, listed.stdout.split()) for one in family(child))]
