"""Counts of pins before a day: hand-worked, by their definition, and as serving counts the same log."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.days import DAY_US, ds_range, ds_start_us, shift_ds
from pf_core.embeddings.parts_pins import open_parts_pins
from pf_core.pins.counts import counts_as_of
from pf_core.pins.features import build_pin_features
from pf_core.storage.arrays import read_arrow
from pf_core.timelines.arrays import Timelines
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.training.parts import counts as module
from pf_core.training.parts.counts import UseLog, write_use_log
from pf_core.training.parts.prepared import pins_of_day
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.parts import FIRST_DAY, Action, random_model, random_table, timelines_of, user_days
from tests.support.shared import SharedSites
from tests.support.sites import START, SmallSite
from tests.support.tiny_world import make_tiny_site


def use_log(folder: Path, timelines: Timelines, *, num_pins: int, first_day: int, end_day: int) -> UseLog:
    write_use_log(user_days(timelines, first_day, end_day), folder, num_pins=num_pins, first_day=first_day)
    return UseLog.open(folder, num_pins=num_pins, origin_day=first_day)


USERS: list[list[Action]] = [
    [(100.1, 0, 0, True), (100.2, 0, 0, True), (100.3, 1, 0, False), (103.5, 0, 1, True), (109.9, 2, 0, True)],
    [],
    [(100.5, 0, 0, True), (102.9, 1, 0, False), (103.0, 1, 2, True), (110.0, 0, 0, True)],
]
"""Pin 0: two users on day 100, one on day 103, one on day 110; pin 1: day 103; pin 2: day 109; pin 3 never."""

EXPECTED = {
    100: ([[0] * 5] * 4, [0, 0, 0, 0], 1),
    101: ([[2] * 5, [0] * 5, [0] * 5, [0] * 5], [1, 0, 0, 0], 1),
    103: ([[0, 2, 2, 2, 2], [0] * 5, [0] * 5, [0] * 5], [3, 0, 0, 0], 3),
    104: ([[1, 3, 3, 3, 3], [1] * 5, [0] * 5, [0] * 5], [4, 1, 0, 0], 4),
    108: ([[0, 1, 3, 3, 3], [0, 1, 1, 1, 1], [0] * 5, [0] * 5], [8, 5, 0, 0], 8),  # 7 days: 101 to 107
    110: ([[0, 1, 3, 3, 3], [0, 1, 1, 1, 1], [1] * 5, [0] * 5], [10, 7, 1, 0], 10),
    111: ([[1, 1, 4, 4, 4], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0] * 5], [11, 8, 2, 0], 11),
}
"""Day: user-days in the windows of 1, 7, 28, 91 and 364 days before it, ages, days of the log."""


@pytest.mark.parametrize("day", EXPECTED)
def test_counts_before_a_day(tmp_path: Path, day: int) -> None:
    timelines = timelines_of(*USERS)
    found = use_log(tmp_path / "uses", timelines, num_pins=4, first_day=100, end_day=111).before(day)
    user_days, age, num_days = EXPECTED[day]
    assert found.user_days_NW.tolist() == user_days
    assert found.age_N.tolist() == age
    assert found.num_days == num_days


def test_ages_count_from_the_first_day_of_the_longest_window(tmp_path: Path) -> None:
    """A pin that was used 400 days ago and 5 days ago is 5 days old; serving reads no more than 364 days."""
    timelines = timelines_of([(100.0, 0, 0, True), (100.1, 1, 0, True), (495.0, 0, 0, True)])
    uses = use_log(tmp_path / "uses", timelines, num_pins=2, first_day=100, end_day=500)
    for day, ages in ((464, [364, 364]), (465, [0, 0]), (496, [1, 0]), (500, [5, 0])):
        assert uses.before(day).age_N.tolist() == ages, day


def test_the_use_log_is_mapped_and_sorted_by_day(tmp_path: Path) -> None:
    uses = use_log(tmp_path / "uses", timelines_of(*USERS), num_pins=4, first_day=100, end_day=111)
    assert isinstance(uses.pin_E, np.memmap)
    assert uses.pins_of(100, 104).tolist() == [0, 0, 0, 1]
    assert uses.pins_of(104, 109).tolist() == []
    assert uses.pins_of(90, 500).tolist() == [0, 0, 0, 1, 2, 0]
    assert uses.pins_of(50, 90).tolist() == uses.pins_of(110, 105).tolist() == []
    assert sorted(path.name for path in (tmp_path / "uses").iterdir()) == ["first_use.npy", "offsets.npy", "pin.npy"]


HOURS = st.integers(100 * 24, 129 * 24).map(lambda hour: hour / 24)
ACTIONS = st.lists(st.tuples(HOURS, st.integers(0, 3), st.just(0), st.booleans()), max_size=15).map(sorted)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(users=st.lists(ACTIONS, min_size=1, max_size=5), day=st.integers(100, 135))
def test_counts_agree_with_their_definition(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    users: list[list[Action]],
    day: int,
) -> None:
    monkeypatch.setattr(module, "WINDOWS_DAYS", (1, 3, 10))
    timelines = timelines_of(*users)
    folder = tmp_path_factory.mktemp("uses")
    found = use_log(folder / "uses", timelines, num_pins=4, first_day=100, end_day=130).before(day)
    used_on = {
        (user, int(ts), pin) for user, actions in enumerate(users) for ts, pin, _, positive in actions if positive
    }
    for pin in range(4):
        days = [used for _, used, of in used_on if of == pin and day - 10 <= used < day]
        expected = [sum(used >= day - window for used in days) for window in (1, 3, 10)]
        assert found.user_days_NW[pin].tolist() == expected
        assert found.age_N[pin] == (day - min(days) if days else 0)


def test_serving_counts_the_same_log_alike(tmp_path: Path, shared_sites: SharedSites) -> None:
    """On a world with held-out users: counts, statistics and rates as of the cut, and of an earlier day."""
    site = shared_sites.copy("tiny-world", make_tiny_site, tmp_path / "site")
    data = open_training_set(latest_training_set(site))
    cut_ds = data.manifest["cut_ds"]
    pin_ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    model = random_model()
    table = random_table(model, tmp_path / "table", num_pins=data.num_pins)
    log_repeat_N = np.zeros(data.num_pins, np.float32)
    table = type(table)(**(vars(table) | {"ids": data.path / "pins" / "pin_id.arrow", "log_repeat": log_repeat_N}))
    assert data.held_out.num_users > 0
    for ds in (cut_ds, shift_ds(cut_ds, -6)):
        day = ds_start_us(ds) // DAY_US + 1
        counts = data.uses.before(day)
        served = counts_as_of(site, ds)
        of_pins = served.of(pin_ids)
        assert counts.user_days_NW.sum() > 0
        np.testing.assert_array_equal(of_pins.user_days_NW, counts.user_days_NW)
        np.testing.assert_array_equal(np.where(of_pins.first_day_N >= 0, day - of_pins.first_day_N, 0), counts.age_N)
        trained = pins_of_day(counts, log_repeat_N)
        pins = open_parts_pins(
            ds, model, table, served, first_us=data.manifest["time_origin_us"], num_pins=data.num_pins
        )
        inputs, rates_NW = pins.inputs(pin_ids, np.zeros((data.num_pins, 0), np.float32))
        np.testing.assert_array_equal(rates_NW, trained.rates_NW)
        np.testing.assert_allclose(inputs.statistics_MF, trained.statistics_NF, atol=1e-5)
        np.testing.assert_allclose(pins._mean_rate_W, trained.mean_rate_W, rtol=1e-6)


def test_serving_counts_no_more_days_than_timelines_have(
    tmp_path: Path, shared_sites: SharedSites, small_site: Callable[..., SmallSite]
) -> None:
    """Training counts the days of timelines; older ones may not even be in raw_actions."""
    site = shared_sites.copy("tiny-world", make_tiny_site, tmp_path / "site")
    short = site.model_copy(update={"timelines": site.timelines.model_copy(update={"window_days": 3})})
    cut_ds = open_training_set(latest_training_set(site)).manifest["cut_ds"]
    shutil.rmtree(site.directory / "raw_actions" / shift_ds(cut_ds, -3))
    options: dict[str, Any] = {"engine": small_site().engine, "progress": lambda message: None}
    list(build_timelines(short, [cut_ds], rebuild=True, **options))
    build_training_set(short, cut_ds=cut_ds, **options)
    data = open_training_set(latest_training_set(short))
    end_day, num_pins = data.cut_us // DAY_US, data.num_pins
    counts = data.uses.before(end_day)
    assert counts.user_days_NW[:, -1].tolist() == counts.user_days_NW[:, 1].tolist() != [0] * num_pins
    served = counts_as_of(short, cut_ds)
    pin_ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    np.testing.assert_array_equal(served.of(pin_ids).user_days_NW, counts.user_days_NW)
    table = random_table(random_model(), tmp_path / "table", num_pins=num_pins)
    table = type(table)(**(vars(table) | {"ids": data.path / "pins" / "pin_id.arrow"}))
    first_us = (end_day - 5) * DAY_US  # of a model that is two days old
    pins = open_parts_pins(cut_ds, random_model(), table, served, first_us=first_us, num_pins=num_pins)
    _, rates_NW = pins.inputs(pin_ids, np.zeros((num_pins, 0), np.float32))
    np.testing.assert_array_equal(rates_NW, counts.rates())


def test_actions_that_timelines_have_no_room_for_count(small_site: Callable[..., SmallSite]) -> None:
    """A timeline keeps the user's newest actions; serving adds up days, whose counts no later action changes."""
    site = small_site(timelines={"max_actions": 4})
    days = ds_range(START, shift_ds(START, 5))
    for number, ds in enumerate(days):
        busy = [(1, f"p{number}", 86_400 * number + 60 * hour, "save") for hour in range(2)]
        site.write_log(
            ds, [*busy, (1, "always", 86_400 * number + 3600, "save"), (2, "always", 86_400 * number, "save")]
        )
    site.ingest(days)
    site.build(days)
    pins = site.site.source.pins.model_copy(update={"catalogue": None, "vectors": None})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"pins": pins})})
    options: dict[str, Any] = {"engine": site.engine, "progress": lambda message: None}
    list(build_pin_features(site.site, days, **options))
    build_training_set(site.site, cut_ds=days[-1], **options)
    data = open_training_set(latest_training_set(site.site))
    assert np.diff(data.train.offsets).max() == 4
    pin_ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    assert pin_ids.to_pylist() == ["always", *(f"p{number}" for number in range(6))]
    end_day = data.cut_us // DAY_US
    counts = data.uses.before(end_day)
    assert counts.user_days_NW[0].tolist() == [2, 12, 12, 12, 12]
    assert counts.user_days_NW[1].tolist() == [0, 1, 1, 1, 1]  # of the first day, which the timeline has lost
    for age in range(3):
        served = counts_as_of(site.site, days[-1 - age]).of(pin_ids)
        counts = data.uses.before(end_day - age)
        np.testing.assert_array_equal(counts.user_days_NW, served.user_days_NW)
        day_N = np.where(served.first_day_N >= 0, end_day - age - served.first_day_N, 0)
        np.testing.assert_array_equal(counts.age_N, day_N)


def test_the_first_day_of_random_timelines() -> None:
    assert ds_start_us("2024-10-04") == FIRST_DAY * DAY_US
