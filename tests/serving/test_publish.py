"""Publishing, rolling back and forgetting users; and what a reader sees when they are interrupted."""

import json
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import redis

from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.serving.build_index import build_index_days
from pf_core.serving.client import Serving
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.publish import publish_release
from pf_core.serving.redis_store import RedisStore
from pf_core.serving.releases import (
    CURRENT,
    DESCRIPTION,
    PublishedReleases,
    list_releases,
    opened_store,
    read_published,
    release_root,
)
from pf_core.serving.rollback import forget_users, rollback
from tests.support.releases import (
    NUM_PINS,
    make_site,
    model_of,
    publish,
    publish_day,
    redis_server,
    silent,
    vector_of,
    write_day,
    write_snapshot,
)
from tests.support.small_disk import small_disk

REPOSITORY = Path(__file__).parents[2]
USERS = list(range(1500))
DAYS = ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04", "2026-01-05"]


@pytest.fixture(scope="module")
def redis_address() -> Iterator[str]:
    with redis_server() as address:
        yield address


@pytest.fixture(params=["lmdb", "redis"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return site_with(request.param, tmp_path, request)


def site_with(kind: str, root: Path, request: pytest.FixtureRequest) -> Site:
    if kind == "lmdb":
        return make_site(root)
    prefix = f"pf-{root.name}"
    return make_site(
        root, store={"kind": "redis", "url": request.getfixturevalue("redis_address"), "key_prefix": prefix}
    )


def folders(site: Site) -> list[str]:
    return sorted(path.name for path in release_root(site).iterdir() if path.is_dir())


def assert_serves(site: Site, release: str, version: int, users: list[int] = USERS) -> None:
    """Assert that a new reader sees all of this release and nothing of another."""
    opened = Serving(site).release()
    assert opened.manifest["release"] == release
    assert opened.manifest["model_version"] == model_of(version)
    vectors, is_found = opened.embeddings(users)
    assert is_found.all()
    np.testing.assert_array_equal(vectors, np.array([vector_of(user, version) for user in users], np.float32))
    assert {hit.interest for hit in opened.recommend(users[0])} == {f"interest-{version}"}
    with opened_store(site, release_root(site) / release) as store:
        assert store.count() == len(users)


# Publishing


def test_a_release_has_a_manifest(site: Site) -> None:
    write_day(site, DAYS[0], USERS, version=1)
    messages: list[str] = []
    manifest = publish(site, DAYS[0], progress=messages.append)
    assert manifest["release"] == "2026-01-01.1"
    assert manifest["counts"] == {"users": 1500, "pins": NUM_PINS}
    assert manifest["model_version"] == "model-1"
    assert manifest["store"]["kind"] == site.serving.store.kind
    assert manifest["checks"]["users_in_store"] == manifest["checks"]["users_in_snapshot"] == 1500
    assert manifest["checks"]["users_read_back_equal"] >= 1000
    assert "2026-01-01.1 is current" in messages[-1]
    assert json.loads((release_root(site) / "2026-01-01.1" / DESCRIPTION).read_text()) == manifest
    assert "s3cret" not in json.dumps(manifest) + json.dumps(messages)
    assert_serves(site, "2026-01-01.1", version=1)


def test_publishing_the_same_again_changes_nothing(site: Site) -> None:
    first = publish_day(site, DAYS[0], USERS, version=1)
    before = (release_root(site) / CURRENT).stat()
    assert publish(site, DAYS[0]) == first
    assert (release_root(site) / CURRENT).stat() == before


def test_a_store_that_lost_users_is_published_again(site: Site) -> None:
    publish_day(site, DAYS[0], USERS, version=1)
    with opened_store(site, release_root(site) / "2026-01-01.1") as store:
        store.delete(pa.array(USERS[:7]))
    assert publish(site, DAYS[0])["release"] == "2026-01-01.2"
    assert_serves(site, "2026-01-01.2", version=1)


def test_a_day_published_again_with_other_content_has_a_new_number(site: Site) -> None:
    publish_day(site, DAYS[0], USERS, version=1)
    publish_day(site, DAYS[0], USERS[:1200], version=2)
    assert_serves(site, "2026-01-01.2", version=2, users=USERS[:1200])


def test_string_ids_and_few_users(tmp_path: Path) -> None:
    site = make_site(tmp_path, id_type="string")
    manifest = publish_day(site, DAYS[0], ["anna", "béla", "x" * 700], version=1)
    assert manifest["checks"]["users_read_back_equal"] == 3
    assert Serving(site).release().embeddings(["x" * 700, "nobody"])[1].tolist() == [True, False]


def test_an_older_day_is_refused_with_the_command_that_goes_back(site: Site) -> None:
    publish_day(site, DAYS[1], USERS, version=1)
    write_day(site, DAYS[0], USERS, version=2)
    with pytest.raises(PipelineError, match="pf rollback"):
        publish(site, DAYS[0])
    assert_serves(site, "2026-01-02.1", version=1)


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    with pytest.raises(PipelineError, match="user_embedding_snapshot has no partition 2026-01-01"):
        publish(site, DAYS[0])
    write_snapshot(site, DAYS[0], USERS, version=1)
    with pytest.raises(PipelineError, match="pin_index has no partition 2026-01-01"):
        publish(site, DAYS[0])
    assert folders(site) == []


def test_two_models_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    write_day(site, DAYS[0], USERS, version=1)
    write_snapshot(site, DAYS[0], USERS, version=2)
    with pytest.raises(PipelineError, match="a release has one model"):
        publish(site, DAYS[0])


def test_rows_of_another_model_in_the_snapshot_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0], USERS, version=1)
    write_day(site, DAYS[1], USERS, version=2)
    state = snapshot_state(site)
    manifest = state.require(DAYS[1])
    versions = [*manifest["versions"][:-1], state.require(DAYS[0])["versions"][-1]]
    state.publish(DAYS[1], versions, manifest)
    with pytest.raises(PipelineError, match="rows of model-1"):
        publish(site, DAYS[1])
    assert_serves(site, "2026-01-01.1", version=1)
    assert folders(site) == ["2026-01-01.1"]


def test_users_missing_in_the_store_are_noticed_before_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0], USERS, version=1)
    write_day(site, DAYS[1], USERS, version=2)
    complete = LmdbStore.build

    def forgetful(self: LmdbStore, buckets: Any, *, num_users: int) -> None:
        complete(self, ((bucket, rows[1:]) for bucket, rows in buckets), num_users=num_users)

    monkeypatch.setattr(LmdbStore, "build", forgetful)
    with pytest.raises(PipelineError, match="1,496 are in the store"):
        publish(site, DAYS[1])
    assert_serves(site, "2026-01-01.1", version=1)


def test_values_that_changed_on_the_way_are_noticed_before_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    write_day(site, DAYS[0], USERS, version=1)
    complete = LmdbStore.build

    def mixing(self: LmdbStore, buckets: Any, *, num_users: int) -> None:
        mixed = ((bucket, rows.set_column(1, "embedding", rows["embedding"][::-1])) for bucket, rows in buckets)
        complete(self, mixed, num_users=num_users)

    monkeypatch.setattr(LmdbStore, "build", mixing)
    with pytest.raises(PipelineError, match="differ from the snapshot"):
        publish(site, DAYS[0])
    assert folders(site) == []
    assert read_published(site) == PublishedReleases()


def test_the_index_is_linked_and_survives_its_partition(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0], USERS, version=1)
    [graph] = (release_root(site) / "2026-01-01.1" / "index").glob("*.hnsw")
    assert graph.stat().st_nlink == 2
    shutil.rmtree(site.directory / "pin_index")
    assert_serves(site, "2026-01-01.1", version=1)


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    write_day(site, DAYS[0], USERS, version=1)

    def publish_too(message: str) -> None:
        with pytest.raises(PipelineError, match="another run is writing release"):
            publish(site, DAYS[0])
        with pytest.raises(PipelineError, match="another run"):
            rollback(site)

    publish(site, DAYS[0], progress=publish_too)
    assert_serves(site, "2026-01-01.1", version=1)


# Keeping, rolling back, forgetting


def test_old_releases_go_and_the_newest_stay(site: Site) -> None:
    for version, ds in enumerate(DAYS):
        publish_day(site, ds, USERS[:50], version)
    assert folders(site) == ["2026-01-03.1", "2026-01-04.1", "2026-01-05.1"]
    assert read_published(site) == PublishedReleases(
        current="2026-01-05.1", previous=("2026-01-03.1", "2026-01-04.1"), revision=5
    )
    listed = [(manifest["release"], manifest["is_current"]) for manifest in list_releases(site)]
    assert listed == [("2026-01-05.1", True), ("2026-01-04.1", False), ("2026-01-03.1", False)]


def test_a_release_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    site = make_site(tmp_path, keep_releases=2)
    publish_day(site, DAYS[0], USERS[:50], version=0)
    held = Serving(site).release()
    for version, ds in enumerate(DAYS[1:4], start=1):
        publish_day(site, ds, USERS[:50], version)
    assert {hit.interest for hit in held.recommend(3)} == {"interest-0"}  # the index was not opened before
    assert folders(site) == ["2026-01-01.1", "2026-01-03.1", "2026-01-04.1"]
    with pytest.raises(PipelineError, match="there is no release"):
        rollback(site, to="2026-01-01.1")
    assert forget_users(site, pa.array([3]), str)["2026-01-01.1"] == 1  # also for readers that have it open
    assert not held.embeddings([3])[1].any()
    del held
    publish_day(site, DAYS[4], USERS[:50], version=4)
    assert folders(site) == ["2026-01-04.1", "2026-01-05.1"]


def test_rollback_goes_back_and_withdraws(site: Site) -> None:
    for version, ds in enumerate(DAYS[:3]):
        publish_day(site, ds, USERS[:50], version)
    assert rollback(site)["release"] == "2026-01-02.1"
    assert_serves(site, "2026-01-02.1", version=1, users=USERS[:50])
    assert rollback(site)["release"] == "2026-01-01.1"
    assert_serves(site, "2026-01-01.1", version=0, users=USERS[:50])
    with pytest.raises(PipelineError, match="no earlier release"):
        rollback(site)
    assert [manifest["is_withdrawn"] for manifest in list_releases(site)] == [True, True, False]


def test_a_rollback_can_be_undone(site: Site) -> None:
    for version, ds in enumerate(DAYS[:3]):
        publish_day(site, ds, USERS[:50], version)
    rollback(site, to="2026-01-01.1")
    rollback(site, to="2026-01-03.1")
    assert_serves(site, "2026-01-03.1", version=2, users=USERS[:50])
    assert read_published(site).previous == ("2026-01-01.1",)


def test_a_withdrawn_release_goes_with_the_next_publication_and_its_id_never_returns(site: Site) -> None:
    publish_day(site, DAYS[0], USERS[:50], version=0)
    publish_day(site, DAYS[1], USERS[:50], version=1)
    rollback(site)
    assert publish_day(site, DAYS[1], USERS[:50], version=2)["release"] == "2026-01-02.2"
    assert folders(site) == ["2026-01-01.1", "2026-01-02.2"]
    rollback(site)
    assert publish_day(site, DAYS[1], USERS[:50], version=3)["release"] == "2026-01-02.3"


def test_rollback_refuses_what_is_not_there_or_not_whole(site: Site) -> None:
    with pytest.raises(PipelineError, match="no earlier release"):
        rollback(site)
    for version, ds in enumerate(DAYS[:2]):
        publish_day(site, ds, USERS[:50], version)
    with pytest.raises(PipelineError, match="current one already"):
        rollback(site, to="2026-01-02.1")
    with pytest.raises(PipelineError, match=r"there is no release 2026-01-01\.7"):
        rollback(site, to="2026-01-01.7")
    with opened_store(site, release_root(site) / "2026-01-01.1") as store:
        store.delete(pa.array([1, 2]))
    with pytest.raises(PipelineError, match="48 of 50 users"):
        rollback(site)
    shutil.rmtree(release_root(site) / "2026-01-01.1")
    with pytest.raises(PipelineError, match="does not exist any more"):
        rollback(site)
    assert_serves(site, "2026-01-02.1", version=1, users=USERS[:50])


def test_forgotten_users_leave_every_release_at_once(site: Site) -> None:
    for version, ds in enumerate(DAYS[:2]):
        publish_day(site, ds, USERS[: 50 + version], version)
    reader = Serving(site).release()
    assert reader.embeddings([3, 50])[1].all()
    assert forget_users(site, pa.array([3, 50, 999]), str) == {"2026-01-01.1": 1, "2026-01-02.1": 2}
    assert reader.embeddings([3, 50, 4])[1].tolist() == [False, False, True]
    left = [user for user in USERS[:50] if user != 3]
    assert_serves(site, "2026-01-02.1", version=1, users=left)
    rollback(site)
    assert_serves(site, "2026-01-01.1", version=0, users=left)
    assert forget_users(site, pa.array([3]), str) == {"2026-01-02.1": 0, "2026-01-01.1": 0}


def test_a_user_on_the_deletion_list_does_not_come_back(site: Site) -> None:
    for version, ds in enumerate(DAYS[:2]):
        publish_day(site, ds, USERS[:50], version)
    assert site.deletion_list is not None
    Path(site.deletion_list).write_text("3\n4\n")
    manifest = publish(site, DAYS[1])  # the snapshot still has them
    assert manifest["release"] == "2026-01-02.2"
    assert manifest["counts"]["users"] == 48
    assert manifest["checks"]["forgotten_left_out"] == 2
    left = [user for user in USERS[:50] if user not in (3, 4)]
    assert_serves(site, "2026-01-02.2", version=1, users=left)
    rollback(site, to="2026-01-01.1")
    assert_serves(site, "2026-01-01.1", version=0, users=left)


# Damage


@pytest.mark.parametrize("content", ["", "{", "[]", '{"current": null, "previous": [], "withdrawn": []}', '"x"', "{}"])
def test_a_damaged_current_json_is_an_error_with_what_to_do(tmp_path: Path, content: str) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0], USERS[:50], version=1)
    (release_root(site) / CURRENT).write_text(content)
    for attempt in (lambda: Serving(site).release(), lambda: rollback(site), lambda: list_releases(site)):
        with pytest.raises(PipelineError, match=r"is damaged.*; remove the file, and publish again"):
            attempt()
    (release_root(site) / CURRENT).unlink()
    assert publish(site, DAYS[0])["release"] == "2026-01-01.2"
    assert_serves(site, "2026-01-01.2", version=1, users=USERS[:50])


def test_an_unknown_folder_is_not_removed(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (release_root(site) / "2026-01-01.backup").mkdir(parents=True)
    publish_day(site, DAYS[0], USERS[:50], version=1)
    assert folders(site) == ["2026-01-01.1", "2026-01-01.backup"]


def test_an_unreachable_redis_leaves_the_release_before(tmp_path: Path, redis_address: str) -> None:
    site = make_site(tmp_path, store={"kind": "redis", "url": redis_address, "key_prefix": tmp_path.name})
    publish_day(site, DAYS[0], USERS[:50], version=1)
    write_day(site, DAYS[1], USERS[:50], version=2)
    away = make_site(tmp_path, store={"kind": "redis", "url": "redis://:s3cret@127.0.0.1:1", "key_prefix": "x"})
    with pytest.raises(PipelineError, match=r"Redis at 127\.0\.0\.1:1") as caught:
        publish(away, DAYS[1])
    assert "s3cret" not in str(caught.value)
    assert_serves(site, "2026-01-01.1", version=1, users=USERS[:50])
    publish(site, DAYS[1])
    assert_serves(site, "2026-01-02.1", version=2, users=USERS[:50])


def test_a_redis_that_stays_away_is_the_reason_every_time(tmp_path: Path, redis_address: str) -> None:
    away = make_site(tmp_path, store={"kind": "redis", "url": "redis://127.0.0.1:1", "key_prefix": tmp_path.name})
    write_day(away, DAYS[0], USERS[:50], version=1)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"Redis at 127\.0\.0\.1:1 failed"):
            publish(away, DAYS[0])
    assert folders(away) == [".building-2026-01-01.1", ".building-2026-01-01.2"]
    moved = make_site(tmp_path)  # as if Redis were gone for good
    assert publish(moved, DAYS[0])["release"] == "2026-01-01.3"
    assert_serves(moved, "2026-01-01.3", version=1, users=USERS[:50])
    back = make_site(tmp_path, store={"kind": "redis", "url": redis_address, "key_prefix": tmp_path.name})
    publish(back, DAYS[0])
    assert folders(back) == ["2026-01-01.3", "2026-01-01.4"]


def test_a_release_that_redis_missed_is_announced_by_the_next_run(
    tmp_path: Path, redis_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path, store={"kind": "redis", "url": redis_address, "key_prefix": tmp_path.name})
    publish_day(site, DAYS[0], USERS[:50], version=1)
    write_day(site, DAYS[1], USERS[:50], version=2)

    def fail(self: RedisStore) -> None:
        raise PipelineError("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "announce", fail)
        with pytest.raises(PipelineError, match="Redis is away"):
            publish(site, DAYS[1])
    assert_serves(site, "2026-01-02.1", version=2, users=USERS[:50])
    publish(site, DAYS[1])
    with redis.Redis.from_url(redis_address) as client:
        assert client.get(f"{tmp_path.name}:small:current") == b"2026-01-02.1"


def test_a_release_in_redis_needs_redis_in_the_site_file(tmp_path: Path, redis_address: str) -> None:
    site = make_site(tmp_path, store={"kind": "redis", "url": redis_address, "key_prefix": tmp_path.name})
    publish_day(site, DAYS[0], USERS[:50], version=1)
    moved = make_site(tmp_path)
    with pytest.raises(PipelineError, match=r"are in Redis, but serving\.store in the site file is lmdb"):
        Serving(moved).release()
    publish_day(moved, DAYS[1], USERS[:50], version=2)
    assert_serves(moved, "2026-01-02.1", version=2, users=USERS[:50])


class RecordingEngine(LocalEngine):
    """Keeps the tasks of every `map_buckets`, pickled as they are sent to other machines."""

    def __init__(self, root: Path) -> None:
        super().__init__(num_workers=1, memory_mb=256, temp_dir=root)
        self.sent: dict[str, bytes] = {}

    def map_buckets(self, function: Any, tasks: Any, progress: Any = None) -> Any:
        self.sent[function.__name__] = pickle.dumps(tasks)
        return super().map_buckets(function, tasks, progress)


def test_only_the_task_that_loads_redis_carries_its_password(tmp_path: Path, redis_address: str) -> None:
    store = {"kind": "redis", "url": redis_address, "key_prefix": tmp_path.name}
    site = make_site(tmp_path, store=store, index={"num_shards": 3})
    write_day(site, DAYS[0], USERS[:50], version=1)
    shutil.rmtree(site.directory / "pin_index")
    engine = RecordingEngine(tmp_path / "tmp")
    with engine:
        list(build_index_days(site, DAYS[:1], engine=engine, progress=silent))
        publish_release(site, DAYS[0], engine=engine, progress=silent)
    assert {name: b"s3cret" in tasks for name, tasks in engine.sent.items()} == {
        "_link_shard": False,
        "_load_into_redis": True,
    }
    [task, *_] = pickle.loads(engine.sent["_load_into_redis"])
    assert "s3cret" not in repr(task)
    assert "s3cret" not in pickle.dumps(task.read).decode("latin-1")
    assert not any(b"pf_core.config.site" in tasks for tasks in engine.sent.values())


# Interruptions: a process is killed, or refused disk space, at a chosen moment

KILLED_AT = {
    "in the store": "load_store._validate",  # at its third bucket
    "named": "publish.write_published",
    "pointed to": "releases.sync",
}
PUBLISH = """
import os, signal, sys
from pathlib import Path
from pf_core.serving import load_store, publish as publishing, releases
from tests.support.releases import make_site, publish
import json

root, serving, ds, where = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
holder = {"load_store": load_store, "publish": publishing, "releases": releases}[where.rpartition(".")[0]]
original = getattr(holder, where.rpartition(".")[2])
calls = []

def kill(*arguments):
    calls.append(arguments)
    if len(calls) == (3 if where.endswith("_validate") else 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

setattr(holder, where.rpartition(".")[2], kill)
publish(make_site(root, **serving), ds)
"""


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def serving_of(site: Site) -> str:
    return json.dumps(site.serving.model_dump(include={"store"}))


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    processes = []
    for kind in ("lmdb", "redis"):
        for moment, function in KILLED_AT.items():
            if kind == "redis" and moment != "in the store":
                continue
            site = site_with(kind, tmp_path / f"{kind}-{moment.replace(' ', '-')}", request)
            publish_day(site, DAYS[0], USERS, version=1)
            write_day(site, DAYS[1], USERS, version=2)
            root = Path(site.data_dir).parent
            processes.append((site, moment, start(PUBLISH, str(root), serving_of(site), DAYS[1], function)))
    for site, moment, process in processes:
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        if moment == "pointed to":
            assert_serves(site, "2026-01-02.1", version=2)
        else:
            assert_serves(site, "2026-01-01.1", version=1)
        new = ".building-2026-01-02.1" if moment == "in the store" else "2026-01-02.1"
        assert folders(site) == sorted(["2026-01-01.1", new])

        manifest = publish(site, DAYS[1])
        assert manifest["release"] == ("2026-01-02.2" if moment == "named" else "2026-01-02.1")
        assert_serves(site, manifest["release"], version=2)
        assert folders(site) == ["2026-01-01.1", manifest["release"]]
        if site.serving.store.kind == "redis":
            prefix = site.serving.store.key_prefix
            with redis.Redis.from_url(str(site.serving.store.url)) as client:
                assert client.get(f"{prefix}:small:current") == manifest["release"].encode()
                keys = {key.decode().split(":")[2] for key in client.scan_iter(f"{prefix}:*")}
            assert keys == {"current", "2026-01-01.1", manifest["release"]}


def test_no_room_for_the_store(tmp_path: Path) -> None:
    """No file may grow beyond 50 kB: what a full disk is for the store."""
    site = make_site(tmp_path)
    publish_day(site, DAYS[0], USERS, version=1)
    write_day(site, DAYS[1], USERS, version=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(PipelineError, match=r"the users cannot be written to .*; check that the disk is not full"):
            publish(site, DAYS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_serves(site, "2026-01-01.1", version=1)
    assert folders(site) == ["2026-01-01.1"]  # the unfinished release is removed
    publish(site, DAYS[1])
    assert_serves(site, "2026-01-02.1", version=2)


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", megabytes=2) as disk:
        site = make_site(tmp_path / "site")
        site.directory.mkdir(parents=True)
        release_root(site).symlink_to(disk.path)
        publish_day(site, DAYS[0], USERS, version=1)
        disk.leave_free(65_536)
        write_day(site, DAYS[1], USERS, version=2)
        with pytest.raises(PipelineError, match="check that the disk is not full"):
            publish(site, DAYS[1])
        assert_serves(site, "2026-01-01.1", version=1)
        assert folders(site) == ["2026-01-01.1"]
        disk.empty()
        publish(site, DAYS[1])
        assert_serves(site, "2026-01-02.1", version=2)
