"""Pins through the pin tower: exact, in order, all or none published; and the exact search for comparing an index."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from pf_core.config.site import Site
from pf_core.config.training import ModelConfig
from pf_core.days import ds_range
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import BLOCK_ROWS, CHUNK_ROWS, embed_pin_days, nearest_scores, pin_tower, sample_users
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of, matrix_of
from pf_core.engine.daily_state import Manifest, create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.model.checkpoint import load_model, save_model
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import PinManifest, pin_state
from pf_core.schemas import pin_embeddings_schema, pin_features_schema, user_embeddings_schema
from tests.support import sites
from tests.support.records import empty_lists

REPOSITORY = Path(__file__).parents[2]
DAYS = ds_range("2026-01-01", "2026-01-04")
FEATURE_DIM, EMBEDDING_DIM = 37, 33  # odd ones: there, rounding depends on how a product is divided among threads


def make_site(root: Path, *, id_type: str = "string", **serving: Any) -> Site:
    return sites.make_site(
        root,
        id_type=id_type,
        pin_id_type=id_type,
        engine={"num_workers": 3, "memory_mb": 64},
        serving={"retention_days": 3, **serving},
    )


def make_model(folder: Path, *, seed: int = 0, poisoned: bool = False) -> ServedModel:
    torch.manual_seed(seed)
    config = ModelConfig(
        num_layers=0, hidden_dim=16, pin_hidden_dim=65, embedding_dim=EMBEDDING_DIM, near_identity_init=False
    )
    sizes = {"feature_dim": FEATURE_DIM, "time_origin_us": 0, "feature_scale": 1.5}
    model = PinnerFormer(config, num_action_types=1, num_surfaces=1, **sizes)
    if poisoned:
        torch.nn.init.constant_(next(model.pins.parameters()), float("nan"))
    path = folder / f"model-{seed}-{poisoned}"
    save_model(path, model, {**sizes, "action_types": ["repin"], "surfaces": ["home"]})
    return ServedModel(model_version=path.name, path=path)


def pins_of(ids: Sequence[Any], *, seed: int = 0, candidates: Sequence[bool] | None = None) -> pa.Table:
    """The feature of a pin follows from its id and the seed."""
    feature = np.stack([np.random.default_rng([seed, hash_of(pin_id)]).normal(size=FEATURE_DIM) for pin_id in ids])
    values = pa.array(feature.astype(np.float32).reshape(-1))
    return pa.table(
        [
            pa.array(ids),
            pa.FixedSizeListArray.from_arrays(values, FEATURE_DIM),
            pa.array([f"interest of {pin_id}" for pin_id in ids]),
            pa.array([True] * len(ids) if candidates is None else candidates),
            pa.array([True] * len(ids)),
        ],
        schema=pin_features_schema("int" if isinstance(ids[0], int) else "string", FEATURE_DIM),
    )


def hash_of(pin_id: Any) -> int:
    return int(bucket_of(pa.array([pin_id]), 65_521)[0])


def publish_features(site: Site, ds: str, pins: pa.Table) -> PinManifest:
    state = pin_state(site)
    dataset = create_bucket(state.bucket_path(0), pins)
    counts = {"pins": pins.num_rows, "candidates": sum(pins["is_candidate"].to_pylist())}
    content = {"dim": FEATURE_DIM, "counts": counts, "inputs": None}
    return state.publish(ds, [dataset.version], content)


def embed(site: Site, days: Sequence[str], served: ServedModel, said: list[str] | None = None) -> list[Manifest]:
    engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=Path(site.data_dir) / "tmp")
    progress = (lambda _: None) if said is None else said.append
    return list(embed_pin_days(site, days, model_for=lambda ds: served, engine=engine, progress=progress))


def rows_of(site: Site, ds: str) -> pa.Table:
    return pin_embedding_state(site).open_bucket(ds, 0).to_table()


def vectors_of(site: Site, ds: str) -> dict[Any, bytes]:
    rows = rows_of(site, ds)
    vectors = matrix_of(rows["embedding"])
    return {pin_id: vectors[row].tobytes() for row, pin_id in enumerate(rows["pin_id"].to_pylist())}


@pytest.mark.parametrize("ids", [["pb", "pé", "a", "zz", "P"], [7, -3, 2**60, 0, 12]])
def test_candidates_are_embedded_by_pin_id(tmp_path: Path, ids: list[Any]) -> None:
    site, served = make_site(tmp_path, id_type="int" if isinstance(ids[0], int) else "string"), make_model(tmp_path)
    pins = pins_of(ids, candidates=[True, True, False, True, True])
    publish_features(site, DAYS[0], pins)
    [manifest] = embed(site, DAYS[:1], served)
    rows = rows_of(site, DAYS[0])
    assert rows.schema == pin_embeddings_schema(site.source.pins.pin_id.type, EMBEDDING_DIM)
    assert rows["pin_id"].to_pylist() == sorted(pin_id for pin_id in ids if pin_id != ids[2])
    assert rows["interest"].to_pylist() == [f"interest of {pin_id}" for pin_id in rows["pin_id"].to_pylist()]
    assert set(rows["model_version"].to_pylist()) == {served.model_version}
    model, _ = load_model(served.path)
    order = [ids.index(pin_id) for pin_id in rows["pin_id"].to_pylist()]
    with torch.inference_mode():
        expected = model.embed_pins(torch.from_numpy(matrix_of(pins["feature"]).copy()))[order]
    np.testing.assert_allclose(matrix_of(rows["embedding"]).astype(np.float32), expected.numpy(), atol=1e-3)
    assert manifest["counts"] == {"pins": 4, "clipped": 0}
    assert manifest["embedding_dim"] == EMBEDDING_DIM
    norm = manifest["norm"]
    assert 1 - 1e-3 < norm["min"] <= norm["mean"] <= norm["max"] < 1 + 1e-3


def without_vectors(pins: pa.Table, *rows: int) -> pa.Table:
    """Return the pins without the vectors of these rows."""
    has_feature = pa.array([row not in rows for row in range(len(pins))])
    feature = pc.if_else(has_feature, pins["feature"].combine_chunks(), None)
    return pins.set_column(1, "feature", feature).set_column(4, "has_feature", has_feature)


def test_candidates_without_a_vector_are_left_out(tmp_path: Path) -> None:
    site, served = make_site(tmp_path), make_model(tmp_path)
    pins = pins_of(["a", "b", "c", "d"], candidates=[True, True, False, True])
    publish_features(site, DAYS[0], pins)
    publish_features(site, DAYS[1], without_vectors(pins, 1, 2))
    [_, manifest] = embed(site, DAYS[:2], served)
    assert rows_of(site, DAYS[1])["pin_id"].to_pylist() == ["a", "d"]
    assert manifest["counts"] == {"pins": 2, "clipped": 0}
    everything = vectors_of(site, DAYS[0])
    assert vectors_of(site, DAYS[1]) == {pin_id: everything[pin_id] for pin_id in ("a", "d")}
    publish_features(site, DAYS[1], without_vectors(pins, 0, 1, 3))
    with pytest.raises(PipelineError, match=r"none of the 3 candidates of pin_features .* has a content vector"):
        embed(site, [DAYS[1]], served)


def test_a_pins_vector_depends_on_its_feature_alone(tmp_path: Path) -> None:
    """Many chunks, one that is not full, a pin among others or alone: the same vector bit for bit."""
    site, served = make_site(tmp_path), make_model(tmp_path)
    ids = [f"pin{number * 7919 % 100_003}" for number in range(CHUNK_ROWS + BLOCK_ROWS + 17)]
    everything = pins_of(ids)
    few = np.random.default_rng(0).permutation(len(ids))[: BLOCK_ROWS + 9]
    for ds, pins in zip(DAYS, (everything, everything.take(few), everything.slice(5, 1)), strict=False):
        publish_features(site, ds, pins)
        embed(site, [ds], served)
    expected = vectors_of(site, DAYS[0])
    assert len(expected) == len(ids)
    for ds in DAYS[1:3]:
        found = vectors_of(site, ds)
        assert found == {pin_id: expected[pin_id] for pin_id in found}
    assert len(vectors_of(site, DAYS[1])) == len(few)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(tmp_path: Path, num_threads: int) -> None:
    model, _ = load_model(make_model(tmp_path).path)
    feature = np.random.default_rng(0).normal(size=(3 * BLOCK_ROWS + 1, FEATURE_DIM)).astype(np.float32)
    before = torch.get_num_threads()
    with pin_tower(model, num_threads=num_threads) as tower:
        everything = tower(feature)
        assert everything[-2:].tobytes() == tower(feature[-2:]).tobytes()
    with pin_tower(model, num_threads=1) as tower:
        assert everything.tobytes() == tower(feature).tobytes()
    assert torch.get_num_threads() == before


def test_the_same_features_and_model_are_embedded_once(tmp_path: Path) -> None:
    site, served = make_site(tmp_path), make_model(tmp_path)
    features = publish_features(site, DAYS[0], pins_of(["a", "b"]))
    pin_state(site).publish(DAYS[1], features["versions"], features)  # a day without news shares its version
    said: list[str] = []
    first, second = embed(site, DAYS[:2], served, said)
    [again] = embed(site, DAYS[:1], served, said)
    assert again == first
    assert second == first | {"ds": DAYS[1]}
    assert sum("unchanged" in line for line in said) == 2
    other = make_model(tmp_path, seed=1)
    [changed] = embed(site, DAYS[1:2], other)
    assert changed["versions"] != first["versions"]
    assert changed["digest"] != first["digest"]
    assert vectors_of(site, DAYS[0]) != vectors_of(site, DAYS[1])
    assert set(rows_of(site, DAYS[1])["model_version"].to_pylist()) == {other.model_version}


def test_a_range_gives_what_days_give_singly(tmp_path: Path) -> None:
    served, found = make_model(tmp_path), []
    for name, groups in (("range", [DAYS[:3]]), ("singly", [[ds] for ds in DAYS[:3]])):
        site = make_site(tmp_path / name)
        for number, ds in enumerate(DAYS[:3]):
            publish_features(site, ds, pins_of([f"p{pin}" for pin in range(20 + number)], seed=number))
        for days in groups:
            embed(site, days, served)
        found.append({ds: vectors_of(site, ds) for ds in DAYS[:3]})
    assert found[0] == found[1]


def test_days_beyond_the_retention_are_dropped(tmp_path: Path) -> None:
    site, served = make_site(tmp_path), make_model(tmp_path)
    for ds in DAYS:
        publish_features(site, ds, pins_of(["a", "b"], seed=int(ds[-2:])))
    embed(site, DAYS, served)
    assert pin_embedding_state(site).days() == DAYS[1:]
    with pytest.raises(PipelineError, match="older than the 3 days that are kept"):
        embed(site, DAYS[:1], served)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("feature", "the feature of pin 'p3' has a value that is not finite; fix its vector, then: dagster asset"),
        ("model", "6 embeddings are not of unit length; the first is that of pin_id 'p0'"),
        ("candidates", "none of the 6 pins of pin_features 2026-01-01 is a candidate"),
        ("twice", "a pin_id has two rows; nothing was published"),
        ("users", "user_embeddings 2026-01-01 is of model other, the pins were to be embedded by model model-1-False"),
    ],
)
def test_what_is_wrong_is_named_and_the_old_partition_stays(tmp_path: Path, what: str, sentence: str) -> None:
    site, ids = make_site(tmp_path), [f"p{pin}" for pin in range(6)]
    publish_features(site, DAYS[0], pins_of(ids))
    [old] = embed(site, DAYS[:1], make_model(tmp_path))
    vectors = vectors_of(site, DAYS[0])
    pins = pins_of(ids, candidates=[False] * 6 if what == "candidates" else None)
    if what == "feature":
        values = matrix_of(pins["feature"]).copy()
        values[3, -1] = np.inf
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), FEATURE_DIM)
        pins = pins.set_column(1, pins.schema.field("feature"), column)
    if what == "twice":
        pins = pa.concat_tables([pins, pins.slice(0, 1)])
    if what == "users":
        embedding_state(site).publish(DAYS[0], [1, 1], {"model_version": "other"})
    publish_features(site, DAYS[0], pins)
    with pytest.raises(PipelineError) as caught:
        embed(site, DAYS[:1], make_model(tmp_path, seed=1, poisoned=what == "model"))
    assert sentence in str(caught.value)
    assert pin_embedding_state(site).require(DAYS[0]) == old
    assert vectors_of(site, DAYS[0]) == vectors


def test_a_repeated_pin_is_found_across_chunks(tmp_path: Path) -> None:
    site = make_site(tmp_path, id_type="int")
    pins = pins_of(list(range(10)))
    many = pins.take(pa.array(np.arange(CHUNK_ROWS + 1) % 10))
    ids = pa.array([*range(CHUNK_ROWS), CHUNK_ROWS - 1])
    publish_features(site, DAYS[0], many.set_column(0, "pin_id", ids))
    with pytest.raises(PipelineError, match="a pin_id has two rows"):
        embed(site, DAYS[:1], make_model(tmp_path))


def test_features_of_another_width_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    features = publish_features(site, DAYS[0], pins_of(["a"]))
    pin_state(site).publish(DAYS[0], features["versions"], features | {"dim": 5})
    with pytest.raises(PipelineError, match="reads features of 37 numbers, those of pin_features 2026-01-01 have 5"):
        embed(site, DAYS[:1], make_model(tmp_path))


KILLED = """
import os, sys
from pathlib import Path
from pf_core.embeddings.pins import _Pass
from tests.embeddings.test_pins import DAYS, embed, make_model, make_site
root = Path(sys.argv[1])
def wait(self, vectors):
    (root / "half done").touch()
    import time; time.sleep(60)
_Pass._count = wait
embed(make_site(root), DAYS[:1], make_model(root, seed=1))
"""


def test_killed_while_embedding(tmp_path: Path) -> None:
    site, ids = make_site(tmp_path), [f"p{pin}" for pin in range(50)]
    publish_features(site, DAYS[0], pins_of(ids))
    [old] = embed(site, DAYS[:1], make_model(tmp_path))
    vectors = vectors_of(site, DAYS[0])
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY)
    while not (tmp_path / "half done").exists():
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(PipelineError, match="another run is writing pin_embeddings"):
        embed(site, DAYS[:1], make_model(tmp_path, seed=1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert pin_embedding_state(site).require(DAYS[0]) == old
    assert vectors_of(site, DAYS[0]) == vectors
    [new] = embed(site, DAYS[:1], make_model(tmp_path, seed=1))
    assert new["counts"] == {"pins": 50, "clipped": 0}
    assert vectors_of(site, DAYS[0]).keys() == vectors.keys()


# The exact search that an index is compared with


def publish_users(site: Site, ds: str, ids: Sequence[Any], vectors: np.ndarray, *, seed: int = 0) -> None:
    """A snapshot of these users, each bucket's rows in random order."""
    state, versions = snapshot_state(site), []
    bucket, rng = bucket_of(pa.array(ids), state.num_buckets), np.random.default_rng(seed)
    pin_id = site.source.pins.pin_id.type
    schema = user_embeddings_schema(site.source.actions.user_id.type, pin_id, vectors.shape[1])
    for number in range(state.num_buckets):
        rows = rng.permutation(np.flatnonzero(bucket == number))
        columns: dict[str, Any] = {
            "user_id": pa.array(ids).take(pa.array(rows)),
            "embedding": column_of(vectors[rows]),
            "model_version": pa.array(["m"] * len(rows), pa.string()),
            "computed_ds": pa.array([0] * len(rows), pa.int32()).cast(pa.date32()),
            "last_action_ts": pa.array([0] * len(rows), pa.int64()).cast(schema.field("last_action_ts").type),
            "num_actions": pa.array([1] * len(rows), pa.int32()),
            **empty_lists(pin_id, len(rows)),
        }
        versions.append(create_bucket(state.bucket_path(number), pa.table(columns, schema=schema)).version)
    state.publish(ds, versions, {"model_version": "m", "embedding_dim": vectors.shape[1]})


@pytest.mark.parametrize("num_users", [1, 5, 60, 100])
def test_the_same_users_are_sampled_whatever_the_order_of_rows(tmp_path: Path, num_users: int) -> None:
    site = make_site(tmp_path)
    ids = [f"user {number}" for number in range(100)]
    vectors = np.stack([np.arange(100), np.arange(100) % 7], axis=1).astype(np.float16)
    publish_users(site, DAYS[0], ids, vectors)
    publish_users(site, DAYS[1], ids[::-1], vectors[::-1], seed=1)
    first, second = (sample_users(snapshot_state(site).open_day(ds), num_users) for ds in DAYS[:2])
    assert sorted(first[:, 0]) == sorted(second[:, 0])
    assert len(set(first[:, 0])) == len(first) == num_users
    assert {tuple(row) for row in first} <= {tuple(row) for row in vectors.tolist()}
    smaller = sample_users(snapshot_state(site).open_day(DAYS[0]), max(1, num_users // 2))
    assert set(smaller[:, 0]) <= set(first[:, 0])


def test_a_sample_of_more_users_than_there_are_is_all_of_them(tmp_path: Path) -> None:
    site = make_site(tmp_path, id_type="int")
    publish_users(site, DAYS[0], list(range(30)), np.arange(60).reshape(30, 2).astype(np.float16))
    assert len(sample_users(snapshot_state(site).open_day(DAYS[0]), 31)) == 30


def test_exact_search_gives_the_largest_inner_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, served = make_site(tmp_path), make_model(tmp_path)
    monkeypatch.setattr("pf_core.embeddings.pins.USERS_AT_ONCE", 7)
    publish_features(site, DAYS[0], pins_of([f"p{pin}" for pin in range(300)]))
    embed(site, DAYS[:1], served)
    pins = matrix_of(rows_of(site, DAYS[0])["embedding"]).astype(np.float32)
    users = np.random.default_rng(0).normal(size=(20, EMBEDDING_DIM)).astype(np.float32)
    expected = -np.sort(-(users @ pins.T), axis=1)
    opened = pin_embedding_state(site).open_day(DAYS[0])
    np.testing.assert_allclose(nearest_scores(opened, users, 10), expected[:, :10], rtol=1e-5)
    assert nearest_scores(opened, users, 1000).shape == (20, 300)
