"""Small inputs of the model of parts: timelines from lists, training sets, a model with random weights, a pin table."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pf_core.config.parts import PartsConfig
from pf_core.days import DAY_US
from pf_core.layouts import marked
from pf_core.model.parts.inference import KnownPins
from pf_core.model.parts.inputs import OwnPins, PinInputs
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.own_pins import FEATURES
from pf_core.model.parts.statistics import STATISTICS
from pf_core.model.parts.table import PinTable
from pf_core.timelines.arrays import Timelines
from pf_core.training.parts.counts import write_use_log
from pf_core.training.training_set import open_training_set

Action = tuple[float, int, int, bool]
"""Time in days since 1970, pin, code of the action type, whether it is positive."""

NUM_TYPES = 3

FIRST_DAY = 20_000
"""First day of the random timelines and of the training sets, in days since 1970."""


def timelines_of(*users: Sequence[Action]) -> Timelines:
    actions = [action for user in users for action in user]
    return Timelines(
        offsets=np.cumsum([0, *map(len, users)]),
        pin=np.array([pin for _, pin, _, _ in actions], np.int32),
        ts=np.array([round(day * DAY_US) for day, _, _, _ in actions], np.int64),
        action_type=np.array([kind for _, _, kind, _ in actions], np.int16),
        surface=np.zeros(len(actions), np.int16),
        duration=np.zeros(len(actions), np.float32),
        is_positive=np.array([positive for _, _, _, positive in actions], bool),
    )


def random_timelines(lengths: Sequence[int], *, num_pins: int, num_days: int = 40, seed: int = 0) -> Timelines:
    """Users with these numbers of actions; some pins are popular, so that users repeat them."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ts = [np.sort(rng.integers(num_days * DAY_US, size=length)) for length in lengths]
    return Timelines(
        offsets=offsets,
        pin=np.floor(num_pins * rng.random(offsets[-1]) ** 2).astype(np.int32),
        ts=FIRST_DAY * DAY_US + np.concatenate(ts),
        action_type=rng.integers(NUM_TYPES, size=offsets[-1]).astype(np.int16),
        surface=np.zeros(offsets[-1], np.int16),
        duration=np.zeros(offsets[-1], np.float32),
        is_positive=rng.random(offsets[-1]) < 0.5,
    )


def own_pins_of(*pins_of_user: Sequence[int], **columns: Sequence[float]) -> OwnPins:
    """Own pins by their places; `columns` are columns of features_PX by number, "x1" for column 1; others are 0."""
    row = [user for user, pins in enumerate(pins_of_user) for _ in pins]
    features_PX = torch.zeros(len(row), len(FEATURES))
    for name, values in columns.items():
        features_PX[:, int(name.removeprefix("x"))] = torch.tensor(values)
    return OwnPins(
        num_users=len(pins_of_user),
        row_P=torch.tensor(row, dtype=torch.int64),
        pin_P=torch.tensor([pin for pins in pins_of_user for pin in pins], dtype=torch.int64),
        features_PX=features_PX,
        action_type_P=torch.zeros(len(row), dtype=torch.int64),
    )


def pin_inputs(
    *,
    factor: Sequence[Sequence[float]] = (),
    trust: Sequence[float] = (),
    content: Sequence[Sequence[float]] = (),
    num_pins: int | None = None,
) -> PinInputs:
    """Inputs of pins whose statistics are 0."""
    num_pins = num_pins if num_pins is not None else max(len(factor), len(content))
    return PinInputs(
        factor_MD=torch.tensor(factor) if factor else torch.zeros(num_pins, 0),
        trust_M=torch.tensor(trust) if trust else torch.ones(num_pins),
        statistics_MF=torch.zeros(num_pins, len(STATISTICS)),
        content_MC=torch.tensor(content) if content else torch.zeros(num_pins, 0),
    )


def random_model(*, content_dim: int = 0, seed: int = 0, pin_length: float = 4.0, **config: Any) -> PartsModel:
    """A model whose weights are all random, so that every input matters."""
    chosen: dict[str, Any] = {"factor_dim": 8, "trend_dim": 4} | config
    torch.manual_seed(seed)
    model = PartsModel(PartsConfig(**chosen), content_dim=content_dim, num_action_types=NUM_TYPES)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
        model.own_mean_X.copy_(torch.randn(len(FEATURES)))
        model.unknown_statistics_F.copy_(torch.randn(len(STATISTICS)))
        model.pin_length.fill_(pin_length)
    return model.eval()


def random_table(model: PartsModel, folder: Path, *, num_pins: int, seed: int = 0) -> PinTable:
    """A pin table of pins 0 to num_pins - 1 with random values; vectors have unit norm."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_ids(folder / "ids.arrow", num_pins)
    factor, vector = (rng.normal(size=(num_pins, dim)) for dim in (model.config.factor_dim, model.embedding_dim))
    return PinTable(
        ids=folder / "ids.arrow",
        factor=(factor / np.linalg.norm(factor, axis=1, keepdims=True)).astype(np.float32),
        trust=rng.random(num_pins).astype(np.float32),
        statistics=rng.normal(size=(num_pins, len(STATISTICS))).astype(np.float32),
        log_repeat=rng.random(num_pins).astype(np.float32),
        vector=(vector / np.linalg.norm(vector, axis=1, keepdims=True)).astype(np.float16),
    )


def known_pins(model: PartsModel, table: PinTable, *, num_pins: int) -> KnownPins:
    """Pins 0 to num_pins - 1 in the table's own numbers; those that it does not have are new. Content is random."""
    row = np.where(np.arange(num_pins) < len(table.trust), np.arange(num_pins), -1)
    content_NC = np.random.default_rng(7).normal(size=(num_pins, model.content_dim)).astype(np.float32)
    content_NC /= np.maximum(np.linalg.norm(content_NC, axis=1, keepdims=True), 1e-9)
    content_NC[::5] = 0  # pins without a vector
    return KnownPins(model=model, table=table, table_row=row, content=lambda pin_M: content_NC[pin_M])


def write_parts_set(path: Path, timelines: Timelines, *, num_pins: int, num_days: int, content_dim: int = 0) -> Path:
    """A training set whose training users have these timelines, which start on day `FIRST_DAY`; all pins compete."""
    features = np.random.default_rng(5).normal(size=(num_pins, content_dim)).astype(np.float32)
    pins = {
        "feature": features,
        "has_feature": np.full(num_pins, content_dim > 0),
        "candidates": np.arange(num_pins),
        "interest": np.zeros(num_pins, np.int32),
    }
    names = ("offsets", "pin", "ts", "action_type", "surface", "duration", "is_positive")
    train = {name: getattr(timelines, name) for name in names}
    held_out = {name: values[:1] if name == "offsets" else values[:0] for name, values in train.items()}
    for folder, arrays in (("pins", pins), ("train", train), ("held_out", held_out)):
        (path / folder).mkdir(parents=True)
        for name, values in arrays.items():
            np.save(path / folder / f"{name}.npy", values)
    manifest = {
        "cut_ds": "2024-12-31",
        "cut_us": (FIRST_DAY + num_days) * DAY_US,
        "time_origin_us": FIRST_DAY * DAY_US + 1,
        "vocabularies": {"action_type": [f"type {number}" for number in range(NUM_TYPES)], "surface": ["homefeed"]},
        "fingerprint": "parts",
        **marked("training_set"),
    }
    (path / "training_set.json").write_text(json.dumps(manifest))
    return complete_parts_set(path)


def complete_parts_set(path: Path) -> Path:
    """Add to a training set what the training of the model of parts also reads: the pins' ids, their user-days, and the
    definition of a positive action."""
    data = open_training_set(path)
    write_ids(path / "pins" / "pin_id.arrow", data.num_pins)
    first_day, end_day = data.manifest["time_origin_us"] // DAY_US, data.cut_us // DAY_US
    days = user_days(data.train, first_day, end_day)
    write_use_log(days, path / "uses", num_pins=data.num_pins, first_day=first_day)
    manifest = json.loads((path / "training_set.json").read_text())
    (path / "training_set.json").write_text(json.dumps(manifest | {"inputs": {"positive": {}}}))
    return path


def user_days(timelines: Timelines, first_day: int, end_day: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pins of each day from `first_day` to the one before `end_day`, and how many users had a positive on them."""
    user = np.repeat(np.arange(timelines.num_users), np.diff(timelines.offsets))
    for day in range(first_day, end_day):
        is_counted = timelines.is_positive & (timelines.ts // DAY_US == day)
        pairs = set(zip(user[is_counted].tolist(), timelines.pin[is_counted].tolist(), strict=True))
        yield np.unique(np.array([pin for _, pin in pairs], np.int64), return_counts=True)


def write_ids(path: Path, num_pins: int) -> None:
    ids = pa.table({"pin_id": pa.array(range(num_pins), pa.int64())})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, ids.schema) as writer:
        writer.write_table(ids)
