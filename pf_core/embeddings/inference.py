"""From timelines to unit vectors (paper, section 3.6), independent of who else is embedded.

A user's vector is a function of the model and of that user's sequence alone: embedding a few users gives, bit for bit,
what embedding everyone gives, so that a repair or a late action costs only the users that it concerns. Arithmetic is
that exact only if its shape is always the same, so nothing else about the batch may vary:
- lengths are padded to a grid, a padded length has one batch shape, and a batch that is not full repeats its users;
- one thread computes a batch, because how two threads divide the work depends on its size (measured: another last bit,
  even in the same shape). Several threads compute batches side by side. Batches are small enough for the CPU caches.
This holds on the CPU (tested). On a GPU shapes are fixed too, but bfloat16 autocast promises nothing beyond its
rounding.

The model reads the newest actions whose pin is known and whose action type and surface it knows; other actions are
dropped and counted. A pin without a content vector is read as zeros, as in training. Pins are memory-mapped from files
that are packed once for each version of pin_features.
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
"""Lengths are padded to a multiple of this: in a bucket with heavy-tailed lengths, 96 % of the positions are then
real."""

MIN_POSITIONS = 256

BATCH_NUMBERS = 65_536
"""Positions of a batch times the hidden dimension, on a CPU core: larger batches gain little, and filling them up costs
more. A GPU takes this many positions."""

ACTION = np.dtype([("feature", "<i8"), ("ts", "<i8"), ("duration", "<f4"), ("action_type", "<i2"), ("surface", "<i2")])
"""What the model reads of an action; the pin's feature is represented by its hash."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that embeds users and pins: its version, and its folder (model.safetensors, model.json)."""

    model_version: str
    path: Path


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddedRecords:
    """What a model computes for N users."""

    vectors_ND: np.ndarray
    """Unit vectors, float32."""
    memory_pin_id: pa.ListArray
    """Pins of memory of each user, best first."""
    memory_increment: pa.ListArray
    """What is added to the score of each pin of memory, float32."""
    num_padded: int
    """Number of padded positions that were computed."""


@functools.lru_cache(maxsize=1)
def open_served_model(served: ServedModel, device: torch.device) -> tuple[PinnerFormer, ModelDescription]:
    """Return the towers on the device and the model's description; a process keeps the last model that it opened."""
    model, description = load_model(served.path)
    return model.to(device), description


# Sequences

READ_COLUMNS = ("pin", "ts", "action_type", "surface", "duration")


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTimelines:
    """Timelines in the codes of a model and the rows of the pins; a code is -1 where the model knows no such thing."""

    user_ids: pa.Array
    actions: Timelines

    @property
    def lengths(self) -> np.ndarray:
        """Number of actions of each user."""
        return np.diff(self.actions.offsets)

    @property
    def is_known(self) -> np.ndarray:
        """Whether the model knows the action type and the surface of each action."""
        return (self.actions.action_type >= 0) & (self.actions.surface >= 0)

    @property
    def is_usable(self) -> np.ndarray:
        """Whether the model can read each action."""
        return self.is_known & (self.actions.pin >= 0)

    @property
    def num_usable(self) -> np.ndarray:
        """Number of usable actions of each user."""
        until = np.concatenate([[0], np.cumsum(self.is_usable)])
        return np.diff(until[self.actions.offsets])

    def where(self, chosen: np.ndarray) -> "EncodedTimelines":
        """Return the users that the boolean mask selects."""
        kept = np.repeat(chosen, self.lengths)
        return EncodedTimelines(
            user_ids=self.user_ids.filter(pa.array(chosen)),
            actions=_select(self.actions, kept, self.lengths[chosen]),
        )

    def joined(self, others: "EncodedTimelines") -> "EncodedTimelines":
        """Return these users, followed by others."""
        columns = {
            name: np.concatenate([getattr(self.actions, name), getattr(others.actions, name)]) for name in READ_COLUMNS
        }
        return EncodedTimelines(
            user_ids=pa.concat_arrays([self.user_ids, others.user_ids]),
            actions=_timelines(np.concatenate([self.lengths, others.lengths]), columns),
        )


def _timelines(lengths: np.ndarray, columns: dict[str, np.ndarray]) -> Timelines:
    return Timelines(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        pin=columns["pin"],
        ts=columns["ts"],
        action_type=columns["action_type"],
        surface=columns["surface"],
        duration=columns["duration"],
        is_positive=np.zeros(0, bool),  # only targets need it
    )


def _select(actions: Timelines, chosen: np.ndarray, lengths: np.ndarray) -> Timelines:
    """Return the chosen actions, which form timelines of these lengths."""
    return _timelines(lengths, {name: getattr(actions, name)[chosen] for name in READ_COLUMNS})


def encode_timelines(timelines: pa.Table, pins: PackedPins, description: ModelDescription) -> EncodedTimelines:
    """Look up the pins, action types and surfaces of all actions."""
    column = {name: pc.list_flatten(timelines[name]) for name in timelines.column_names if name != "user_id"}
    read_types = description["model"].get("sequence_types")
    columns = {
        "pin": find_pins(pins.ids, column["pin_id"].combine_chunks()),
        "ts": column["ts"].cast(pa.int64()).to_numpy(),
        "action_type": encode_words(column["action_type"], description["action_types"], of=read_types),
        "surface": encode_words(column["surface"], description["surfaces"]),
        "duration": column["duration_s"].to_numpy(),
    }
    return EncodedTimelines(
        user_ids=timelines["user_id"].combine_chunks(),
        actions=_timelines(pc.list_value_length(timelines["ts"]).to_numpy(), columns),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class UserSequences:
    """Input of the model for the users who have any usable action."""

    user_ids: pa.Array
    actions: Timelines
    """Usable actions, in the model's codes and the pins' rows."""
    num_without_actions: int
    """Number of users of the timelines without a usable action; they are left out here."""
    num_no_feature: int
    """Number of actions that were dropped because pin_features does not have their pin."""
    num_unknown_word: int
    """Number of other actions that were dropped because the model does not know their action type or surface."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of actions of each user."""
        return np.diff(self.actions.offsets)

    @property
    def last_action_us(self) -> np.ndarray:
        """Time of each user's newest usable action, UTC microseconds."""
        return self.actions.ts[self.actions.offsets[1:] - 1]


def cut_sequences(timelines: EncodedTimelines, sequence_length: int) -> UserSequences:
    """Return the newest usable actions of every timeline, at most `sequence_length`."""
    user = np.repeat(np.arange(len(timelines.lengths)), timelines.lengths)
    usable, num_usable = np.flatnonzero(timelines.is_usable), timelines.num_usable
    from_newest = np.cumsum(num_usable)[user[usable]] - 1 - np.arange(len(usable))
    length = np.minimum(num_usable, sequence_length)
    has_any = length > 0
    is_known_pin = timelines.actions.pin >= 0
    return UserSequences(
        user_ids=timelines.user_ids.filter(pa.array(has_any)),
        actions=_select(timelines.actions, usable[from_newest < sequence_length], length[has_any]),
        num_without_actions=int((~has_any).sum()),
        num_no_feature=int((~is_known_pin).sum()),
        num_unknown_word=int((~timelines.is_known & is_known_pin).sum()),
    )


def hash_inputs(sequences: UserSequences, pins: PackedPins) -> np.ndarray:
    """Return the input_hash of each user: a hash of all that the model reads.

    Equal hashes mean equal vectors of the same model.
    """
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
    """Rows of the sequences that the batch embeds."""
    num_rows: int
    """Number of rows of the batch after it is filled up with repeated ones."""
    num_steps: int
    """Length to which the sequences are padded."""


def plan_batches(length_U: np.ndarray, *, sequence_length: int, positions: int) -> Iterator[_Batch]:
    """Put every sequence into a batch, the longest first. A batch's shape depends only on its padded length."""
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
    """Return unit vectors (float32) of these rows of the sequences, and the number of padded positions.

    `progress` is called with the number of users done. Memory is one batch per thread.
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
        positions, num_threads = BATCH_NUMBERS, 2  # one thread gathers while the other computes
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
