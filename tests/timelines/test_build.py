"""user_timelines against its definition in plain Python; how a day is stored, and which days are refused."""

import itertools
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.config.fields import CategoryField
from pf_core.config.serving import ServingConfig, StoreConfig
from pf_core.config.site import QualityConfig, TimelineConfig
from pf_core.days import ds_range, ds_start, shift_ds
from pf_core.engine.daily_state import _first_to_merge
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.timelines.assembly import timeline_fault
from pf_core.timelines.build import read_bucket, timeline_state
from pf_core.timelines.checks import audit_day
from tests.support.sites import START, Row, SmallSite

DAY_S = 86_400
DAYS = ds_range(START, shift_ds(START, 5))
TYPES = {"save": "repin", "look": "closeup", "go": "click"}
MakeSite = Callable[..., SmallSite]
Logs = dict[str, list[Row]]


def expected_timelines(site: SmallSite, logs: Logs, ds: str) -> dict[Any, list[tuple]]:
    """The definition, in plain Python: distinct accepted actions of the window, in order, the newest kept."""
    options = site.site
    since = ds_start(ds) - timedelta(days=options.timelines.window_days - 1)
    until = ds_start(ds) + timedelta(days=1)
    by_user: dict[Any, set[tuple]] = {}
    for arrival_ds, rows in logs.items():
        for user, pin, second, event in rows:
            ts = ds_start(START) + timedelta(seconds=second)
            days_late = (ds_start(arrival_ds).date() - ts.date()).days
            if since <= ts < until and 0 <= days_late <= options.source.actions.late_days:
                user_id = user if options.source.actions.user_id.type == "int" else str(user)
                by_user.setdefault(user_id, set()).add((ts, pin, TYPES[event], "homefeed", 20.0))
    return {user: sorted(rows)[-options.timelines.max_actions :] for user, rows in by_user.items()}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Any], Logs]:
    """Few users, times and pins, so that duplicates, ties, late rows, the cap and the window's edge all occur."""
    options = {
        "id_type": draw(st.sampled_from(["int", "string"])),
        "late_days": draw(st.integers(0, 2)),
        "quality": {"max_quarantined_share": 1},  # rows that are too late are many
        "timelines": {
            "window_days": draw(st.sampled_from([1, 2, 3, 365])),
            "max_actions": draw(st.sampled_from([1, 2, 5, 1000])),
            "segment_actions": draw(st.sampled_from([1, 2, 3, 64])),
            "compact_after_fragments": draw(st.sampled_from([2, 24])),
        },
    }
    row = st.tuples(
        st.sampled_from([1, 2, 30, -4]),
        st.sampled_from(["p", "q"]),
        st.sampled_from([0.0, 1.0, 1.000001, 50_000.0, DAY_S - 0.000001]),
        st.sampled_from(sorted(TYPES)),
        st.integers(0, 2),
    )
    logs: Logs = {}
    for offset, ds in enumerate(DAYS):
        rows = draw(st.lists(row, max_size=8))
        logs[ds] = [(u, p, max(0, offset - late) * DAY_S + s, e) for u, p, s, e, late in rows]
    return options, logs


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_incremental_equals_rebuild_equals_definition(
    world: tuple[dict[str, Any], Logs], split: int, reruns: list[int]
) -> None:
    options, logs = world
    with tempfile.TemporaryDirectory() as folder:
        site = SmallSite(Path(folder), options)
        for ds, rows in logs.items():
            # One row of another user keeps every day readable.
            site.write_log(ds, [*rows, (777, "p", DAYS.index(ds) * DAY_S + 1.0, "look")])
            logs[ds] = [*rows, (777, "p", DAYS.index(ds) * DAY_S + 1.0, "look")]
        site.ingest(DAYS)
        site.build(DAYS[:split])  # a range, then days one by one
        for ds in DAYS[split:]:
            site.build([ds])
        expected = {ds: expected_timelines(site, logs, ds) for ds in DAYS}
        assert {ds: site.timelines(ds) for ds in DAYS} == expected
        for index in reruns:
            site.build([DAYS[index]])
            assert {ds: site.timelines(ds) for ds in DAYS} == expected
        for ds in DAYS:
            site.build([ds], rebuild=True)
            assert site.timelines(ds) == expected[ds]
            assert audit_day(site.site, ds) is None


def three_days(site: SmallSite) -> SmallSite:
    for offset in range(3):
        rows = [(user, f"p{offset}", offset * DAY_S + user, "look") for user in range(1, 9) if (user + offset) % 3]
        site.write_log(DAYS[offset], rows)
    site.ingest(DAYS[:3])
    return site


def test_a_missing_day_is_an_error_with_the_repairing_command(small_site: MakeSite) -> None:
    site = three_days(small_site())
    with pytest.raises(
        PipelineError, match=r"builds on 2026-01-01, which is missing.*--partition 2026-01-02 .*rebuild"
    ):
        site.build(DAYS[1:2])
    site.build(DAYS[:1])
    with pytest.raises(PipelineError, match=r"--partition-range 2026-01-02\.\.\.2026-01-03"):
        site.build(DAYS[2:3])
    with pytest.raises(PipelineError, match=r"raw_actions has no partition 2026-01-04; make it with: dagster asset"):
        site.build(DAYS[1:4])
    assert timeline_state(site.site).days() == DAYS[:3]


def test_the_command_for_a_gap_ingests_the_days_that_are_missing(small_site: MakeSite) -> None:
    site = small_site()
    for offset, ds in enumerate(DAYS[:4]):
        site.write_log(ds, [(1, "p", offset * DAY_S, "look")])
    site.ingest(DAYS[3:4])
    with pytest.raises(PipelineError, match=rf"--select raw_actions,user_timelines .*{DAYS[0]}\.\.\.{DAYS[3]} "):
        site.build(DAYS[3:4])
    site.ingest(DAYS[:1])
    site.build(DAYS[:1])
    with pytest.raises(PipelineError, match=rf"--select raw_actions,user_timelines .*{DAYS[1]}\.\.\.{DAYS[3]} "):
        site.build(DAYS[3:4])


@pytest.mark.parametrize("bad_day", [0, 1, 2])
@pytest.mark.parametrize("rebuild", [False, True])
def test_a_day_with_too_many_quarantined_rows_is_not_built(small_site: MakeSite, bad_day: int, rebuild: bool) -> None:
    """The check of raw_actions blocks the run that ingested the day; a later run may select user_timelines alone."""
    site = small_site()
    for offset, ds in enumerate(DAYS[:3]):
        bad = [(2, "p", offset * DAY_S, "dance")] if offset == bad_day else []
        site.write_log(ds, [(1, "p", offset * DAY_S + second, "look") for second in range(9)] + bad)
    site.ingest(DAYS[:3])
    days = DAYS[2:3] if rebuild else DAYS[:3]
    with pytest.raises(PipelineError) as refused:
        site.build(days, rebuild=rebuild)
    assert str(refused.value) == (
        f"user_timelines cannot be built from raw_actions {DAYS[bad_day]}: {1 / 10:.2%} of 10 rows quarantined, "
        "at most 2.00% allowed; most often: action_type: unknown value (column event); repair the logs, or their "
        "mapping in the site file, and ingest the day again with: dagster asset materialize --select raw_actions "
        f"--partition {DAYS[bad_day]} -m pf_assets.definitions; or raise quality.max_quarantined_share there"
    )
    assert timeline_state(site.site).days() == []
    site.site = site.site.model_copy(update={"quality": QualityConfig(max_quarantined_share=0.1)})
    site.build(days, rebuild=rebuild)
    assert timeline_state(site.site).days() == days


def test_rerunning_a_day_touches_no_other_day(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:3])
    state = timeline_state(site.site)
    before = {ds: (state.require(ds)["versions"], site.timelines(ds)) for ds in DAYS[:3]}
    site.write_log(DAYS[1], [(1, "corrected", DAY_S + 5.0, "save")])
    site.ingest(DAYS[1:2])
    site.build(DAYS[1:2])
    assert {ds: (state.require(ds)["versions"], site.timelines(ds)) for ds in (DAYS[0], DAYS[2])} == {
        ds: before[ds] for ds in (DAYS[0], DAYS[2])
    }
    assert site.timelines(DAYS[1])[1][-1][1] == "corrected"
    assert "corrected" not in str(site.timelines(DAYS[2]))
    site.build(DAYS[2:3])  # repair: the day after follows from the corrected one
    assert "corrected" in str(site.timelines(DAYS[2]))


def test_unchanged_buckets_share_their_version(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(DAYS[0], [(user, "p", 1.0, "look") for user in range(20)])
    site.write_log(DAYS[1], [(1, "p", DAY_S + 1.0, "look")])
    site.ingest(DAYS[:2])
    first, second = site.build(DAYS[:2])
    same = [one == other for one, other in zip(first["versions"], second["versions"], strict=True)]
    assert sorted(same) == [False, True]
    assert second["counts"]["active_users"] == 1
    assert second["counts"]["users"] == 20
    assert second["counts"]["actions"] == 21


def test_counts_follow_the_changes(small_site: MakeSite) -> None:
    site = three_days(small_site(timelines={"max_actions": 2}))
    manifests = site.build(DAYS[:3])
    for ds, manifest in zip(DAYS, manifests, strict=False):
        timelines = site.timelines(ds)
        lengths = [len(rows) for rows in timelines.values()]
        assert manifest["counts"]["users"] == len(lengths)
        assert manifest["counts"]["actions"] == sum(lengths)
        histogram = [sum(bucket["lengths"][index] for bucket in manifest["buckets"]) for index in range(2)]
        assert histogram == [lengths.count(1), lengths.count(2)]  # bins 1 and 2-3


def test_forgotten_users_leave_and_stay_out(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:2])
    assert 4 in site.timelines(DAYS[1])
    (site.root / "forget.txt").write_text("4\n12345\n")
    [manifest] = site.build(DAYS[2:3])  # raw_actions of all days still hold the user
    assert 4 not in site.timelines(DAYS[2])
    assert manifest["counts"]["forgotten_users"] == 1
    assert manifest["counts"]["users"] == len(site.timelines(DAYS[2]))
    assert audit_day(site.site, DAYS[2]) is None  # the logs still know the user, and that is no fault
    site.build(DAYS[2:3], rebuild=True)
    assert 4 not in site.timelines(DAYS[2])
    assert 5 in site.timelines(DAYS[2])
    assert audit_day(site.site, DAYS[2]) is None


def test_the_files_of_a_day_lose_a_forgotten_user(small_site: MakeSite) -> None:
    """Lance only marks rows as deleted; those of a forgotten user must not wait for a compaction."""
    site = three_days(small_site(timelines={"num_buckets": 1, "retention_days": 2}))
    site.build(DAYS[:2])
    state = timeline_state(site.site)
    assert 4 in user_ids_in_files(state.open_bucket(DAYS[1], 0))
    (site.root / "forget.txt").write_text("4\n")
    site.build(DAYS[2:3])
    newest = state.open_bucket(DAYS[2], 0)
    assert user_ids_in_files(newest) == set(site.timelines(DAYS[2])) != set()
    site.build(DAYS[2:3])  # again, on the day before
    assert 4 not in user_ids_in_files(state.open_bucket(DAYS[2], 0))


def user_ids_in_files(dataset: lance.LanceDataset) -> set[int]:
    """The users of all rows, deleted ones included."""
    rows = dataset.scanner(columns=["user_id"], include_deleted_rows=True, with_row_id=True).to_table()
    return set(rows["user_id"].to_pylist())


def test_retention_drops_old_days_and_their_files(small_site: MakeSite) -> None:
    site = small_site(timelines={"retention_days": 2})
    for offset, ds in enumerate(DAYS):
        site.write_log(ds, [(user, "p", offset * DAY_S + user, "look") for user in range(10)])
    site.ingest(DAYS)
    for ds in DAYS:
        site.build([ds])
    state = timeline_state(site.site)
    assert state.days() == DAYS[-2:]
    for bucket in range(2):
        dataset = lance.dataset(state.bucket_path(bucket))
        kept = sorted(state.require(ds)["versions"][bucket] for ds in DAYS[-2:])
        assert sorted(version["version"] for version in dataset.versions()) == kept
        assert set(dataset.tags.list()) == {f"ds-{ds}" for ds in DAYS[-2:]}
    assert len(site.timelines(DAYS[-2])[1]) == 5
    assert len(site.timelines(DAYS[-1])[1]) == 6


def test_compaction_bounds_the_fragments(small_site: MakeSite) -> None:
    site = small_site(timelines={"compact_after_fragments": 3, "num_buckets": 1})
    for offset, ds in enumerate(DAYS):
        site.write_log(ds, [(offset * 10 + user, "p", offset * DAY_S + user, "look") for user in range(10)])
    site.ingest(DAYS)
    manifests = site.build(DAYS)
    assert max(manifest["counts"]["fragments"] for manifest in manifests) <= 3
    assert len(site.timelines(DAYS[-1])) == 60
    assert len(site.timelines(DAYS[1])) == 20


def test_full_segments_are_never_rewritten(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 1, "segment_actions": 3, "max_actions": 7})
    for offset, ds in enumerate(DAYS[:5]):
        site.write_log(ds, [(user, f"p{n}", offset * DAY_S + n, "look") for user in (1, 2) for n in range(2 * user)])
    site.ingest(DAYS[:5])
    stored = []
    for ds in DAYS[:5]:
        site.build([ds])
        table = timeline_state(site.site).open_bucket(ds, 0).to_table(with_row_address=True)
        stored.append(
            {
                (row["user_id"], row["piece"]): (row["num_actions"], row["_rowaddr"])
                for row in table.to_pylist()
                if len(row["ts"]) == row["num_actions"] and row["ts"][-1] == row["last_ts"]
            }
        )
    lengths = [{key: length for key, (length, _) in segments.items()} for segments in stored]
    assert lengths == [
        {(1, 0): 2, (2, 0): 3, (2, 1): 1},
        {(1, 0): 3, (1, 1): 1, (2, 0): 3, (2, 1): 3, (2, 2): 2},
        {(1, 0): 3, (1, 1): 3, (2, 1): 3, (2, 2): 3, (2, 3): 3},  # with 12 actions, user 2's first segment goes
        {(1, 0): 3, (1, 1): 3, (1, 2): 2, (2, 3): 3, (2, 4): 3, (2, 5): 1},
        {(1, 1): 3, (1, 2): 3, (1, 3): 1, (2, 4): 3, (2, 5): 3, (2, 6): 2},  # after it, user 1 has 7 actions, too
    ]
    for before, after in itertools.pairwise(stored):
        full = {key for key, (length, _) in before.items() if length == 3} & after.keys()
        assert {key: before[key] for key in full} == {key: after[key] for key in full}
    timelines = site.timelines(DAYS[4])
    assert {user: len(rows) for user, rows in timelines.items()} == {1: 7, 2: 7}
    assert site.build(DAYS[4:5])[0]["counts"]["actions"] == 14


def test_a_site_file_may_use_the_old_name_of_segment_actions() -> None:
    new, old = (TimelineConfig.model_validate({name: 7}) for name in ("segment_actions", "piece_actions"))
    assert new == old
    assert new.segment_actions == 7
    assert TimelineConfig.model_validate(new.model_dump()) == new


def test_tasks_carry_no_secret_of_the_site_file(small_site: MakeSite) -> None:
    site = three_days(small_site())
    store = StoreConfig(kind="redis", url="redis://:swordfish@localhost:6379/0")
    site.site = site.site.model_copy(update={"serving": ServingConfig(store=store)})
    tasks: list[Any] = []

    class Spy(LocalEngine):
        def map_buckets(self, function: Any, given: Any, *progress: Any) -> Iterator[Any]:
            tasks.extend(given)
            yield from super().map_buckets(function, given, *progress)

    site.engine = Spy(num_workers=1, memory_mb=64, temp_dir=site.root / "tmp")
    site.build(DAYS[:2])
    assert len(tasks) >= 2 * 2
    assert b"swordfish" in pickle.dumps(site.site)
    assert b"swordfish" not in pickle.dumps(tasks)


def test_reading_the_newest_actions(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 1, "segment_actions": 2})
    for offset, ds in enumerate(DAYS[:3]):
        site.write_log(
            ds, [(user, f"p{offset}{n}", offset * DAY_S + n, "look") for user in (1, 2) for n in range(user)]
        )
    site.ingest(DAYS[:3])
    site.build(DAYS[:3])
    newest = read_bucket(timeline_state(site.site), DAYS[2], 0, ["pin_id"], newest=3)
    assert newest.to_pylist() == [
        {"user_id": 1, "pin_id": ["p00", "p10", "p20"]},
        {"user_id": 2, "pin_id": ["p11", "p20", "p21"]},
    ]
    one = read_bucket(timeline_state(site.site), DAYS[2], 0, ["pin_id"], newest=1, user_ids=pa.array([2, 99]))
    assert one.to_pylist() == [{"user_id": 2, "pin_id": ["p21"]}]


def test_timelines_of_an_older_version_ask_for_a_rebuild(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:1])
    state = timeline_state(site.site)
    manifest = state.require(DAYS[0])
    del manifest["settings"]["stored_as"], manifest["layout"]
    state.manifest_path(DAYS[0]).write_text(json.dumps(manifest))
    sentence = r"2026-01-01 was stored in layout 1, and this version of the code reads layout 2; rebuild it with: "
    for read in (lambda: site.timelines(DAYS[0]), lambda: site.build(DAYS[1:2])):
        with pytest.raises(PipelineError, match=sentence + ".*--partition 2026-01-01 .*rebuild"):
            read()
    site.build(DAYS[:1], rebuild=True)
    site.build(DAYS[1:2])
    assert site.timelines(DAYS[0])


def test_old_fragments_are_seldom_rewritten() -> None:
    """1,000 days add one row each, in at most 8 fragments, to a state of 10,000 rows."""
    fragments, num_written = [10_000], 0
    for _ in range(1000):
        fragments.append(1)
        if len(fragments) > 8:
            first = _first_to_merge(fragments)
            assert len(fragments) - first >= 2
            num_written += sum(fragments[first:])
            fragments[first:] = [sum(fragments[first:])]
    assert fragments[0] == 10_000
    assert sum(fragments) == 11_000
    assert num_written < 5 * 1000
    assert _first_to_merge([2, 1, 1]) == 1
    assert _first_to_merge([1, 2, 3]) == 0


def test_a_second_writer_is_refused(small_site: MakeSite) -> None:
    site = three_days(small_site())
    with timeline_state(site.site).writing(), pytest.raises(PipelineError, match="another run is writing"):
        site.build(DAYS[:1])
    assert len(site.build(DAYS[:1])) == 1


def with_settings(site: SmallSite, **settings: Any) -> SmallSite:
    """The same data under a changed site file."""
    timelines = site.site.timelines.model_copy(update=settings)
    site.site = site.site.model_copy(update={"timelines": timelines})
    return site


def test_a_day_is_not_built_on_logs_that_have_changed_since(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:2])
    site.ingest(DAYS[:2])  # the same rows again: nothing has changed
    site.write_log(DAYS[0], [(user, "fixed", float(user), "look") for user in range(1, 9) if user % 3])
    site.ingest(DAYS[:1])
    repair = r"raw_actions 2026-01-01 changed .*--partition-range 2026-01-01\.\.\.2026-01-03"
    with pytest.raises(PipelineError, match=repair):
        site.build(DAYS[2:3])
    site.build(DAYS[:1])  # half a repair: the day between is still built on the old logs
    with pytest.raises(PipelineError, match=repair):
        site.build(DAYS[2:3])
    site.build(DAYS[:3])
    repaired = site.timelines(DAYS[2])
    assert "fixed" in str(repaired)
    site.build(DAYS[2:3], rebuild=True)
    assert site.timelines(DAYS[2]) == repaired


@pytest.mark.parametrize("settings", [{"window_days": 1}, {"max_actions": 1}])
def test_a_day_is_not_built_on_one_with_other_settings(small_site: MakeSite, settings: dict[str, int]) -> None:
    site = three_days(small_site(timelines=settings))
    site.build(DAYS[:2])
    before = site.timelines(DAYS[1])
    with_settings(site, window_days=365, max_actions=1000)
    assert site.timelines(DAYS[1]) == before  # a partition is read as it was built
    with pytest.raises(PipelineError, match=r"was built with .*; rebuild 2026-01-03 from the logs: .*rebuild"):
        site.build(DAYS[2:3])
    site.build(DAYS[2:3], rebuild=True)
    assert {len(rows) for rows in site.timelines(DAYS[2]).values()} == {2}  # each user misses one of three days


def test_another_number_of_buckets_is_a_rebuild_that_drops_the_old_days(small_site: MakeSite) -> None:
    site = three_days(small_site(timelines={"num_buckets": 3}))
    site.build(DAYS[:2])
    with_settings(site, num_buckets=2)
    site.ingest(DAYS[:3])
    site.build(DAYS[2:3], rebuild=True)
    state = timeline_state(site.site)
    assert state.days() == DAYS[2:3]
    assert not state.bucket_path(2).exists()
    assert len(site.timelines(DAYS[2])) == 8


def test_a_day_older_than_the_retention_is_refused(small_site: MakeSite) -> None:
    site = three_days(small_site(timelines={"retention_days": 2}))
    site.build(DAYS[:3])
    with pytest.raises(
        PipelineError, match=r"2026-01-01 is older than the 2 days that are kept \(from 2026-01-02 on\)"
    ):
        site.build(DAYS[:1])


def test_changing_the_number_of_buckets_is_refused(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:1])
    with_settings(site, num_buckets=3)
    with pytest.raises(PipelineError, match="2 buckets, the site file says 3"):
        site.build(DAYS[1:2])


def test_reading_some_columns(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:1])
    table = read_bucket(timeline_state(site.site), DAYS[0], 0, ["pin_id"])
    assert table.column_names == ["user_id", "pin_id"]


def set_list(table: pa.Table, name: str, values: list[list[Any]]) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, name, pa.array(values, table.schema.field(name).type))


def test_every_fault_is_found(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 1, "max_actions": 3})
    site.write_log(DAYS[0], [(user, f"p{n}", user * 10.0 + n, "look") for user in (1, 2) for n in range(3)])
    site.ingest(DAYS[:1])
    site.build(DAYS[:1])
    good = read_bucket(timeline_state(site.site), DAYS[0], 0)
    times, pins = good["ts"].to_pylist(), good["pin_id"].to_pylist()
    doctored = {
        "two rows": pa.concat_tables([good, good.slice(0, 1)]),
        "ascending order": set_list(good, "ts", [list(reversed(times[0])), times[1]]),
        "later than": set_list(good, "ts", [times[0], [*times[1][:2], times[1][2] + timedelta(days=1)]]),
        "differ in length": set_list(good, "pin_id", [pins[0], pins[1][:2]]),
        "allowed are 1 to": good,
    }
    assert timeline_fault(good, ds=DAYS[0], max_actions=3) is None
    for words, table in doctored.items():
        fault = timeline_fault(table, ds=DAYS[0], max_actions=2 if words == "allowed are 1 to" else 3)
        assert fault is not None
        assert words in fault


def test_the_audit_sees_a_day_whose_logs_were_rerun_alone(small_site: MakeSite) -> None:
    site = three_days(small_site())
    site.build(DAYS[:3])
    assert audit_day(site.site, DAYS[1]) is None
    site.write_log(DAYS[1], [(1, "p", DAY_S + 5.0, "save")])
    site.ingest(DAYS[1:2])
    fault = audit_day(site.site, DAYS[1])
    assert fault is not None
    assert fault == "raw_actions was re-run, and the timelines were not"


@pytest.mark.parametrize("rebuild", [False, True])
def test_more_surfaces_over_the_days_than_are_possible_are_a_sentence(small_site: MakeSite, rebuild: bool) -> None:
    """No day has too many, but all days of a timeline together have."""
    site = small_site(timelines={"num_buckets": 1, "max_actions": 100_000}, pin_id_type="string")
    actions = site.site.source.actions.model_copy(update={"surface": CategoryField(column="pin")})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"actions": actions})})
    days = ds_range(START, shift_ds(START, 1))
    for day, ds in enumerate(days):
        site.write_log(ds, [(1, f"p{day}-{n}", day * 86_400.0 + n / 1000, "look") for n in range(20_000)])
        site.ingest([ds])
    with pytest.raises(PipelineError, match=r"surface has 40,000 .* 32,768 .*`source.actions.surface`"):
        site.build(days[1:] if rebuild else days, rebuild=rebuild)
