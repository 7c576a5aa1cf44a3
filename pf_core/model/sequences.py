"""Sequences as the model reads them, collated from timelines; training and inference share this code."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pf_core.hashing import Ints
from pf_core.timelines.arrays import Timelines


class Sequences(NamedTuple):
    """Actions as the user tower reads them; padding is 0 everywhere."""

    feature_RSF: Tensor
    action_type_RS: Tensor
    surface_RS: Tensor
    duration_RS: Tensor
    ts_RS: Tensor
    """Microseconds, int64."""
    length_R: Tensor

    def to(self, device: torch.device) -> "Sequences":
        return Sequences(*(tensor.to(device, non_blocking=True) for tensor in self))


class Allocate(Protocol):
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
    """Sequences as the model reads them: actions start … end (included), padded on the right.

    They are numbers of the split's arrays, or of `action_A`, which then says where those actions lie.
    """
    length_R = end_R - start_R + 1
    step_S = np.arange(length_R.max(initial=1))
    action_RS = np.minimum(start_R[:, None] + step_S, end_R[:, None])
    if action_A is not None:
        action_RS = take(action_A, action_RS)
    is_padding_RS = step_S >= length_R[:, None]

    def column(values: np.ndarray, dtype: npt.DTypeLike) -> Tensor:
        values_RS = take(values, action_RS).astype(dtype, copy=False)
        values_RS[is_padding_RS] = 0
        return copied(values_RS, empty)

    feature_RSF = gather_features(pin_feature, take(timelines.pin, action_RS), empty=empty)
    feature_RSF.numpy()[is_padding_RS] = 0
    return Sequences(
        feature_RSF=feature_RSF,
        action_type_RS=column(timelines.action_type, np.int64),
        surface_RS=column(timelines.surface, np.int64),
        duration_RS=column(timelines.duration, np.float32),
        ts_RS=column(timelines.ts, np.int64),
        length_R=copied(length_R, empty),
    )


def gather_features(pin_feature: np.ndarray, pin: np.ndarray, *, empty: Allocate = torch.empty) -> Tensor:
    """The features of these pin rows, one more dimension than `pin` has."""
    result = empty((*pin.shape, pin_feature.shape[1]), dtype=torch.float32)
    np.take(np.asarray(pin_feature), pin, axis=0, out=result.numpy(), mode="clip")  # other modes copy once more
    return result


def take(column: np.ndarray, index: Ints) -> np.ndarray:
    return np.take(np.asarray(column), index)


def copied(array: np.ndarray, empty: Allocate) -> Tensor:
    source = torch.from_numpy(array)
    return empty(source.shape, dtype=source.dtype).copy_(source)
