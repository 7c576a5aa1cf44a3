"""One suite for both stores: they return the values that were stored, bit for bit, and nothing else."""

import struct
import threading
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pf_core.embeddings.vectors import column_of, matrix_of
from pf_core.errors import PipelineError
from pf_core.schemas import IdType
from pf_core.serving import lmdb_store as store_module
from pf_core.serving import redis_store as redis_store_module
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.redis_store import RedisLocation, RedisStore
from pf_core.serving.store import UserStore
from pf_core.serving.values import Values, decode_values, fixed_bytes
from tests.support.records import empty_lists, list_columns
from tests.support.releases import DIM, NUM_BUCKETS, redis_server, seen_of, split_rows, user_rows

MakeStore = Callable[[], UserStore]

INT_IDS = [0, -1, 1, 2**63 - 1, -(2**63), 255, 256, 10**12, *range(1000, 1300)]
LONG = "x" * 600
STRING_IDS = ["", "a", "ä", "user 7", "a\x00", "a\x00b", LONG, LONG + "y", "x" * 508, "x" * 509, "x" * 510, "漢" * 170]
LIST_COLUMNS = ["memory_pin_id", "memory_increment", "seen_pin_id", "seen_is_complete"]
IDS = pytest.mark.parametrize("ids", [INT_IDS, STRING_IDS], ids=["int", "string"])


@pytest.fixture(scope="module")
def redis_address() -> Iterator[str]:
    with redis_server() as address:
        yield address


@pytest.fixture(params=["lmdb", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Returns a function that opens the same store at every call."""
    made: list[UserStore] = []

    def make() -> UserStore:
        if request.param == "lmdb":
            made.append(LmdbStore(tmp_path / "users", num_buckets=NUM_BUCKETS, embedding_dim=DIM))
        else:
            made.append(redis_store(request.getfixturevalue("redis_address")))
        return made[-1]

    yield make
    for store in made:
        store.close()
    made[0].drop()
    made[0].close()


def redis_store(address: str, release: str = "2026-01-01.1") -> RedisStore:
    return RedisStore(
        RedisLocation(
            url=address,
            is_cluster=False,
            prefix="pf:small",
            release=release,
            num_buckets=NUM_BUCKETS,
            embedding_dim=DIM,
        )
    )


def rows_of(ids: list[Any], version: int = 1) -> pa.Table:
    return user_rows(ids, version, "int" if isinstance(ids[0], int) else "string")


def build(store: UserStore, rows: pa.Table) -> None:
    if isinstance(store, LmdbStore):
        store.build(iter(split_rows(rows)), num_users=rows.num_rows)
    else:
        assert isinstance(store, RedisStore)
        store.drop()
        for bucket, part in split_rows(rows):
            store.put(bucket, part)


def ids_of(rows: pa.Table) -> pa.Array:
    return rows["user_id"].combine_chunks()


def assert_holds(store: UserStore, rows: pa.Table) -> None:
    found = store.get(ids_of(rows))
    assert found.found_N.all()
    np.testing.assert_array_equal(found.vectors_ND, matrix_of(rows["embedding"]).astype(np.float32))
    assert found.computed_ds() == [day.isoformat() for day in rows["computed_ds"].to_pylist()]
    for number, row in enumerate(rows.select(LIST_COLUMNS).to_pylist()):
        lists = found.lists(number)
        stored = (
            lists.memory_pin_ids.to_pylist(),
            lists.memory_increments.tobytes(),
            lists.seen_pin_ids.to_pylist(),
            lists.seen_is_complete,
        )
        increments = np.array(row["memory_increment"], np.float32).tobytes()
        assert stored == (row["memory_pin_id"], increments, row["seen_pin_id"], row["seen_is_complete"])


def with_lists(rows: pa.Table, pin_id: IdType, *, seed: int = 0, most: int = 40) -> pa.Table:
    """The rows with random memory and seen pins; some lists are empty, and some ids are long."""
    rng = np.random.default_rng(seed)
    texts = ["", "ä", "\x00", "漢字", "x" * 3000]

    def pins(num: int) -> list[Any]:
        numbers = [0, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**62), 2**62, num).tolist()][:num]
        return numbers if pin_id == "int" else [*texts, *(f"p{number}" for number in numbers)][:num]

    columns = list_columns(
        pin_id,
        memory=[dict.fromkeys(pins(int(num)), 0.0) for num in rng.integers(0, 5, len(rows))],
        seen=[pins(int(num)) for num in rng.integers(0, most, len(rows)) * rng.integers(0, 2, len(rows))],
        is_complete=rng.integers(0, 2, len(rows)).astype(bool).tolist(),
    )
    increments = [rng.standard_normal(len(ids)).astype(np.float32).tolist() for ids in columns["memory_pin_id"]]
    columns["memory_increment"] = pa.array(increments, pa.list_(pa.float32()))
    return pa.table({**{name: rows[name] for name in rows.column_names if name not in columns}, **columns})


@pytest.mark.parametrize("pin_id", ["int", "string"])
@IDS
def test_lists_come_back_to_the_bit(make_store: MakeStore, ids: list[Any], pin_id: IdType) -> None:
    rows = with_lists(rows_of(ids), pin_id)
    build(make_store(), rows)
    assert_holds(make_store(), rows)


@pytest.mark.parametrize("pin_id", ["int", "string"])
def test_lists_that_are_parts_of_larger_arrays(make_store: MakeStore, pin_id: IdType) -> None:
    """Rows as a filtered or sliced table has them: their lists do not begin at the first element of their buffers."""
    rows = with_lists(rows_of(INT_IDS), pin_id)
    part = pa.concat_tables([rows.slice(13, 30), rows.slice(100, 7)])
    build(make_store(), part)
    assert_holds(make_store(), part)


def test_the_map_grows_with_long_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LmdbStore, "_map_size", lambda self, num_users: 1 << 20)
    monkeypatch.setattr(store_module, "COMMIT_BYTES", 64 << 10)
    rows = with_lists(rows_of(list(range(3000))), "int", most=400)
    store = lmdb_store(tmp_path)
    build(store, rows)
    assert (tmp_path / "users" / "data.mdb").stat().st_size > 2 << 20
    assert_holds(store, rows)
    assert store.delete(ids_of(rows)) == 3000
    store.close()


def test_too_long_a_list_is_refused(tmp_path: Path) -> None:
    rows = rows_of([1])
    seen = pa.array([["x"] * 65_536], pa.list_(pa.string()))
    with pytest.raises(PipelineError, match="more than 65,535 elements"):
        build(lmdb_store(tmp_path), rows.set_column(rows.schema.get_field_index("seen_pin_id"), "seen_pin_id", seen))


def test_a_cut_value_and_one_of_another_version_are_refused() -> None:
    [value] = Values(with_lists(rows_of([1]), "int", seed=3)).take(np.array([0]))
    whole = decode_values([value], DIM).lists(0)
    assert len(whole.memory_pin_ids) > 0
    with pytest.raises(PipelineError, match="damaged: a value of"):
        decode_values([value[:-1]], DIM).lists(0)
    with pytest.raises(
        PipelineError, match=r"the store of users was stored in layout 1, .*; rebuild it with: dagster asset"
    ):
        decode_values([b"\x01" + value[1:], None], DIM)
    with pytest.raises(PipelineError, match=f"damaged: a vector does not have {DIM - 1} dimensions"):
        decode_values([value], DIM - 1)


@IDS
def test_every_user_comes_back_to_the_bit(make_store: MakeStore, ids: list[Any]) -> None:
    rows = rows_of(ids)
    build(make_store(), rows)
    store = make_store()
    assert store.count() == len(ids)
    assert_holds(store, rows)


@IDS
def test_unknown_users_are_not_found_and_keep_their_place(make_store: MakeStore, ids: list[Any]) -> None:
    rows = rows_of(ids)
    store = make_store()
    build(store, rows)
    unknown = [77, 7_777] if ids is INT_IDS else ["nobody", LONG + "z"]
    asked = [unknown[0], ids[3], unknown[1], ids[3], ids[0]]
    found = store.get(pa.array(asked, rows["user_id"].type))
    assert found.found_N.tolist() == [False, True, False, True, True]
    assert np.isnan(found.vectors_ND[[0, 2]]).all()
    np.testing.assert_array_equal(found.vectors_ND[1], found.vectors_ND[3])
    assert [ds is None for ds in found.computed_ds()] == [True, False, True, False, False]
    assert store.get(pa.array([], rows["user_id"].type)).vectors_ND.shape == (0, DIM)


@IDS
def test_deleted_users_are_gone_for_those_who_have_it_open(make_store: MakeStore, ids: list[Any]) -> None:
    rows = rows_of(ids)
    build(make_store(), rows)
    reader, writer = make_store(), make_store()
    assert reader.count() == len(ids)
    gone = pa.array([ids[2], ids[6]], rows["user_id"].type)
    assert writer.delete(gone) == 2
    assert writer.delete(gone) == 0
    assert reader.count() == len(ids) - 2
    assert not reader.get(gone).found_N.any()
    is_left = [row for row in range(len(ids)) if row not in (2, 6)]
    assert_holds(reader, rows.take(is_left))


def test_building_again_replaces_what_was_there(make_store: MakeStore) -> None:
    build(make_store(), rows_of(INT_IDS))
    rows = rows_of([1, 2, 3], version=2)
    build(make_store(), rows)
    store = make_store()
    assert store.count() == 3
    assert_holds(store, rows)


def test_no_users_at_all(make_store: MakeStore) -> None:
    build(make_store(), rows_of([1])[:0])
    assert make_store().count() == 0
    assert not make_store().get(pa.array([1])).found_N.any()


def test_a_dropped_store_is_empty_or_gone(make_store: MakeStore, tmp_path: Path) -> None:
    build(make_store(), rows_of([1, 2]))
    make_store().drop()
    store = make_store()
    if isinstance(store, RedisStore):
        assert store.count() == 0
    else:
        assert not (tmp_path / "users").exists()
        with pytest.raises(FileNotFoundError):
            store.count()


def test_a_bucket_is_written_in_portions(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "COMMIT_BYTES", 7 * fixed_bytes(DIM))
    monkeypatch.setattr(redis_store_module, "FIELDS_AT_ONCE", 7)
    rows = rows_of(list(range(-300, 300)))
    build(make_store(), rows)
    assert_holds(make_store(), rows)


def test_wide_vectors(tmp_path: Path) -> None:
    dim = 3000  # LMDB gives such a value pages of its own
    vectors = np.random.default_rng(0).standard_normal((50, dim)).astype(np.float16)
    days = pa.array([date(1969, 12, 31)] * 50, pa.date32())
    columns = {"user_id": list(range(50)), "embedding": column_of(vectors), "computed_ds": days}
    rows = pa.table({**columns, **empty_lists("int", 50)})
    store = LmdbStore(tmp_path / "users", num_buckets=NUM_BUCKETS, embedding_dim=dim)
    build(store, rows)
    found = store.get(ids_of(rows))
    np.testing.assert_array_equal(found.vectors_ND, vectors.astype(np.float32))
    assert found.computed_ds() == ["1969-12-31"] * 50
    assert store.delete(ids_of(rows)) == 50
    store.close()


# LMDB


def lmdb_store(tmp_path: Path) -> LmdbStore:
    return LmdbStore(tmp_path / "users", num_buckets=NUM_BUCKETS, embedding_dim=DIM)


def test_a_user_with_two_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="two rows"):
        build(lmdb_store(tmp_path), rows_of([5, 6, 5]))


def test_buckets_out_of_order_are_refused(tmp_path: Path) -> None:
    rows = rows_of(INT_IDS)
    with pytest.raises(PipelineError, match="in order"):
        lmdb_store(tmp_path).build(reversed(split_rows(rows)), num_users=rows.num_rows)


def test_a_full_map_is_an_error_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LmdbStore, "_map_size", lambda self, num_users: 64 << 10)
    monkeypatch.setattr(store_module, "MAP_SHARE", 0)  # lists do not make it grow
    with pytest.raises(PipelineError, match=r"cannot be written to .*users"):
        build(lmdb_store(tmp_path), rows_of(list(range(3000))))


def test_one_process_may_open_a_store_many_times(tmp_path: Path) -> None:
    rows = rows_of(INT_IDS)
    build(lmdb_store(tmp_path), rows)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(50):
                store = lmdb_store(tmp_path)
                assert_holds(store, rows)
                del store  # closes it: this was the only reference
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store_module._environments._opened == {}


def test_a_store_of_other_dimensions_is_called_damaged(tmp_path: Path) -> None:
    build(lmdb_store(tmp_path), rows_of([1, 2]))
    for dim in (DIM - 1, DIM + 1, 10 * DIM):
        store = LmdbStore(tmp_path / "users", num_buckets=NUM_BUCKETS, embedding_dim=dim)
        with pytest.raises(PipelineError, match="damaged"):
            store.get(pa.array([1, 2]))
        store.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_store_that_is_cut_off_is_called_damaged(tmp_path: Path, share: float) -> None:
    """The kernel would kill a service that reads beyond the end; of an empty file LMDB says that it has no users."""
    build(lmdb_store(tmp_path), rows_of(INT_IDS))
    path = tmp_path / "users" / "data.mdb"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    store = lmdb_store(tmp_path)
    with pytest.raises(PipelineError, match=r"damaged: data.mdb is cut off; publish the day again, or return"):
        store.get(pa.array(INT_IDS))
    assert store_module._environments._opened == {}


def test_a_service_that_may_not_write_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(INT_IDS)
    build(lmdb_store(tmp_path), rows)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    store = lmdb_store(tmp_path)
    assert_holds(store, rows)
    with pytest.raises(PipelineError, match="cannot be deleted"):
        store.delete(pa.array([1]))
    store.close()


# Redis


def test_the_current_release_is_announced_in_redis(redis_address: str) -> None:
    store = redis_store(redis_address, "2026-01-02.3")
    store.announce()
    assert store._client.get("pf:small:current") == b"2026-01-02.3"
    store.close()


def test_any_client_can_look_a_user_up_in_redis(redis_address: str) -> None:
    store = redis_store(redis_address)
    rows = user_rows([-5], 1, memory={-5: {"pin1": 0.5, "ä": -2.0}})
    build(store, rows)
    [bucket] = [bucket for bucket, part in split_rows(rows) if part.num_rows]
    value = store._client.hget(f"pf:small:2026-01-01.1:{bucket}", "-5")
    assert isinstance(value, bytes)
    day = (rows["computed_ds"][0].as_py() - date(1970, 1, 1)).days
    memory, seen = {"pin1": 0.5, "ä": -2.0}, seen_of(-5)
    assert len(seen) == 8  # an even number: not complete
    lengths = [np.array([len(text.encode()) for text in texts], "<u4").tobytes() for texts in (memory, seen)]
    assert value == b"".join(
        [
            struct.pack("<BBHHHi", 2, 2, DIM, 2, 8, day),
            matrix_of(rows["embedding"]).tobytes(),
            struct.pack("<ff", 0.5, -2.0),
            lengths[0] + "pin1ä".encode(),
            lengths[1] + "".join(seen).encode(),
        ]
    )
    store.drop()
    store.close()


def test_an_unreachable_redis_is_a_sentence_without_credentials() -> None:
    store = redis_store("redis://someone:h1dden@127.0.0.1:1/0")
    for attempt in (store.count, store.drop, store.announce, lambda: store.get(pa.array([1]))):
        with pytest.raises(PipelineError, match=r"Redis at 127\.0\.0\.1:1 failed") as caught:
            attempt()
        assert "h1dden" not in str(caught.value)
        assert "someone" not in str(caught.value)
    store.close()


def test_a_wrong_password_does_not_appear_in_the_error(redis_address: str) -> None:
    store = redis_store(redis_address.replace("s3cret", "wr0ng-password"))
    with pytest.raises(PipelineError, match="Redis at") as caught:
        store.count()
    assert "wr0ng" not in str(caught.value)
    store.close()


@pytest.mark.parametrize("address", ["http://h1dden@host", "redis://:h1dden/5@host:6379/0", "redis://x:h1d#den@host:1"])
def test_an_address_that_is_none_does_not_appear_in_the_error(address: str) -> None:
    with pytest.raises(PipelineError, match=r"serving\.store\.url") as caught:
        redis_store(address).count()
    assert "h1d" not in str(caught.value)
