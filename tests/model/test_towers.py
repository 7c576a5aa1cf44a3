"""The towers against numbers worked out by hand, and against a plain numpy transformer that has no padding at all."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pf_core.config.training import FeatureConfig, ModelConfig
from pf_core.model.sequences import Sequences
from pf_core.model.towers import ABSOLUTE_PERIODS_S, RELATIVE_PERIODS_S, PinnerFormer, TimeEncoding

NOW_US = 1_700_000_000_123_457
ORIGIN_US = NOW_US - 40 * 86_400_000_000
FEATURE_DIM = 6
WIDTHS = {
    **{"pin_feature": FEATURE_DIM, "action_type": 3, "surface": 3, "duration": 1},
    **{"absolute_time": 2 * 12 + 1, "since_latest": 2 * 32 + 1, "gap": 2 * 32 + 1},
}


def tiny_model(*, features: dict[str, bool] | None = None, **changes: Any) -> PinnerFormer:
    """Every weight, bias and phase random, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    base: dict[str, Any] = {"sequence_length": 9, "num_layers": 2, "hidden_dim": 8, "num_heads": 2}
    base |= {"embedding_dim": 5, "category_dim": 3, "pin_hidden_dim": 12, "near_identity_init": False}
    config = ModelConfig(features=FeatureConfig(**(features or {})), **(base | changes))
    sizes = {"feature_dim": FEATURE_DIM, "num_action_types": 4, "num_surfaces": 3}
    model = PinnerFormer(config, **sizes, time_origin_us=ORIGIN_US, feature_scale=1.7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.eval()


def some_actions(lengths: list[int], *, num_steps: int | None = None) -> Sequences:
    """Random actions, a few minutes to a few days apart; padding is 0 everywhere."""
    random = torch.Generator().manual_seed(1)
    num_rows, steps = len(lengths), num_steps or max(lengths)
    length_R = torch.tensor(lengths)
    real = torch.arange(steps) < length_R[:, None]
    gaps = (10 ** (torch.rand(num_rows, steps, generator=random, dtype=torch.float64) * 4 + 7)).long()
    return Sequences(
        feature_RSF=torch.randn(num_rows, steps, FEATURE_DIM, generator=random) * real[..., None],
        action_type_RS=torch.randint(0, 4, (num_rows, steps), generator=random) * real,
        surface_RS=torch.randint(0, 3, (num_rows, steps), generator=random) * real,
        duration_RS=(torch.rand(num_rows, steps, generator=random) * 30).floor() * real,
        ts_RS=(NOW_US - 86_400_000_000 + gaps.cumsum(1)) * real,
        length_R=length_R,
    )


def row_of(actions: Sequences, row: int) -> Sequences:
    """One sequence alone, without padding."""
    length = int(actions.length_R[row])
    cut = [tensor[row : row + 1, :length] for tensor in actions[:-1]]
    return Sequences(*cut, actions.length_R[row : row + 1])  # type: ignore[call-arg]


# --- an independent transformer: float64, one sequence at a time, loops ---------------------------


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def exact_turn(time_us: int, period_s: float) -> float:
    return float(Fraction(time_us, 1_000_000) / Fraction(period_s) % 1)


def encode_time(encoding: TimeEncoding, periods_s: list[float], time_us: int, log: float) -> list[float]:
    angles = [2 * math.pi * exact_turn(time_us, period) for period in periods_s]
    cos_phase, sin_phase = numbers(encoding.cos_phase), numbers(encoding.sin_phase)
    cosines = [math.cos(angle + phase) for angle, phase in zip(angles, cos_phase, strict=True)]
    sines = [math.sin(angle + phase) for angle, phase in zip(angles, sin_phase, strict=True)]
    return [*cosines, *sines, log]


def input_vectors(model: PinnerFormer, actions: Sequences) -> np.ndarray:
    days = [1 / 96, 1 / 48, 1 / 32, 1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3, 1, 7, 28, 365]
    absolute, relative = [day * 86_400 for day in days], list(np.geomspace(1, 4 * 7 * 86_400, 32))
    ts = actions.ts_RS[0].tolist()
    rows = []
    for index, time_us in enumerate(ts):
        since = ts[-1] - time_us
        gap = time_us - ts[index - 1] if index > 0 else 0
        days_old = (time_us - ORIGIN_US) / 86_400e6
        rows.append(
            [
                *(1.7 * numbers(actions.feature_RSF[0, index])),
                *numbers(model.actions.action_type.weight[actions.action_type_RS[0, index]]),
                *numbers(model.actions.surface.weight[actions.surface_RS[0, index]]),
                math.log(1 + float(actions.duration_RS[0, index])),
                *encode_time(model.actions.absolute_time, absolute, time_us, math.log(1 + days_old)),
                *encode_time(model.actions.since_latest, relative, since, math.log(1 + since / 1e6)),
                *encode_time(model.actions.gap, relative, gap, math.log(1 + gap / 1e6)),
            ]
        )
    return np.array(rows)


def apply_linear(layer: Any, x: np.ndarray) -> np.ndarray:
    return x @ numbers(layer.weight).T + (0 if layer.bias is None else numbers(layer.bias))


def apply_norm(layer: Any, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return scaled * numbers(layer.weight) + numbers(layer.bias)


def apply_mlp(layers: Any, x: np.ndarray) -> np.ndarray:
    hidden = apply_linear(layers[0], x)
    gelu = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return apply_linear(layers[2], gelu)


def attend(attention: Any, x: np.ndarray, num_heads: int, is_causal: bool) -> np.ndarray:
    num_steps, hidden = x.shape
    width = hidden // num_heads
    projected = apply_linear(attention.qkv, x)
    query, key, value = projected[:, :hidden], projected[:, hidden : 2 * hidden], projected[:, 2 * hidden :]
    mixed = np.zeros_like(x)
    for head in range(num_heads):
        part = slice(head * width, (head + 1) * width)
        for step in range(num_steps):
            seen = step + 1 if is_causal else num_steps
            scores = np.array([query[step, part] @ key[other, part] for other in range(seen)]) / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            mixed[step, part] = (weights / weights.sum()) @ value[:seen, part]
    return apply_linear(attention.out, mixed)


def hidden_states(model: PinnerFormer, actions: Sequences) -> np.ndarray:
    x = apply_linear(model.project, input_vectors(model, actions))
    x = x + numbers(model.position.weight)[: len(x)][::-1]  # row 0 of the table belongs to the newest action
    for block in model.blocks:
        x = x + attend(block.attention, apply_norm(block.attention_norm, x), 2, model.config.is_causal)
        x = x + apply_mlp(block.ffn, apply_norm(block.ffn_norm, x))
    return x


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_user_tower_equals_plain_numpy(is_causal: bool) -> None:
    model, actions = tiny_model(is_causal=is_causal), some_actions([5, 1, 9, 3], num_steps=11)
    hidden, newest = model.encode(actions), model.embed_users(actions)
    for row, length in enumerate(actions.length_R.tolist()):
        expected = hidden_states(model, row_of(actions, row))
        np.testing.assert_allclose(numbers(hidden[row, :length]), expected, rtol=1e-4, atol=1e-4)
        head = unit(apply_mlp(model.head, apply_norm(model.head_norm, expected)))
        np.testing.assert_allclose(numbers(newest[row]), head[-1], atol=2e-5)
        chosen = model.embed_positions(actions, torch.full((length,), row), torch.arange(length))
        np.testing.assert_allclose(numbers(chosen), head, atol=2e-5)


def test_the_pin_tower_equals_plain_numpy() -> None:
    model, feature_NF = tiny_model(), torch.randn(7, FEATURE_DIM)
    expected = unit(apply_mlp(model.pins, 1.7 * numbers(feature_NF)))
    np.testing.assert_allclose(numbers(model.embed_pins(feature_NF)), expected, atol=1e-6)


# --- time (A.1) -----------------------------------------------------------------------------------


def test_periods_are_the_papers() -> None:
    hour, day = 3600, 86_400
    hours = [hour / 4, hour / 2, hour * 3 / 4, hour, 2 * hour, 4 * hour, 8 * hour, 16 * hour]
    assert list(ABSOLUTE_PERIODS_S) == [*hours, day, 7 * day, 28 * day, 365 * day]
    assert len(RELATIVE_PERIODS_S) == 32
    steps = np.diff(np.log(RELATIVE_PERIODS_S))
    np.testing.assert_allclose(steps, math.log(4 * 7 * day) / 31)
    assert (RELATIVE_PERIODS_S[0], RELATIVE_PERIODS_S[-1]) == (1, pytest.approx(4 * 7 * day))


def test_time_encoding_by_hand() -> None:
    encoding = TimeEncoding([4.0, 12.0], log_unit_s=2)
    with torch.no_grad():
        encoding.cos_phase.copy_(torch.tensor([0.0, math.pi / 6]))
        encoding.sin_phase.copy_(torch.tensor([math.pi / 2, 0.0]))
    out = encoding(torch.tensor([1_000_000, 0]), torch.tensor([6_000_000, 0]))
    at_1s = [math.cos(math.pi / 2), math.cos(math.pi / 6 + math.pi / 6), math.sin(math.pi), math.sin(math.pi / 6)]
    np.testing.assert_allclose(numbers(out[0]), [*at_1s, math.log(1 + 6 / 2)], atol=1e-6)
    np.testing.assert_allclose(numbers(out[1]), [1, math.cos(math.pi / 6), 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize(("periods", "atol"), [(ABSOLUTE_PERIODS_S, 1e-6), (RELATIVE_PERIODS_S, 1e-5)])
def test_one_second_apart_at_an_epoch(periods: tuple[float, ...], atol: float) -> None:
    encoding, num = TimeEncoding(periods, log_unit_s=1), len(periods)
    times = torch.tensor([NOW_US, NOW_US + 1_000_000])
    out = numbers(encoding(times, torch.zeros_like(times)))
    for row, time_us in enumerate(times.tolist()):
        angles = 2 * math.pi * np.array([exact_turn(time_us, period) for period in periods])
        np.testing.assert_allclose(out[row, :num], np.cos(angles), atol=atol)
        np.testing.assert_allclose(out[row, num : 2 * num], np.sin(angles), atol=atol)
    advance = out[0, :num] * out[1, num : 2 * num] - out[0, num : 2 * num] * out[1, :num]  # sin of the difference
    np.testing.assert_allclose(advance, np.sin(2 * math.pi / np.array(periods)), atol=2 * atol)


def test_since_latest_and_gap_of_a_padded_sequence() -> None:
    model, second = tiny_model(), 1_000_000
    actions = some_actions([3, 5])
    actions.ts_RS[0] = torch.tensor([NOW_US, NOW_US + 10 * second, NOW_US + 70 * second, 0, 0])
    encoded = model.actions(actions)
    assert encoded.isfinite().all()
    start = FEATURE_DIM + 2 * 3
    log_since, log_gap = encoded[0, :, start + 1 + 25 + 64], encoded[0, :, -1]
    np.testing.assert_allclose(numbers(log_since[:3]), [math.log(1 + 70), math.log(1 + 60), 0], rtol=1e-6)
    np.testing.assert_allclose(numbers(log_gap), [0, math.log(1 + 10), math.log(1 + 60), 0, 0], rtol=1e-6)
    days_old = 40 + np.array([0, 10, 70]) / 86_400
    np.testing.assert_allclose(numbers(encoded[0, :3, start + 1 + 24]), np.log(1 + days_old), rtol=1e-6)


def test_input_vector_has_the_papers_parts() -> None:
    assert tiny_model().actions.output_dim == FEATURE_DIM + 2 * 3 + 1 + 25 + 65 + 65
    assert tiny_model().actions(some_actions([2])).shape == (1, 2, FEATURE_DIM + 2 * 3 + 1 + 25 + 65 + 65)


def test_every_parameter_learns() -> None:
    model, actions, target = tiny_model(), some_actions([9, 4]), torch.randn(2, 5)
    ((model.embed_users(actions) * target).sum() + (model.embed_pins(actions.feature_RSF[0]) ** 3).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


# --- what an output may depend on -----------------------------------------------------------------


def changed(actions: Sequences, field: str, row: int, step: int) -> Sequences:
    tensor = getattr(actions, field).clone()
    if field == "feature_RSF":
        tensor[row, step] += 1.5
    elif field == "ts_RS":
        tensor[row, step] += 1_234_567
    else:
        tensor[row, step] = (tensor[row, step] + 1) % 3
    return actions._replace(**{field: tensor})


@pytest.mark.parametrize("field", ["feature_RSF", "action_type_RS", "surface_RS", "duration_RS", "ts_RS"])
def test_the_future_leaves_earlier_outputs_bit_equal(field: str) -> None:
    # The paper's since_latest looks ahead by definition: without it, no later time is seen, by gap neither.
    model = tiny_model(features={"since_latest": False} if field == "ts_RS" else {})
    actions = some_actions([7, 5])
    before, after = model.encode(actions), model.encode(changed(actions, field, 0, 4))
    assert torch.equal(before[0, :4], after[0, :4])
    assert torch.equal(before[1], after[1])
    assert (before[0, 4:7] != after[0, 4:7]).any(dim=-1).all()
    sees_all = tiny_model(is_causal=False)
    assert not torch.equal(sees_all.encode(actions)[0, :4], sees_all.encode(changed(actions, field, 0, 4))[0, :4])


def test_a_long_sequence_is_causal_too() -> None:
    model, actions = tiny_model(sequence_length=300, hidden_dim=32), some_actions([300, 280])
    before, after = model.encode(actions), model.encode(changed(actions, "feature_RSF", 0, 150))
    assert torch.equal(before[0, :150], after[0, :150])
    assert not torch.equal(before[0, 150:], after[0, 150:])


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_and_neighbours_change_nothing(is_causal: bool) -> None:
    model, actions = tiny_model(is_causal=is_causal), some_actions([6, 2], num_steps=9)
    alone, padded = row_of(actions, 0), actions
    torch.testing.assert_close(model.embed_users(alone)[0], model.embed_users(padded)[0], atol=1e-6, rtol=1e-5)
    is_padding = torch.arange(9) >= padded.length_R[:, None]
    garbage = padded._replace(
        feature_RSF=padded.feature_RSF + 7 * is_padding[..., None],
        action_type_RS=padded.action_type_RS + 2 * is_padding,
        duration_RS=padded.duration_RS + 99 * is_padding,
        ts_RS=padded.ts_RS + 123_456_789 * is_padding,
    )
    torch.testing.assert_close(model.embed_users(garbage), model.embed_users(padded), atol=1e-6, rtol=1e-5)


def test_positions_count_from_the_newest() -> None:
    model = tiny_model(num_layers=0)
    with torch.no_grad():
        model.project.weight.zero_()
        model.project.bias.zero_()
    hidden = model.encode(some_actions([4, 9, 1], num_steps=9))
    table = model.position.weight
    assert torch.equal(hidden[0, :4], table[[3, 2, 1, 0]])
    assert torch.equal(hidden[1], table.flip(0))
    assert torch.equal(hidden[2, 0], table[0])


def test_embeddings_have_unit_norm() -> None:
    model, actions = tiny_model(), some_actions([9, 1, 4])
    chosen = model.embed_positions(actions, torch.tensor([0, 0, 1, 2]), torch.tensor([0, 8, 0, 3]))
    for embedding in (chosen, model.embed_users(actions), model.embed_pins(torch.randn(50, FEATURE_DIM) * 100)):
        torch.testing.assert_close(embedding.norm(dim=-1), torch.ones(len(embedding)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("feature", WIDTHS)
def test_a_feature_can_be_removed(feature: str) -> None:
    model, full, actions = tiny_model(features={feature: False}), tiny_model(), some_actions([8, 3])
    assert model.project.in_features == sum(WIDTHS.values()) - WIDTHS[feature]
    gone = {name for name, _ in full.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert all(name.startswith(f"actions.{feature}.") for name in gone)
    assert bool(gone) == (feature not in ("pin_feature", "duration"))
    field = {"pin_feature": "feature_RSF", "duration": "duration_RS"}.get(feature, f"{feature}_RS")
    if field in Sequences._fields:
        other = changed(actions, field, 0, 2)
        assert torch.equal(model.encode(actions), model.encode(other))
        assert not torch.equal(full.encode(actions), full.encode(other))


def test_without_time_features_time_is_ignored() -> None:
    model = tiny_model(features={"absolute_time": False, "since_latest": False, "gap": False})
    actions = some_actions([8, 3])
    assert torch.equal(model.encode(actions), model.encode(actions._replace(ts_RS=actions.ts_RS * 3 // 2)))


def test_the_positional_encoding_can_be_removed() -> None:
    model = tiny_model(num_layers=0, features={"position": False, "since_latest": False, "gap": False})
    assert not any("position" in name for name, _ in model.named_parameters())
    doubled = [tensor.repeat_interleave(2, dim=1) for tensor in some_actions([3])[:-1]]
    twice = Sequences(*doubled, torch.tensor([6]))  # type: ignore[call-arg]
    torch.testing.assert_close(model.encode(twice)[0, 0::2], model.encode(twice)[0, 1::2], atol=1e-5, rtol=1e-5)


# --- near-identity start: not the paper's ---------------------------------------------------------


@pytest.mark.parametrize(
    ("feature_dim", "hidden_dim", "embedding_dim"),
    [(16, 32, 16), (16, 16, 16), (16, 64, 64), (32, 64, 16), (64, 32, 64), (64, 32, 32), (64, 32, 16), (16, 32, 160)],
)
def test_the_towers_start_near_identity(feature_dim: int, hidden_dim: int, embedding_dim: int) -> None:
    """Users start near the mean of their pins' vectors, whichever of the three dimensions is the smallest."""
    torch.manual_seed(0)
    sizes = {"hidden_dim": hidden_dim, "embedding_dim": embedding_dim, "pin_hidden_dim": 256, "num_heads": 4}
    config = ModelConfig(sequence_length=20, num_layers=2, category_dim=4, **sizes)
    model = PinnerFormer(config, feature_dim=feature_dim, num_action_types=4, num_surfaces=3, time_origin_us=ORIGIN_US)
    feature_NF = torch.randn(100, feature_dim)
    if embedding_dim >= feature_dim:
        cosine, unit_NF = model.embed_pins(feature_NF), feature_NF / feature_NF.norm(dim=1, keepdim=True)
        torch.testing.assert_close(cosine @ cosine.T, unit_NF @ unit_NF.T, atol=0.06, rtol=0)
    taste = torch.randn(30, 1, feature_dim)
    actions = some_actions([20] * 30)._replace(feature_RSF=taste + 0.3 * torch.randn(30, 20, feature_dim))
    scores = model.embed_users(actions) @ model.embed_pins(actions.feature_RSF.mean(dim=1)).T
    # With (64, 32, ≤ 32), users and pins must be projected alike; (16, 32, 160) has no room for 2 * 160 mirrored units.
    # Content wider than the hidden state is projected; an embedding that keeps all of it then matches only in part.
    assert scores.diagonal().mean() > (0.65 if hidden_dim < feature_dim <= embedding_dim else 0.9)
    assert (scores.argmax(dim=1) == torch.arange(30)).float().mean() > 0.9
