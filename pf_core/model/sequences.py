"""Sequences as the user tower reads them (paper, section 3.1), and their collation from timelines.

Training, evaluation and inference share this code, so that an action has the same input vector in all of them.

- A timeline is a slice of flat arrays, mostly memory-mapped; collation gathers the actions of each sequence from them.
- Sequences are in ascending order of time and padded with 0 on the right, up to the longest of the batch.
- The tensors come from an allocator: a batch of training lies in one block of memory, which worker processes share.

Suffixes: R sequences, S actions of the longest sequence, F content vector, A actions that the caller has numbered.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pf_core.hashing import Ints
from pf_core.timelines.arrays import Timelines


class Sequences(NamedTuple):
    """The user tower's input: the actions of some sequences, with 0 in every column as padding."""

    feature_RSF: Tensor
    """Content vector of each action's pin."""
    action_type_RS: Tensor
    surface_RS: Tensor
    duration_RS: Tensor
    """Seconds."""
    ts_RS: Tensor
    """UTC microseconds, int64."""
    length_R: Tensor
    """Number of actions without the padding."""

    def to(self, device: torch.device) -> "Sequences":
        return Sequences(*(tensor.to(device, non_blocking=True) for tensor in self))


class Allocate(Protocol):
    """Returns an uninitialized tensor on the CPU, as torch.empty does."""

    def __call__(self, size: Sequence[int], /, *, dtype: torch.dtype) -> Tensor: ...


def collate_sequences(
    timelines: Timelines,
    pin_feature: np.ndarray,
    start_R: Ints,
    end_R: Ints,
    *,
    action_A: Ints | None = None,
    empty: Allocate = torch.empty,
) -> Sequences:
    """Collate the sequences of the actions start to end, both included.

    Actions are rows of the timelines' arrays. With `action_A` they are positions in `action_A`, which holds those rows:
    this way a sequence can skip actions of its timeline.
    """
    length_R = end_R - start_R + 1
    step_S = np.arange(length_R.max(initial=1))
    action_RS = np.minimum(start_R[:, None] + step_S, end_R[:, None])
    if action_A is not None:
        action_RS = gather_values(action_A, action_RS)
    is_padding_RS = step_S >= length_R[:, None]

    def column(values: np.ndarray, dtype: npt.DTypeLike) -> Tensor:
        values_RS = gather_values(values, action_RS).astype(dtype, copy=False)
        values_RS[is_padding_RS] = 0
        return copy_to_tensor(values_RS, empty)

    feature_RSF = gather_features(pin_feature, gather_values(timelines.pin, action_RS), empty=empty)
    feature_RSF.numpy()[is_padding_RS] = 0
    return Sequences(
        feature_RSF=feature_RSF,
        action_type_RS=column(timelines.action_type, np.int64),
        surface_RS=column(timelines.surface, np.int64),
        duration_RS=column(timelines.duration, np.float32),
        ts_RS=column(timelines.ts, np.int64),
        length_R=copy_to_tensor(length_R, empty),
    )


def gather_features(pin_feature: np.ndarray, pin: np.ndarray, *, empty: Allocate = torch.empty) -> Tensor:
    """Return the content vectors of these pin rows, with one dimension more than `pin`, copied once."""
    result = empty((*pin.shape, pin_feature.shape[1]), dtype=torch.float32)
    np.take(np.asarray(pin_feature), pin, axis=0, out=result.numpy(), mode="clip")  # other modes copy once more
    return result


def gather_values(column: np.ndarray, row: Ints) -> np.ndarray:
    """Return a column's values at these rows, in the shape of `row`; the column may be memory-mapped."""
    return np.take(np.asarray(column), row)


def copy_to_tensor(array: np.ndarray, empty: Allocate) -> Tensor:
    """Copy an array into a tensor of the allocator."""
    source = torch.from_numpy(array)
    return empty(source.shape, dtype=source.dtype).copy_(source)
