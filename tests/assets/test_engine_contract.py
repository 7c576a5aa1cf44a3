"""The contract of engines on the embedded one: a pool of processes gives what one process gives."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import pytest

from pf_core.config.site import EngineConfig
from pf_core.engine.local import LocalEngine
from tests.support.engine_contract import run_daily_path
from tests.support.shared import SharedSites


class KeptPoolEngine(LocalEngine):
    """Engines that share one pool of processes: starting one for every asset takes most of this test's time."""

    kept: ClassVar[tuple[ProcessPoolExecutor, "SimpleQueue[str]"] | None] = None

    def __enter__(self) -> "KeptPoolEngine":
        if KeptPoolEngine.kept is not None:
            self._pool, self._messages = KeptPoolEngine.kept
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            KeptPoolEngine.kept = (self._pool, self._messages)


@pytest.fixture
def kept_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("pf_assets.settings.LocalEngine", KeptPoolEngine)
    yield
    assert KeptPoolEngine.kept is not None, "no asset used a pool"
    KeptPoolEngine.kept[0].shutdown()
    KeptPoolEngine.kept = None


@pytest.mark.usefixtures("kept_pool")
def test_many_workers_give_what_one_gives(tmp_path: Path, shared_sites: SharedSites) -> None:
    one, two = (
        run_daily_path(tmp_path / name, EngineConfig(num_workers=num_workers, memory_mb=256), shared=shared_sites)
        for name, num_workers in (("one", 1), ("two", 2))
    )
    for asset, values in one.items():
        assert values, asset
        assert two[asset] == values, asset
