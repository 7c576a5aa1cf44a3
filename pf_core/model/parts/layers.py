"""Small layers that several parts share."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from pf_core.model.parts.inputs import OwnPins
from pf_core.model.parts.own_pins import LOG_AGE, LOG_DECAYED

HEAD_START = ((0.0, 0.0), (0.0, -0.7), (0.5, 0.0), (0.0, -1.5))
"""Initial powers of the decayed days and of the age in the weights of each head."""


def residual_mlp(inputs: int, hidden: int, outputs: int, *, has_bias: bool = True) -> nn.Sequential:
    """Two layers, the last of which starts at 0, so that training starts from the formula around them.

    Without `has_bias`, no constant is added to the output.
    """
    layers = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs, bias=has_bias))
    last = layers[2]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    if has_bias:
        nn.init.zeros_(last.bias)
    return layers


class HeadWeights(nn.Module):
    """Weights of the own pins in each head: decayed_days ** p_h * age ** q_h * exp(MLP), weights_PH."""

    def __init__(self, heads: int, num_inputs: int, *, start: tuple[tuple[float, float], ...]) -> None:
        super().__init__()
        self.powers_H2 = nn.Parameter(torch.tensor(start[:heads]))
        self.mlp = residual_mlp(num_inputs, 32, heads)

    def forward(self, own: OwnPins, inputs_PI: Tensor) -> Tensor:
        known_P2 = own.features_PX[:, [LOG_DECAYED, LOG_AGE]]
        return (self.mlp(inputs_PI) + known_P2 @ self.powers_H2.T).clamp(-9, 6).exp()


def weighted_sums(vectors_MK: Tensor, own: OwnPins, weights_PH: Tensor) -> list[Tensor]:
    """Return sums_BK of the own pins' vectors for each head."""
    begin_B = torch.searchsorted(own.row_P, torch.arange(own.num_users, device=own.row_P.device))
    return [
        embedding_bag(own.pin_P, vectors_MK, begin_B, mode="sum", per_sample_weights=weights_P.contiguous())
        for weights_P in weights_PH.T
    ]
