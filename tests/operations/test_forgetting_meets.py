"""`pf forget` beside runs: those that began before the request, and what killed ones have left."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lance.fragment import write_fragments

from pf_core.days import ds_range, shift_ds
from pf_core.engine.daily_state import DailyState
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import add_to_deletion_list, read_deletion_list
from pf_core.logs.log_day import open_log_day
from pf_core.logs.purge import purge_days
from pf_core.logs.settings import IngestSettings
from pf_core.operations.forgetting import delete_users
from pf_core.operations.remains import Place, find_remains
from pf_core.operations.search import bucket_number
from pf_core.pins.counts import day_counts
from pf_core.serving import export
from pf_core.serving.export import export_embeddings
from pf_core.storage.locks import holding
from pf_core.timelines.build import build_timelines, timeline_state
from tests.support.releases import NUM_BUCKETS, silent, write_snapshot
from tests.support.sites import START, Row, SmallSite

DAYS = ds_range(START, shift_ds(START, 2))
USERS = list(range(1, 20))
USER = 7


@pytest.fixture
def small(small_site: Callable[..., SmallSite], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SmallSite:
    """Everybody acts every day; the first two days are built, and the first has a snapshot."""
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "local"))
    small = small_site(timelines={"num_buckets": NUM_BUCKETS}, late_days=0)
    for day, ds in enumerate(DAYS):
        rows: list[Row] = [(user, "p", 86_400 * day + user, "look") for user in USERS]
        small.write_log(ds, rows)
    small.ingest(DAYS)
    small.build(DAYS[:2])
    write_snapshot(small.site, DAYS[0], USERS, 1)
    return small


def forget(small: SmallSite, *users: int) -> None:
    add_to_deletion_list(small.site, users)
    delete_users(small.site, read_deletion_list(small.site), artifacts=[], progress=silent)


def place(small: SmallSite, name: str) -> Place:
    found = find_remains(small.site, USER, artifacts=[], models=[])
    [one] = [place for place in found.places if place.name == name]
    return one


def test_counts_are_without_users_whose_rows_a_killed_request_deleted(small: SmallSite) -> None:
    """It was killed after it had deleted the rows of the day, and before it had counted the day again."""
    [before] = day_counts(small.site, open_log_day(small.site, DAYS[0]))["user_days"].to_pylist()
    add_to_deletion_list(small.site, [USER])
    [first, *_] = purge_days(IngestSettings.of(small.site), DAYS[:1], read_deletion_list(small.site))
    assert first.ds == DAYS[0]
    assert place(small, "pin_counts").found == (f"{DAYS[0]}: numbers that count forgotten users, without their ids",)
    forget(small, USER)
    assert place(small, "pin_counts").found == ()
    counts = day_counts(small.site, open_log_day(small.site, DAYS[0]))
    assert counts["user_days"].to_pylist() == [before - 1]


# Runs that began before the request


def test_a_run_reads_the_list_when_no_other_can_write(small: SmallSite) -> None:
    """The request comes between the start of the run and its first change: the run honours it."""
    run = build_timelines(small.site, DAYS[2:], engine=small.engine, rebuild=False, progress=silent)
    add_to_deletion_list(small.site, [USER])
    assert [manifest["ds"] for manifest in run] == DAYS[2:]
    assert small.timelines(DAYS[2]).keys() == set(USERS) - {USER}


@pytest.mark.parametrize("asset", ["user_timelines", "user_embedding_snapshot"])
def test_a_run_that_may_have_read_the_list_before_is_waited_for(small: SmallSite, asset: str) -> None:
    """Otherwise it publishes a day with the user, after the request was granted."""
    state = DailyState[Any](root=small.site.directory / asset, asset=asset, num_buckets=NUM_BUCKETS)
    with state.writing(), pytest.raises(PipelineError, match=f"another run is writing {asset}"):
        forget(small, USER)
    assert read_deletion_list(small.site).to_pylist() == [USER]
    forget(small)
    assert place(small, "raw_actions").state == "gone"


def test_an_export_that_is_being_written_is_stopped(small: SmallSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read the list before the request, and so would bring the user back."""
    without = export._without

    def request_comes(rows: pa.Table, user_ids: pa.Array) -> pa.Table:
        if not len(user_ids):
            thread = threading.Thread(target=forget, args=(small, USER))
            thread.start()
            thread.join()
        return without(rows, user_ids)

    monkeypatch.setattr(export, "_without", request_comes)
    out = small.root / "out" / "users"
    with pytest.raises(PipelineError, match=r"was removed while the export was written.*export again"):
        export_embeddings(small.site, "users", out, ds=None, progress=silent)
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()
    export_embeddings(small.site, "users", out, ds=None, progress=silent)
    assert set(pq.read_table(out)["user_id"].to_pylist()) == set(USERS) - {USER}


# What killed runs have left


def test_an_export_whose_run_was_killed_is_found_and_removed(small: SmallSite) -> None:
    out = small.root / "out" / "users"
    export_embeddings(small.site, "users", out, ds=None, progress=silent)
    left = out.with_name(".users.4711.tmp")
    out.rename(left)
    other = out.with_name(".users2.4711.tmp")
    other.mkdir()
    assert place(small, "exports").found == (f"{left}, an export that is not complete, and is not searched",)
    forget(small, USER)
    assert place(small, "exports").state == "gone"
    assert [path.name for path in out.parent.iterdir()] == [other.name]


def test_files_of_killed_runs_that_no_version_names_are_found_and_removed(small: SmallSite) -> None:
    """Lance writes rows before the version that names them; a run that is killed in between leaves a file of rows."""
    forget(small, USER)
    small.build(DAYS[1:2])
    assert place(small, "user_timelines").state == "left"
    bucket = bucket_number(pa.array([USER]), NUM_BUCKETS)
    path = timeline_state(small.site).bucket_path(bucket)
    known = set((path / "data").iterdir())
    dataset = lance.dataset(str(path))
    write_fragments(dataset.to_table().slice(0, 1), dataset, mode="append")
    (path / "data" / ".tmp4711").write_bytes(b"half a file")
    told = f"2 files of killed runs in {path.name}, which nobody can search"
    assert told in place(small, "user_timelines").found
    before = {user: small.timelines(DAYS[1])[user] for user in USERS if user != USER}
    with holding(timeline_state(small.site).root, "user_timelines"):  # a reader: then the next one removes them
        forget(small)
        assert told in place(small, "user_timelines").found
    forget(small)
    assert set((path / "data").iterdir()) <= known
    assert not any("killed" in where for where in place(small, "user_timelines").found)
    assert small.timelines(DAYS[1]) == before
    assert timeline_state(small.site).days() == DAYS[:2]


def test_buckets_of_a_first_run_that_was_killed_are_removed(small: SmallSite) -> None:
    """They have versions with users, but no day."""
    state = timeline_state(small.site)
    for ds in state.days():
        state.manifest_path(ds).unlink()
    assert "which no day names" in place(small, "user_timelines").found[0]
    forget(small, USER)
    assert place(small, "user_timelines").state == "gone"
    assert list(state.root.glob("*.lance")) == []


def test_days_of_another_number_of_buckets_are_not_touched(small: SmallSite) -> None:
    """Somebody changes the site file by mistake: that may cost no day."""
    timelines = small.site.timelines.model_copy(update={"num_buckets": NUM_BUCKETS + 1})
    changed = small.site.model_copy(update={"timelines": timelines})
    add_to_deletion_list(small.site, [USER])
    delete_users(changed, read_deletion_list(changed), artifacts=[], progress=silent)
    assert small.timelines(DAYS[1]).keys() == set(USERS)
