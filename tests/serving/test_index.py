"""The index finds what exact search finds, is judged before it is published, and is published completely or not."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of
from pf_core.engine.daily_state import create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.schemas import IdType, pin_embeddings_schema, user_embeddings_schema
from pf_core.serving import index as pin_index
from pf_core.serving.build_index import build_index_days
from pf_core.serving.checks import judge_index
from pf_core.serving.index import (
    IndexManifest,
    PinIndex,
    Shard,
    index_dir,
    index_manifest,
    merge_hits,
    require_index,
    scores_all,
)
from tests.support import sites
from tests.support.records import empty_lists

REPOSITORY = Path(__file__).parents[2]
DAYS = ds_range("2026-01-01", "2026-01-05")
DIM = 16


def make_site(root: Path, *, id_type: IdType = "string", **index: Any) -> Site:
    serving = {"index": {"sample_users": 100, **index}}
    return sites.make_site(root, id_type=id_type, pin_id_type=id_type, serving=serving)


def unit_vectors(num: int, *, seed: int = 0) -> np.ndarray:
    """float32 values that float16 can hold."""
    vectors = np.random.default_rng(seed).normal(size=(num, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)


def publish_pins(site: Site, ds: str, vectors: np.ndarray, *, digest: str = "pins", model: str = "m") -> list[Any]:
    """pin_embeddings of a day; returns the ids, one a row."""
    state, id_type = pin_embedding_state(site), site.source.pins.pin_id.type
    ids = [f"p{row:05d}" if id_type == "string" else row * 3 - 50 for row in range(len(vectors))]
    rows = pa.table(
        [
            pa.array(ids),
            column_of(vectors),
            pa.array([model] * len(ids)),
            pa.array([f"i{row % 7}" for row in range(len(ids))]),
        ],
        schema=pin_embeddings_schema(id_type, vectors.shape[1]),
    )
    version = create_bucket(state.bucket_path(0), rows).version
    described = {"model_version": model, "embedding_dim": vectors.shape[1], "digest": digest}
    state.publish(ds, [version], {**described, "counts": {"pins": len(ids)}})
    return ids


def publish_users(site: Site, ds: str, vectors: np.ndarray, *, model: str = "m") -> None:
    state, versions, id_type = snapshot_state(site), [], site.source.actions.user_id.type
    ids = pa.array(
        [f"u{row}" if id_type == "string" else row for row in range(len(vectors))],
        type=pa.string() if id_type == "string" else pa.int64(),
    )
    bucket = bucket_of(ids, state.num_buckets)
    pin_id = site.source.pins.pin_id.type
    schema = user_embeddings_schema(id_type, pin_id, vectors.shape[1])
    for number in range(state.num_buckets):
        rows = np.flatnonzero(bucket == number)
        columns = [
            ids.take(pa.array(rows)),
            column_of(vectors[rows]),
            pa.array([model] * len(rows), pa.string()),
            pa.array([0] * len(rows), pa.int32()).cast(pa.date32()),
            pa.array([0] * len(rows), pa.int64()).cast(schema.field("last_action_ts").type),
            pa.array([1] * len(rows), pa.int32()),
            *empty_lists(pin_id, len(rows)).values(),
        ]
        versions.append(create_bucket(state.bucket_path(number), pa.table(columns, schema=schema)).version)
    digest = hashlib.sha256(vectors.tobytes()).hexdigest()
    state.publish(ds, versions, {"model_version": model, "embedding_dim": vectors.shape[1], "digest": digest})


def publish_day(site: Site, ds: str, *, num_pins: int = 400, seed: int = 0) -> None:
    publish_pins(site, ds, unit_vectors(num_pins, seed=seed), digest=f"pins of seed {seed}")
    publish_users(site, ds, unit_vectors(200, seed=1000 + seed))


def build(
    site: Site, days: Sequence[str], messages: list[str] | None = None, num_workers: int = 1
) -> list[IndexManifest]:
    with LocalEngine(num_workers=num_workers, memory_mb=256, temp_dir=site.directory / "tmp") as engine:
        progress = (lambda _: None) if messages is None else messages.append
        return list(build_index_days(site, days, engine=engine, progress=progress))


def open_index(site: Site, ds: str) -> PinIndex:
    return PinIndex.open(require_index(site, ds)[1])


def exact(users: np.ndarray, pins: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    score = users @ pins.T
    label = np.broadcast_to(np.arange(len(pins)), score.shape)
    order = np.lexsort((label, -score))[:, :k]
    return order, np.take_along_axis(score, order, 1)


# Searching


@pytest.mark.parametrize("id_type", ["string", "int"])
@pytest.mark.parametrize("num_shards", [1, 3, 40])
def test_a_search_gives_what_exact_search_gives(tmp_path: Path, id_type: IdType, num_shards: int) -> None:
    site = make_site(tmp_path, id_type=id_type, num_shards=num_shards, target_recall=1.0)
    pins, users = unit_vectors(500), unit_vectors(100, seed=1)
    ids = publish_pins(site, DAYS[0], pins)
    publish_users(site, DAYS[0], users)
    [manifest] = build(site, DAYS[:1])
    assert manifest["recall_at_10"] == 1.0
    index = open_index(site, DAYS[0])
    label, score = index.search(users, 10)
    expected_label, expected_score = exact(users, pins, 10)
    assert (label.dtype, score.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
    assert label.tolist() == expected_label.tolist()
    np.testing.assert_allclose(score, expected_score, atol=1e-6)
    assert index.pin_ids.to_pylist() == ids
    assert index.interests.to_pylist()[:8] == ["i0", "i1", "i2", "i3", "i4", "i5", "i6", "i0"]
    assert len(index) == manifest["counts"]["pins"] == sum(manifest["pins_of_shard"]) == 500
    assert (bucket_of(index.pin_ids, num_shards) == bucket_of(pa.array(ids), num_shards)).all()


def test_shards_are_linked_side_by_side(tmp_path: Path) -> None:
    """In processes of their own; the labels are the same as in one graph."""
    site = make_site(tmp_path, num_shards=3, target_recall=1.0)
    publish_pins(site, DAYS[0], unit_vectors(500))
    publish_users(site, DAYS[0], unit_vectors(100, seed=1))
    messages: list[str] = []
    [manifest] = build(site, DAYS[:1], messages, num_workers=2)
    assert [f"pin_index {DAYS[0]}: {done} of 3 shards are linked" in messages for done in (1, 2, 3)] == [True] * 3
    assert sum(manifest["pins_of_shard"]) == 500
    label, _ = open_index(site, DAYS[0]).search(unit_vectors(100, seed=1), 10)
    assert label.tolist() == exact(unit_vectors(100, seed=1), unit_vectors(500), 10)[0].tolist()


def test_shards_without_pins_have_no_file_and_change_nothing(tmp_path: Path) -> None:
    site = make_site(tmp_path, num_shards=64)
    publish_day(site, DAYS[0], num_pins=5)
    [manifest] = build(site, DAYS[:1])
    assert manifest["pins_of_shard"].count(0) >= 59
    assert len(list(require_index(site, DAYS[0])[1].glob("shard-*"))) == 64 - manifest["pins_of_shard"].count(0)
    label, score = open_index(site, DAYS[0]).search(unit_vectors(3, seed=9), 10)
    assert np.sort(label, axis=1).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert (np.diff(score, axis=1) <= 0).all()


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_search_for_more_pins_than_there_are_returns_all(tmp_path: Path, num_shards: int) -> None:
    site = make_site(tmp_path, num_shards=num_shards)
    publish_day(site, DAYS[0], num_pins=300)
    build(site, DAYS[:1])
    index = open_index(site, DAYS[0])
    users = unit_vectors(4, seed=5)
    for k in (299, 300, 301, 5000):
        label, _ = index.search(users, k)
        assert label.shape == (4, min(k, 300))
        assert all(len(set(row)) == len(row) for row in label.tolist())
    assert index.search(np.empty((0, DIM), np.float32), 7)[0].shape == (0, 7)
    with pytest.raises(ValueError, match="the index has rows of 16"):
        index.search(np.zeros((1, 5), np.float32), 3)


hits = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 10**6)), max_size=6),
    min_size=1,
    max_size=5,
).filter(lambda parts: len({label for part in parts for _, label in part}) == sum(len(part) for part in parts))


@settings(max_examples=200, deadline=None)
@given(parts=hits, k=st.integers(1, 12))
def test_merging_is_exact_with_ties_by_label(parts: list[list[tuple[float, int]]], k: int) -> None:
    arrays = [
        (
            np.array([[label for _, label in part]], np.int64).reshape(1, -1),
            np.array([[score for score, _ in part]], np.float32).reshape(1, -1),
        )
        for part in parts
    ]
    label, score = merge_hits(arrays, k)
    expected = sorted((-score, label) for part in parts for score, label in part)[:k]
    assert [(-s, n) for s, n in zip(score[0].tolist(), label[0].tolist(), strict=True)] == expected


def test_pins_that_the_graph_cannot_reach_are_found_all_the_same() -> None:
    """Many equal pins with few links fall apart into islands; hnswlib raises an error instead of returning fewer."""
    rng = np.random.default_rng(0)
    pins = rng.normal(size=(40, 4))[rng.integers(0, 40, 2000)].astype(np.float32)
    graph = hnswlib.Index(space="ip", dim=4)
    graph.init_index(len(pins), M=2, ef_construction=10)
    graph.add_items(pins, np.arange(len(pins)), num_threads=1)
    graph.set_ef(10)
    with pytest.raises(RuntimeError, match="Cannot return the results"):
        graph.knn_query(pins[:20], k=500)
    label, score = Shard(graph).search(pins[:20], 500)
    expected_label, expected_score = exact(pins[:20], pins, 500)
    np.testing.assert_allclose(score, expected_score, atol=1e-5)
    assert label.shape == expected_label.shape


def test_a_pin_is_found_by_its_id_and_gives_its_vector(tmp_path: Path) -> None:
    absent_ids: dict[IdType, list[Any]] = {"string": ["", "p00000x", "zz"], "int": [-51, 0, 10**9]}
    for id_type, absent in absent_ids.items():
        site = make_site(tmp_path / id_type, id_type=id_type, num_shards=3)
        pins = unit_vectors(300)
        ids = publish_pins(site, DAYS[0], pins)
        publish_users(site, DAYS[0], unit_vectors(50, seed=1))
        build(site, DAYS[:1])
        index = open_index(site, DAYS[0])
        assert [index.row_of(pin_id) for pin_id in ids] == list(range(300))
        assert [index.row_of(pin_id) for pin_id in absent] == [None] * 3
        some = np.array([299, 0, 17, 0])
        assert np.array_equal(index.vectors(some), pins[some])
        assert index.vectors(np.array([], np.int64)).shape == (0, DIM)


def test_threads_share_an_index_and_load_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(tmp_path, num_shards=3)
    publish_day(site, DAYS[0])
    build(site, DAYS[:1])
    loaded: list[int] = []
    load = pin_index.load_shard

    def slowly(folder: Path, description: IndexManifest, number: int, *, ef: int) -> Any:
        loaded.append(number)
        time.sleep(0.02)
        return load(folder, description, number, ef=ef)

    monkeypatch.setattr(pin_index, "load_shard", slowly)
    users = unit_vectors(50, seed=3)
    expected = open_index(site, DAYS[0]).search(users, 10)[0].tolist()
    loaded.clear()
    index = open_index(site, DAYS[0])
    assert loaded == []
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.extend(index.search(users, 10)[0].tolist() for _ in range(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert all(labels == expected for labels in found)
    assert sorted(loaded) == [0, 1, 2]


def test_missing_and_damaged_files_are_errors(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0])
    build(site, DAYS[:1])
    folder = require_index(site, DAYS[0])[1]
    (folder / "shard-00000.hnsw").write_bytes((folder / "shard-00000.hnsw").read_bytes()[:5000])
    with pytest.raises(PipelineError, match=r"shard-00000.hnsw cannot be read"):
        PinIndex.open(folder).search(unit_vectors(1), 3)
    with pytest.raises(PipelineError, match="no pin index in"):
        PinIndex.open(tmp_path)
    with pytest.raises(PipelineError, match="pin_index has no partition 2026-01-02; make it with: dagster asset"):
        require_index(site, DAYS[1])


# Judging


def test_the_smallest_ef_that_is_good_enough_is_taken_and_kept(tmp_path: Path) -> None:
    site = make_site(tmp_path, links=4, ef_construction=20, target_recall=0.9)
    publish_day(site, DAYS[0], num_pins=3000)
    messages: list[str] = []
    [manifest] = build(site, DAYS[:1], messages)
    tried = manifest["ef_tried"]
    assert [step["ef"] for step in tried] == [10, 16, 24, 32, 48, 64, 96, 128, 192, 256][: len(tried)]
    assert len(tried) > 1
    assert all(step["recall_at_10"] < 0.9 for step in tried[:-1])
    assert manifest["recall_at_10"] == tried[-1]["recall_at_10"] >= 0.9
    assert manifest["ef"] == tried[-1]["ef"]
    assert manifest["judged_users"] == 100
    assert any(f"ef {manifest['ef']} finds" in line and "for 100 users" in line for line in messages)
    index = open_index(site, DAYS[0])
    index.search(unit_vectors(1), 10)
    assert index._shard(0).graph.ef == manifest["ef"]
    assert index.description == manifest == index_manifest(site, DAYS[0])
    users, pins = unit_vectors(200, seed=1000), unit_vectors(3000)
    found, best = index.search(users, 10)[1], exact(users, pins, 10)[1]
    assert 0.85 < (found >= best[:, -1:] - 1e-6).mean() < 1


def test_an_index_that_misses_the_target_is_not_published(tmp_path: Path) -> None:
    bad = make_site(tmp_path, links=2, ef_construction=10, max_ef=12, target_recall=0.99, max_exact_pins=2999)
    publish_day(bad, DAYS[0], num_pins=3000)
    with pytest.raises(PipelineError, match=r"than target_recall 0.99; nothing was published; raise max_exact_pins"):
        build(bad, DAYS[:1])
    assert index_manifest(bad, DAYS[0]) is None
    assert list(index_dir(bad, DAYS[0]).iterdir()) == []
    [good] = build(make_site(tmp_path, target_recall=0.9), DAYS[:1])
    with pytest.raises(PipelineError, match="nothing was published"):
        build(bad, DAYS[:1])
    assert index_manifest(bad, DAYS[0]) == good
    assert len(open_index(bad, DAYS[0]).search(unit_vectors(1), 10)[0]) == 1


def test_all_pins_are_scored_where_the_graph_finds_too_few(tmp_path: Path) -> None:
    """Most pins of a catalogue that nobody has seen yet have one and the same vector, far from what users like."""
    users = unit_vectors(100, seed=1)
    users[:, 0] = 0  # as users of the model of parts in the dimension that completes the length of pins
    unseen = np.zeros((2500, DIM), np.float32)
    unseen[:, 0] = 1
    seen = 0.2 * unit_vectors(1500)
    seen[:, 0] = np.sqrt(1 - (seen[:, 1:] ** 2).sum(1))
    pins = np.concatenate([unseen, seen]).astype(np.float16).astype(np.float32)
    messages: list[str] = []
    for folder, num_shards in (("one", 1), ("many", 3)):
        site = make_site(tmp_path / folder, num_shards=num_shards, max_ef=64)
        publish_pins(site, DAYS[0], pins)
        publish_users(site, DAYS[0], users)
        [manifest] = build(site, DAYS[:1], messages)
        assert manifest["ef"] == len(pins)
        assert manifest["recall_at_10"] == 1.0
        assert scores_all(manifest)
        before = manifest["ef_tried"][-2]
        assert before["recall_at_10"] < 0.95
        shown = f"by scoring all pins (the graph finds {before['recall_at_10']:.1%} at ef 64)"
        assert shown in judge_index(site, DAYS[0]).reason
        assert judge_index(site, DAYS[0]).passed
        assert "scoring all pins finds 1.0000" in messages[-2]
        for k in (1, 10, 300, 5000):
            label, score = open_index(site, DAYS[0]).search(users, k)
            expected_label, expected_score = exact(users, pins, k)
            np.testing.assert_allclose(score, expected_score, atol=1e-6)
            assert (label == expected_label).mean() > 0.9  # sums in another order: near ties may change places


def test_equal_pins_do_not_count_as_missed(tmp_path: Path) -> None:
    site = make_site(tmp_path, target_recall=1.0, max_ef=10)
    publish_pins(site, DAYS[0], np.repeat(unit_vectors(1), 200, axis=0))
    publish_users(site, DAYS[0], unit_vectors(50, seed=1))
    assert build(site, DAYS[:1])[0]["recall_at_10"] == 1.0


def test_fewer_pins_than_are_judged(tmp_path: Path) -> None:
    site = make_site(tmp_path, num_shards=2)
    publish_day(site, DAYS[0], num_pins=3)
    [manifest] = build(site, DAYS[:1])
    assert (manifest["recall_at_10"], manifest["counts"]["pins"]) == (1.0, 3)


def test_days_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    with pytest.raises(PipelineError, match="pin_embeddings has no partition"):
        build(site, DAYS[:1])
    publish_pins(site, DAYS[0], unit_vectors(20))
    with pytest.raises(PipelineError, match="user_embedding_snapshot has no partition"):
        build(site, DAYS[:1])
    publish_users(site, DAYS[0], unit_vectors(20), model="newer")
    with pytest.raises(PipelineError, match="is of model m, user_embedding_snapshot 2026-01-01 of model newer"):
        build(site, DAYS[:1])
    publish_users(site, DAYS[0], unit_vectors(0))
    with pytest.raises(PipelineError, match="has no users to measure the recall of the index with"):
        build(site, DAYS[:1])
    assert index_manifest(site, DAYS[0]) is None


# Partitions


def inode(site: Site, ds: str) -> int:
    return (require_index(site, ds)[1] / "shard-00000.hnsw").stat().st_ino


def test_the_same_inputs_are_not_built_again(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    publish_day(site, DAYS[0])
    messages: list[str] = []
    [first] = build(site, DAYS[:1], messages)
    [again] = build(site, DAYS[:1], messages)
    assert again == first
    assert messages[-1] == "pin_index 2026-01-01: unchanged, 400 pins"
    before = inode(site, DAYS[0])
    [judged] = build(make_site(tmp_path, target_recall=0.5), DAYS[:1])
    assert judged["build"] > first["build"]
    assert inode(site, DAYS[0]) == before  # the same graph, judged by another bar
    [linked] = build(make_site(tmp_path, links=8), DAYS[:1])
    assert linked["links"] == 8
    assert inode(site, DAYS[0]) != before
    assert [path.name for path in index_dir(site, DAYS[0]).glob("build-*")] == [linked["build"]]


def test_days_with_the_same_pins_share_a_graph_and_are_judged_by_their_own_users(tmp_path: Path) -> None:
    site = make_site(tmp_path, num_shards=2)
    for ds, seed in zip(DAYS, (0, 0, 1), strict=False):
        publish_pins(site, ds, unit_vectors(400, seed=seed), digest=f"seed {seed}")
        publish_users(site, ds, unit_vectors(60, seed=int(ds[-2:])))
    first, second, third = build(site, DAYS[:3])
    assert inode(site, DAYS[0]) == inode(site, DAYS[1]) != inode(site, DAYS[2])
    assert first["graph"] == second["graph"] != third["graph"]
    users = unit_vectors(20, seed=7)
    results = [open_index(site, ds).search(users, 5)[0].tolist() for ds in DAYS[:3]]
    assert results[0] == results[1] != results[2]


def test_old_days_are_removed_but_not_what_is_linked_elsewhere(tmp_path: Path) -> None:
    site = make_site(tmp_path, retention_days=2)
    for number, ds in enumerate(DAYS):
        publish_day(site, ds, num_pins=50, seed=number)
    build(site, DAYS[:1])
    released = tmp_path / "released"
    released.mkdir()
    for path in require_index(site, DAYS[0])[1].iterdir():
        os.link(path, released / path.name)
    build(site, DAYS[1:])
    assert sorted(path.name for path in index_dir(site, DAYS[0]).parent.glob("20*")) == DAYS[3:]
    assert PinIndex.open(released).search(unit_vectors(1), 3)[0].shape == (1, 3)
    with pytest.raises(PipelineError, match="pin_index 2026-01-02 is older than the 2 days that are kept"):
        build(site, DAYS[1:2])


KILLED = """
import sys, time
from pathlib import Path
from pf_core.serving import build_index
from tests.serving.test_index import DAYS, build, make_site
root, where = Path(sys.argv[1]), sys.argv[2]
def wait(*arguments, **options):
    (root / "half done").touch()
    time.sleep(60)
setattr(build_index, where, wait)
build(make_site(root, links=8, num_shards=2), DAYS[:1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sample_users", "publish_build"])
def test_killed_while_building(tmp_path: Path, where: str) -> None:
    site, new_site = make_site(tmp_path), make_site(tmp_path, links=8, num_shards=2)
    publish_day(site, DAYS[0])
    [old] = build(site, DAYS[:1])
    users = unit_vectors(30, seed=5)
    expected = open_index(site, DAYS[0]).search(users, 10)[0].tolist()
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), where], cwd=REPOSITORY)
    while not (tmp_path / "half done").exists():
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(PipelineError, match="another run is writing pin_index"):
        build(new_site, DAYS[:1])
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(index_dir(site, DAYS[0]).glob("build-*"))) == 2
    assert index_manifest(site, DAYS[0]) == old
    assert open_index(site, DAYS[0]).search(users, 10)[0].tolist() == expected
    [new] = build(new_site, DAYS[:1])
    assert [path.name for path in index_dir(site, DAYS[0]).glob("build-*")] == [new["build"]]
    assert len(open_index(site, DAYS[0])) == 400
