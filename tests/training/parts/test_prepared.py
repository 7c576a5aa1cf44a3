"""What training reads of pins before each day, on disk and in an object store."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from upath import UPath

from pf_core.config.parts import PartsConfig
from pf_core.storage import cache, files
from pf_core.training.parts.prepared import TrainingDays, open_prepared, prepare, training_days
from pf_core.training.training_set import TrainingSet, open_training_set
from tests.support.parts import FIRST_DAY, random_timelines, write_parts_set

NUM_PINS = 15
CONFIG = PartsConfig(factor_dim=4, points_in_time=3, window_days=5, min_window_days=2)


def make_set(folder: Path, *, num_days: int = 24) -> TrainingSet:
    timelines = random_timelines([15] * 40, num_pins=NUM_PINS, num_days=num_days)
    return open_training_set(write_parts_set(folder, timelines, num_pins=NUM_PINS, num_days=num_days))


@contextlib.contextmanager
def _reaching_memory(path: Path) -> Iterator[None]:
    """Stands for `reaching`, which needs botocore: nothing in memory can be unreachable."""
    yield


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "local"))
    for module in (files, cache):
        monkeypatch.setattr(module, "reaching", _reaching_memory)
    monkeypatch.setattr(cache, "plain_etag", lambda info: str(info["created"]))  # memory has no ETags
    return cast("Path", UPath(f"memory://bucket/{uuid.uuid4().hex}"))


def test_an_object_store_holds_the_same(tmp_path: Path, remote: Path) -> None:
    """Training with a data_dir in an object store keeps the run's folder there; files are mapped from the cache."""
    data = make_set(tmp_path / "set")
    found = []
    for folder in (tmp_path / "here", remote / "run" / "prepared"):
        prepare(data, CONFIG, folder, lambda message: None)
        found.append(open_prepared(data, folder))
    here, there = found
    np.testing.assert_array_equal(here.scale_F, there.scale_F)
    assert [point.day for point in here.points] == [point.day for point in there.points]
    for one, other in zip(here.points, there.points, strict=True):
        assert isinstance(other.factors.factor_ND, np.memmap)
        for name, values in one.factors._asdict().items():
            np.testing.assert_array_equal(values, getattr(other.factors, name), err_msg=name)
        np.testing.assert_array_equal(one.statistics_NF, other.statistics_NF)


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    said: list[str] = []
    for _ in range(2):
        prepare(data, CONFIG, tmp_path / "prepared", said.append)
    assert len(said) == 4  # three points in time and the end


@pytest.mark.parametrize("num_days", [1, 2, 3, 8, 30])
def test_short_logs_have_days(tmp_path: Path, num_days: int) -> None:
    data = make_set(tmp_path / "set", num_days=num_days)
    days = training_days(data, CONFIG)
    assert days.end_day == FIRST_DAY + num_days
    assert len(days.day) >= 1
    assert days.day[0] > FIRST_DAY  # a row has a past
    assert days.day[-1] <= max(days.end_day - 2, FIRST_DAY + 1)
    prepare(data, CONFIG, tmp_path / "prepared", lambda message: None)
    assert open_prepared(data, tmp_path / "prepared").points[-1].day == days.end_day


def test_points_in_time_are_quantiles_of_the_rows() -> None:
    days = TrainingDays(np.arange(100, 110), np.full(10, 0.1), 112)
    assert days.points_in_time(2) == [100, 104]
    late = TrainingDays(np.arange(100, 104), np.array([0.1, 0.1, 0.1, 0.7]), 105)
    assert late.points_in_time(4) == [100, 102, 103]  # half of the rows stand on the last day
