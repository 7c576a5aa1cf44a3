"""The model of parts: one vector for each user and each pin, and a memory of the user's own pins.

    logit(u, i) = taste_u . taste_i + content_u . content_i + trend_u . trend_i, and more for own pins (memory.py)

A vector is [taste | content | trend]. A user's vector is a function of the user's actions and of what the model knows
of pins: their factors, content vectors, and statistics as of the end of training. A pin's vector has the statistics of
its day.

What is stored has unit norm. Pins are divided by a constant of the model, `pin_length`, and get one more coordinate,
the slack sqrt(1 - |p|^2); a longer pin is clipped. Users are divided by their norm, and their slack is 0. The cosine
then ranks pins as the logit does; an increment of the logit, divided by both lengths, is added to the cosine. A user of
whom no part knows anything has a slack of -1 and nothing else, which ranks the longest pins first: those that the model
knows best.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pf_core.config.parts import PartsConfig
from pf_core.model.parts.content import Content
from pf_core.model.parts.inputs import OwnPins, PinInputs, sums_by_user
from pf_core.model.parts.memory import START_SHARE, Memory
from pf_core.model.parts.own_pins import FEATURES, LOG_DAYS
from pf_core.model.parts.sequence import NewestActions, SequencePart
from pf_core.model.parts.statistics import LOG_RATE_7, LOG_USER_DAYS, STATISTICS
from pf_core.model.parts.taste import Taste
from pf_core.model.parts.trend import Trend

USER_FEATURES = ("log own pins", "log own pin-days", "mean log rate of own pins", "mean log user-days of own pins")

USER_MEAN, USER_SCALE = (4.0, 4.5), (1.5, 1.5)
"""Bring the first two features of a user to about unit variance."""

TYPE_DIM = 4


class Users(NamedTuple):
    """The vectors of B users, before scaling, and the strengths of their own pins in memory."""

    vector_BV: Tensor
    strength_P: Tensor


class PartsModel(nn.Module):
    own_mean_X: Tensor
    own_scale_X: Tensor
    statistics_scale_F: Tensor
    unknown_statistics_F: Tensor
    """Statistics of a pin that the pin table does not have."""
    pin_length: Tensor

    def __init__(self, config: PartsConfig, *, content_dim: int, num_action_types: int) -> None:
        super().__init__()
        self.config = config
        self.content_dim = content_dim if config.content else 0
        self.action_type = nn.Embedding(num_action_types, TYPE_DIM)
        num_inputs = len(FEATURES) + len(STATISTICS) + 2 + TYPE_DIM
        shape = {"num_inputs": num_inputs, "num_user_features": len(USER_FEATURES)}
        self.taste = Taste(config.factor_dim, config.heads, **shape) if config.factor_dim else None
        self.content = Content(self.content_dim, config.heads, **shape) if self.content_dim else None
        self.trend = Trend(config.trend_dim, num_user_features=len(USER_FEATURES)) if config.trend_dim else None
        self.memory = Memory(num_inputs=num_inputs) if config.memory else None
        self.sequence = (
            SequencePart(
                config,
                pin_dim=config.factor_dim + self.content_dim,
                vector_dim=self.embedding_dim - 1,
                num_action_types=num_action_types,
            )
            if config.transformer_layers
            else None
        )
        for name, size in (("own_mean_X", len(FEATURES)), ("own_scale_X", len(FEATURES))):
            self.register_buffer(name, torch.full((size,), float(name == "own_scale_X")))
        self.register_buffer("statistics_scale_F", torch.ones(len(STATISTICS)))
        self.register_buffer("unknown_statistics_F", torch.zeros(len(STATISTICS)))
        self.register_buffer("pin_length", torch.tensor(1.0))

    @property
    def slices(self) -> dict[str, tuple[int, int]]:
        """First and last coordinate (exclusive) of each part in a stored vector."""
        sizes = {
            "taste": self.config.factor_dim,
            "content": self.content_dim,
            "trend": self.config.trend_dim,
            "slack": 1,
        }
        result, start = {}, 0
        for name, size in sizes.items():
            if size:
                result[name] = (start, start + size)
            start += size
        return result

    def matrices(self) -> list[nn.Parameter]:
        """Return the matrices of taste and content, which start at multiples of the identity."""
        return [matrix for part in (self.taste, self.content) if part is not None for matrix in part.matrices]

    @property
    def embedding_dim(self) -> int:
        """Length of a stored vector."""
        return self.config.factor_dim + self.content_dim + self.config.trend_dim + 1

    def embed_users(
        self, own: OwnPins, pins: PinInputs, newest: NewestActions | None = None, *, keep_P: Tensor | None = None
    ) -> Users:
        """Return the users' vectors and memories; `keep_P` leaves own pins out of the weighted sums.

        A model with a transformer reads the newest actions, too.
        """
        pins = self._scaled(pins)
        pin_PF = pins.statistics_MF[own.pin_P]
        summed_P4 = torch.cat(
            [
                own.features_PX.new_ones(len(own.pin_P), 1),
                own.features_PX[:, [LOG_DAYS]].exp(),
                pin_PF[:, [LOG_RATE_7, LOG_USER_DAYS]],
            ],
            dim=1,
        )
        sums_B4 = sums_by_user(summed_P4, own)
        size_B2 = (torch.log1p(sums_B4[:, :2]) - sums_B4.new_tensor(USER_MEAN)) / sums_B4.new_tensor(USER_SCALE)
        user_BU = torch.cat([size_B2, sums_B4[:, 2:] / sums_B4[:, :1].clamp(min=1)], dim=1)
        features_PX = (own.features_PX - self.own_mean_X) / self.own_scale_X
        inputs_PI = torch.cat([features_PX, pin_PF, size_B2[own.row_P], self.action_type(own.action_type_P)], dim=1)
        keep_P1 = own.features_PX.new_ones(len(own.pin_P), 1) if keep_P is None else keep_P[:, None]
        parts = [
            part.of_users(own, pins, inputs_PI, user_BU, keep_P1)
            for part in (self.taste, self.content)
            if part is not None
        ]
        if self.trend is not None:
            parts.append(self.trend.of_users(user_BU))
        strength_P = inputs_PI.new_zeros(len(inputs_PI)) if self.memory is None else self.memory(own, inputs_PI)
        vector_BV = torch.cat(parts, dim=1)
        if self.sequence is not None:
            assert newest is not None
            vector_BV = vector_BV + self.sequence(newest, pins)
        return Users(vector_BV, strength_P)

    def embed_pins(self, pins: PinInputs, rates_MW: Tensor, mean_rate_W: Tensor) -> Tensor:
        """Return the pins' vectors before scaling, vector_MV; rates are those of the day, and their mean over pins."""
        pins = self._scaled(pins)
        parts = [part.of_pins(pins) for part in (self.taste, self.content) if part is not None]
        if self.trend is not None:
            parts.append(self.trend.of_pins(pins.statistics_MF, rates_MW, mean_rate_W))
        return torch.cat(parts, dim=1)

    def _scaled(self, pins: PinInputs) -> PinInputs:
        """Return the pins with statistics of about unit variance."""
        return pins._replace(statistics_MF=pins.statistics_MF / self.statistics_scale_F)

    def unit_pins(self, vector_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors with a slack coordinate, and whether each pin was longer than `pin_length`."""
        scaled_MV = vector_MV / self.pin_length
        norm_M1 = scaled_MV.norm(dim=1, keepdim=True)
        is_clipped_M1 = norm_M1 > 1
        scaled_MV = torch.where(is_clipped_M1, scaled_MV / norm_M1, scaled_MV)
        slack_M1 = (1 - scaled_MV.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
        return torch.cat([scaled_MV, slack_M1], dim=1), is_clipped_M1[:, 0]

    def unit_users(self, vector_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors, and the logit of a cosine of 1 for each user: both lengths multiplied.

        The slack is 0; where the vector is zero, it is -1, and the length counts as 1.
        """
        norm_B1 = vector_BV.norm(dim=1, keepdim=True)
        is_zero_B1 = norm_B1 < 1e-12
        norm_B1 = norm_B1.masked_fill(is_zero_B1, 1.0)
        slack_B1 = torch.zeros_like(norm_B1).masked_fill(is_zero_B1, -1.0)
        return torch.cat([vector_BV / norm_B1, slack_B1], dim=1), norm_B1[:, 0] * self.pin_length

    @torch.no_grad()
    def start(self, log_share_M: Tensor, num_pins: int) -> None:
        """Set what the first logits depend on: the center of the trend, and memory above it.

        `log_share_M` is `Trend.log_share` of the pins that compete.
        """
        center = (log_share_M.max() + log_share_M.min()) / 2 if len(log_share_M) else torch.tensor(0.0)
        if self.trend is not None:
            self.trend.center.copy_(center)
        if self.memory is not None:
            self.memory.b0.fill_(START_SHARE + math.log(num_pins) - float(center))
