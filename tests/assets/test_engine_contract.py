"""The contract of engines on the embedded one: a pool of processes gives what one process gives."""

from pathlib import Path

from pf_core.config.site import EngineConfig
from tests.support.engine_contract import run_daily_path


def test_many_workers_give_what_one_gives(tmp_path: Path) -> None:
    one = run_daily_path(tmp_path / "one", EngineConfig(num_workers=1, memory_mb=256))
    two = run_daily_path(tmp_path / "two", EngineConfig(num_workers=2, memory_mb=256))
    for asset, values in one.items():
        assert values, asset
        assert two[asset] == values, asset
