"""Counts of pins as of a day: which actions count, the windows, and when a day is counted again."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.config.source import Positive
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from pf_core.hashing import digest_of, is_held_out
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.log_day import open_log_day
from pf_core.logs.purge import purge_days
from pf_core.logs.routing import day_number
from pf_core.logs.settings import IngestSettings
from pf_core.pins.counts import NO_DAY, WINDOWS_DAYS, PinCounts, counts_as_of, day_counts
from tests.support.sites import START, SmallSite

DAY_S = 86_400
DAYS = ds_range(START, shift_ds(START, 9))
MakeSite = Callable[..., SmallSite]

_HELD_OUT = is_held_out(pa.array(range(200)), 0.1)
(A, B, C, *_), (HIDDEN, *_) = ([user for user in range(200) if _HELD_OUT[user] == held] for held in (False, True))
"""Three training users, and one who is held out."""


def write(site: SmallSite, by_day: dict[int, list[tuple[int, str, str]]], num_days: int) -> None:
    """Write and ingest days of (user, pin, event); every event `look` of 20 s is positive, `go` of 20 s too."""
    for number in range(num_days):
        rows = [
            (user, pin, number * DAY_S + second, event)
            for second, (user, pin, event) in enumerate(by_day.get(number, []))
        ]
        site.write_log(DAYS[number], rows)
    site.ingest(DAYS[:num_days])


def by_pin(site: SmallSite, ds: str) -> dict[str, tuple[list[int], int]]:
    counts = counts_as_of(site.site, ds)
    assert counts.ids.to_pylist() == sorted(counts.ids.to_pylist())
    rows = zip(counts.ids.to_pylist(), counts.user_days_NW.tolist(), counts.first_day_N.tolist(), strict=True)
    return {pin: (user_days, first) for pin, user_days, first in rows}


def first_day(site: SmallSite) -> pa.Table:
    return day_counts(site.site, open_log_day(site.site, DAYS[0]))


def with_training(site: SmallSite, **training: Any) -> SmallSite:
    site.site = site.site.model_copy(update={"training": TrainingConfig(**training)})
    return site


def test_a_user_counts_once_a_day_for_a_pin(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {0: [(A, "x", "save"), (A, "x", "look"), (B, "x", "save"), (A, "y", "save"), (C, "y", "go")]}, 1)
    counts = first_day(site)
    assert counts.to_pydict() == {"pin_id": ["x", "y"], "user_days": [2, 2]}
    assert counts.schema.field("user_days").type == pa.int32()


def test_held_out_forgotten_and_other_actions_do_not_count(small_site: MakeSite) -> None:
    site = small_site()
    rows = [(A, "x", "save"), (HIDDEN, "x", "save"), (B, "x", "save"), (C, "x", "look"), (HIDDEN, "hidden", "save")]
    write(site, {0: [*rows, (C, "only looked at", "look")]}, 1)
    positive = Positive(action_types=("repin",), longer_than_s={}, surfaces=None)
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"positive": positive})})
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [2]}  # A and B
    (site.root / "forget.txt").write_text(f"{B}\n")  # after the day was ingested and counted
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [1]}
    (site.root / "forget.txt").write_text("")
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [2]}


def test_a_day_is_counted_again_when_users_are_deleted_from_it(small_site: MakeSite) -> None:
    """The deletion list may have been there when the day was counted: what counts is who is in the day."""
    site = small_site()
    write(site, {0: [(A, "x", "save"), (B, "x", "save")]}, 1)
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [2]}
    (site.root / "forget.txt").write_text(f"{B}\n")
    [purged] = purge_days(IngestSettings.of(site.site), DAYS[:1], read_deletion_list(site.site))
    assert purged.actions == 1
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [1]}
    (site.root / "forget.txt").write_text("")  # the actions are gone
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [1]}


def test_windows_end_with_the_day_and_contain_it(small_site: MakeSite) -> None:
    """Ten days: A acts on x every day, B on day 2 (0-based) only; y is new on the last day."""
    site = small_site()
    by_day = {number: [(A, "x", "save")] for number in range(10)}
    by_day[2] += [(B, "x", "save")]
    by_day[9] += [(B, "y", "save"), (C, "y", "save")]
    write(site, by_day, 10)
    first = day_number(START)
    assert WINDOWS_DAYS == (1, 7, 28, 91, 364)
    assert by_pin(site, DAYS[0]) == {"x": ([1, 1, 1, 1, 1], first)}
    assert by_pin(site, DAYS[2]) == {"x": ([2, 3 + 1, 3 + 1, 3 + 1, 3 + 1], first)}
    assert by_pin(site, DAYS[8]) == {"x": ([1, 7 + 1, 9 + 1, 9 + 1, 9 + 1], first)}  # day 2 is the 7th day back
    assert by_pin(site, DAYS[9]) == {
        "x": ([1, 7, 10 + 1, 10 + 1, 10 + 1], first),
        "y": ([2, 2, 2, 2, 2], first + 9),
    }


def test_the_longest_window_forgets(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pf_core.pins.counts.WINDOWS_DAYS", (1, 2, 3))
    site = small_site()
    write(site, {0: [(A, "old", "save"), (A, "x", "save")], 2: [(A, "x", "save")]}, 5)
    first = day_number(START)
    assert by_pin(site, DAYS[2]) == {"old": ([0, 0, 1], first), "x": ([1, 1, 2], first)}
    assert by_pin(site, DAYS[3]) == {"x": ([0, 1, 1], first + 2)}


def test_nothing_later_than_the_day_enters(small_site: MakeSite) -> None:
    early, late = small_site(), small_site()
    for site, num_days in ((early, 3), (late, 6)):
        write(site, {number: [(A, "x", "save"), (B, f"new on {number}", "save")] for number in range(num_days)}, 4)
    shutil.rmtree(early.site.directory / "raw_actions" / DAYS[3])
    assert by_pin(early, DAYS[2]) == by_pin(late, DAYS[2])


def test_a_day_is_counted_again_when_its_actions_or_the_definition_change(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {0: [(A, "x", "save"), (HIDDEN, "x", "save")], 1: [(A, "x", "save")]}, 2)
    counts_as_of(site.site, DAYS[1])
    folder = site.site.directory / "pin_counts"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{ds}.{kind}" for ds in DAYS[:2] for kind in ("arrow", "json")
    ]

    def written() -> list[int]:
        return [(folder / f"{ds}.arrow").stat().st_mtime_ns for ds in DAYS[:2]]

    before = written()
    counts_as_of(site.site, DAYS[1])
    assert written() == before
    (site.root / "forget.txt").write_text("99999\n")  # nobody of these days
    counts_as_of(site.site, DAYS[1])
    assert written() == before
    write(site, {0: [(A, "x", "save"), (B, "x", "save")], 1: [(A, "x", "save")]}, 2)
    assert by_pin(site, DAYS[1])["x"][0] == [1, 3, 3, 3, 3]
    after = written()
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)
    write(site, {0: [(A, "x", "save"), (HIDDEN, "x", "save")], 1: [(A, "x", "save")]}, 2)
    assert by_pin(with_training(site, held_out_share=0.0), DAYS[1])["x"][0] == [1, 3, 3, 3, 3]


def test_counts_of_another_log_are_never_read_as_those_of_this_one(small_site: MakeSite) -> None:
    """A run that was killed, or that met another one, left the file of one log beside the manifest of another."""
    site = small_site()
    old, new = {0: [(A, "x", "save")]}, {0: [(A, "x", "save"), (B, "x", "save")]}
    folder = site.site.directory / "pin_counts"
    write(site, old, 1)
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [1]}
    manifest = (folder / f"{DAYS[0]}.json").read_text()
    write(site, new, 1)
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [2]}
    (folder / f"{DAYS[0]}.json").write_text(manifest)
    write(site, old, 1)
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [1]}


def test_a_day_is_counted_from_the_files_that_were_opened(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {0: [(A, "x", "save")]}, 1)
    opened = open_log_day(site.site, DAYS[0])
    write(site, {0: [(A, "x", "save"), (B, "x", "save")]}, 1)
    with pytest.raises(PipelineError, match="another run may have replaced it meanwhile"):
        day_counts(site.site, opened)
    assert first_day(site).to_pydict() == {"pin_id": ["x"], "user_days": [2]}


def test_a_missing_day_is_named(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {}, 1)
    with pytest.raises(PipelineError, match=rf"raw_actions has no partition {DAYS[1]}; .*--partition {DAYS[1]} "):
        counts_as_of(site.site, DAYS[2])


def test_days_without_actions(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {}, 2)
    counts = counts_as_of(site.site, DAYS[1])
    assert len(counts.ids) == 0
    assert counts.user_days_NW.shape == (0, len(WINDOWS_DAYS))


def test_the_counts_of_other_pins(small_site: MakeSite) -> None:
    site = small_site()
    write(site, {0: [(A, "x", "save")]}, 1)
    counts = counts_as_of(site.site, DAYS[0]).of(pa.array(["z", "x", "x"]))
    assert counts.user_days_NW.tolist() == [[0] * 5, [1] * 5, [1] * 5]
    assert counts.first_day_N.tolist() == [NO_DAY, day_number(START), day_number(START)]


ACTIONS = st.lists(
    st.tuples(st.sampled_from([A, B, C, HIDDEN]), st.sampled_from("xyz"), st.sampled_from(["save", "go"])), max_size=8
)


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(by_day=st.lists(ACTIONS, min_size=1, max_size=5), rows_at_once=st.sampled_from([1, 3, 100]))
def test_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    by_day: list[list[tuple[int, str, str]]],
    rows_at_once: int,
) -> None:
    monkeypatch.setattr("pf_core.pins.counts.ROWS_AT_ONCE", rows_at_once)
    site = SmallSite(tmp_path_factory.mktemp("site"))
    write(site, dict(enumerate(by_day)), len(by_day))
    last = len(by_day) - 1
    user_days: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for number, actions in enumerate(by_day):
        for user, pin, _ in actions:
            if user != HIDDEN:
                user_days[pin].add((user, number))
    expected = {
        pin: (
            [sum(last - number < window for _, number in pairs) for window in WINDOWS_DAYS],
            day_number(START) + min(number for _, number in pairs),
        )
        for pin, pairs in user_days.items()
    }
    assert by_pin(site, DAYS[last]) == expected


def test_counts_have_the_types_of_the_ids(tmp_path: Path) -> None:
    site = SmallSite(tmp_path, {"id_type": "string"})
    users = [f"user {number}" for number in range(50)]
    is_hidden = is_held_out(pa.array(users), 0.1)
    site.write_log(START, [(user, "x", second, "save") for second, user in enumerate(users)])
    site.ingest([START])
    counts = counts_as_of(site.site, START)
    assert counts.ids.type == pa.string()
    assert counts.user_days_NW.dtype == np.int64
    assert counts.first_day_N.dtype == np.int32
    assert counts.user_days_NW[0, 0] == int((~is_hidden).sum())


@pytest.mark.parametrize("pin_id", [pa.int64(), pa.string()])
def test_the_counts_of_some_pins_do_not_search_all_others(monkeypatch: pytest.MonkeyPatch, pin_id: pa.DataType) -> None:
    """pin_embeddings looks up chunk after chunk of ascending pins: hashing all of them each time would be quadratic."""
    ids = pa.array(range(1000, 2000, 2)).cast(pin_id)
    counts = PinCounts(
        ids=ids, user_days_NW=np.arange(500)[:, None] + np.zeros(5, np.int64), first_day_N=np.arange(500)
    )
    searched: list[int] = []
    original = pc.index_in

    def index_in(values: pa.Array, value_set: pa.Array) -> pa.Array:
        searched.append(len(value_set))
        return original(values, value_set=value_set)

    monkeypatch.setattr(pc, "index_in", index_in)
    found = counts.of(pa.array([1003, 1004, 1010, 1011]).cast(pin_id))
    assert found.user_days_NW[:, 0].tolist() == [0, 2, 5, 0]
    assert found.first_day_N.tolist() == [NO_DAY, 2, 5, NO_DAY]
    assert counts.of(pa.array([], pin_id)).first_day_N.tolist() == []
    assert counts.of(pa.array([1, 9999]).cast(pin_id)).first_day_N.tolist() == [NO_DAY, NO_DAY]
    assert searched[:2] == [4, 0]  # 1004, 1006, 1008 and 1010


def test_the_deletion_list_is_hashed_once_for_all_days(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site = small_site()
    write(site, {0: [(A, "x", "save")]}, 5)
    counts_as_of(site.site, DAYS[4])
    hashed: list[Any] = []

    def digest(inputs: Any) -> str:
        hashed.append(inputs)
        return digest_of(inputs)

    monkeypatch.setattr("pf_core.pins.counts.digest_of", digest)
    counts_as_of(site.site, DAYS[4])
    assert hashed == [{"users": []}]
