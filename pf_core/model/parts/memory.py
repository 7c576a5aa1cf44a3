"""Memory: what is known of a user's own pins beside the vector.

    logit of own pin j = log(exp(<u, p_j>) + exp(r_j)),   r_j = b0 + b1 * log D_j + MLP(own pin j)

D is the number of the user's days on the pin, decayed by 120 days. The own pins form a distribution of their own, mixed
with that of the vector: where r is large, own pins rank by r alone, and memory starts as the user's own frequency. What
a record stores is the increment over the vector's logit, which is never negative: softplus(r_j + 1 - <u, p_j>).

The 1 is added where records are made, not in the likelihood. Factors are fitted on the training users themselves, so
that a vector is worth more to them than to anybody else, while a user's own counts are as good for all: memory that is
trained beside such vectors is too weak for the users who are served.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from pf_core.model.parts.inputs import OwnPins
from pf_core.model.parts.layers import residual_mlp
from pf_core.model.parts.own_pins import LOG_DECAYED

START_SHARE = -2.0
"""r of a pin that was used once, just now, at the start: as a log share, above that of any but a dominating pin."""


SERVED_SHIFT = 1.0
"""Added to the strength of memory where records are made."""


class Memory(nn.Module):
    def __init__(self, *, num_inputs: int) -> None:
        super().__init__()
        self.mlp = residual_mlp(num_inputs, 32, 1)
        self.b0 = nn.Parameter(torch.tensor(START_SHARE))
        self.b1 = nn.Parameter(torch.tensor(1.0))

    def forward(self, own: OwnPins, inputs_PI: Tensor) -> Tensor:
        """Return the log strength of each own pin, strength_P."""
        return self.b0 + self.b1 * own.features_PX[:, LOG_DECAYED] + self.mlp(inputs_PI)[:, 0]


def increments(strength_P: Tensor, logit_P: Tensor) -> Tensor:
    """Return what memory adds to the vector's logits of own pins."""
    return softplus(strength_P - logit_P)
