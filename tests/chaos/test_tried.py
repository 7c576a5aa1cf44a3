"""The table of what was tried counts trials, failures and tests that failed."""

from types import SimpleNamespace
from typing import Any

from tests.support.tried import Tried, table_of


def test_the_table_adds_up_what_the_tests_tried() -> None:
    recorded: list[tuple[str, Any]] = []
    tried = Tried(lambda name, value: recorded.append((name, value)))
    assert list(tried.each("mutated logs", 3)) == [0, 1, 2]
    tried.count("kills of stages", 1000, 2)
    reports = [
        SimpleNamespace(when="setup", outcome="passed", duration=1.0, user_properties=recorded),
        SimpleNamespace(when="call", outcome="passed", duration=60.0, user_properties=recorded),
        SimpleNamespace(when="call", outcome="failed", duration=60.0, user_properties=recorded),
        SimpleNamespace(when="teardown", outcome="failed", duration=60.0, user_properties=recorded),
    ]
    assert [line.split() for line in table_of(reports)] == [
        ["tried", "number", "failed", "minutes"],
        ["kills", "of", "stages", "2,000", "4", "0.0"],
        ["mutated", "logs", "6", "0", "0.0"],
        ["tests", "2", "2", "2.0"],
    ]
