from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sites import SmallSite


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
