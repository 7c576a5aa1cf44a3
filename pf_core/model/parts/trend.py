"""Trend: how much a pin is used these days, and how much this user follows it.

    trend_i = MLP(statistics_i) + e1 * (log share_i - center),   share_i = (r_i + epsilon) / sum_j (r_j + epsilon)
    trend_u = MLP(user) + e1 * weight,                           r_i = sum_w beta_w * rate_iw

r is linear in the counts: a mixture of logarithms misranks the most used pins. beta is a softmax; epsilon is a small
share of the mean r. Subtracting a constant of the model (`center`) changes no ranking and makes pins shorter.
"""

import torch
from torch import Tensor, nn

from pf_core.model.parts.layers import residual_mlp
from pf_core.model.parts.statistics import STATISTICS, WINDOWS_DAYS

START_BETA = (0.05, 0.6, 0.25, 0.07, 0.03)

EPSILON = 1e-4


class Trend(nn.Module):
    center: Tensor
    e1_G: Tensor

    def __init__(self, dim: int, *, num_user_features: int) -> None:
        super().__init__()
        assert len(START_BETA) == len(WINDOWS_DAYS)
        # A constant in all pins changes no softmax: its gradient would be rounding errors, which Adam makes large.
        self.pin_mlp = residual_mlp(len(STATISTICS), 32, dim, has_bias=False)
        self.user_mlp = residual_mlp(num_user_features, 32, dim)
        self.log_beta_W = nn.Parameter(torch.tensor(START_BETA).log())
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("e1_G", torch.eye(dim)[0])
        self.register_buffer("center", torch.tensor(0.0))

    def log_share(self, rates_MW: Tensor, mean_rate_W: Tensor) -> Tensor:
        """Return log(share * number of pins) of M pins; `mean_rate_W` is the mean over all pins of the day."""
        beta_W = torch.softmax(self.log_beta_W, 0)
        mean = mean_rate_W @ beta_W
        return torch.log((rates_MW @ beta_W / mean.clamp(min=1e-30) + EPSILON) / (1 + EPSILON))

    def of_pins(self, statistics_MF: Tensor, rates_MW: Tensor, mean_rate_W: Tensor) -> Tensor:
        log_share_M = self.log_share(rates_MW, mean_rate_W) - self.center
        return self.pin_mlp(statistics_MF) + log_share_M[:, None] * self.e1_G

    def of_users(self, user_BU: Tensor) -> Tensor:
        return self.user_mlp(user_BU) + self.weight * self.e1_G
