"""What `pf forget` deletes at once, what it has built again, and what is found of a user before and after."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.engine.daily_state import create_bucket
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import add_to_deletion_list, read_deletion_list
from pf_core.logs.log_day import open_log_day
from pf_core.logs.partition import partition_dir, read_manifest
from pf_core.operations.forgetting import (
    LOCK,
    benchmark_folders,
    delete_users,
    one_at_a_time,
    plan_rebuild,
    score_files,
)
from pf_core.operations.remains import Place, Remains, TrainedModel, find_remains
from pf_core.pins.counts import day_counts
from pf_core.serving.export import export_embeddings
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.releases import BUILDING, release_root
from pf_core.storage.files import read_json, write_json
from pf_core.storage.locks import exclusive
from pf_core.timelines.build import timeline_state
from tests.support.releases import DIM, NUM_BUCKETS, publish_day, silent, split_rows, user_rows, write_snapshot
from tests.support.sites import START, SmallSite

DAYS = ds_range(START, shift_ds(START, 3))
USERS = list(range(1, 30))
USER, STAYS = 7, 8
HEADER = "user,pin,time_us,event,place,dwell_s"


OPTIONS: dict[str, Any] = {
    "timelines": {"num_buckets": NUM_BUCKETS},
    "path": "logs/{ds}.csv",
    "late_days": 0,
    "quality": {"max_quarantined_share": 1.0},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everybody acts every day, and has a rejected row; two days are released."""
    root = tmp_path_factory.mktemp("made")
    small = SmallSite(root, OPTIONS)
    (root / "logs").mkdir()
    for day, ds in enumerate(DAYS):
        start_us = 1_767_225_600_000_000 + day * 86_400_000_000
        rows = [f"{user},p,{start_us + user},{event},home,60" for user in USERS for event in ("look", "dance")]
        rows += [f"{USER},p", f"{USER}.0,p,1,look,home,1"]
        (root / "logs" / f"{ds}.csv").write_text("\n".join([HEADER, *rows]))
    small.ingest(DAYS)
    small.build(DAYS)
    small.engine.__exit__(None, None, None)
    for version, ds in enumerate(DAYS[:2]):
        publish_day(small.site, ds, USERS, version)
    day_counts(small.site, open_log_day(small.site, DAYS[0]))
    return root


@pytest.fixture
def small(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallSite]:
    """A copy with an export, scores of an evaluation, and a training set."""
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "local"))
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    small = SmallSite(tmp_path, OPTIONS)
    export_embeddings(small.site, "users", tmp_path / "exported", ds=None, progress=silent)
    write_scores(small.site.directory / "offline_evaluation" / "scores.parquet")
    write_scores(artifacts(small.site)[0] / "run" / "artifacts" / "scores.parquet")
    (small.site.directory / "training_set" / "build-000001" / "train").mkdir(parents=True)
    ids = pa.table({"user_id": USERS})
    with pa.ipc.new_file(small.site.directory / "training_set/build-000001/train/user_id.arrow", ids.schema) as file:
        file.write_table(ids)
    yield small
    small.engine.__exit__(None, None, None)


def write_scores(path: Path) -> None:
    path.parent.mkdir(parents=True)
    scores = pa.table({"frequency": ["once"] * len(USERS), "user_id": USERS, "recall_at_10": [0.5] * len(USERS)})
    pq.write_table(scores.replace_schema_metadata({"question": "q", "index_size": "40"}), path)


def artifacts(site: Site) -> list[Path]:
    return [site.directory.parent / "mlflow" / "artifacts" / "small"]


def forget(site: Site, *users: int | str, progress: Any = silent) -> None:
    add_to_deletion_list(site, users)
    delete_users(site, read_deletion_list(site), artifacts=artifacts(site), progress=progress)


def remains(site: Site, user: int | str = USER, models: tuple[TrainedModel, ...] = ()) -> Remains:
    return find_remains(site, user, artifacts=artifacts(site), models=models)


def by_name(found: Remains) -> dict[str, Place]:
    return {place.name: place for place in found.places}


def states(found: Remains) -> dict[str, str]:
    return {place.name: place.state for place in found.places if place.state != "gone"}


# Before and after

EVERYWHERE = {
    "raw_actions": "overdue",
    "quarantine": "overdue",
    "user_timelines": "overdue",
    "user_embedding_snapshot": "overdue",
    "stores of releases": "overdue",
    "exports": "overdue",
    "training sets": "left",
    "evaluations": "overdue",
}


def test_a_user_is_found_everywhere_and_then_only_where_the_site_says_until_when(small: SmallSite) -> None:
    site = small.site
    assert states(remains(site)) == EVERYWHERE
    assert not remains(site).is_forgotten
    lines: list[str] = []
    forget(site, USER, progress=lines.append)
    assert lines == [
        "release 2026-01-01.1: 1 deleted from the store",
        "release 2026-01-02.1: 1 deleted from the store",
        "raw_actions: 4 actions and 4 rejected rows deleted on 4 days; "
        "8 others lost their content, because nobody can tell whose they are",
        "user_timelines: 4 days kept, 0.0 MB of older versions removed",
        "user_embedding_snapshot: 2 days kept, 0.0 MB of older versions removed",
        f"export {small.root / 'exported'}: 1 deleted",
        "evaluations: 2 ids deleted from the scores of users",
    ]
    left = {"user_timelines": "overdue", "user_embedding_snapshot": "overdue", "training sets": "left"}
    assert states(remains(site)) == left  # Dagster builds the newest days again
    small.build(DAYS[-1:])
    write_snapshot(site, DAYS[1], [user for user in USERS if user != USER], 1)
    found = remains(site)
    assert states(found) == {"user_timelines": "left", "user_embedding_snapshot": "left", "training sets": "left"}
    assert found.is_forgotten
    assert by_name(found)["user_timelines"].found[0] == f"{DAYS[0]} … {DAYS[2]}"
    assert str(by_name(found)["user_timelines"].until).startswith(f"{shift_ds(DAYS[2], 60)} is built")
    assert str(by_name(found)["user_embedding_snapshot"].until).startswith(f"{shift_ds(DAYS[0], 30)} is built")
    assert not remains(site, STAYS).is_forgotten
    assert states(remains(site, STAYS)) == EVERYWHERE  # nobody else left


def test_a_second_time_changes_nothing(small: SmallSite) -> None:
    forget(small.site, USER)
    before = {path: path.stat().st_mtime_ns for path in small.site.directory.rglob("*.parquet")}
    lines: list[str] = []
    forget(small.site, USER, progress=lines.append)
    assert all(": 0 " in line or "0 actions" in line or "0.0 MB" in line for line in lines)
    assert {path: path.stat().st_mtime_ns for path in small.site.directory.rglob("*.parquet")} == before


def test_what_is_found_can_be_read_by_programs(small: SmallSite) -> None:
    forget(small.site, USER)
    content = json.loads(json.dumps(remains(small.site).as_json()))
    assert content["user_id"] == USER
    assert content["is_on_deletion_list"] is True
    assert datetime.fromisoformat(content["since"]) <= datetime.now(UTC)
    assert content["is_forgotten"] is False
    [timelines] = [place for place in content["places"] if place["name"] == "user_timelines"]
    assert timelines["state"] == "overdue"
    assert set(timelines) == {"name", "searched", "found", "until", "is_overdue", "state"}


def test_nothing_is_written_by_a_search(small: SmallSite) -> None:
    def files() -> dict[Path, int]:
        found = (path for path in small.root.rglob("*") if path.is_file() and path.name != "lock.mdb")
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    remains(small.site)
    assert files() == before


def test_users_of_other_types_and_lists(tmp_path: Path) -> None:
    """A site without a list, and one of string ids, on which nothing was built."""
    site = SmallSite(tmp_path, {"id_type": "string"}).site
    assert states(remains(site, "x\x1b[2J")) == {}
    assert not remains(site, "x\x1b[2J").is_forgotten
    forget(site, "x\x1b[2J")
    assert remains(site, "x\x1b[2J").is_forgotten
    assert not remains(site, "x").is_forgotten
    without = site.model_copy(update={"deletion_list": None})
    assert not remains(without, "x").is_forgotten


@pytest.mark.parametrize("user", [-(2**63), 2**63 - 1, -1, 0])
def test_the_ends_of_the_integers_are_users(small: SmallSite, user: int) -> None:
    rows = [f"{each},p,1767225600000000,look,home,1" for each in (user, 1)]
    (small.root / "logs" / f"{DAYS[0]}.csv").write_text("\n".join([HEADER, *rows]))
    small.ingest(DAYS[:1])
    small.build(DAYS)
    found = {name: state for name, state in states(remains(small.site, user)).items() if name != "quarantine"}
    assert found == {"raw_actions": "overdue", "user_timelines": "overdue"}
    forget(small.site, user)
    small.build(DAYS[-1:])
    assert remains(small.site, user).is_forgotten


# Places


def test_what_killed_runs_left_is_found_and_removed(small: SmallSite) -> None:
    site = small.site
    forget(site, USER)
    build = partition_dir(site.directory, DAYS[0]) / "build-000099"
    build.mkdir()
    pq.write_table(pa.table({"user_id": [USER]}), build / "bucket-00000.parquet")
    scratch = site.directory / "tmp" / f"raw_actions-{DAYS[0]}-0123"
    scratch.mkdir(parents=True)
    found = by_name(remains(site))
    assert found["raw_actions"].found == (f"{build}, of a killed run",)
    assert found["temporary files"].found == (str(scratch),)
    forget(site)
    assert states(remains(site)).keys() & {"raw_actions", "temporary files"} == set()


def test_the_store_of_a_killed_publication_is_found_and_removed(small: SmallSite) -> None:
    """Nobody reads it, and the next publication removes it; but after a rollback there may be none for long."""
    forget(small.site, USER)
    root = release_root(small.site)
    left = root / f"{BUILDING}2026-01-03.1"
    shutil.copytree(root / "2026-01-02.1", left)
    store = LmdbStore(left / "users", num_buckets=NUM_BUCKETS, embedding_dim=DIM)
    store.build(split_rows(user_rows([USER], 1)), num_users=1)
    assert by_name(remains(small.site))["stores of releases"].found == (left.name,)
    forget(small.site)
    assert by_name(remains(small.site))["stores of releases"].state == "gone"
    assert not left.exists()


def test_a_table_that_nobody_expects_is_found(small: SmallSite) -> None:
    forget(small.site, USER)
    path = small.site.directory / "somebodys" / "copy.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"user_id": [USER]}), path)
    other = by_name(remains(small.site))["other files"]
    assert (other.found, other.state) == ((str(path),), "overdue")
    model = small.site.directory / "pinnerformer_model" / "abc" / "users.arrow"
    model.parent.mkdir(parents=True)
    with pa.ipc.new_file(model, pa.schema([("user_id", pa.int64())])) as file:
        file.write_table(pa.table({"user_id": [USER]}))
    assert by_name(remains(small.site))["files of models"].found == (str(model),)


def test_an_unpublished_version_is_found(small: SmallSite) -> None:
    forget(small.site, USER)
    small.build(DAYS[-1:])
    state = timeline_state(small.site)
    [bucket] = [number for number, rows in split_rows(user_rows([USER], 1)) if rows.num_rows]
    dataset = create_bucket(state.bucket_path(bucket), state.open_bucket(DAYS[0], bucket).to_table())
    place = by_name(remains(small.site))["user_timelines"]
    assert f"version {dataset.version} of bucket-{bucket:05d}.lance, which no day names" in place.found
    assert place.state == "left"


def test_a_place_that_cannot_be_searched_is_overdue(small: SmallSite) -> None:
    forget(small.site, USER)
    (release_root(small.site) / "2026-01-02.1" / "users" / "data.mdb").write_bytes(b"\0" * 8192)
    path = small.site.directory / "offline_evaluation" / "scores.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    timeline_state(small.site).manifest_path(DAYS[0]).write_text('{"ds": "2026-01-01"}')
    found = by_name(remains(small.site))
    for name in ("stores of releases", "evaluations", "user_timelines"):
        assert found[name].state == "overdue"
        assert found[name].found[0].startswith("it cannot be searched: ")


def test_the_lock_of_all_days_is_no_day(small: SmallSite) -> None:
    """Ingestion of a log without dates locks the folder of all days."""
    forget(small.site, USER)
    with exclusive(small.site.directory / "raw_actions", "raw_actions"):
        pass
    found = by_name(remains(small.site))
    assert (found["raw_actions"].state, found["quarantine"].state) == ("gone", "gone")


def test_an_export_that_was_moved_is_named(small: SmallSite, tmp_path: Path) -> None:
    (tmp_path / "exported").rename(tmp_path / "elsewhere")
    forget(small.site, USER)
    place = by_name(remains(small.site))["exports"]
    assert place.state == "gone"
    assert f"no longer where they were written, and not searched: {tmp_path / 'exported'}" in place.searched


def test_scores_stay_without_the_id(small: SmallSite) -> None:
    before = {path: pq.read_table(path) for path in score_files(small.site, artifacts(small.site))}
    assert len(before) == 2
    forget(small.site, USER, 99)
    for path, table in before.items():
        after = pq.read_table(path)
        assert after["user_id"].to_pylist() == [None if user == USER else user for user in USERS]
        assert after.drop_columns(["user_id"]).equals(table.drop_columns(["user_id"]))
        assert after.schema.metadata[b"question"] == b"q"


def test_counts_of_pins_lose_the_user(small: SmallSite) -> None:
    assert read_json(small.site.directory / "pin_counts" / f"{DAYS[0]}.json")["settings"].get("users_deleted") is None
    total = sum(day_counts(small.site, open_log_day(small.site, DAYS[0]))["user_days"].to_pylist())
    forget(small.site, USER)
    manifest = read_json(small.site.directory / "pin_counts" / f"{DAYS[0]}.json")
    assert manifest["settings"]["users_deleted"] == 1
    assert sum(day_counts(small.site, open_log_day(small.site, DAYS[0]))["user_days"].to_pylist()) == total - 1
    write_json(
        small.site.directory / "pin_counts" / f"{DAYS[0]}.json",
        manifest | {"settings": {**manifest["settings"], "users_deleted": 0}},
    )
    assert by_name(remains(small.site))["pin_counts"].state == "left"


def test_benchmarks_of_the_site_are_removed(small: SmallSite, tmp_path: Path) -> None:
    root = tmp_path / "local" / "benchmark"
    ours = [root / f"small-{'0a' * 8}", root / "results" / "small-quick-0" / "peers"]
    others = [root / f"small-two-{'0a' * 8}", root / "results" / "smaller-quick-0" / "peers"]
    for folder in (*ours, *others):
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"user_id": [USER]}), folder / "train_users.parquet")
    (root / "results" / "small-quick-0" / "table.md").touch()
    assert benchmark_folders(small.site) == ours
    assert len(by_name(remains(small.site))["benchmarks"].found) == 2
    forget(small.site, USER)
    assert [folder.exists() for folder in (*ours, *others)] == [False, False, True, True]
    assert (root / "results" / "small-quick-0" / "table.md").exists()
    assert by_name(remains(small.site))["benchmarks"].state == "gone"


# Models


def test_a_model_remembers_until_one_is_trained_without_the_user(small: SmallSite) -> None:
    forget(small.site, USER)
    entry = remains(small.site).entry
    assert entry is not None
    since = datetime.fromisoformat(str(entry["since"]))
    before, after = ((since + timedelta(seconds=shift)).isoformat() for shift in (-1, 1))
    models = (
        TrainedModel(name="old", data_read_at=before),
        TrainedModel(name="unknown", data_read_at=None),
        TrainedModel(name="new", data_read_at=after),
        TrainedModel(name="served", data_read_at=before, serves=True),
    )
    write_json(small.site.directory / "refitted_model" / "a" / "b" / "job.json", {"data_read_at": after})
    write_json(small.site.directory / "ablation_runs" / "base" / "c" / "job.json", {})
    found = by_name(remains(small.site, models=models))
    assert found["model that serves"].found == ("served",)
    folder = small.site.directory / "ablation_runs" / "base" / "c"
    assert found["other models"].found == ("old", "unknown", str(folder))
    assert found["other models"].state == found["model that serves"].state == "left"
    assert "5 models" in found["other models"].searched


@pytest.mark.parametrize("line", ["7", '{"user_id": 7}', '{"user_id": 7, "since": "last week"}'])
def test_of_a_request_without_a_time_any_model_may_remember(small: SmallSite, line: str) -> None:
    (small.root / "forget.txt").write_text(line + "\n")
    model = TrainedModel(name="new", data_read_at=datetime.now(UTC).isoformat(), serves=True)
    assert by_name(remains(small.site, models=(model,)))["model that serves"].found == ("new",)


# What is built again


def test_the_newest_days_are_built_again(small: SmallSite) -> None:
    plan = plan_rebuild(small.site)
    assert plan.timeline_days == DAYS[-1:]
    assert not plan.from_logs
    assert plan.embedding_days == []  # the snapshots were written by hand
    assert plan.release_days == [DAYS[1]]
    timeline_state(small.site).manifest_path(DAYS[-2]).unlink()
    assert plan_rebuild(small.site).from_logs
    empty = small.site.model_copy(update={"name": "empty"})
    nothing = plan_rebuild(empty)
    assert (nothing.timeline_days, nothing.embedding_days, nothing.release_days) == ([], [], [])


def test_one_request_waits_for_the_other(small: SmallSite) -> None:
    lines: list[str] = []
    with (small.site.workspace / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def end_the_other(message: str) -> None:
            lines.append(message)
            fcntl.flock(other, fcntl.LOCK_UN)

        with one_at_a_time(small.site, end_the_other), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert lines == ["waiting for another `pf forget`, which deletes users of this site"]


def test_a_stage_that_is_busy_says_so(small: SmallSite) -> None:
    with exclusive(release_root(small.site), "release"), pytest.raises(PipelineError, match="another run is writing"):
        forget(small.site, USER)
    assert read_deletion_list(small.site).to_pylist() == [USER]
    manifest = read_manifest(small.site, DAYS[0])
    assert manifest is not None
    forget(small.site)
    assert by_name(remains(small.site))["stores of releases"].state == "gone"
