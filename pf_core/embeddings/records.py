"""How a family of models turns timelines into records: vectors, and the memory beside them.

`users.py` decides who is embedded and stores the result; it knows a model only by `read_inputs`, whose result hashes
what the model reads and embeds any rows of it. A record is a function of the user's timeline and the model alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch

from pf_core.embeddings.histories import Histories
from pf_core.embeddings.inference import (
    EmbeddedRecords,
    ServedModel,
    UserSequences,
    cut_sequences,
    embed,
    encode_timelines,
    hash_inputs,
    open_served_model,
)
from pf_core.embeddings.parts_records import read_parts_inputs
from pf_core.model.checkpoint import ModelDescription, read_description
from pf_core.model.towers import PinnerFormer
from pf_core.pins.packed import PackedPins
from pf_core.schemas import IdType, Slices, id_arrow_type


class UserInputs(Protocol):
    """Input of a model for the users of a bucket who have any usable action."""

    @property
    def sequences(self) -> UserSequences: ...

    def hashes(self) -> np.ndarray:
        """Return for each user a hash of all that the model reads. Equal hashes mean equal vectors and memory."""

    def embed(self, rows: np.ndarray, *, num_threads: int, progress: Callable[[int], None]) -> EmbeddedRecords:
        """Embed these rows of the sequences; `progress` is called with the number of users done."""


def num_actions_read(description: ModelDescription) -> int | None:
    """Return how many of a user's newest actions the model reads; None for all of them."""
    if description.get("family", "towers") == "parts":
        return None
    return int(description["model"]["sequence_length"])


def read_inputs(
    served: ServedModel, device: torch.device, histories: Histories, pins: PackedPins, pin_id_type: IdType
) -> UserInputs:
    """Encode histories for a model. Where too few of the newest actions are usable, older ones are read."""
    if read_description(served.path).get("family", "towers") == "parts":
        return read_parts_inputs(served, device, histories, pins, pin_id_type)
    model, description = open_served_model(served, device)
    length = description["model"]["sequence_length"]
    encoded = encode_timelines(histories.newest(length), pins, description)
    may_have_more = (encoded.lengths == length) & (encoded.num_usable < length)
    may_have_more &= ~histories.is_whole | (histories.lengths > length)
    if may_have_more.any():
        whole = histories.whole(may_have_more)
        encoded = encoded.where(~may_have_more).joined(encode_timelines(whole, pins, description))
    return TowerInputs(
        model=model, sequences=cut_sequences(encoded, length), pins=pins, pin_id=id_arrow_type(pin_id_type)
    )


def vector_slices(description: ModelDescription) -> Slices:
    """Return the parts of the model's vectors by name, each as [start, end]; the towers' vectors have one part."""
    return description.get("slices") or {"embedding": [0, description["model"]["embedding_dim"]]}


def vector_dim(description: ModelDescription) -> int:
    """Return the length of the model's vectors."""
    return max(end for _, end in vector_slices(description).values())


@dataclass(frozen=True, kw_only=True, eq=False)
class TowerInputs:
    """Input of the towers: sequences of the newest usable actions. The towers have no memory."""

    model: PinnerFormer
    sequences: UserSequences
    pins: PackedPins
    pin_id: pa.DataType

    def hashes(self) -> np.ndarray:
        return hash_inputs(self.sequences, self.pins)

    def embed(self, rows: np.ndarray, *, num_threads: int, progress: Callable[[int], None]) -> EmbeddedRecords:
        vectors_ND, num_padded = embed(
            self.model, self.sequences, rows, self.pins, num_threads=num_threads, progress=progress
        )
        return EmbeddedRecords(
            vectors_ND=vectors_ND,
            memory_pin_id=_empty_lists(len(rows), self.pin_id),
            memory_increment=_empty_lists(len(rows), pa.float32()),
            num_padded=num_padded,
        )


def _empty_lists(num_lists: int, value_type: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.zeros(num_lists + 1, np.int32)), pa.array([], value_type))
