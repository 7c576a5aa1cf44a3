from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.support.daily import DailySites
from tests.support.shared import SharedSites


@pytest.fixture
def daily_sites(shared_sites: SharedSites, tmp_path: Path) -> DailySites:
    return DailySites(shared_sites, tmp_path)


@pytest.fixture
def memory_instance() -> Iterator[dg.DagsterInstance]:
    """Runs and events in memory, which is faster than in SQLite files."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def stored_instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Runs and events in SQLite files, as `make dev` has them."""
    (tmp_path / "dagster").mkdir()
    with dg.instance_for_test(temp_dir=str(tmp_path / "dagster")) as instance:
        yield instance
