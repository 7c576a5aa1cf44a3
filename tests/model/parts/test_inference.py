"""Records of users: independent of who else is embedded, bit for bit, and what memory keeps of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pf_core.model.parts import inference
from pf_core.model.parts.inference import NEVER, KnownPins, Records, embed_records
from pf_core.model.parts.own_pins import own_pins
from pf_core.timelines.arrays import Timelines
from tests.support.parts import known_pins, random_model, random_table, random_timelines

NUM_PINS, IN_TABLE = 400, 350
"""Pins of the timelines, and how many of them the table has."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A block is computed by one thread, as in serving."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some users have more own pins than a block; blocks are full of users or of pins."""
    monkeypatch.setattr(inference, "BLOCK_PINS", 128)
    monkeypatch.setattr(inference, "BLOCK_USERS", 16)


@pytest.fixture(params=["all parts", "no memory", "no content", "content alone", "transformer"])
def known(request: pytest.FixtureRequest, tmp_path: Path) -> KnownPins:
    config = {
        "all parts": {},
        "no memory": {"memory": False},
        "no content": {"content": False},
        "content alone": {"factor_dim": 0, "trend_dim": 0},
        "transformer": {"transformer_layers": 2, "transformer_dim": 16, "sequence_length": 12},
    }
    model = random_model(content_dim=6, memory_size=10, **config[request.param])
    return known_pins(model, random_table(model, tmp_path, num_pins=IN_TABLE), num_pins=NUM_PINS)


def embed(known: KnownPins, timelines: Timelines, users: Sequence[int] | np.ndarray) -> Records:
    users = np.asarray(users)
    return embed_records(known, timelines, timelines.offsets[users], timelines.offsets[users + 1])


def record(records: Records, row: int) -> tuple[bytes, bytes, bytes]:
    memory = slice(*records.offsets_B[row : row + 2].tolist())
    values = records.vector_BV[row], records.memory_pin[memory], records.memory_increment[memory]
    return values[0].tobytes(), values[1].tobytes(), values[2].tobytes()


LENGTHS = [*([1] * 8), *range(1, 40, 2), 900, 2, 300, 700, *range(40, 3, -3), 500, *([1] * 5)]
"""Many users with one action; users with more than 128 own pins, which is more than a block."""


@pytest.mark.usefixtures("_small_blocks")
def test_who_else_is_embedded_changes_no_bit(known: KnownPins) -> None:
    timelines = random_timelines(LENGTHS, num_pins=NUM_PINS)
    num_users = timelines.num_users
    together = embed(known, timelines, np.arange(num_users))
    expected = [record(together, user) for user in range(num_users)]
    rng = np.random.default_rng(1)
    for size in (num_users, num_users, 30, 17, 5, 2):
        users = rng.permutation(num_users)[:size]
        found = embed(known, timelines, users)
        for row, user in enumerate(users.tolist()):
            assert record(found, row) == expected[user], (size, user)
    for user in range(0, num_users, 2):
        assert record(embed(known, timelines, [user]), 0) == expected[user], user


@pytest.mark.usefixtures("_small_blocks")
def test_the_actions_before_and_after_change_no_bit(known: KnownPins) -> None:
    """A user's slice of the timelines is all that is read, wherever it lies."""
    timelines = random_timelines([30, 5, 200], num_pins=NUM_PINS)
    first, end = timelines.offsets[1], timelines.offsets[2]
    names = ("pin", "ts", "action_type", "surface", "duration", "is_positive")
    moved = Timelines(offsets=np.array([0, 5]), **{name: getattr(timelines, name)[first:end] for name in names})
    assert record(embed(known, moved, [0]), 0) == record(embed(known, timelines, [1]), 0)


@pytest.mark.parametrize("lengths", [[3, 5000, 1], [1] * 70])
def test_blocks_of_the_real_size(tmp_path: Path, lengths: list[int]) -> None:
    """5,000 actions have more than 4,096 own pins here; 70 users are more than a block's."""
    model = random_model(content_dim=6)
    known = known_pins(model, random_table(model, tmp_path, num_pins=90_000), num_pins=100_000)
    timelines = random_timelines(lengths, num_pins=100_000)
    together = embed(known, timelines, np.arange(len(lengths)))
    for user in {0, 1, 2, len(lengths) - 1}:
        assert record(embed(known, timelines, [user]), 0) == record(together, user)


def test_vectors_have_unit_norm_and_no_slack(known: KnownPins) -> None:
    """With content alone, a user whose pins have no content vector has nothing but a slack of -1."""
    timelines = random_timelines(LENGTHS, num_pins=NUM_PINS)
    records = embed(known, timelines, np.arange(timelines.num_users))
    is_known = np.ones(timelines.num_users, bool)
    if known.model.trend is None:
        is_known = np.logical_or.reduceat(known.content(timelines.pin).any(axis=1), timelines.offsets[:-1])
        assert not is_known.all()
    np.testing.assert_allclose(np.linalg.norm(records.vector_BV, axis=1), 1, rtol=1e-5)
    assert records.vector_BV[:, -1].tolist() == np.where(is_known, 0, -1).tolist()
    assert np.isfinite(records.memory_increment).all()
    assert np.abs(records.memory_increment).max() < 100
    assert records.vector_BV.dtype == records.memory_increment.dtype == np.float32


def test_memory_keeps_the_best_by_the_whole_score(tmp_path: Path) -> None:
    """Kept are the 64 best sums of cosine and increment; a memory without an end shows all of them."""
    kept, everything = (
        embed(
            known_pins(model, random_table(model, tmp_path, num_pins=IN_TABLE), num_pins=NUM_PINS),
            random_timelines([600, 30, 900], num_pins=IN_TABLE, seed=3),
            [0, 1, 2],
        )
        for model in (random_model(), random_model(memory_size=10_000))
    )
    vectors = random_table(random_model(), tmp_path, num_pins=IN_TABLE).vector.astype(np.float64)
    assert np.diff(kept.offsets_B).tolist()[::2] == [64, 64]
    for row in range(3):
        mine, whole = (slice(*each.offsets_B[row : row + 2].tolist()) for each in (kept, everything))
        pins = everything.memory_pin[whole]
        assert len(set(pins.tolist())) == len(pins)
        score = vectors[pins] @ everything.vector_BV[row] + everything.memory_increment[whole]
        assert (np.diff(score) <= 1e-6).all()  # the best first
        assert kept.memory_pin[mine].tolist() == pins[:64].tolist()
        assert kept.memory_increment[mine].tolist() == everything.memory_increment[whole][:64].tolist()
        assert (kept.memory_increment[mine] >= 0).all()
        assert score.argsort().tolist() != (-everything.memory_increment[whole]).argsort().tolist()


def test_an_increment_on_the_cosines_scale_is_that_of_the_logit(tmp_path: Path) -> None:
    """scale * (cosine + increment) = log(exp(logit) + exp(strength + 1)), with the strength of the model."""
    model = random_model(memory_size=1000)
    table = random_table(model, tmp_path, num_pins=IN_TABLE)
    known, timelines = known_pins(model, table, num_pins=NUM_PINS), random_timelines([40], num_pins=IN_TABLE)
    records = embed(known, timelines, [0])
    arrays = own_pins(timelines, timelines.offsets[:1], timelines.offsets[1:])
    own = inference._filled(arrays, np.arange(len(arrays.pin_P)), arrays.row_P, np.arange(len(arrays.pin_P)))
    with torch.inference_mode():
        users = model.embed_users(own, known.inputs(arrays.pin_P))
        scale = float(model.unit_users(users.vector_BV)[1][0])
    strength = dict(zip(arrays.pin_P.tolist(), users.strength_P.tolist(), strict=False))
    for pin, increment in zip(records.memory_pin.tolist(), records.memory_increment.tolist(), strict=True):
        cosine = float(table.vector[pin].astype(np.float64) @ records.vector_BV[0])
        mixed = np.logaddexp(cosine * scale, strength[pin] + 1.0)
        assert scale * (cosine + increment) == pytest.approx(mixed, rel=1e-4, abs=1e-4)


def test_without_memory_own_pins_are_never_recommended_again(tmp_path: Path) -> None:
    model = random_model(memory=False)
    known = known_pins(model, random_table(model, tmp_path, num_pins=IN_TABLE), num_pins=NUM_PINS)
    timelines = random_timelines([600, 1], num_pins=NUM_PINS)
    records = embed(known, timelines, [0, 1])
    assert NEVER == -2
    assert set(records.memory_increment.tolist()) == {NEVER}
    assert np.diff(records.offsets_B).tolist() == [64, 1]
    cosine = known.table.vector[records.memory_pin[records.memory_pin < IN_TABLE]].astype(np.float32)
    mine = records.memory_pin[:64] < IN_TABLE
    assert (np.diff(cosine[: mine.sum()] @ records.vector_BV[0]) <= 1e-6).all()  # those that would come first


def test_pins_that_came_after_training(tmp_path: Path) -> None:
    """They have no factor, and the model's statistics of an unknown pin; content and memory carry them."""
    model = random_model(content_dim=6)
    known = known_pins(model, random_table(model, tmp_path, num_pins=3), num_pins=NUM_PINS)
    inputs = known.inputs(np.array([2, 3, 399]))
    assert inputs.trust_M.tolist() == [pytest.approx(float(known.table.trust[2])), 0, 0]
    assert not inputs.factor_MD[1:].any()
    assert torch.equal(inputs.statistics_MF[1], model.unknown_statistics_F)
    vectors = known.vectors(np.array([2, 3, 399]), inputs)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3), atol=1e-3, rtol=0)
    assert torch.equal(vectors[0], torch.from_numpy(known.table.vector[2].astype(np.float32)))
    timelines = random_timelines([20], num_pins=NUM_PINS)
    records = embed(known, timelines, [0])
    assert sorted(records.memory_pin.tolist()) == np.unique(timelines.pin).tolist()
    assert np.isfinite(records.vector_BV).all()
    assert np.isfinite(records.memory_increment).all()


def test_new_pins_are_embedded_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 new pins need 4 calls of the model, not 200; the same vectors as one by one, bit for bit."""
    model = random_model(content_dim=6)
    known = known_pins(model, random_table(model, tmp_path, num_pins=3), num_pins=NUM_PINS)
    pins = np.arange(203)
    with torch.inference_mode():
        one_by_one = [known.vectors(pins[pin : pin + 1], known.inputs(pins[pin : pin + 1])) for pin in pins]
        calls, original = list[int](), model.embed_pins

        def embed_pins(*inputs: Any) -> torch.Tensor:
            calls.append(1)
            return original(*inputs)

        monkeypatch.setattr(model, "embed_pins", embed_pins)
        together = known.vectors(pins, known.inputs(pins))
    assert len(calls) == 4
    assert torch.equal(together, torch.cat(one_by_one))


def test_nobody_is_embedded(known: KnownPins) -> None:
    records = embed(known, random_timelines([3], num_pins=NUM_PINS), np.zeros(0, np.int64))
    assert records.vector_BV.shape == (0, known.model.embedding_dim)
    assert records.offsets_B.tolist() == [0]
    assert len(records.memory_pin) == len(records.memory_increment) == 0
