"""Memory: an increment of the score of each own pin.

    increment_uj = exp(b0 + b1 * log D_j + MLP(own pin j))

D is the number of the user's days on the pin, decayed by 120 days: memory starts as the user's own frequency.
"""

import torch
from torch import Tensor, nn

from pf_core.model.parts.inputs import OwnPins
from pf_core.model.parts.layers import residual_mlp
from pf_core.model.parts.own_pins import LOG_DECAYED


class Memory(nn.Module):
    def __init__(self, *, num_inputs: int) -> None:
        super().__init__()
        self.mlp = residual_mlp(num_inputs, 32, 1)
        self.b0 = nn.Parameter(torch.tensor(1.0))
        self.b1 = nn.Parameter(torch.tensor(0.5))

    def forward(self, own: OwnPins, inputs_PI: Tensor) -> Tensor:
        """Return increment_P."""
        log_P = self.b0 + self.b1 * own.features_PX[:, LOG_DECAYED] + self.mlp(inputs_PI)[:, 0]
        return log_P.clamp(-9, 4).exp()
