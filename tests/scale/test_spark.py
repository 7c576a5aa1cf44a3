"""The engine `spark` on a real standalone cluster: a master and two workers on loopback."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pf_core.config.site import EngineConfig
from pf_core.config.training import tiny
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.inference import ServedModel, open_served_model
from pf_core.engine.spark import SparkEngine
from pf_core.errors import PipelineError
from pf_core.model.checkpoint import save_model
from pf_core.model.device import choose_device
from pf_core.model.towers import PinnerFormer
from pf_core.progress import report
from tests.scale.servers import SparkCluster, wait_until
from tests.support.engine_contract import run_daily_path
from tests.support.ingestion import outcome, write_parts
from tests.support.sites import START, Row, SmallSite

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

DAYS = ds_range(START, shift_ds(START, 1))
PARTS_A_DAY, ROWS_A_PART = 4, 200_000
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
    return SparkEngine(master=cluster.master, num_workers=2, memory_mb=256, settings=SETTINGS)


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


def open_for_a_bucket(served: ServedModel) -> tuple[int, int]:
    """The process, and how many models it has opened."""
    open_served_model(served, choose_device("cpu"))
    return os.getpid(), open_served_model.cache_info().misses


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


def test_a_worker_opens_a_model_once(cluster: SparkCluster, tmp_path: Path) -> None:
    model = PinnerFormer(tiny().model, feature_dim=8, num_action_types=3, num_surfaces=2, time_origin_us=0)
    words = {"action_types": ["click", "closeup", "repin"], "surfaces": ["homefeed", "search"]}
    numbers = {"feature_dim": 8, "feature_scale": 1.0, "time_origin_us": 0}
    save_model(tmp_path / "model", model, words | numbers)
    served = ServedModel(model_version="a", path=tmp_path / "model")
    with start_engine(cluster) as engine:
        opened = list(engine.map_buckets(open_for_a_bucket, [served] * 12))
    assert {num_opened for _, num_opened in opened} == {1}
    assert len({process for process, _ in opened}) <= 2 * 2, "processes are used again"


def test_a_lost_worker_changes_nothing(cluster: SparkCluster, tmp_path: Path) -> None:
    """SIGKILL to a worker and its executor while tasks run on both."""

    def kill_one() -> None:
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.1)
        kill_a_worker(cluster)

    killer = threading.Thread(target=kill_one)
    with start_engine(cluster) as engine:
        killer.start()
        results = list(engine.map_buckets(slow_square, [(number, str(tmp_path)) for number in range(10)]))
        killer.join()
    assert sorted(results) == [(number, number**2) for number in range(10)]
    assert len(list(tmp_path.iterdir())) > 10, "a task was lost and started again"
    replace_worker(cluster)


def test_a_worker_lost_during_ingestion_changes_nothing(cluster: SparkCluster, tmp_path: Path) -> None:
    """SIGKILL while both workers read files of the same days."""
    site = SmallSite(tmp_path, {"path": "logs/{ds}/*.parquet", "id_type": "string", "timelines": {"num_buckets": 6}})
    for number, ds in enumerate(DAYS):
        write_parts(site, ds, [many_rows(number, part) for part in range(PARTS_A_DAY)])
    local = outcome(site, DAYS)
    assert local["manifests"][DAYS[0]]["counts"]["received"] > 0
    attempts: set[str] = set()
    ended = threading.Event()

    def kill_one() -> None:
        is_killed = False
        while not ended.wait(0.02):
            running = [path.name for path in (site.site.directory / "tmp").glob("raw_actions-*/.0*")]
            attempts.update(running)
            if len(running) == 2 and not is_killed:  # a worker has one core: each of them runs one
                kill_a_worker(cluster)
                is_killed = True

    killer = threading.Thread(target=kill_one)
    with start_engine(cluster) as engine:
        site.engine = engine
        killer.start()
        try:
            spark = outcome(site, DAYS)
        finally:
            ended.set()
            killer.join()
    assert spark == local
    assert len(attempts) > len({name.split("-")[0] for name in attempts}), "a task was lost and started again"
    replace_worker(cluster)


def many_rows(day: int, part: int) -> list[Row]:
    """Enough to be killed over; rows recur in the next part, and some are a day late."""
    first = part * ROWS_A_PART // 2
    return [
        (f"user-{n * 7919 % 20_011}", f"p{n % 301}", (day - (n % 50 == 0)) * 86_400 + n * 0.05, "look")
        for n in range(first, first + ROWS_A_PART)
    ]


def kill_a_worker(cluster: SparkCluster) -> None:
    for pid in family(cluster.workers.pop().pid):
        os.kill(pid, signal.SIGKILL)


def replace_worker(cluster: SparkCluster) -> None:
    cluster.workers.append(cluster.start_worker())
    wait_until(lambda: cluster.num_alive() == 2, cluster.workers[-1], "another worker")


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *(one for child in map(int, listed.stdout.split()) for one in family(child))]
