"""Queries of a model of parts, as serving would store them: the vector, and the increments that memory keeps.

The user side reads the model's own pin table. The pin side is as of the cut: the counts are those of the training
users before it, which is what pin_embeddings of that day reads.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pf_core.days import DAY_US
from pf_core.evaluation.increments import Increments, QueryVectors
from pf_core.evaluation.question import Question
from pf_core.model.checkpoint import ModelDescription, load_parts
from pf_core.model.parts.inference import KnownPins, embed_records
from pf_core.model.parts.inputs import unit_rows
from pf_core.pins.lookup import find_pins
from pf_core.storage.arrays import read_arrow
from pf_core.timelines.arrays import Timelines, recode
from pf_core.training.parts.prepared import PinsOfDay, pins_of_day

READ = ("pin", "ts", "surface", "duration", "is_positive")


@dataclass(frozen=True, kw_only=True, eq=False)
class PartsQueryEmbedder:
    """Records of the question's users, from the actions whose action type the model knows."""

    question: Question
    known: KnownPins
    description: ModelDescription
    has_memory: bool = True
    """False leaves the increments out: the vector alone."""
    ranks: np.ndarray | None = None
    """Every pin is ranked."""
    _timelines: Timelines = field(init=False)
    _before_A: np.ndarray = field(init=False)
    """Number of readable actions before each action."""
    _pins: PinsOfDay = field(init=False)

    def __post_init__(self) -> None:
        timelines, data = self.question.timelines, self.question.data
        type_code = recode(data.action_types, self.description["action_types"])[timelines.action_type]
        readable = np.flatnonzero(type_code >= 0)
        before_A = np.concatenate([[0], np.cumsum(type_code >= 0)])
        kept = Timelines(
            offsets=before_A[timelines.offsets],
            action_type=type_code[readable],
            **{
                name: getattr(timelines, name)[readable] for name in ("pin", "ts", "surface", "duration", "is_positive")
            },
        )
        set_once = object.__setattr__
        set_once(self, "_timelines", kept)
        set_once(self, "_before_A", before_A)
        set_once(self, "_pins", self._pins_at_cut())

    def _pins_at_cut(self) -> PinsOfDay:
        data, row_N = self.question.data, self.known.table_row
        # An older model's training set may begin earlier than the timelines of this one reach back.
        origin_day = max(self.description["time_origin_us"], data.manifest["time_origin_us"]) // DAY_US
        counts = replace(data.uses, origin_day=origin_day).before(data.cut_us // DAY_US)
        repeat_N = np.where(row_N >= 0, self.known.table.log_repeat[np.maximum(row_N, 0)], np.float32(0))
        return pins_of_day(counts, repeat_N)

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        start_Q, last_Q = self._timelines.offsets[user_Q], self._before_A[end_Q]
        has_any_Q = last_Q > start_Q
        offsets_Q = np.concatenate([[0], np.cumsum(has_any_Q)])
        records = embed_records(self.known, self._timelines, start_Q[has_any_Q], last_Q[has_any_Q])
        query_I = np.repeat(np.flatnonzero(has_any_Q), np.diff(records.offsets_B))
        order = np.lexsort((records.memory_pin, query_I))
        increments = Increments(query_I[order], records.memory_pin[order], records.memory_increment[order])
        vector_VD = torch.from_numpy(records.vector_BV)
        return QueryVectors(offsets_Q, vector_VD, increments if self.has_memory else None)

    def pins(self, pin: np.ndarray) -> Tensor:
        model, inputs = self.known.model, self.known.inputs(pin)
        inputs = inputs._replace(statistics_MF=torch.from_numpy(self._pins.statistics_NF[pin]))
        device = model.pin_length.device
        rates_MW, mean_rate_W = (
            torch.from_numpy(values) for values in (self._pins.rates_NW[pin], self._pins.mean_rate_W)
        )
        vector_MV = model.embed_pins(inputs.to(device), rates_MW.to(device), mean_rate_W.to(device))
        return model.unit_pins(vector_MV)[0].cpu()


def open_parts_embedder(
    question: Question, folder: Path, *, device: torch.device, has_memory: bool = True
) -> PartsQueryEmbedder:
    """Load the model of parts in a folder."""
    model, table, description = load_parts(folder)
    data = question.data

    def content(pin_M: np.ndarray) -> np.ndarray:
        if not model.content_dim:
            return np.zeros((len(pin_M), 0), np.float32)
        return unit_rows(np.asarray(data.pin_feature[pin_M], np.float32))

    ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    known = KnownPins(model=model.to(device), table=table, table_row=find_pins(table.ids, ids), content=content)
    return PartsQueryEmbedder(question=question, known=known, description=description, has_memory=has_memory)
