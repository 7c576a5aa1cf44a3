"""Releases in Redis: a real cluster of three masters, and a real single server, each with a password, on loopback."""

import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pf_core.config.site import Site, TimelineConfig
from pf_core.errors import PipelineError
from pf_core.serving import redis_store
from pf_core.serving.client import Serving
from pf_core.serving.redis_store import RedisStore
from pf_core.serving.releases import opened_store, read_published, release_root
from pf_core.serving.rollback import forget_users, rollback
from tests.scale.servers import RedisNodes, free_port
from tests.serving.test_publish import assert_serves, folders
from tests.support import releases
from tests.support.releases import publish, redis_server, write_day

pytestmark = pytest.mark.scale

PASSWORD = "s3cret-of-redis"
DAYS = ["2026-01-01", "2026-01-02", "2026-01-03"]
USERS = list(range(400))
NUM_BUCKETS = 12
"""Enough buckets that every node has some."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisNodes]:
    nodes = RedisNodes(tmp_path_factory.mktemp("redis"), password=PASSWORD)
    try:
        nodes.form()
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with redis_server() as address:
        yield address


def cluster_site(root: Path, **store: Any) -> Site:
    site = releases.make_site(root, keep_releases=2, store={"key_prefix": root.name, **store})
    return site.model_copy(update={"timelines": TimelineConfig(num_buckets=NUM_BUCKETS)})


@pytest.fixture
def site(nodes: RedisNodes, tmp_path: Path) -> Site:
    return cluster_site(tmp_path, kind="redis", url=nodes.url, cluster=True)


def keys_of(site: Site, nodes: RedisNodes) -> dict[str, int]:
    """How many keys each release has in the cluster, whatever the pointer says; `current` is one."""
    found: dict[str, int] = {}
    for port in nodes.ports:
        with nodes.node(port) as node:
            for key in node.scan_iter(f"{site.serving.store.key_prefix}:*"):
                release = key.decode().split(":")[2]
                found[release] = found.get(release, 0) + 1
    return found


def test_the_cluster_has_what_lmdb_has(site: Site, nodes: RedisNodes, tmp_path: Path) -> None:
    local = cluster_site(tmp_path / "local")
    write_day(local, DAYS[0], USERS, version=1)
    write_day(site, DAYS[0], USERS, version=1)
    messages: list[str] = []
    expected, manifest = publish(local, DAYS[0]), publish(site, DAYS[0], num_workers=2, progress=messages.append)
    assert manifest["counts"] == expected["counts"]
    assert manifest["checks"] == expected["checks"]
    asked = [*USERS, 999_999]
    of_local, of_cluster = (Serving(each).release().look_up(asked) for each in (local, site))
    np.testing.assert_array_equal(of_cluster.vectors_ND, of_local.vectors_ND)
    np.testing.assert_array_equal(of_cluster.days_N, of_local.days_N)
    assert of_cluster.found_N.tolist() == of_local.found_N.tolist() == [True] * len(USERS) + [False]

    assert keys_of(site, nodes) == {"2026-01-01.1": NUM_BUCKETS, "current": 1}
    for port in nodes.ports:
        with nodes.node(port) as node:
            assert node.dbsize() > 0
    assert PASSWORD not in str(manifest) + "".join(messages)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_releases_follow_each_other(site: Site, nodes: RedisNodes) -> None:
    for version, ds in enumerate(DAYS[:2]):
        write_day(site, ds, USERS, version)
        publish(site, ds)
    assert_serves(site, "2026-01-02.1", version=1, users=USERS)
    rollback(site)
    assert_serves(site, "2026-01-01.1", version=0, users=USERS)
    with nodes.client() as client:
        assert client.get(f"{site.serving.store.key_prefix}:small:current") == b"2026-01-01.1"
    rollback(site, to="2026-01-02.1")
    assert forget_users(site, pa.array([3, 50, 999_999]), str) == {"2026-01-01.1": 2, "2026-01-02.1": 2}
    left = [user for user in USERS if user not in (3, 50)]
    assert_serves(site, "2026-01-02.1", version=1, users=left)

    write_day(site, DAYS[2], USERS, version=2)
    publish(site, DAYS[2])  # two are kept
    assert_serves(site, "2026-01-03.1", version=2, users=USERS)
    assert keys_of(site, nodes) == {"2026-01-02.1": NUM_BUCKETS, "2026-01-03.1": NUM_BUCKETS, "current": 1}
    rollback(site)
    assert_serves(site, "2026-01-02.1", version=1, users=left)


def published(site: Site) -> list[str]:
    return [folder for folder in folders(site) if not folder.startswith(".")]


def assert_refused(site: Site, ds: str, reason: str) -> None:
    """In a sentence, without a secret anywhere, and nothing is published."""
    before, messages = published(site), []
    with pytest.raises(PipelineError, match=reason) as caught:
        publish(site, ds, progress=messages.append)
    everything = "".join(traceback.format_exception(caught.value)) + "".join(messages)
    for secret in (PASSWORD, "wr0ng", "s3cret"):
        assert secret not in everything
    assert published(site) == before


@pytest.mark.parametrize("is_cluster", [True, False], ids=["cluster", "single"])
def test_faults_are_sentences_and_the_release_before_stays(
    nodes: RedisNodes, server: str, tmp_path: Path, is_cluster: bool
) -> None:
    def site_at(url: str, *, cluster: bool = is_cluster) -> Site:
        return cluster_site(tmp_path, kind="redis", url=url, cluster=cluster)

    right = nodes.url if is_cluster else server
    where, password = right.rpartition("@")[2], right.split("@")[0].rpartition(":")[2]
    site = site_at(right)
    write_day(site, DAYS[0], USERS, version=0)
    publish(site, DAYS[0], num_workers=2)
    write_day(site, DAYS[1], USERS, version=1)
    kind, away = "Redis Cluster" if is_cluster else "Redis", free_port()
    assert_refused(site_at(f"redis://:{password}@127.0.0.1:{away}"), DAYS[1], rf"{kind} at 127\.0\.0\.1:{away} failed")
    wrong = "invalid username-password pair"
    assert_refused(site_at(right.replace(password, "wr0ng")), DAYS[1], rf"{kind} at {where.split('/')[0]} .*{wrong}")
    confused = "set cluster: true" if not is_cluster else "Cluster mode is not enabled"
    assert_refused(site_at(server if is_cluster else nodes.url, cluster=is_cluster), DAYS[1], confused)
    assert_serves(site, "2026-01-01.1", version=0, users=USERS)
    publish(site, DAYS[1])
    assert_serves(site, "2026-01-02.1", version=1, users=USERS)


@pytest.mark.parametrize("fate", ["is killed", "hangs"])
def test_a_node_is_lost_while_users_are_loaded(
    site: Site, nodes: RedisNodes, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setattr(redis_store, "TIMEOUT_S", 0.5)
    write_day(site, DAYS[0], USERS, version=0)
    publish(site, DAYS[0])
    write_day(site, DAYS[1], USERS, version=1)
    with nodes.client() as client:
        node = client.get_node_from_key(f"{site.serving.store.key_prefix}:small:2026-01-02.1:{NUM_BUCKETS - 1}")
    assert node is not None
    put = RedisStore.put

    def lose_a_node(self: RedisStore, bucket: int, rows: pa.Table) -> None:
        if bucket == 2:
            if fate == "hangs":
                os.kill(nodes.process(node.port).pid, signal.SIGSTOP)
            else:
                nodes.kill(node.port)
        put(self, bucket, rows)

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "put", lose_a_node)
        started = time.monotonic()
        assert_refused(site, DAYS[1], "Redis Cluster at")
        assert time.monotonic() - started < 20
    assert read_published(site).current == "2026-01-01.1"
    [other, *_] = (port for port in nodes.ports if port != node.port)
    deadline = time.monotonic() + 20
    while nodes.is_whole(other):  # a cluster without one of its masters is down
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert_refused(site, DAYS[1], "Redis Cluster at")
    with pytest.raises(PipelineError, match="Redis Cluster at"):
        Serving(site).release().embeddings(USERS)

    if fate == "hangs":
        os.kill(nodes.process(node.port).pid, signal.SIGCONT)
        nodes.wait()
    else:
        nodes.start_again(node.port)
    assert_serves(site, "2026-01-01.1", version=0, users=USERS)
    assert publish(site, DAYS[1], num_workers=2)["release"] == "2026-01-02.1"
    assert_serves(site, "2026-01-02.1", version=1, users=USERS)
    with opened_store(site, release_root(site) / "2026-01-02.1") as store:
        assert store.count() == len(USERS)
    assert keys_of(site, nodes) == {"2026-01-01.1": NUM_BUCKETS, "2026-01-02.1": NUM_BUCKETS, "current": 1}
