"""Content: a learned map of the pins' content vectors, for pins and for the weighted sums of a user's own pins.

    content_i = unit(W c_i) * exp(MLP(statistics_i))
    content_u = gain_u * sum_h A_h (sum_j a_hj c_j / sum_j a_hj),   a_hj = weight_hj of own pin j

W and the matrices A_h start at multiples of the identity. A pin without any action has this part like any other.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pf_core.model.parts.inputs import OwnPins, PinInputs, sums_by_user
from pf_core.model.parts.layers import HEAD_START, HeadWeights, residual_mlp, weighted_sums
from pf_core.model.parts.statistics import STATISTICS

START = ((0.5, 0.0), *HEAD_START[1:])


class Content(nn.Module):
    def __init__(self, dim: int, heads: int, *, num_inputs: int, num_user_features: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.eye(dim))
        self.length = residual_mlp(len(STATISTICS), 32, 1)
        self.gain = residual_mlp(num_user_features, 16, 1)
        self.weights = HeadWeights(heads, num_inputs, start=START)
        self.matrices = nn.ParameterList([torch.eye(dim) * (3.0 if head == 0 else 0.1) for head in range(heads)])

    def of_pins(self, pins: PinInputs) -> Tensor:
        length_M1 = self.length(pins.statistics_MF).clamp(-3, 3).exp()
        return normalize(pins.content_MC @ self.projection, dim=1) * length_M1

    def of_users(self, own: OwnPins, pins: PinInputs, inputs_PI: Tensor, user_BU: Tensor, keep_P1: Tensor) -> Tensor:
        has_content_M1 = pins.content_MC.square().sum(1, keepdim=True) > 0
        a_PH = self.weights(own, inputs_PI) * keep_P1 * has_content_M1[own.pin_P]
        a_PH = a_PH / sums_by_user(a_PH, own).add(1e-6)[own.row_P]
        sums = weighted_sums(pins.content_MC, own, a_PH)
        content_BC = torch.stack([sum_BC @ matrix for sum_BC, matrix in zip(sums, self.matrices, strict=True)]).sum(0)
        return content_BC * self.gain(user_BU).clamp(-3, 3).exp()
