"""The paper's transformer over the newest actions, with the inputs of the parts; its output is added to the vector.

    x_s = Linear(factor, content) + MLP(log age, log gap, statistics of the pin) + action type, oldest action first
    vector_u += MLP(blocks(x) at the newest action)

The blocks are those of the towers (pre-norm, causal). The last layer starts at 0, so that training starts without it.
Ages count from the day after the user's last active day, as everywhere on the user side.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pf_core.config.parts import PartsConfig
from pf_core.config.training import ModelConfig
from pf_core.days import DAY_US
from pf_core.model.parts.inputs import PinInputs
from pf_core.model.parts.layers import residual_mlp
from pf_core.model.parts.statistics import LOG_RATE_7, LOG_USER_DAYS
from pf_core.model.towers import Block
from pf_core.timelines.arrays import Timelines

NUM_HEADS = 8

DROPOUT = 0.2


class NewestActions(NamedTuple):
    """The newest actions of B users, oldest first, padded on the right with zeros."""

    pin_BS: Tensor
    """Position of the pin among the M pins of `PinInputs`."""
    age_BS: Tensor
    """Days from the action to the day after the user's last active day."""
    gap_BS: Tensor
    """Days from the action before; 0 for the oldest one."""
    action_type_BS: Tensor
    length_B: Tensor

    def to(self, device: torch.device) -> "NewestActions":
        return NewestActions(*(tensor.to(device, non_blocking=True) for tensor in self))


def newest_actions(
    timelines: Timelines, start_B: np.ndarray, end_B: np.ndarray, pin_M: np.ndarray, *, num_steps: int
) -> NewestActions:
    """Return at most `num_steps` of the actions `start` to `end` of each user; `pin_M` are the pins, ascending."""
    length_B = np.minimum(end_B - start_B, num_steps)
    step_S = np.arange(num_steps)
    is_real_BS = step_S < length_B[:, None]
    at_BS = np.where(is_real_BS, (end_B - length_B)[:, None] + step_S, 0)
    ts_BS = timelines.ts[at_BS]
    last_B = timelines.ts[np.maximum(end_B - 1, 0)]
    age_BS = np.where(is_real_BS, ((last_B // DAY_US + 1) * DAY_US)[:, None] - ts_BS, 0) / DAY_US
    gap_BS = np.zeros(ts_BS.shape)
    gap_BS[:, 1:] = np.where(is_real_BS[:, 1:], np.diff(ts_BS, axis=1), 0) / DAY_US
    place_BS = np.where(is_real_BS, np.searchsorted(pin_M, timelines.pin[at_BS]), 0)
    return NewestActions(
        pin_BS=torch.from_numpy(place_BS),
        age_BS=torch.from_numpy(age_BS.astype(np.float32)),
        gap_BS=torch.from_numpy(gap_BS.astype(np.float32)),
        action_type_BS=torch.from_numpy(np.where(is_real_BS, timelines.action_type[at_BS], 0).astype(np.int64)),
        length_B=torch.from_numpy(np.maximum(length_B, 1)),
    )


class SequencePart(nn.Module):
    def __init__(self, config: PartsConfig, *, pin_dim: int, vector_dim: int, num_action_types: int) -> None:
        super().__init__()
        dim = config.transformer_dim
        blocks = ModelConfig(hidden_dim=dim, num_heads=NUM_HEADS, dropout=DROPOUT)
        self.pin = nn.Linear(pin_dim, dim)
        self.time = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, dim))
        self.action_type = nn.Embedding(num_action_types, dim)
        self.blocks = nn.ModuleList(Block(blocks) for _ in range(config.transformer_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = residual_mlp(dim, 2 * dim, vector_dim)

    def forward(self, actions: NewestActions, pins: PinInputs) -> Tensor:
        """Return what is added to the users' vectors, vector_BV."""
        pin_MK = torch.cat([pins.factor_MD * pins.trust_M[:, None], pins.content_MC], dim=1)
        time_BS4 = torch.stack(
            [
                torch.log1p(actions.age_BS) / 3 - 1,
                torch.log1p(actions.gap_BS),
                pins.statistics_MF[:, LOG_RATE_7][actions.pin_BS],
                pins.statistics_MF[:, LOG_USER_DAYS][actions.pin_BS],
            ],
            dim=-1,
        )
        pin_BSH = self.pin(pin_MK[actions.pin_BS])  # in this order: rounding must not depend on the number of pins
        x_BSH = pin_BSH + self.time(time_BS4) + self.action_type(actions.action_type_BS)
        *others, last = self.blocks
        for block in others:
            x_BSH = block(x_BSH, actions.length_B)
        assert isinstance(last, Block)
        return self.head(self.norm(last.newest(x_BSH, actions.length_B)))
