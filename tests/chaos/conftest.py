import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.lanes import Lane, open_lanes


@pytest.fixture(scope="session")
def lane() -> Iterator[Lane]:
    with open_lanes(1) as [lane]:
        yield lane


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session know."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chains"
