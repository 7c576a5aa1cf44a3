"""Taste: factors of pins, and weighted sums of the factors of a user's own pins.

    taste_i = trust_i * exp(MLP(statistics_i)) * v_i
    taste_u = gain_u * sum_h A_h (sum_j a_hj v_j / sqrt(sum_j a_hj^2)),   a_hj = trust_j * weight_hj of own pin j

The root makes the vector of a user with many alike pins longer. The matrices A_h start at a multiple of the identity.
Factors are data, not weights: `training/parts/factors.py` fits them at points in time.
"""

import torch
from torch import Tensor, nn

from pf_core.model.parts.inputs import OwnPins, PinInputs, sums_by_user
from pf_core.model.parts.layers import HEAD_START, HeadWeights, residual_mlp, weighted_sums
from pf_core.model.parts.statistics import STATISTICS


class Taste(nn.Module):
    def __init__(self, dim: int, heads: int, *, num_inputs: int, num_user_features: int) -> None:
        super().__init__()
        self.length = residual_mlp(len(STATISTICS), 32, 1)
        self.gain = residual_mlp(num_user_features, 16, 1)
        self.weights = HeadWeights(heads, num_inputs, start=HEAD_START)
        self.matrices = nn.ParameterList([torch.eye(dim) * (1.0 if head == 0 else 0.1) for head in range(heads)])

    def of_pins(self, pins: PinInputs) -> Tensor:
        length_M1 = pins.trust_M[:, None] * self.length(pins.statistics_MF).clamp(-3, 3).exp()
        return pins.factor_MD * length_M1

    def of_users(self, own: OwnPins, pins: PinInputs, inputs_PI: Tensor, user_BU: Tensor, keep_P1: Tensor) -> Tensor:
        a_PH = self.weights(own, inputs_PI) * keep_P1 * pins.trust_M[own.pin_P, None]
        a_PH = a_PH / sums_by_user(a_PH.square(), own).add(1e-6).sqrt()[own.row_P]
        sums = weighted_sums(pins.factor_MD, own, a_PH)
        taste_BD = torch.stack([sum_BD @ matrix for sum_BD, matrix in zip(sums, self.matrices, strict=True)]).sum(0)
        return taste_BD * self.gain(user_BU).clamp(-3, 3).exp()
