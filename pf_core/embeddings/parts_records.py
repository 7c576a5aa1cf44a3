"""Input and records of the model of parts for a bucket: whole timelines, in numbers of the bucket's own pins.

Pins are numbered by their ascending ids among those of the bucket. What the model knows of them comes from its pin
table; content vectors come from the packed pins of the day. An action is usable if the model knows its action type.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pf_core.config.source import Positive
from pf_core.embeddings.histories import Histories, numbers_of
from pf_core.embeddings.inference import EmbeddedRecords, ServedModel, UserSequences
from pf_core.hashing import combined, hash_slices
from pf_core.logs.positives import positive_mask
from pf_core.model.checkpoint import ModelDescription, load_parts
from pf_core.model.device import single_threaded
from pf_core.model.parts.inference import KnownPins, Records, embed_records
from pf_core.model.parts.inputs import unit_rows
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.table import PinTable
from pf_core.pins.lookup import find_pins
from pf_core.pins.packed import PackedPins
from pf_core.schemas import IdType, id_arrow_type
from pf_core.timelines.arrays import Timelines, encode_words

ACTION = np.dtype([("pin", "<i8"), ("feature", "<i8"), ("action_type", "<i2"), ("is_positive", "<i2"), ("ts", "<i8")])
"""What decides a record, of an action."""


@functools.lru_cache(maxsize=1)
def open_parts_model(served: ServedModel, device: torch.device) -> tuple[PartsModel, PinTable, ModelDescription]:
    """Return the model on the device, its pin table and its description; a process keeps the last that it opened."""
    model, table, description = load_parts(served.path)
    return model.to(device), table, description


@dataclass(frozen=True, kw_only=True, eq=False)
class PartsInputs:
    """Input of the model of parts for the users of a bucket who have any usable action."""

    known: KnownPins
    sequences: UserSequences
    pin_ids: pa.Array
    """Ids of the bucket's pins, ascending; the actions' pins are positions here."""
    feature_hash: np.ndarray
    """Hash of the content vector of each of these pins; 0 without one, and for a model without content."""

    def hashes(self) -> np.ndarray:
        actions = self.sequences.actions
        records = np.empty(len(actions.pin), ACTION)
        records["pin"] = numbers_of(self.pin_ids)[actions.pin]
        records["feature"] = self.feature_hash[actions.pin]
        for name in ("ts", "action_type", "is_positive"):
            records[name] = getattr(actions, name)
        return hash_slices(records, actions.offsets * ACTION.itemsize)

    def embed(self, rows: np.ndarray, *, num_threads: int, progress: Callable[[int], None]) -> EmbeddedRecords:
        offsets = self.sequences.actions.offsets
        parts = np.array_split(rows, max(1, min(num_threads, len(rows))))

        def run(part: np.ndarray) -> Records:
            return embed_records(self.known, self.sequences.actions, offsets[part], offsets[part + 1])

        num_done, found = 0, []
        with single_threaded(), ThreadPoolExecutor(max(1, num_threads)) as pool:
            for part, records in zip(parts, pool.map(run, parts), strict=True):
                found.append(records)
                num_done += len(part)
                progress(num_done)
        lengths = np.concatenate([np.diff(records.offsets_B) for records in found])
        list_offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        pin = np.concatenate([records.memory_pin for records in found])
        increment = np.concatenate([records.memory_increment for records in found])
        return EmbeddedRecords(
            vectors_ND=np.concatenate([records.vector_BV for records in found]),
            memory_pin_id=pa.ListArray.from_arrays(list_offsets, self.pin_ids.take(pa.array(pin))),
            memory_increment=pa.ListArray.from_arrays(list_offsets, pa.array(increment, pa.float32())),
            num_padded=0,
        )


def read_parts_inputs(
    served: ServedModel, device: torch.device, histories: Histories, pins: PackedPins, pin_id_type: IdType
) -> PartsInputs:
    """Encode the whole histories for a model of parts."""
    model, table, description = open_parts_model(served, device)
    timelines = histories.timelines
    column = {name: pc.list_flatten(timelines[name]) for name in timelines.column_names if name != "user_id"}
    ids = combined(column["pin_id"]).cast(id_arrow_type(pin_id_type))
    pin_ids = pc.unique(ids)
    pin_ids = pin_ids.take(pc.sort_indices(pin_ids))
    flat = pa.table({name: column[name] for name in ("action_type", "surface", "duration_s")})
    action_type = encode_words(column["action_type"], description["action_types"])
    is_usable = action_type >= 0
    user = np.repeat(np.arange(len(timelines)), pc.list_value_length(timelines["ts"]).to_numpy())
    length = np.bincount(user[is_usable], minlength=len(timelines))
    actions = Timelines(
        offsets=np.concatenate([[0], np.cumsum(length[length > 0])]),
        pin=pc.index_in(ids, value_set=pin_ids).to_numpy(zero_copy_only=False).astype(np.int64)[is_usable],
        ts=column["ts"].cast(pa.int64()).to_numpy()[is_usable],
        action_type=action_type[is_usable],
        surface=np.zeros(int(is_usable.sum()), np.int16),
        duration=np.zeros(int(is_usable.sum()), np.float32),
        is_positive=positive_mask(flat, Positive.model_validate(description["positive"]))[is_usable],
    )
    row, feature_row = find_pins(table.ids, pin_ids), find_pins(pins.ids, pin_ids)
    is_known = feature_row >= 0

    def content(pin_M: np.ndarray) -> np.ndarray:
        if not model.content_dim:
            return np.zeros((len(pin_M), 0), np.float32)
        vectors = np.asarray(pins.feature[np.maximum(feature_row[pin_M], 0)], np.float32)
        return unit_rows(np.where(is_known[pin_M, None], vectors, np.float32(0)))

    has_action, is_read = length > 0, is_known & (model.content_dim > 0)
    return PartsInputs(
        known=KnownPins(model=model, table=table, table_row=row, content=content),
        sequences=UserSequences(
            user_ids=combined(timelines["user_id"]).filter(pa.array(has_action)),
            actions=actions,
            num_without_actions=int((~has_action).sum()),
            num_no_feature=0,
            num_unknown_word=int((~is_usable).sum()),
        ),
        pin_ids=pin_ids,
        feature_hash=np.where(is_read, pins.feature_hash[np.maximum(feature_row, 0)], 0),
    )
