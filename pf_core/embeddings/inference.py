"""From timelines to unit vectors (paper, section 3.6), exact whoever else is embedded.

A user's vector is a function of the model and of that user's sequence alone: embedding a few users gives, bit for bit,
what embedding everybody gives, so that a repair or a late action costs only the users whom it concerns. Arithmetic is
that exact if its shape is always the same, so nothing else about the batch may vary:
- lengths are padded to a grid, a padded length has one batch shape, and a batch that is not full repeats its users;
- one thread computes a batch, because where two divide the work depends on its size (measured: another last bit, even
  in the same shape). Several threads take batches side by side. A batch is small, so that it stays in the caches.
It holds on the CPU (test). On a GPU, shapes are fixed too, but bfloat16 autocast makes no promise beyond its rounding.

The model reads the newest actions whose pin has a feature and whose words it knows; other actions are dropped and
counted. Pins are read by memory map from files that are packed once for each version of pin_features.
"""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F

from pf_core.hashing import hash_slices
from pf_core.model.checkpoint import ModelDescription, load_model
from pf_core.model.device import single_threaded
from pf_core.model.sequences import Sequences, collate_sequences
from pf_core.model.towers import PinnerFormer
from pf_core.pins.lookup import find_pins
from pf_core.pins.packed import PackedPins
from pf_core.timelines.arrays import Timelines, encode_words

LENGTH_STEP = 8
"""Lengths are padded to a multiple: of a heavy-tailed bucket's positions, 96 in 100 are then real."""

MIN_POSITIONS = 256

BATCH_NUMBERS = 65_536
"""Positions of a batch times the hidden dimension, on a CPU core: from there on, larger batches gain little, and what
is filled up costs more. A GPU takes as many positions."""

ACTION = np.dtype([("feature", "<i8"), ("ts", "<i8"), ("duration", "<f4"), ("action_type", "<i2"), ("surface", "<i2")])
"""What the model reads of an action, a feature by its hash."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is to embed: its name, and its folder (model.safetensors, model.json)."""

    model_version: str
    path: Path


@functools.lru_cache(maxsize=1)
def open_model(served: ServedModel, device: torch.device) -> tuple[PinnerFormer, ModelDescription]:
    """The towers on the device and the model's description; a process keeps the last one that it opened."""
    model, description = load_model(served.path)
    return model.to(device), description


# Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class UserSequences:
    """What the model reads of the users who have anything to read."""

    user_ids: pa.Array
    actions: Timelines
    """In the model's codes and the pins' rows."""
    num_without_actions: int
    """Users of the timelines who are not here."""
    num_no_feature: int
    """Actions that were dropped."""
    num_unknown_word: int

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.actions.offsets)

    @property
    def last_action_us(self) -> np.ndarray:
        return self.actions.ts[self.actions.offsets[1:] - 1]


def cut_sequences(timelines: pa.Table, pins: PackedPins, description: ModelDescription) -> UserSequences:
    """The newest usable actions of every timeline, as many as the model reads."""
    column = {name: pc.list_flatten(timelines[name]) for name in timelines.column_names if name != "user_id"}
    user = np.repeat(np.arange(timelines.num_rows), pc.list_value_length(timelines["ts"]).to_numpy())
    pin = find_pins(pins.ids, column["pin_id"].combine_chunks())
    read_types = description["model"].get("sequence_types")
    action_type = encode_words(column["action_type"], description["action_types"], of=read_types)
    surface = encode_words(column["surface"], description["surfaces"])
    is_known = (action_type >= 0) & (surface >= 0)
    usable = np.flatnonzero(is_known & (pin >= 0))
    num_usable = np.bincount(user[usable], minlength=timelines.num_rows)
    from_newest = np.cumsum(num_usable)[user[usable]] - 1 - np.arange(len(usable))
    read = usable[from_newest < description["model"]["sequence_length"]]
    length = np.minimum(num_usable, description["model"]["sequence_length"])
    has_any = length > 0
    return UserSequences(
        user_ids=timelines["user_id"].filter(pa.array(has_any)).combine_chunks(),
        actions=Timelines(
            offsets=np.concatenate([[0], np.cumsum(length[has_any])]),
            pin=pin[read],
            ts=column["ts"].cast(pa.int64()).to_numpy()[read],
            action_type=action_type[read],
            surface=surface[read],
            duration=column["duration_s"].to_numpy()[read],
            is_positive=np.zeros(0, bool),  # only targets need it
        ),
        num_without_actions=int((~has_any).sum()),
        num_no_feature=int((pin < 0).sum()),
        num_unknown_word=int((~is_known & (pin >= 0)).sum()),
    )


def hash_inputs(sequences: UserSequences, pins: PackedPins) -> np.ndarray:
    """input_hash: of all that the model reads of each user. The same model gives the same hash the same vector."""
    actions = sequences.actions
    records = np.empty(len(actions.pin), ACTION)
    records["feature"] = pins.feature_hash[actions.pin]
    for name in ("ts", "duration", "action_type", "surface"):
        records[name] = getattr(actions, name)
    return hash_slices(records, actions.offsets * ACTION.itemsize)


# Vectors


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    rows: np.ndarray
    """Of the sequences."""
    num_rows: int
    """Of the batch: it is filled up."""
    num_steps: int


def plan_batches(length_U: np.ndarray, *, sequence_length: int, positions: int) -> Iterator[_Batch]:
    """Every sequence once, the longest first. A batch's shape follows from its sequences' padded length."""
    padded_U = np.minimum(-(-length_U // LENGTH_STEP) * LENGTH_STEP, sequence_length)
    for num_steps in np.unique(padded_U)[::-1].tolist():
        num_rows = -(-positions // num_steps)
        rows = np.flatnonzero(padded_U == num_steps)
        for first in range(0, len(rows), num_rows):
            yield _Batch(rows=rows[first : first + num_rows], num_rows=num_rows, num_steps=num_steps)


def embed(
    model: PinnerFormer,
    sequences: UserSequences,
    rows: np.ndarray,
    pins: PackedPins,
    *,
    num_threads: int,
    progress: Callable[[int], None] = lambda num_users: None,
) -> tuple[np.ndarray, int]:
    """Unit vectors (float32) of these rows of the sequences, and the number of padded positions that they took.

    `progress` is told how many users are done. Memory is that of a batch a thread.
    """
    device = model.project.weight.device
    start_U, length_U = sequences.actions.offsets[rows], sequences.lengths[rows]

    def run(batch: _Batch) -> np.ndarray:
        filled = np.resize(batch.rows, batch.num_rows)
        end_R = start_U[filled] + length_U[filled] - 1
        actions = _padded(collate_sequences(sequences.actions, pins.feature, start_U[filled], end_R), batch.num_steps)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            user_RD = model.embed_users(actions.to(device))
        return np.asarray(user_RD[: len(batch.rows)].cpu().numpy())

    result = np.empty((len(rows), model.config.embedding_dim), np.float32)
    positions = max(MIN_POSITIONS, BATCH_NUMBERS // model.config.hidden_dim)
    if device.type == "cuda":
        positions, num_threads = BATCH_NUMBERS, 2  # one gathers while the other computes
    batches = list(plan_batches(length_U, sequence_length=model.config.sequence_length, positions=positions))
    num_done = 0
    with single_threaded(), ThreadPoolExecutor(num_threads) as pool:
        for batch, vectors in zip(batches, pool.map(run, batches), strict=True):
            result[batch.rows] = vectors
            num_done += len(batch.rows)
            progress(num_done)
    return result, sum(batch.num_rows * batch.num_steps for batch in batches) - int(length_U.sum())


def _padded(actions: Sequences, num_steps: int) -> Sequences:
    missing = num_steps - actions.ts_RS.shape[1]
    return Sequences(
        feature_RSF=F.pad(actions.feature_RSF, (0, 0, 0, missing)),
        action_type_RS=F.pad(actions.action_type_RS, (0, missing)),
        surface_RS=F.pad(actions.surface_RS, (0, missing)),
        duration_RS=F.pad(actions.duration_RS, (0, missing)),
        ts_RS=F.pad(actions.ts_RS, (0, missing)),
        length_R=actions.length_R,
    )
