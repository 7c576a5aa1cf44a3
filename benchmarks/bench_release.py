"""Publishing a release of 1M users, and recommending from it.

Publishing is all of `publish_release`: from a Lance snapshot on disk (1M x 256 float16, buckets of 30k users) to a
synced LMDB store, users read back, the index linked, the pointer replaced. One user of 61 has a full record, with 64
pins in memory and 256 seen ones; the others have no memory and 16 seen pins. Its bar: at least half the speed of bare
LMDB puts of the same keys and values, prepared in memory beforehand, in the fastest way that we found: appended by
`putmulti` in transactions of 16k, synced once at the end. Both run in processes of their own, in turns; the fastest run
of each counts.

`recommend` is timed one user after the other in one thread, warm: look the user up, search the index of 100k pins with
the ef that its judgement found, and name the pins; then for users with a full record, with memory merged, and with new
pins only. Beside it, in the same run, bare hnswlib's query of the same graph for the same vectors. Users and pins are
unit vectors in 500 clusters, as those of a trained model are, not random ones.

About 2 GB of disk.
"""

import argparse
import shutil
import tempfile
import time
from datetime import date
from pathlib import Path

import hnswlib
import lmdb
import numpy as np
import pyarrow as pa
from measuring import measure, num_buckets_for, record_lists, report, say, working_directory, world_site

from pf_core.config.site import Site
from pf_core.days import ds_start, shift_ds
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of
from pf_core.engine.daily_state import create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.hashing import bucket_of, digest_of
from pf_core.schemas import pin_embeddings_schema, user_embeddings_schema
from pf_core.serving.build_index import build_index_days
from pf_core.serving.client import Serving
from pf_core.serving.publish import publish_release
from pf_core.serving.releases import release_root

DS = "2026-01-01"
DIM = 256
NUM_CLUSTERS = 500
MODEL = "bench-model"
PUTS_AT_ONCE = 16_384
FULL_RECORD_OF = 61
"""One of this number of users has a full record."""
NUM_MEMORY, NUM_SEEN, FEW_SEEN = 64, 256, 16


def unit_vectors(num: int, rng: np.random.Generator) -> np.ndarray:
    """Around the centres of clusters, which are the same for all."""
    centres = np.random.default_rng(0).standard_normal((NUM_CLUSTERS, DIM), np.float32)
    vectors = centres[rng.integers(0, NUM_CLUSTERS, num)] + rng.standard_normal((num, DIM), np.float32)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def bench_site(root: Path, num_users: int) -> Site:
    return world_site(
        logs=root, data_dir=root, start_ds=DS, end_ds=shift_ds(DS, 30), num_buckets=num_buckets_for(num_users)
    )


def pin_names(num_pins: int) -> list[str]:
    return [f"pin{number:07d}" for number in range(num_pins)]


def has_full_record(user_ids: np.ndarray) -> np.ndarray:
    return bucket_of(pa.array(user_ids), FULL_RECORD_OF) == 0


def write_snapshot(site: Site, ds: str, num_users: int, num_pins: int, rng: np.random.Generator) -> None:
    state, schema = snapshot_state(site), user_embeddings_schema("int", "string", DIM)
    pins = pa.array(pin_names(num_pins))
    ids = np.arange(num_users, dtype=np.int64) * 2_654_435_761 % (1 << 52)
    bucket = bucket_of(pa.array(ids), state.num_buckets)
    versions = []
    for number in range(state.num_buckets):
        users = rng.permutation(ids[bucket == number])
        columns = [
            pa.array(users),
            column_of(unit_vectors(len(users), rng)),
            pa.array([MODEL] * len(users)),
            pa.array([date.fromisoformat(ds)] * len(users)),
            pa.array([ds_start(ds)] * len(users), schema.field("last_action_ts").type),
            pa.array(np.ones(len(users), np.int32)),
            *record_lists(
                pins,
                num_memory=np.where(has_full_record(users), NUM_MEMORY, 0),
                num_seen=np.where(has_full_record(users), NUM_SEEN, FEW_SEEN),
                seed=number,
            ),
        ]
        versions.append(create_bucket(state.bucket_path(number), pa.table(columns, schema=schema)).version)
    manifest = {"model_version": MODEL, "embedding_dim": DIM, "digest": ds, "counts": {"users": num_users}}
    state.publish(ds, versions, {**manifest, "slices": {"embedding": [0, DIM]}})


def write_index(site: Site, num_pins: int, rng: np.random.Generator) -> None:
    state, names = pin_embedding_state(site), pin_names(num_pins)
    columns = [
        pa.array(names),
        column_of(unit_vectors(num_pins, rng)),
        pa.array([MODEL] * num_pins),
        pa.array([f"interest {number % 350}" for number in range(num_pins)]),
    ]
    dataset = create_bucket(state.bucket_path(0), pa.table(columns, schema=pin_embeddings_schema("string", DIM)))
    digest = digest_of({"pins": num_pins})
    state.publish(DS, [dataset.version], {"model_version": MODEL, "embedding_dim": DIM, "digest": digest})
    with LocalEngine(num_workers=1, memory_mb=512, temp_dir=site.directory / "tmp") as engine:
        list(build_index_days(site, [DS], engine=engine, progress=say))


# Publishing


def publish(root: Path, num_users: int) -> tuple[float, float]:
    """Seconds of a publication from nothing, and of building and verifying its store."""
    site = bench_site(root, num_users)
    shutil.rmtree(release_root(site), ignore_errors=True)
    started = time.perf_counter()
    with LocalEngine(num_workers=1, memory_mb=512, temp_dir=site.directory / "tmp") as engine:
        manifest = publish_release(site, DS, engine=engine, progress=say)
    seconds = time.perf_counter() - started
    assert manifest["counts"]["users"] == num_users
    return seconds, manifest["store_seconds"]


def put_bare(root: Path, num_users: int) -> float:
    """Seconds of putting what a release's store holds into an empty LMDB."""
    with lmdb.open(str(release_root(bench_site(root, num_users)) / f"{DS}.1" / "users"), readonly=True) as published:
        with published.begin() as transaction, transaction.cursor() as cursor:
            pairs = list(cursor.iternext())
    folder = tempfile.mkdtemp(dir=root)
    started = time.perf_counter()
    with lmdb.open(folder, map_size=16 << 30, sync=False, metasync=False, meminit=False) as bare:
        for start in range(0, num_users, PUTS_AT_ONCE):
            with bare.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(pairs[start : start + PUTS_AT_ONCE], append=True)
        bare.sync(True)
        seconds = time.perf_counter() - started
        assert bare.stat()["entries"] == num_users
    shutil.rmtree(folder)
    return seconds


# Recommending


def recommend(root: Path, num_users: int, num_requests: int) -> dict[str, np.ndarray]:
    """Milliseconds of each request, and of bare hnswlib for the same users."""
    site = bench_site(root, num_users)
    serving = Serving(site)
    ids = snapshot_state(site).open_bucket(DS, 0).to_table(columns=["user_id"])["user_id"].to_pylist()
    is_full, rng = has_full_record(np.array(ids)), np.random.default_rng(1)
    users = rng.choice(np.array(ids)[~is_full], num_requests).tolist()
    full_users = rng.choice(np.array(ids)[is_full], num_requests).tolist()
    release = serving.release()
    description = release.index.description
    [shard] = release.index.folder.glob("*.hnsw")
    graph = hnswlib.Index(space=description["space"], dim=DIM)
    graph.load_index(str(shard))
    graph.set_ef(description["ef"])
    vectors, is_found = release.embeddings(users)
    assert is_found.all()
    ours, bare, merged, new = np.empty((4, num_requests))
    for _ in range(2):  # the first round warms up
        for row, user in enumerate(full_users):
            started = time.perf_counter()
            hits = serving.release().recommend(user, k=10)
            merged[row] = time.perf_counter() - started
            assert len(hits) == 10
            started = time.perf_counter()
            serving.release().recommend(user, k=10, new_only=True)
            new[row] = time.perf_counter() - started
        for row, user in enumerate(users):
            started = time.perf_counter()
            hits = serving.release().recommend(user, k=10)
            ours[row] = time.perf_counter() - started
            started = time.perf_counter()
            labels, _ = graph.knn_query(vectors[row : row + 1], k=10, num_threads=1)
            bare[row] = time.perf_counter() - started
            assert hits[0].pin_id == release.index.pin_ids[int(labels[0, 0])].as_py()
    seconds = {"recommend": ours, "hnswlib": bare, "recommend_with_memory": merged, "recommend_new_only": new}
    return {name: each * 1e3 for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test")
    parser.add_argument("--data", type=Path, help="where snapshot and index stay, for a quick second run")
    arguments = parser.parse_args()
    num_users, num_pins, num_requests = (20_000, 2_000, 200) if arguments.quick else (1_000_000, 100_000, 5_000)

    with working_directory(arguments.data) as root:
        site, rng = bench_site(root, num_users), np.random.default_rng(7)
        if not snapshot_state(site).days():
            write_snapshot(site, DS, num_users, num_pins, rng)
            write_index(site, num_pins, rng)
        whole_s, ours_s, bare_s, peak_gb = [], [], [], 0.0
        for _ in range(3):
            published = measure(publish, root, num_users)
            whole_s.append(published.outcome[0])
            ours_s.append(published.outcome[1])
            peak_gb = max(peak_gb, published.peak_gb)
            bare_s.append(measure(put_bare, root, num_users).outcome)
            say(f"release {whole_s[-1]:.2f} s, its store {ours_s[-1]:.2f} s, bare puts {bare_s[-1]:.2f} s")
        size_gb = (release_root(site) / f"{DS}.1" / "users" / "data.mdb").stat().st_size / 1e9
        requests = measure(recommend, root, num_users, num_requests).outcome

    report("release_publish_1m_users", min(whole_s), "s")
    report("release_store_1m_users", min(ours_s), "s")
    report("release_bare_lmdb_puts_1m_users", min(bare_s), "s")
    report("release_store_speed_over_bare_puts", min(bare_s) / min(ours_s), "x", bar=">= 0.5")
    report("release_publish_peak_memory", peak_gb, "GB")
    report("release_store_size", size_gb, "GB")
    for name, milliseconds in requests.items():
        bar = {"recommend": "< 5", "recommend_with_memory": "< 3"}.get(name)
        report(f"{name}_100k_pins_p50", float(np.percentile(milliseconds, 50)), "ms")
        report(f"{name}_100k_pins_p99", float(np.percentile(milliseconds, 99)), "ms", bar=bar)


if __name__ == "__main__":
    main()
