import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.shared import SharedSites
from tests.support.sites import SmallSite
from tests.support.tried import Tried, table_of

settings.register_profile("tests", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=150, help="number of mutated files that each reader is tried on")
    parser.addoption("--kills", type=int, default=3, help="number of moments at which each stage is killed")
    parser.addoption("--minutes", type=float, default=0.2, help="length of the stress test")
    parser.addoption("--table", action="store_true", help="print how much was tried, and what of it failed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--table"):
        reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "when")]
        for line in table_of(reports):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def shared_sites(tmp_path_factory: pytest.TempPathFactory) -> SharedSites:
    """Sites that are made once for all workers of this session."""
    folder = tmp_path_factory.getbasetemp()
    return SharedSites((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared")


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Tried:
    return Tried(record_property)


@pytest.fixture
def small_site(tmp_path: Path) -> Iterator[Callable[..., SmallSite]]:
    """`small_site(id_type="string", timelines={"max_actions": 5}, …)` in a folder of its own."""
    made: list[SmallSite] = []

    def make(**options: Any) -> SmallSite:
        root = tmp_path / f"site-{len(made)}"
        root.mkdir()
        made.append(SmallSite(root, options))
        return made[-1]

    yield make
    for site in made:
        site.engine.__exit__(None, None, None)
