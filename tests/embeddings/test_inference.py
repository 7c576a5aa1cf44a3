"""From timelines to vectors: what the model reads, and that a user's vector is a function of that alone."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pf_core.config.source import PinsSource
from pf_core.config.training import ModelConfig
from pf_core.days import shift_ds
from pf_core.embeddings.inference import (
    LENGTH_STEP,
    ServedModel,
    UserSequences,
    cut_sequences,
    embed,
    encode_timelines,
    hash_inputs,
    open_served_model,
    plan_batches,
)
from pf_core.embeddings.vectors import NORM_TOLERANCE
from pf_core.errors import PipelineError
from pf_core.model.checkpoint import save_model
from pf_core.model.device import choose_device
from pf_core.model.sequences import Sequences
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import build_pin_features, pin_state
from pf_core.pins.lookup import find_pins
from pf_core.pins.packed import PACKS_KEPT, PackedPins, open_pins, pack_pins, write_pins
from pf_core.schemas import user_timelines_schema
from tests.support.sites import START, Row, SmallSite

FEATURE_DIM = 12
NUM_PINS = 50
ACTION_TYPES = ["click", "closeup", "repin"]
SURFACES = ["homefeed", "search"]
MODEL = ModelConfig(
    sequence_length=40, num_layers=2, hidden_dim=32, num_heads=4, embedding_dim=16, category_dim=4, pin_hidden_dim=8
)
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
DAY_S = 86_400

Action = tuple[str, float, str, str, float]  # pin, seconds since FIRST, action type, surface, duration


def make_model(seed: int = 0, **changes: Any) -> PinnerFormer:
    """Far from its gentle start, so that every part shows in the result."""
    torch.manual_seed(seed)
    config = ModelConfig.model_validate(MODEL.model_dump() | changes)
    model = PinnerFormer(config, feature_dim=FEATURE_DIM, num_action_types=3, num_surfaces=2, time_origin_us=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def describe(model: PinnerFormer) -> dict[str, Any]:
    return {
        "action_types": ACTION_TYPES,
        "surfaces": SURFACES,
        "feature_dim": FEATURE_DIM,
        "time_origin_us": 0,
        "feature_scale": 1.0,
        "model": model.config.model_dump(mode="json"),
    }


def feature_of(pin: int) -> np.ndarray:
    return np.random.default_rng(pin).normal(size=FEATURE_DIM).astype(np.float32)


@pytest.fixture
def pins(tmp_path: Path) -> PackedPins:
    return make_pins(tmp_path / "pins", {f"p{pin:03d}": feature_of(pin) for pin in range(NUM_PINS)})


def make_pins(folder: Path, features: dict[str, np.ndarray]) -> PackedPins:
    folder.mkdir()
    np.save(folder / "feature.npy", np.stack(list(features.values())))
    np.save(folder / "has_feature.npy", np.ones(len(features), bool))
    np.save(folder / "feature_hash.npy", np.array([hash(vector.tobytes()) for vector in features.values()]))
    table = pa.table({"pin_id": list(features)})
    with pa.ipc.new_file(folder / "pin_id.arrow", table.schema) as writer:
        writer.write_table(table)
    return open_pins(folder)


def timelines_of(users: dict[int, Sequence[Action]]) -> pa.Table:
    rows = [
        {
            "user_id": user,
            "pin_id": [action[0] for action in actions],
            "ts": [FIRST + timedelta(seconds=action[1]) for action in actions],
            "action_type": [action[2] for action in actions],
            "surface": [action[3] for action in actions],
            "duration_s": [action[4] for action in actions],
        }
        for user, actions in users.items()
    ]
    return pa.Table.from_pylist(rows, schema=user_timelines_schema("int", "string"))


def some_users(lengths: Sequence[int], seed: int = 0) -> dict[int, list[Action]]:
    """User n + 100 has lengths[n] actions."""
    rng = np.random.default_rng(seed)
    users = {}
    for number, length in enumerate(lengths):
        seconds = np.sort(rng.uniform(0, 60 * DAY_S, length)).round(3)
        users[number + 100] = [
            (
                f"p{rng.integers(NUM_PINS):03d}",
                float(second),
                str(rng.choice(ACTION_TYPES)),
                str(rng.choice(SURFACES)),
                float(rng.integers(60)),
            )
            for second in seconds
        ]
    return users


def by_hand(users: Sequence[Sequence[Action]]) -> Sequences:
    """What `embed_users` reads, without any of the code under test; sequences of equal length."""

    def column(value: Callable[[Action], Any]) -> list[list[Any]]:
        return [[value(action) for action in actions] for actions in users]

    features = column(lambda action: feature_of(int(action[0][1:])))
    first_us = int(FIRST.timestamp()) * 1_000_000
    return Sequences(
        feature_RSF=torch.from_numpy(np.array(features, np.float32)),
        action_type_RS=torch.tensor(column(lambda action: ACTION_TYPES.index(action[2]))),
        surface_RS=torch.tensor(column(lambda action: SURFACES.index(action[3]))),
        duration_RS=torch.tensor(column(lambda action: action[4])),
        ts_RS=torch.tensor(column(lambda action: first_us + round(action[1] * 1e6))),
        length_R=torch.tensor([len(actions) for actions in users]),
    )


def cut(timelines: pa.Table, pins: PackedPins, description: dict[str, Any]) -> UserSequences:
    return cut_sequences(encode_timelines(timelines, pins, description), description["model"]["sequence_length"])


def embed_all(model: PinnerFormer, timelines: pa.Table, pins: PackedPins, *, num_threads: int = 1) -> dict[int, bytes]:
    """Each user's vector, bit for bit."""
    sequences = cut(timelines, pins, describe(model))
    rows = np.arange(len(sequences.user_ids))
    vectors, _ = embed(model, sequences, rows, pins, num_threads=num_threads)
    return {user: vector.tobytes() for user, vector in zip(sequences.user_ids.to_pylist(), vectors, strict=True)}


# --- what the model reads ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_vectors_are_the_models_own_on_hand_cut_sequences(pins: PackedPins, is_causal: bool) -> None:
    model = make_model(is_causal=is_causal)
    users = some_users([1, 2, 7, 8, 9, 39, 40, 41, 100])
    vectors = embed_all(model, timelines_of(users), pins)
    for user, actions in users.items():
        sequence = by_hand([actions[-40:]])
        newest = torch.tensor([sequence.ts_RS.shape[1] - 1])
        with torch.inference_mode():
            expected = model.embed_positions(sequence, torch.tensor([0]), newest)[0]
        found = np.frombuffer(vectors[user], np.float32)
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)
        assert abs(np.linalg.norm(found.astype(np.float16).astype(np.float32)) - 1) < NORM_TOLERANCE


@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_newest_position_alone_is_what_the_whole_encoder_gives_there(num_layers: int, is_causal: bool) -> None:
    model = make_model(num_layers=num_layers, is_causal=is_causal)
    sequences = by_hand(list(some_users([30, 30, 30]).values()))
    sequences = sequences._replace(length_R=torch.tensor([30, 17, 1]))
    with torch.inference_mode():
        whole = model.encode(sequences)[torch.arange(3), sequences.length_R - 1]
        torch.testing.assert_close(model.encode_newest(sequences), whole, atol=1e-5, rtol=1e-5)


def test_actions_without_a_feature_or_with_unknown_words_are_dropped_and_counted(pins: PackedPins) -> None:
    good = [("p001", 10.0, "repin", "homefeed", 1.0), ("p002", 20.0, "click", "search", 2.0)]
    bad = [
        ("elsewhere", 5.0, "repin", "homefeed", 1.0),
        ("p003", 6.0, "mystery", "homefeed", 1.0),
        ("p004", 15.0, "repin", "moon", 1.0),
        ("elsewhere", 30.0, "mystery", "moon", 1.0),
    ]
    mixed = sorted([*good, *bad], key=lambda action: action[1])
    model = make_model()
    sequences = cut(timelines_of({7: mixed, 8: bad, 9: good}), pins, describe(model))
    assert sequences.user_ids.to_pylist() == [7, 9]
    assert sequences.num_without_actions == 1
    assert sequences.num_no_feature == 2 + 2
    assert sequences.num_unknown_word == 2 + 2  # where the pin has no feature, that is the reason given
    assert sequences.lengths.tolist() == [2, 2]
    vectors = embed_all(model, timelines_of({7: mixed, 8: bad, 9: good}), pins)
    assert vectors[7] == vectors[9]
    last_us = int(FIRST.timestamp()) * 1_000_000 + 20_000_000
    assert sequences.last_action_us.tolist() == [last_us, last_us]  # not the unusable action's


def test_a_model_may_read_some_action_types_only(pins: PackedPins) -> None:
    actions = [("p001", 10.0, "repin", "homefeed", 1.0), ("p002", 20.0, "click", "search", 2.0)]
    model = make_model()
    description = describe(model)
    description["model"] = description["model"] | {"sequence_types": ["repin"]}
    sequences = cut(timelines_of({7: actions}), pins, description)
    assert sequences.actions.pin.tolist() == [1]
    assert sequences.num_unknown_word == 1


def test_the_newest_usable_actions_are_read(pins: PackedPins) -> None:
    """Dropping comes before cutting: an unusable action takes nobody's place."""
    [actions] = some_users([60]).values()
    unusable = [("elsewhere", action[1] + 0.5, *action[2:]) for action in actions]
    together = sorted([*actions, *unusable], key=lambda action: action[1])
    vectors = embed_all(make_model(), timelines_of({1: together, 2: actions, 3: actions[-40:], 4: actions[-39:]}), pins)
    assert vectors[1] == vectors[2] == vectors[3] != vectors[4]


def test_timelines_without_users_give_nothing(pins: PackedPins) -> None:
    assert embed_all(make_model(), timelines_of({}), pins) == {}


# --- a function of the user alone -------------------------------------------------------------------

LENGTHS = [int(length) for length in np.clip(np.random.default_rng(3).lognormal(2.5, 1, 90).round(), 1, 60)]


def test_embedding_some_users_equals_embedding_all_bit_for_bit(pins: PackedPins) -> None:
    model, users = make_model(), some_users(LENGTHS)
    everyone = embed_all(model, timelines_of(users), pins)
    assert len(set(everyone.values())) == len(users)
    rng = np.random.default_rng(0)
    for size in (1, 1, 1, 2, 3, 5, 10, 30, 89):
        chosen = rng.choice(list(users), size, replace=False).tolist()
        assert embed_all(model, timelines_of({user: users[user] for user in chosen}), pins) == {
            user: everyone[user] for user in chosen
        }


def test_neither_order_nor_threads_change_a_bit(pins: PackedPins) -> None:
    model, users = make_model(), some_users(LENGTHS)
    everyone = embed_all(model, timelines_of(users), pins)
    backwards = dict(reversed(users.items()))
    before = torch.get_num_threads()
    try:
        for num_torch_threads in (1, 3):
            torch.set_num_threads(num_torch_threads)
            assert embed_all(model, timelines_of(backwards), pins, num_threads=3) == everyone
            assert torch.get_num_threads() == num_torch_threads  # as it was
    finally:
        torch.set_num_threads(before)


def test_one_thread_computes_a_batch(pins: PackedPins, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make_model(), []
    original = model.embed_users

    def spy(actions: Sequences) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return original(actions)

    monkeypatch.setattr(model, "embed_users", spy)
    embed_all(model, timelines_of(some_users(LENGTHS)), pins, num_threads=2)
    assert set(seen) == {1}


def test_a_subset_is_embedded_by_row(pins: PackedPins) -> None:
    model = make_model()
    sequences = cut(timelines_of(some_users(LENGTHS)), pins, describe(model))
    num_done: list[int] = []
    everyone, _ = embed(model, sequences, np.arange(90), pins, num_threads=1)
    rows = np.array([80, 3, 41])
    chosen, num_padded = embed(model, sequences, rows, pins, num_threads=1, progress=num_done.append)
    assert np.array_equal(chosen, everyone[rows])
    assert sorted(num_done) == num_done
    assert num_done[-1] == 3
    assert num_padded > 0


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 300))
def test_a_batchs_shape_follows_from_its_sequences_length(lengths: list[int], positions: int) -> None:
    batches = list(plan_batches(np.array(lengths, np.int64), sequence_length=50, positions=positions))
    planned = [row for batch in batches for row in batch.rows.tolist()]
    assert sorted(planned) == list(range(len(lengths)))
    for batch in batches:
        for row in batch.rows:
            assert batch.num_steps == min(-(-lengths[row] // LENGTH_STEP) * LENGTH_STEP, 50)
        assert 0 < len(batch.rows) <= batch.num_rows
        assert (batch.num_rows - 1) * batch.num_steps < positions <= batch.num_rows * batch.num_steps


# --- input_hash -------------------------------------------------------------------------------------


def hashes_of(users: dict[int, Sequence[Action]], pins: PackedPins) -> list[int]:
    sequences = cut(timelines_of(users), pins, describe(make_model()))
    return [int(value) for value in hash_inputs(sequences, pins)]


def test_the_hash_sees_all_that_the_model_reads_and_nothing_else(pins: PackedPins) -> None:
    [actions] = some_users([45]).values()
    second = actions[20][1]
    actions[20] = ("p001", second, "repin", "search", 5.0)
    changes: list[Action] = [
        ("p002", second, "repin", "search", 5.0),
        ("p001", second + 0.001, "repin", "search", 5.0),
        ("p001", second, "click", "search", 5.0),
        ("p001", second, "repin", "homefeed", 5.0),
        ("p001", second, "repin", "search", 5.5),
    ]
    variants = {1: actions, 2: actions[:-1], 3: actions[-20:]}
    for number, change in enumerate(changes, 4):
        variants[number] = [*actions[:20], change, *actions[21:]]
    found = hashes_of(variants, pins)
    assert len(set(found)) == len(variants)
    unread = [("elsewhere", *actions[20][1:]), *actions[5:]]
    assert hashes_of({9: unread, 10: actions[-40:]}, pins) == [found[0]] * 2


def test_the_hash_sees_a_pins_new_feature(pins: PackedPins, tmp_path: Path) -> None:
    features = {f"p{pin:03d}": feature_of(pin) for pin in range(NUM_PINS)}
    features["p007"] = features["p007"].copy()
    features["p007"][3] += 1e-6
    changed = make_pins(tmp_path / "changed", features)
    of_seven: list[Action] = [("p007", 1.0, "repin", "homefeed", 0.0)]
    of_eight: list[Action] = [("p008", 1.0, "repin", "homefeed", 0.0)]
    before, after = (hashes_of({1: of_seven, 2: of_eight}, some) for some in (pins, changed))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_equal_hashes_mean_equal_vectors(pins: PackedPins) -> None:
    model, users = make_model(), some_users([5, 12, 40])
    doubled = users | {user + 1000: actions for user, actions in users.items()}
    sequences = cut(timelines_of(doubled), pins, describe(model))
    found = hash_inputs(sequences, pins)
    vectors, _ = embed(model, sequences, np.arange(6), pins, num_threads=1)
    assert np.array_equal(found[:3], found[3:])
    assert np.array_equal(vectors[:3], vectors[3:])


# --- packed pins ------------------------------------------------------------------------------------


def write_catalogue(site: SmallSite, ds: str, pins: dict[str, np.ndarray]) -> None:
    path = site.root / "pins" / f"{ds}.parquet"
    path.parent.mkdir(exist_ok=True)
    vectors = pa.array([vector.tolist() for vector in pins.values()], pa.list_(pa.float32()))
    pq.write_table(pa.table({"pin": pa.array(list(pins), pa.string()), "vector": vectors}), path)


def build_catalogue(site: SmallSite, num_days: int, log: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """Ten pins a day; `log` has the actions of every day."""
    days = [shift_ds(START, day) for day in range(num_days)]
    for number, ds in enumerate(days):
        write_catalogue(site, ds, {f"p{10 * number + pin:03d}": feature_of(pin) for pin in range(10)})
        site.write_log(ds, log)
    site.ingest(days)
    return list(build_pin_features(site.site, days, engine=site.engine, progress=lambda _: None))


def test_pins_are_packed_once_for_each_version(small_site: Callable[..., SmallSite]) -> None:
    site, said = small_site(), []
    first, second = build_catalogue(site, 2)
    path = pack_pins(site.site, first, said.append)
    inode = path.stat().st_ino
    assert pack_pins(site.site, first, said.append) == path
    assert path.stat().st_ino == inode
    assert said == ["packing the features of 10 pins, pin_features 2026-01-01"]
    assert pack_pins(site.site, second, said.append) != path
    pins = open_pins(path)
    assert pins.feature.shape == (10, FEATURE_DIM)
    assert np.array_equal(pins.feature[4], feature_of(4))
    assert len(set(pins.feature_hash.tolist())) == 10
    again = open_pins(pack_pins(site.site, second, said.append))
    assert np.array_equal(again.feature_hash[10:], pins.feature_hash)  # p010 … have the vectors of p000 …


def test_pins_without_a_feature_are_packed_as_zeros(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    [manifest] = build_catalogue(site, 1, [(1, "p0035", 1, "look"), (1, "p000", 2, "look")])
    pins = open_pins(pack_pins(site.site, manifest, lambda _: None))
    assert find_pins(pins.ids, pa.array(["p0035", "p003", "p004"])).tolist() == [4, 3, 5]
    assert pins.has_feature.tolist() == [True] * 4 + [False] + [True] * 6
    assert not pins.feature[4].any()
    assert np.array_equal(pins.feature[5], feature_of(4))
    assert len(set(pins.feature_hash.tolist())) == 11


def test_pins_of_a_site_without_vectors_are_packed(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    source = site.site.source.model_copy(update={"pins": PinsSource(pin_id=site.site.source.actions.pin_id)})
    site.site = site.site.model_copy(update={"source": source})
    [manifest] = build_catalogue(site, 1, [(1, "b", 1, "look"), (1, "a", 2, "look")])
    pins = open_pins(pack_pins(site.site, manifest, lambda _: None))
    assert pins.feature.shape == (2, 0)
    assert not pins.has_feature.any()
    assert len(pins.feature_hash) == 2
    assert find_pins(pins.ids, pa.array(["b"])).tolist() == [1]


def test_the_packs_that_were_used_last_are_kept(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    manifests = build_catalogue(site, PACKS_KEPT + 1)
    paths = [pack_pins(site.site, manifest, lambda _: None) for manifest in manifests[:-1]]
    pack_pins(site.site, manifests[0], lambda _: None)
    paths.append(pack_pins(site.site, manifests[-1], lambda _: None))
    assert [path.exists() for path in paths] == [True, False, *[True] * (PACKS_KEPT - 1)]


def test_the_pack_that_was_just_made_is_kept_when_the_clock_was_set_back(small_site: Callable[..., SmallSite]) -> None:
    site = small_site()
    manifests = build_catalogue(site, PACKS_KEPT + 2)
    tomorrow = time.time() + 86_400
    paths = []
    for number, manifest in enumerate(manifests[:PACKS_KEPT]):
        paths.append(pack_pins(site.site, manifest, lambda _: None))
        os.utime(paths[-1].with_suffix(".json"), (tomorrow + number, tomorrow + number))
    for manifest in manifests[PACKS_KEPT:]:
        paths.append(pack_pins(site.site, manifest, lambda _: None))
        assert len(open_pins(paths[-1]).feature)
    assert [path.exists() for path in paths] == [False, False, *[True] * PACKS_KEPT]


def test_a_pack_that_was_interrupted_is_made_again(
    small_site: Callable[..., SmallSite], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = small_site()
    [manifest] = build_catalogue(site, 1)

    def interrupted(*arguments: Any, **options: Any) -> dict[str, int]:
        write_pins(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pf_core.pins.packed.write_pins", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack_pins(site.site, manifest, lambda _: None)
    folder = pin_state(site.site).root / "packed"
    assert list(folder.glob("v*")) == []
    path = pack_pins(site.site, manifest, lambda _: None)
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", path.name, f"{path.name}.json"]
    assert len(open_pins(path).feature) == 10


# --- models -----------------------------------------------------------------------------------------


def test_a_model_is_opened_once(tmp_path: Path) -> None:
    model = make_model()
    save_model(tmp_path / "model", model, describe(model))
    served, device = ServedModel(model_version="a", path=tmp_path / "model"), choose_device("cpu")
    opened, description = open_served_model(served, device)
    assert open_served_model(served, device)[0] is opened
    assert description["action_types"] == ACTION_TYPES
    assert not opened.training


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no model in .*nowhere"):
        open_served_model(ServedModel(model_version="a", path=tmp_path / "nowhere"), choose_device("cpu"))
