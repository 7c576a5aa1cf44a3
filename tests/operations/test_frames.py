"""Frames have what was logged and stored, are bounded, and keep the types of ids, times and vectors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.operations import frames
from pf_core.schemas import raw_actions_schema
from pf_core.serving.client import Serving
from tests.support.daily import FEATURE_DIM, NUM_PINS, DailySites, day, day_of_logs
from tests.support.outcomes import once
from tests.support.shared import SharedSites
from tests.support.sites import START

LAST = day(2)


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return DailySites(shared_sites, tmp_path).released(2)


def logged(days: list[str], user: int) -> list[tuple[int, str]]:
    """Times and pins of a user's actions, oldest first, as the logs have them."""
    rows = [row for ds in days for row in zip(*(day_of_logs(ds)[n] for n in ("user", "time_us", "pin")), strict=True)]
    return sorted((time, pin) for who, time, pin in rows if who == user)


def shown(frame: pd.DataFrame) -> list[tuple[int, str]]:
    times = frame["ts"].astype("int64[pyarrow]") if len(frame) else []
    return list(zip(map(int, times), frame["pin_id"], strict=True))


def users_of(ds: str) -> list[int]:
    return sorted(set(day_of_logs(ds)["user"]))


def test_raw_actions_of_some_users(site: Site) -> None:
    first, second, *_ = users_of(START)
    frame = frames.raw_actions(site, START, users=[second, first, second, 10**6])
    assert shown(frame[frame["user_id"] == first]) == logged([START], first)
    assert shown(frame[frame["user_id"] == second]) == logged([START], second)
    assert set(frame["user_id"]) == {first, second}
    assert list(frame.columns) == raw_actions_schema("int", "string").names
    assert frame.dtypes["user_id"] == pd.ArrowDtype(pa.int64())


def test_timelines_are_one_row_for_each_action(site: Site) -> None:
    user = users_of(START)[0]
    expected = logged(ds_range(START, LAST), user)
    frame = frames.timelines(site, LAST, users=[user])
    assert shown(frame) == expected
    assert shown(frames.timelines(site, LAST, users=[user], newest=3)) == expected[-3:]
    assert frames.timelines(site, LAST, limit=5)["user_id"].nunique() == 5


def test_embeddings_are_those_that_are_served(site: Site) -> None:
    users = users_of(LAST)[:4]
    frame = frames.embeddings(site, LAST, users=users)
    assert sorted(frame["user_id"]) == users
    served, found = Serving(site).release().embeddings(list(frame["user_id"]))
    assert found.all()
    np.testing.assert_array_equal(frames.vectors(frame["embedding"]), served.astype(np.float32))
    assert {ds.isoformat() for ds in frame["computed_ds"]} == {LAST}
    assert len(frames.embeddings(site, LAST, limit=7)) == 7
    everybody = frames.embeddings(site, LAST, limit=10**6)
    assert len(everybody) == len({user for ds in ds_range(START, LAST) for user in users_of(ds)})


def test_pins_have_their_vectors(site: Site) -> None:
    frame = frames.pins(site, LAST, pins=["p3", "p0", "none"])
    assert sorted(frame["pin_id"]) == ["p0", "p3"]
    assert frames.vectors(frame["feature"]).shape == (2, FEATURE_DIM)
    assert len(frames.pins(site, LAST, limit=10)) == 10 < NUM_PINS


def test_a_row_without_a_vector_is_nan() -> None:
    kind = pa.list_(pa.float16(), 2)
    column = pd.Series([np.array([1, 2], np.float16), None, np.array([3, 4], np.float16)], dtype=pd.ArrowDtype(kind))
    np.testing.assert_array_equal(frames.vectors(column), [[1, 2], [np.nan, np.nan], [3, 4]])
    np.testing.assert_array_equal(frames.vectors(column[2:]), [[3, 4]])
    with pytest.raises(PipelineError, match="not vectors"):
        frames.vectors(pd.Series([1.0], name="x"))


@pytest.mark.parametrize("function", [frames.raw_actions, frames.timelines, frames.embeddings])
def test_a_frame_is_bounded(site: Site, function: Callable[..., pd.DataFrame]) -> None:
    with pytest.raises(PipelineError, match="give either `users` or `limit`"):
        function(site, LAST)
    with pytest.raises(PipelineError, match="give either"):
        function(site, LAST, users=[1], limit=1)
    with pytest.raises(PipelineError, match="limit is 0"):
        function(site, LAST, limit=0)
    with pytest.raises(PipelineError, match="its ids are integers"):
        function(site, LAST, users=["u1"])
    with pytest.raises(PipelineError, match="has no partition"):
        function(site, day(7), limit=1)
    assert len(function(site, LAST, users=[])) == 0
    assert len(function(site, LAST, users=[10**6])) == 0


def test_scores_are_those_of_each_user(tmp_path: Path) -> None:
    written = once([0.25, float("nan"), 1.0])
    written.write(tmp_path / "scores.parquet", forgotten=pa.array([], pa.int64()))
    frame = frames.scores(tmp_path / "scores.parquet")
    np.testing.assert_array_equal(frame["recall_at_10"].astype(float), [0.25, np.nan, 1.0])
    assert list(frame["frequency"]) == ["once"] * 3
