from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.world.config import ContentConfig, DefectConfig, WorldConfig, demo, ending_by, large, tiny
from pf_core.world.ids import PIN_BITS, USER_BITS, Scramble, parse_pins, spell_pins


def test_presets_have_the_documented_sizes() -> None:
    assert (demo().num_users, demo().num_pins, demo().num_days, demo().num_topics) == (10_000, 50_000, 90, 350)
    big = large(num_users=1_000_000, num_days=365)
    assert (big.num_users, big.num_days) == (1_000_000, 365)
    assert big.num_chunks * big.users_per_chunk >= big.num_users


def test_dates_are_consecutive_and_utc() -> None:
    config = replace(tiny(), start_ds="2026-02-27", num_days=3)
    assert config.dates == ["2026-02-27", "2026-02-28", "2026-03-01"]
    assert config.start_s == np.datetime64("2026-02-27", "s").astype(int)


@given(st.dates(date(2000, 1, 1), date(2100, 1, 1)))
def test_a_world_is_moved_by_whole_weeks_until_a_day(last: date) -> None:
    moved = ending_by(demo(), last.isoformat())
    assert timedelta(0) <= last - date.fromisoformat(moved.dates[-1]) <= timedelta(days=6)
    assert (date.fromisoformat(moved.start_ds) - date.fromisoformat(demo().start_ds)).days % 7 == 0
    assert replace(moved, start_ds=demo().start_ds) == demo()


def test_a_world_that_ends_by_its_last_day_is_not_moved() -> None:
    assert [ending_by(demo(), f"2026-04-0{day}") for day in range(1, 7)] == [demo()] * 6
    assert ending_by(demo(), "2026-03-30").dates[-1] == "2026-03-24"
    assert ending_by(demo(), "2026-04-07").dates[-1] == "2026-04-07"


def test_a_configuration_survives_json() -> None:
    config = replace(tiny(seed=5), content=ContentConfig(dim=40), dirt=DefectConfig(duplicate=0.1))
    assert WorldConfig.from_dict(config.to_dict()) == config


def test_the_fingerprint_follows_every_value() -> None:
    base = tiny()
    others = [
        tiny(seed=1),
        replace(base, users_per_chunk=151),
        replace(base, content=ContentConfig(dim=32, noise=0.4)),
        replace(base, dirt=DefectConfig(malformed=0.001)),
    ]
    assert base.fingerprint() == tiny().fingerprint()
    assert len({config.fingerprint() for config in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_users": 0}, "num_users must be at least 1"),
        ({"initial_pin_share": 1.5}, "initial_pin_share must be in"),
        ({"num_subtopics": 10}, "every topic a sub-topic"),
        ({"num_pins": 50}, "sub-topics empty"),
        ({"seed": -1}, "seed must not be negative"),
        ({"start_ds": "yesterday"}, "isoformat"),
    ],
)
def test_impossible_worlds_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(tiny(), **change)


def test_impossible_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        ContentConfig(dim=20)
    with pytest.raises(ValueError, match="defect rate duplicate"):
        DefectConfig(duplicate=0.9)


@given(
    seed=st.integers(0, 2**32),
    bits=st.sampled_from([USER_BITS, PIN_BITS]),
    index=st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True),
)
def test_ids_are_a_bijection(seed: int, bits: int, index: list[int]) -> None:
    scramble = Scramble(seed=seed, bits=bits)
    codes = scramble.encode(np.array(index))
    assert codes.min() >= 0
    assert codes.max() < 2**bits
    assert scramble.decode(codes).tolist() == index


def test_ids_are_neither_dense_nor_ordered() -> None:
    codes = Scramble(seed=0, bits=USER_BITS).encode(np.arange(10_000))
    ascending = (np.diff(codes) > 0).mean()
    assert 0.45 < ascending < 0.55
    assert np.median(codes) == pytest.approx(2**52, rel=0.05)


def test_pin_names_are_base_36() -> None:
    names = spell_pins(np.array([0, 35, 36, 36**8 - 1]))
    assert names.to_pylist() == ["p00000000", "p0000000z", "p00000010", "pzzzzzzzz"]
    assert parse_pins(names).tolist() == [0, 35, 36, 36**8 - 1]
    assert len(spell_pins(np.array([], dtype=np.int64))) == 0
    assert names.type == pa.string()
