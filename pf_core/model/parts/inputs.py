"""Inputs of the model of parts, as tensors.

Suffixes of all modules here: B users, P own pins of all users (row_P is the user of each), M pins, D factors,
C content, G trend, V = D + C + G, H heads, X features of an own pin, F statistics of a pin, U features of a user,
W windows of days.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PinInputs(NamedTuple):
    """What the model reads of M pins, float32."""

    factor_MD: Tensor
    """Unit factors, of the newest point in time before the row; zeros for a pin without one."""
    trust_M: Tensor
    """Trust in the factor, n / (n + 7) of n users; 0 for a pin without a factor."""
    statistics_MF: Tensor
    """Centered statistics: of the model's pin table on the user side, as of the day on the pin side."""
    content_MC: Tensor
    """Unit content vectors; zeros for a pin without one, and no columns for a model without content."""

    def to(self, device: torch.device) -> "PinInputs":
        return PinInputs(*(tensor.to(device, non_blocking=True) for tensor in self))


class OwnPins(NamedTuple):
    """The own pins of B users: pins that a user has acted on, each once, ascending by user."""

    num_users: int
    row_P: Tensor
    """The user of each own pin."""
    pin_P: Tensor
    """Position of the pin among the M pins of `PinInputs`."""
    features_PX: Tensor
    """`own_pins.FEATURES`."""
    action_type_P: Tensor
    """Code of the user's newest action on the pin."""

    def to(self, device: torch.device) -> "OwnPins":
        return OwnPins(self.num_users, *(tensor.to(device, non_blocking=True) for tensor in self[1:]))


def sums_by_user(values_PK: Tensor, own: OwnPins) -> Tensor:
    """Return the sum of the values over the own pins of each user, sums_BK."""
    return values_PK.new_zeros(own.num_users, values_PK.shape[1]).index_add_(0, own.row_P, values_PK)


def unit_rows(vectors_MC: np.ndarray) -> np.ndarray:
    """Return the rows divided by their norms; zeros stay zeros."""
    norm_M1 = np.linalg.norm(vectors_MC, axis=1, keepdims=True)
    return np.divide(vectors_MC, norm_M1, out=np.zeros_like(vectors_MC), where=norm_M1 > 0)
