"""Deltas written by hand go in; what must come out is group-by-newest over all of them."""

import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.embeddings.checks import judge_embeddings
from pf_core.embeddings.snapshot import merge_days, read_snapshot
from pf_core.embeddings.snapshot_bucket import MAX_DEAD_SHARE
from pf_core.embeddings.tables import UserEmbeddingManifest, embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of, matrix_of
from pf_core.engine.daily_state import Manifest, create_bucket, replace_rows, take_rows
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of, digest_of
from pf_core.logs.deletion_list import add_to_deletion_list
from pf_core.schemas import INPUT_HASH, TIMESTAMP, id_arrow_type, user_embeddings_schema
from tests.support.records import list_columns
from tests.support.sites import START, SmallSite

DAYS = ds_range(START, shift_ds(START, 5))
DIM = 2
MakeSite = Callable[..., SmallSite]
Delta = Mapping[Any, float]  # user: the angle of the embedding, which identifies its day


def unit_vectors(angles: list[float]) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).reshape(-1, DIM)


def lists_of(delta: Delta) -> dict[str, pa.Array]:
    """Memory and seen pins, named after the user and the angle."""
    pins = [(f"{user}", f"{user} at {delta[user]}") for user in sorted(delta)]
    memory = [{first: 0.5, second: delta[user]} for user, (first, second) in zip(sorted(delta), pins, strict=True)]
    return list_columns(
        "string", memory=memory, seen=pins, is_complete=[angle > 1 for _, angle in sorted(delta.items())]
    )


def write_delta(
    site: Site,
    ds: str,
    delta: Delta,
    *,
    mode: str = "active",
    model_version: str = "m1",
    columns: Mapping[str, pa.Array] | None = None,
) -> UserEmbeddingManifest:
    """user_embeddings[ds]: one row a user; `columns` takes the place of what is right."""
    state, id_type = embedding_state(site), site.source.actions.user_id.type
    users = pa.array([user if id_type == "int" else str(user) for user in sorted(delta)], id_arrow_type(id_type))
    num = len(users)
    rows = pa.table(
        [
            users,
            column_of(unit_vectors([delta[user] for user in sorted(delta)])),
            pa.array([model_version] * num, pa.string()),
            pa.array([date.fromisoformat(ds)] * num, pa.date32()),
            pa.array([ds_start_us(ds)] * num, pa.int64()).cast(TIMESTAMP),
            pa.array(range(1, num + 1), pa.int32()),
            *lists_of(delta).values(),
            pa.array(range(num), pa.int64()),
        ],
        schema=user_embeddings_schema(id_type, "string", DIM).append(INPUT_HASH),
    )
    for name, value in (columns or {}).items():
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), value)
    bucket = bucket_of(rows["user_id"], state.num_buckets)
    versions = [
        create_bucket(state.bucket_path(number), rows.filter(pa.array(bucket == number))).version
        for number in range(state.num_buckets)
    ]
    inputs = {"rows": [[str(user), angle] for user, angle in sorted(delta.items())], "model_version": model_version}
    return state.publish(
        ds,
        versions,
        {
            "model_version": model_version,
            "embedding_dim": DIM,
            "slices": {"embedding": [0, DIM]},
            "mode": mode,
            "digest": digest_of(inputs),
            "counts": {"users": num},
        },
    )


def merge(site: SmallSite, days: list[str], forgotten: tuple[Any, ...] = ()) -> list[Manifest]:
    add_to_deletion_list(site.site, forgotten)
    return list(merge_days(site.site, days, engine=site.engine, progress=lambda _: None))


def with_serving(site: SmallSite, **settings: Any) -> SmallSite:
    serving = site.site.serving.model_copy(update=settings)
    site.site = site.site.model_copy(update={"serving": serving})
    return site


def snapshot(site: SmallSite, ds: str) -> dict[Any, tuple[str, float]]:
    """Every user's (day of computation, angle) as of ds."""
    result: dict[Any, tuple[str, float]] = {}
    for bucket in range(site.site.timelines.num_buckets):
        rows = read_snapshot(site.site, ds, bucket)
        vector_ND = matrix_of(rows["embedding"]).astype(np.float64)
        angles = np.arctan2(vector_ND[:, 1], vector_ND[:, 0]).round(2)
        for user, day, angle in zip(
            rows["user_id"].to_pylist(), rows["computed_ds"].to_pylist(), angles.tolist(), strict=True
        ):
            assert user not in result
            result[user] = (day.isoformat(), angle)
    return result


def group_by_newest(deltas: Mapping[str, Delta], ds: str) -> dict[Any, tuple[str, float]]:
    """The definition."""
    return {user: (day, angle) for day in sorted(deltas) if day <= ds for user, angle in deltas[day].items()}


def write_days(site: SmallSite, deltas: Mapping[str, Delta]) -> None:
    """Everyone on the first day, the active users on the others."""
    for number, (ds, delta) in enumerate(deltas.items()):
        write_delta(site.site, ds, delta, mode="active" if number else "everyone")


THREE_DAYS: dict[str, Delta] = {
    DAYS[0]: dict.fromkeys(range(10), 0.1),
    DAYS[1]: {3: 0.2, 4: 0.2, 50: 0.2},
    DAYS[2]: {4: 0.3, 50: 0.3, 60: 0.3, 61: 0.3},
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Delta]]:
    """Few users on many days, with retention and rewriting that set in early or not at all."""
    options = {
        "id_type": draw(st.sampled_from(["int", "string"])),
        "timelines": {"num_buckets": draw(st.sampled_from([1, 3]))},
        "compact_after_fragments": draw(st.sampled_from([2, 24])),
    }
    users = st.sampled_from([-7, 0, 1, 2, 30, 31, 10**12])
    deltas: dict[str, Mapping[Any, float]] = {}
    for number, ds in enumerate(DAYS):
        # A hundred idle users keep the share of deleted rows small, so that buckets are not compacted on every day.
        idle = dict.fromkeys(range(100, 200), 0.5) if number == 0 else {}
        deltas[ds] = idle | draw(st.dictionaries(users, st.sampled_from([0.0, 0.25, 1.0]), max_size=5))
    if options["id_type"] == "string":
        deltas = {ds: {str(user): angle for user, angle in delta.items()} for ds, delta in deltas.items()}
    return options, deltas


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.integers(1, 6), st.integers(0, 5))
def test_a_snapshot_is_the_newest_row_of_every_user(
    history: tuple[dict[str, Any], dict[str, Delta]], split: int, rerun: int
) -> None:
    options, deltas = history
    with tempfile.TemporaryDirectory() as folder:
        site = SmallSite(Path(folder), options)
        with_serving(site, compact_after_fragments=options["compact_after_fragments"])
        write_days(site, deltas)
        manifests = merge(site, DAYS[:split])  # a range, then days one by one
        for ds in DAYS[split:]:
            manifests += merge(site, [ds])
        expected = {ds: group_by_newest(deltas, ds) for ds in DAYS}
        assert {ds: snapshot(site, ds) for ds in DAYS} == expected
        for ds, manifest in zip(DAYS, manifests, strict=True):
            counts, before = manifest["counts"], group_by_newest(deltas, shift_ds(ds, -1))
            assert counts["users"] == len(expected[ds])
            assert counts["previous_users"] == len(before)
            assert counts["new"] == len(deltas[ds].keys() - before.keys())
            assert counts["refreshed"] == len(deltas[ds].keys() & before.keys())
            assert counts["carried_over"] == (len(before.keys() - deltas[ds].keys()) if ds != DAYS[0] else 0)
            assert counts["forgotten"] == counts["expired"] == 0
            days = [day for day, _ in expected[ds].values()]
            assert manifest["by_computed_ds"] == {day: days.count(day) for day in sorted(set(days))}
        [again] = merge(site, [DAYS[rerun]])
        assert {ds: snapshot(site, ds) for ds in DAYS} == expected
        varying = ("seconds", "versions", "buckets", "counts")
        assert {name: value for name, value in again.items() if name not in varying} == {
            name: value for name, value in manifests[rerun].items() if name not in varying
        }


def test_the_manifest_says_what_went_in_and_how_far_users_moved(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, THREE_DAYS)
    _, second, third = merge(site, DAYS[:3])
    delta = embedding_state(site.site).require(DAYS[2])
    assert third["inputs"]["user_embeddings"] == delta["digest"]
    assert third["inputs"]["previous"] == second["digest"]
    assert third["digest"] == digest_of(third["inputs"])
    assert (third["built_from"], third["model_version"], third["embedding_dim"]) == ("previous day", "m1", DIM)
    assert third["counts"] == {
        "users": 13,
        "new": 2,
        "refreshed": 2,
        "carried_over": 9,
        "forgotten": 0,
        "expired": 0,
        "previous_users": 11,
        "fragments": third["counts"]["fragments"],
    }
    assert third["by_computed_ds"] == {DAYS[0]: 8, DAYS[1]: 1, DAYS[2]: 4}
    assert third["norm"]["min"] == pytest.approx(1, abs=2e-3)
    assert third["norm"]["min"] <= third["norm"]["mean"] <= third["norm"]["max"]
    assert third["change"]["sampled"] == 2  # both refreshed users turned from 0.2 to 0.3
    assert third["change"]["mean_distance"] == pytest.approx(2 * np.sin(0.1 / 2), abs=1e-3)
    assert third["change"]["cosine"]["p05"] == pytest.approx(np.cos(0.1), abs=1e-3)


def test_a_day_without_active_users_shares_every_bucket_with_the_day_before(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, {DAYS[0]: THREE_DAYS[DAYS[0]], DAYS[1]: {}})
    first, second = merge(site, DAYS[:2])
    assert second["versions"] == first["versions"]
    assert (second["norm"], second["change"]) == (None, None)
    assert second["counts"]["carried_over"] == 10


def test_when_everyone_is_embedded_the_others_expire(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, THREE_DAYS)
    merge(site, DAYS[:3])
    write_delta(site.site, DAYS[3], {3: 0.7, 4: 0.7, 50: 0.7, 99: 0.7}, mode="everyone", model_version="m2")
    [manifest] = merge(site, [DAYS[3]], forgotten=(60,))
    assert snapshot(site, DAYS[3]) == dict.fromkeys((3, 4, 50, 99), (DAYS[3], 0.7))
    counts = manifest["counts"]
    assert (counts["previous_users"], counts["new"], counts["refreshed"]) == (13, 1, 3)
    assert (counts["forgotten"], counts["expired"], counts["carried_over"]) == (1, 13 - 3 - 1, 0)
    assert (manifest["built_from"], manifest["inputs"]["previous"]) == ("everyone", None)
    assert manifest["change"] is None  # vectors of two models are not comparable
    assert snapshot(site, DAYS[2]) == group_by_newest(THREE_DAYS, DAYS[2])


def test_everyone_by_the_same_model_is_compared_with_the_day_before(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, {DAYS[0]: {1: 0.1, 2: 0.1}})
    write_delta(site.site, DAYS[1], {1: 0.1, 2: 0.4}, mode="everyone")
    _, second = merge(site, DAYS[:2])
    assert second["change"]["mean_distance"] == pytest.approx((0 + 2 * np.sin(0.3 / 2)) / 2, abs=1e-3)


def test_everyone_needs_no_day_before(small_site: MakeSite) -> None:
    site = small_site()
    write_delta(site.site, DAYS[3], {1: 0.1}, mode="everyone")
    [manifest] = merge(site, [DAYS[3]])
    assert manifest["counts"]["previous_users"] == 0
    assert snapshot(site, DAYS[3]) == {1: (DAYS[3], 0.1)}


def test_another_number_of_buckets_starts_again_with_everyone(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 3})
    write_days(site, {DAYS[0]: dict.fromkeys(range(10), 0.1)})
    merge(site, DAYS[:1])
    site.site = site.site.model_copy(update={"timelines": site.site.timelines.model_copy(update={"num_buckets": 2})})
    write_delta(site.site, DAYS[1], dict.fromkeys(range(10), 0.2), mode="everyone")
    merge(site, DAYS[1:2])
    assert snapshot(site, DAYS[1]) == dict.fromkeys(range(10), (DAYS[1], 0.2))
    assert snapshot_state(site.site).days() == DAYS[1:2]


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_forgotten_users_leave_and_stay_out(small_site: MakeSite, id_type: str) -> None:
    site = small_site(id_type=id_type)
    write_days(site, THREE_DAYS)
    merge(site, DAYS[:1])
    gone = (3, 4, 777) if id_type == "int" else ("3", "4", "777")
    second, third = merge(site, DAYS[1:3], forgotten=gone)  # both are active on the second day
    left = {user: row for user, row in group_by_newest(THREE_DAYS, DAYS[2]).items() if user not in (3, 4)}
    assert snapshot(site, DAYS[2]) == (left if id_type == "int" else {str(user): row for user, row in left.items()})
    assert (second["counts"]["forgotten"], third["counts"]["forgotten"]) == (2, 0)
    assert second["counts"]["users"] == 10 + 1 - 2
    assert second["inputs"]["forgotten"] == third["inputs"]["forgotten"]


def test_the_files_of_a_day_lose_a_forgotten_user(small_site: MakeSite) -> None:
    """Lance only marks rows as deleted; the record of a forgotten user must not wait for a compaction."""
    site = small_site(timelines={"num_buckets": 1})
    write_days(site, {DAYS[0]: {user: 0.1 * user for user in range(1, 100)}, DAYS[1]: {5: 1.0}, DAYS[2]: {6: 1.0}})
    merge(site, DAYS[:2])
    merge(site, DAYS[2:3], forgotten=(5,))  # the user has an older row, too, which a day has replaced
    newest = snapshot_state(site.site).open_bucket(DAYS[2], 0)
    rows = newest.scanner(columns=["user_id"], include_deleted_rows=True, with_row_id=True).to_table()
    assert set(rows["user_id"].to_pylist()) == set(snapshot(site, DAYS[2])) == set(range(1, 100)) - {5}


def test_lists_come_with_their_row(small_site: MakeSite) -> None:
    site = small_site()
    days = {DAYS[0]: {1: 0.1, 2: 0.2, 3: 1.3}, DAYS[1]: {2: 1.5}}
    write_days(site, days)
    merge(site, DAYS[:2])
    buckets = range(site.site.timelines.num_buckets)
    rows = pa.concat_tables([read_snapshot(site.site, DAYS[1], bucket) for bucket in buckets]).sort_by("user_id")
    expected = lists_of({1: 0.1, 2: 1.5, 3: 1.3})
    assert rows.select(list(expected)).to_pylist() == pa.table(expected).to_pylist()
    assert rows["seen_is_complete"].to_pylist() == [False, True, True]


LIST_FAULTS: dict[str, tuple[str, list[Any], str]] = {
    "another length": ("memory_increment", [[0.5], [0.5, 1.5]], r"differ in length, first for user_id 1: 2 and 1"),
    "no increment": ("memory_increment", [[0.5, None], [0.5, 1.5]], "1 elements of memory_increment are missing"),
    "NaN": ("memory_increment", [[0.5, 1.0], [float("nan"), 1.5]], "a memory_increment is not finite"),
    "no pin": ("seen_pin_id", [["a"], [None]], "1 elements of seen_pin_id are missing"),
    "no list": ("seen_pin_id", [["a"], None], "seen_pin_id is missing in 1 rows"),
    "a pin twice in memory": (
        "memory_pin_id",
        [["a", "b"], ["b", "b"]],
        "a pin is twice in memory_pin_id of user_id 2",
    ),
    "a pin seen twice": ("seen_pin_id", [["a", "b"], ["b", "c", "b"]], "a pin is twice in seen_pin_id of user_id 2"),
}


@pytest.mark.parametrize("fault", LIST_FAULTS)
def test_faulty_lists_are_refused(small_site: MakeSite, fault: str) -> None:
    site, (name, values, message) = small_site(timelines={"num_buckets": 1}), LIST_FAULTS[fault]
    field = user_embeddings_schema("int", "string", DIM).field(name)
    write_delta(site.site, DAYS[0], {1: 0.1, 2: 1.2}, mode="everyone", columns={name: pa.array(values, field.type)})
    result = judge_embeddings(site.site, DAYS[0])
    assert not result.passed
    assert result.reason.startswith("bucket 0: ")
    assert re.search(message, result.reason)
    if fault == "a pin seen twice":
        return  # only the check of the day's embeddings looks for it
    with pytest.raises(PipelineError, match=f"{message}; nothing was published"):
        merge(site, DAYS[:1])
    assert snapshot_state(site.site).days() == []


def test_a_snapshot_of_an_older_layout_is_refused_with_the_command(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, THREE_DAYS)
    merge(site, DAYS[:1])
    path = snapshot_state(site.site).manifest_path(DAYS[0])
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "layout"}
    path.write_text(json.dumps(older))
    with pytest.raises(
        PipelineError,
        match=r"user_embedding_snapshot 2026-01-01 was stored in layout 1, .*; rebuild it with: .*"
        r"--select user_embeddings,user_embedding_snapshot --partition 2026-01-01 .*everyone",
    ):
        merge(site, DAYS[1:2])
    write_delta(site.site, DAYS[1], {1: 0.5}, mode="everyone")
    [manifest] = merge(site, DAYS[1:2])  # everyone is embedded: nothing of the day before is taken over
    assert manifest["counts"]["users"] == 1


def test_only_some_columns_are_read(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, {DAYS[0]: {1: 0.1}})
    merge(site, DAYS[:1])
    names = user_embeddings_schema("int", "string", DIM).names
    assert read_snapshot(site.site, DAYS[0], 0).column_names == names  # without the hash of the input
    assert read_snapshot(site.site, DAYS[0], 0, ["user_id"]).column_names == ["user_id"]


# Refused inputs


def test_a_day_without_embeddings_names_the_command(small_site: MakeSite) -> None:
    with pytest.raises(PipelineError, match=r"user_embeddings has no partition 2026-01-01; make it with: dagster"):
        merge(small_site(), DAYS[:1])


def test_a_missing_day_is_an_error_with_the_repairing_command(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, THREE_DAYS)
    with pytest.raises(PipelineError, match=r"builds on 2026-01-02, .* --partition-range 2026-01-01\.\.\.2026-01-03"):
        merge(site, DAYS[2:3])  # there is nothing yet: it starts where everyone was embedded
    merge(site, DAYS[:1])
    with pytest.raises(PipelineError, match=r"user_embedding_snapshot --partition-range 2026-01-02\.\.\.2026-01-03"):
        merge(site, DAYS[2:3])
    assert snapshot_state(site.site).days() == DAYS[:1]
    embedding_state(site.site).manifest_path(DAYS[0]).unlink()
    snapshot_state(site.site).manifest_path(DAYS[0]).unlink()
    with pytest.raises(PipelineError, match=r"--partition 2026-01-03 .*\"everyone\": true"):
        merge(site, DAYS[2:3])  # nothing is left to start from


def test_two_models_are_not_mixed(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, THREE_DAYS)
    write_delta(site.site, DAYS[1], {1: 0.2}, model_version="m2")
    merge(site, DAYS[:1])
    with pytest.raises(
        PipelineError, match=r"by model m2, .*has model m1.*; embed 2026-01-02 again: .*--partition 2026"
    ):
        merge(site, DAYS[1:2])


def test_a_day_is_not_merged_on_one_whose_embeddings_have_changed_since(small_site: MakeSite) -> None:
    site = small_site()
    write_days(site, {**THREE_DAYS, DAYS[3]: {1: 0.4}})
    merge(site, DAYS[:3])
    changed = {**THREE_DAYS, DAYS[1]: {3: 0.25, 50: 0.25}, DAYS[3]: {1: 0.4}}
    write_delta(site.site, DAYS[1], changed[DAYS[1]])
    stale = r"user_embedding_snapshot 2026-01-02, on which 2026-01-04 builds, .*2026-01-02\.\.\.2026-01-04"
    with pytest.raises(PipelineError, match=stale):
        merge(site, DAYS[3:4])
    merge(site, DAYS[1:2])  # half a repair: the day after still builds on the old rows
    with pytest.raises(PipelineError, match=r"2026-01-03, on which 2026-01-04 builds"):
        merge(site, DAYS[3:4])
    merge(site, DAYS[1:4])
    assert snapshot(site, DAYS[3]) == group_by_newest(changed, DAYS[3])


DOCTORED: dict[str, tuple[str, Callable[[], pa.Array]]] = {
    "two rows": ("user_id", lambda: pa.array([1, 1, 3])),
    "not of unit length": ("embedding", lambda: column_of(np.ones((3, DIM)))),
    "missing in 1 rows": ("num_actions", lambda: pa.array([1, None, 1], pa.int32())),
    "rows of model m0": ("model_version", lambda: pa.array(["m1", "m0", "m1"])),
}


@pytest.mark.parametrize("fault", DOCTORED)
@pytest.mark.parametrize("mode", ["active", "everyone"])
def test_bad_rows_never_become_visible(small_site: MakeSite, fault: str, mode: str) -> None:
    site = small_site(timelines={"num_buckets": 1})
    write_days(site, {DAYS[0]: {1: 0.1, 2: 0.1, 3: 0.1}})
    merge(site, DAYS[:1])
    name, column = DOCTORED[fault]
    write_delta(site.site, DAYS[1], {1: 0.2, 2: 0.2, 3: 0.2}, mode=mode, columns={name: column()})
    with pytest.raises(PipelineError, match=f"{fault}.*nothing was published; embed the day again: dagster"):
        merge(site, DAYS[1:2])
    assert snapshot_state(site.site).days() == DAYS[:1]
    assert snapshot(site, DAYS[0]) == dict.fromkeys((1, 2, 3), (DAYS[0], 0.1))


def test_a_lost_user_is_noticed(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site = small_site(timelines={"num_buckets": 1})
    write_days(site, THREE_DAYS)
    merge(site, DAYS[:1])

    def lose_one(base: lance.LanceDataset, **changes: Any) -> lance.LanceDataset:
        return replace_rows(base, **changes | {"rows": changes["rows"].slice(1)})

    monkeypatch.setattr("pf_core.embeddings.snapshot_bucket.replace_rows", lose_one)
    with pytest.raises(PipelineError, match="10 users were stored instead of 11"):
        merge(site, DAYS[1:2])
    assert snapshot_state(site.site).days() == DAYS[:1]


# Many days


def test_a_day_stays_as_it_was_through_many_merges_rewriting_and_retention(small_site: MakeSite) -> None:
    site = with_serving(small_site(timelines={"num_buckets": 1}), retention_days=22, compact_after_fragments=4)
    days = ds_range(START, shift_ds(START, 24))
    deltas: dict[str, Delta] = {days[0]: dict.fromkeys(range(1000), 0.1)}
    for number, ds in enumerate(days[1:], 1):
        deltas[ds] = {(7 * number + user) % 1010: number / 100 for user in range(8)}
    write_days(site, deltas)
    fragments = []
    for ds in days:
        [manifest] = merge(site, [ds])
        fragments.append(manifest["counts"]["fragments"])
    assert max(fragments) == 4
    assert sum(later <= earlier for earlier, later in itertools.pairwise(fragments)) >= 4  # merged every few days
    state = snapshot_state(site.site)
    assert state.days() == days[-22:]
    for ds in (days[-22], days[-21], days[-1]):
        assert snapshot(site, ds) == group_by_newest(deltas, ds)
    dataset = lance.dataset(state.bucket_path(0))
    kept = {state.require(ds)["versions"][0] for ds in days[-22:]}
    assert {version["version"] for version in dataset.versions()} == kept


def test_deleted_rows_are_bounded(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 1})
    deltas = {ds: dict.fromkeys(range(0, 100, 1 if number == 0 else 10), number / 10) for number, ds in enumerate(DAYS)}
    write_days(site, deltas)
    merge(site, DAYS)
    for ds in DAYS:
        dataset = snapshot_state(site.site).open_bucket(ds, 0)
        physical = sum(fragment.physical_rows for fragment in dataset.get_fragments())
        assert dataset.count_rows() == 100
        assert physical <= 100 * (1 + MAX_DEAD_SHARE)
        assert snapshot(site, ds) == group_by_newest(deltas, ds)


def test_rows_are_taken_by_position_where_others_were_deleted(small_site: MakeSite) -> None:
    site = small_site(timelines={"num_buckets": 1})
    write_days(site, THREE_DAYS)
    merge(site, DAYS[:3])
    dataset = snapshot_state(site.site).open_bucket(DAYS[2], 0)
    users = dataset.to_table(columns=["user_id"])["user_id"].to_pylist()
    position = np.array([12, 0, 5, 7])
    assert take_rows(dataset, position, ["user_id"])["user_id"].to_pylist() == [users[index] for index in position]
    fresh = create_bucket(site.root / "fresh.lance", dataset.to_table())
    assert take_rows(fresh, position, ["user_id"])["user_id"].to_pylist() == [users[index] for index in position]


# SIGKILL

CRASH_OPTIONS: dict[str, Any] = {"timelines": {"num_buckets": 24}}
MERGE = """
import sys
from pathlib import Path
from pf_core.embeddings.snapshot import merge_days
from tests.support.sites import SmallSite
site = SmallSite(Path(sys.argv[1]), {options})
list(merge_days(site.site, [sys.argv[2]], engine=site.engine, progress=print))
"""


def kill_half_way(site: SmallSite, ds: str, num_buckets: int) -> bool:
    """Merge in a process of its own, and kill it once some buckets have a new version; False if it was faster."""
    state = snapshot_state(site.site)

    def num_versions() -> int:
        return len(list(state.root.glob("bucket-*.lance/_versions/*.manifest")))

    before = num_versions()
    command = [sys.executable, "-c", MERGE.format(options=CRASH_OPTIONS), str(site.root), ds]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if num_versions() >= before + num_buckets:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return process.returncode == -signal.SIGKILL
        time.sleep(0.002)
    assert process.returncode == 0
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["active", "everyone"])
def test_killed_while_merging(small_site: MakeSite, mode: str) -> None:
    """The day is there already, and stays as it is until the new one is whole."""
    site = small_site(**CRASH_OPTIONS)
    users = range(0, 2200, 20 if mode == "active" else 1)
    write_days(site, {DAYS[0]: dict.fromkeys(range(2000), 0.1), DAYS[1]: dict.fromkeys(range(0, 2100, 30), 0.2)})
    write_delta(site.site, DAYS[2], dict.fromkeys(users, 0.3), mode=mode)
    merge(site, DAYS[:3])
    state = snapshot_state(site.site)

    def everything() -> list[Any]:
        return [(state.require(ds), snapshot(site, ds)) for ds in DAYS[:3]]

    old = everything()
    write_delta(site.site, DAYS[2], dict.fromkeys(users, 0.4), mode=mode)
    num_kills = 0
    for num_buckets in (2, 12):
        if kill_half_way(site, DAYS[2], num_buckets):
            num_kills += 1
            assert everything() == old
        else:
            old = everything()
    assert num_kills >= 1
    [manifest] = merge(site, DAYS[2:3])
    now = snapshot(site, DAYS[2])
    assert now == ({} if mode == "everyone" else old[1][1]) | dict.fromkeys(users, (DAYS[2], 0.4))
    assert manifest["counts"]["users"] == len(now)
    assert everything()[:2] == old[:2]


@pytest.mark.slow
def test_killed_in_the_very_first_build(small_site: MakeSite) -> None:
    site = small_site(**CRASH_OPTIONS)
    write_days(site, {DAYS[0]: dict.fromkeys(range(2000), 0.1)})
    kill_half_way(site, DAYS[0], 5)
    [manifest] = merge(site, DAYS[:1])
    assert manifest["counts"]["users"] == 2000
    assert snapshot(site, DAYS[0]) == dict.fromkeys(range(2000), (DAYS[0], 0.1))
