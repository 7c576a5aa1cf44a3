"""Records of users: unit vectors, and the own pins that memory keeps. The same code serves and is evaluated.

A user's record is a function of that user's actions, their pins' content vectors and the model, bit for bit: who else
is embedded changes nothing. As in embeddings/inference.py, arithmetic is that exact only in the same shape: users are
put into blocks of a fixed number of users and own pins, filled up with empty ones, and one thread computes a block. A
user with more own pins than a block has a block of its own.

Memory keeps the own pins with the best scores: the cosine with the pin's vector in the model's pin table, plus the
increment. A model without memory was trained not to recommend a user's own pins again: their increments are NEVER.

Suffixes: B users, P own pins, M distinct pins, V vector, C content.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pf_core.model.parts.inputs import OwnPins, PinInputs
from pf_core.model.parts.memory import SERVED_SHIFT, increments
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.own_pins import OwnPinArrays, own_pins
from pf_core.model.parts.sequence import NewestActions, newest_actions
from pf_core.model.parts.statistics import WINDOWS_DAYS
from pf_core.model.parts.table import PinTable
from pf_core.timelines.arrays import Timelines, ragged

BLOCK_USERS = 64

BLOCK_PINS = 4096

BLOCK_NEW_PINS = 64
"""Pins that came after training are embedded in blocks of this size: on a log of news they are nearly all pins."""

NEVER = -2.0
"""Increment of a pin that is not recommended: below the difference of any two cosines."""


class Content(Protocol):
    """Content vectors of pins, in the numbers of the timelines."""

    def __call__(self, pin_M: np.ndarray, /) -> np.ndarray:
        """Return unit vectors, zeros for pins without one, content_MC."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownPins:
    """What the user side of a model knows of pins, in the numbers of some timelines."""

    model: PartsModel
    table: PinTable
    table_row: np.ndarray
    """Row of each pin in the model's table, -1 if it is not there."""
    content: Content

    def inputs(self, pin_M: np.ndarray) -> PinInputs:
        row_M = self.table_row[pin_M]
        is_known_M, row_M = row_M >= 0, np.maximum(row_M, 0)
        unknown_F = self.model.unknown_statistics_F.cpu().numpy()
        return PinInputs(
            factor_MD=torch.from_numpy(np.where(is_known_M[:, None], self.table.factor[row_M], np.float32(0))),
            trust_M=torch.from_numpy(np.where(is_known_M, self.table.trust[row_M], np.float32(0))),
            statistics_MF=torch.from_numpy(np.where(is_known_M[:, None], self.table.statistics[row_M], unknown_F)),
            content_MC=torch.from_numpy(self.content(pin_M)),
        )

    def vectors(self, pin_M: np.ndarray, inputs: PinInputs) -> Tensor:
        """Return the unit vectors of pins as of the end of training, float32; of a newer pin, as if never used."""
        row_M = self.table_row[pin_M]
        vector_MV = torch.from_numpy(self.table.vector[np.maximum(row_M, 0)].astype(np.float32))
        place_N, device = torch.from_numpy(np.flatnonzero(row_M < 0)), self.model.pin_length.device
        rates_MW = torch.zeros(BLOCK_NEW_PINS, len(WINDOWS_DAYS), device=device)
        mean_rate_W = torch.ones(len(WINDOWS_DAYS), device=device)
        for some in place_N.split(BLOCK_NEW_PINS) if len(place_N) else ():
            filled = torch.cat([some, some[:1].expand(BLOCK_NEW_PINS - len(some))])  # one shape for all
            block = PinInputs(*(values[filled] for values in inputs)).to(device)
            unit_MV, _ = self.model.unit_pins(self.model.embed_pins(block, rates_MW, mean_rate_W))
            vector_MV[some] = unit_MV[: len(some)].cpu()
        return vector_MV


class Records(NamedTuple):
    """Records of B users."""

    vector_BV: np.ndarray
    """Unit vectors, float32."""
    offsets_B: np.ndarray
    """First pin of each user's memory, and the end of the last one's."""
    memory_pin: np.ndarray
    """Pins in the numbers of the timelines; the best first."""
    memory_increment: np.ndarray
    """float32."""


@torch.inference_mode()
def embed_records(
    known: KnownPins,
    timelines: Timelines,
    start_B: np.ndarray,
    end_B: np.ndarray,
    *,
    progress: Callable[[int], None] = lambda num_users: None,
) -> Records:
    """Return the records of users whose actions are `start` to `end` of the timelines; each has at least one."""
    vector_BV = np.empty((len(start_B), known.model.embedding_dim), np.float32)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    num_done = 0
    for rows in _blocks(start_B, end_B):
        own = own_pins(timelines, start_B[rows], end_B[rows])
        for mine in _divided(own, len(rows)):
            bounds = start_B[rows[mine]], end_B[rows[mine]]
            vector_BV[rows[mine]], memory = _embed_block(known, timelines, own, mine, *bounds)
            parts.append((rows[mine][memory[0]], *memory[1:]))
        num_done += len(rows)
        progress(num_done)
    row, pin, increment = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else (_NONE,) * 3
    order = np.argsort(row, kind="stable")
    offsets_B = np.concatenate([[0], np.cumsum(np.bincount(row.astype(np.int64), minlength=len(start_B)))])
    return Records(vector_BV, offsets_B, pin[order].astype(np.int64), increment[order].astype(np.float32))


_NONE = np.zeros(0)


def _blocks(start_B: np.ndarray, end_B: np.ndarray, *, actions: int = 1 << 18) -> Iterator[np.ndarray]:
    """Yield rows of users with a bounded number of actions, to find their own pins together."""
    total = np.cumsum(end_B - start_B)
    first = 0
    while first < len(start_B):
        before = int(total[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(total, before + actions, side="right")))
        yield np.arange(first, last)
        first = last


def _divided(own: OwnPinArrays, num_users: int) -> Iterator[np.ndarray]:
    """Yield users whose own pins fill a block; a user with more own pins than a block is alone."""
    count_B = np.bincount(own.row_P, minlength=num_users)
    for large in np.flatnonzero(count_B > BLOCK_PINS).tolist():
        yield np.array([large])
    users: list[int] = []
    used = 0
    for user in np.flatnonzero(count_B <= BLOCK_PINS).tolist():
        if users and (len(users) == BLOCK_USERS or used + count_B[user] > BLOCK_PINS):
            yield np.array(users)
            users, used = [], 0
        users.append(user)
        used += int(count_B[user])
    if users:
        yield np.array(users)


def _newest(
    known: KnownPins, timelines: Timelines, pin_M: np.ndarray, start_B: np.ndarray, end_B: np.ndarray
) -> NewestActions | None:
    """Return the newest actions of a block's users, filled up with users without any; None without a transformer."""
    if known.model.sequence is None:
        return None
    missing = np.zeros(BLOCK_USERS + 1 - len(start_B), np.int64)
    return newest_actions(
        timelines,
        np.concatenate([start_B, missing]),
        np.concatenate([end_B, missing]),
        pin_M,
        num_steps=known.model.config.sequence_length,
    )


def _embed_block(
    known: KnownPins, timelines: Timelines, own: OwnPinArrays, mine: np.ndarray, start_B: np.ndarray, end_B: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the unit vectors of some users, and (user, pin, increment) of what memory keeps of them."""
    first = np.searchsorted(own.row_P, mine)
    row, number = ragged(np.searchsorted(own.row_P, mine, side="right") - first)
    at = first[row] + number
    pin_M, place = np.unique(own.pin_P[at], return_inverse=True)
    inputs = known.inputs(pin_M)
    filled = _filled(own, at, row, place)
    device = known.model.pin_length.device
    newest = _newest(known, timelines, pin_M, start_B, end_B)
    users = known.model.embed_users(filled.to(device), inputs.to(device), None if newest is None else newest.to(device))
    unit_BV, scale_B = (values[: len(mine)].cpu() for values in known.model.unit_users(users.vector_BV))
    cosine = (unit_BV[row] * known.vectors(pin_M, inputs)[place]).sum(1)
    scale = scale_B[row]
    increment = torch.full((len(at),), NEVER)
    if known.model.memory is not None:
        logit_P = torch.zeros(len(filled.row_P))  # a block's shape: the end of an array is rounded by other code
        logit_P[: len(at)] = cosine * scale
        increment = increments(users.strength_P.cpu() + SERVED_SHIFT, logit_P)[: len(at)] / scale
    kept = _best(row, (cosine + increment).numpy(), known.model.config.memory_size)
    return unit_BV.numpy(), (row[kept], own.pin_P[at][kept], increment.numpy()[kept])


def _filled(own: OwnPinArrays, at: np.ndarray, row: np.ndarray, place: np.ndarray) -> OwnPins:
    """Return own pins as tensors of a block's shape: what is missing belongs to a user of its own, the last one."""
    size = -(-max(1, len(at)) // BLOCK_PINS) * BLOCK_PINS
    missing = size - len(at)

    def filled(values: np.ndarray, value: float = 0) -> Tensor:
        return torch.from_numpy(np.concatenate([values, np.full((missing, *values.shape[1:]), value, values.dtype)]))

    return OwnPins(
        num_users=BLOCK_USERS + 1,
        row_P=filled(row, BLOCK_USERS),
        pin_P=filled(place.reshape(-1)),
        features_PX=filled(own.features_PX[at]),
        action_type_P=filled(own.action_type_P[at]),
    )


def _best(row: np.ndarray, score: np.ndarray, size: int) -> np.ndarray:
    """Return the places of the best scores of each row, at most `size`, the best first; rows ascend."""
    order = np.lexsort((-score, row))
    first = np.searchsorted(row[order], row[order])
    return order[np.arange(len(order)) - first < size]
