"""Nothing on any machine's disk that another needs: a Spark cluster, and all data in object storage."""

from pathlib import Path

import pytest

from pf_core.config.site import EngineConfig
from tests.scale.servers import SparkCluster, new_bucket, object_storage
from tests.scale.test_spark import SETTINGS
from tests.support.engine_contract import run_daily_path

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


def test_the_daily_path_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = run_daily_path(tmp_path / "local", EngineConfig(num_workers=1, memory_mb=256))
    with object_storage() as server:
        bucket = new_bucket(server, tmp_path, monkeypatch)
        (tmp_path / "spark").mkdir()
        cluster = SparkCluster(tmp_path / "spark", num_workers=2)  # has this environment, and so have its executors
        try:
            cluster.wait()
            engine = EngineConfig(kind="spark", master=cluster.master, num_workers=2, memory_mb=256, spark=SETTINGS)
            stored = run_daily_path(tmp_path / "stored", engine, bucket=f"{bucket}/site")
        finally:
            cluster.stop()
    for asset, values in local.items():
        assert values, asset
        assert stored[asset] == values, asset
