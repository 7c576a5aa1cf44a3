"""The user tower and the pin tower (paper, sections 3.1 and 3.2, appendix A.1 and A.2).

Sequences are in ascending order and padded on the right: causal attention then needs no padding mask, because no action
sees the padding after it. The paper writes them newest first; its e_1 is the output at index length - 1. Positions are
counted from the newest action, so that padding never shifts them. Only the queried positions go through the head. If
that is the newest position alone, as in serving, the last block computes only that one, too.

Where the paper leaves a choice: log1p avoids log(0); the log of absolute time counts days from the first action of the
training set, because the log of an epoch hardly varies; time is divided by its periods in float64, because float32
resolves only 128 s of an epoch. `gap` is the time to the previous action, and the oldest action's is 0: A.1 zeroes "the
last one", and A.2 orders a sequence newest first. The time to the next action would tell an inner position when its
target comes. `feature_scale` brings content vectors of any site to unit variance.

Tensor suffixes: R sequences, S actions of the longest sequence, F content vector, H hidden, D embedding, Q queries
(positions whose embedding is computed), N pins.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pf_core.config.training import ModelConfig
from pf_core.model.sequences import Sequences

DAY_S = 86_400.0

ABSOLUTE_PERIODS_S = tuple(hours * 3600.0 for hours in (0.25, 0.5, 0.75, 1, 2, 4, 8, 16, 24, 168, 672, 8760))

RELATIVE_PERIODS_S = tuple((28 * DAY_S) ** (index / 31) for index in range(32))
"""32 periods, evenly spaced on a log scale, from one second to four weeks."""


class TimeEncoding(nn.Module):
    """Encodes a time as 2P + 1 numbers (A.1): cos and sin with fixed periods and learned phases, and a log."""

    inverse_period: Tensor

    def __init__(self, periods_s: Sequence[float], *, log_unit_s: float) -> None:
        super().__init__()
        self.register_buffer("inverse_period", 1 / torch.tensor(periods_s, dtype=torch.float64), persistent=False)
        self.cos_phase = nn.Parameter(torch.zeros(len(periods_s)))
        self.sin_phase = nn.Parameter(torch.zeros(len(periods_s)))
        self.log_unit_s = log_unit_s
        self.output_dim = 2 * len(periods_s) + 1

    def forward(self, time_us: Tensor, since_us: Tensor) -> Tensor:
        """Encode `time_us` by the periods, and `since_us`, which is never negative, by the log."""
        turns = (time_us.double() / 1e6).unsqueeze(-1) * self.inverse_period
        angle = (2 * math.pi) * (turns - turns.floor()).float()
        log = torch.log1p(since_us.double() / (1e6 * self.log_unit_s)).float().unsqueeze(-1)
        return torch.cat([torch.cos(angle + self.cos_phase), torch.sin(angle + self.sin_phase), log], dim=-1)


class ActionEncoder(nn.Module):
    """Builds an action's input vector: the concatenation of the features that are switched on (section 3.1)."""

    def __init__(
        self, config: ModelConfig, *, feature_dim: int, num_action_types: int, num_surfaces: int, time_origin_us: int
    ) -> None:
        super().__init__()
        self.features = config.features
        self.time_origin_us = time_origin_us
        self.output_dim = feature_dim if self.features.pin_feature else 0
        if self.features.action_type:
            self.action_type = nn.Embedding(num_action_types, config.category_dim)
            self.output_dim += config.category_dim
        if self.features.surface:
            self.surface = nn.Embedding(num_surfaces, config.category_dim)
            self.output_dim += config.category_dim
        if self.features.duration:
            self.output_dim += 1
        if self.features.absolute_time:
            self.absolute_time = TimeEncoding(ABSOLUTE_PERIODS_S, log_unit_s=DAY_S)
            self.output_dim += self.absolute_time.output_dim
        if self.features.since_latest:
            self.since_latest = TimeEncoding(RELATIVE_PERIODS_S, log_unit_s=1)
            self.output_dim += self.since_latest.output_dim
        if self.features.gap:
            self.gap = TimeEncoding(RELATIVE_PERIODS_S, log_unit_s=1)
            self.output_dim += self.gap.output_dim

    def forward(self, actions: Sequences) -> Tensor:
        is_real_RS = torch.arange(actions.ts_RS.shape[1], device=actions.ts_RS.device) < actions.length_R[:, None]
        parts: list[Tensor] = []
        if self.features.pin_feature:
            parts.append(actions.feature_RSF)
        if self.features.action_type:
            parts.append(self.action_type(actions.action_type_RS))
        if self.features.surface:
            parts.append(self.surface(actions.surface_RS))
        if self.features.duration:
            parts.append(torch.log1p(actions.duration_RS).unsqueeze(-1))
        if self.features.absolute_time:
            age_us = (actions.ts_RS - self.time_origin_us).clamp(min=0)
            parts.append(self.absolute_time(actions.ts_RS, age_us))
        if self.features.since_latest:
            latest_R1 = actions.ts_RS.gather(1, (actions.length_R - 1)[:, None])
            since_RS = torch.where(is_real_RS, latest_R1 - actions.ts_RS, 0)
            parts.append(self.since_latest(since_RS, since_RS))
        if self.features.gap:
            gap_RS = torch.where(is_real_RS, F.pad(actions.ts_RS.diff(dim=1), (1, 0)), 0)
            parts.append(self.gap(gap_RS, gap_RS))
        return torch.cat(parts, dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention.

    Queries, keys and values have no bias: a bias of the keys cancels in the softmax, and the output's bias can do what
    a bias of the values would do.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.is_causal = config.num_heads, config.is_causal
        self.qkv = nn.Linear(config.hidden_dim, 3 * config.hidden_dim, bias=False)
        self.out = nn.Linear(config.hidden_dim, config.hidden_dim)

    def forward(self, x_RSH: Tensor, length_R: Tensor) -> Tensor:
        num_rows, num_steps, hidden = x_RSH.shape
        heads = self.qkv(x_RSH).view(num_rows, num_steps, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mask = None
        if not self.is_causal:  # every action sees the whole sequence: hide the padding
            mask = (torch.arange(num_steps, device=x_RSH.device) < length_R[:, None])[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(num_rows, num_steps, hidden))

    def newest(self, x_RSH: Tensor, length_R: Tensor) -> Tensor:
        """Return `forward` at the newest action, mixed_RH: one query for each sequence, which sees all of it."""
        num_rows, num_steps, hidden = x_RSH.shape
        of_query, of_others = self.qkv.weight.split([hidden, 2 * hidden])
        query = F.linear(newest_of(x_RSH, length_R), of_query).view(num_rows, self.num_heads, 1, -1)
        others = F.linear(x_RSH, of_others).view(num_rows, num_steps, 2, self.num_heads, hidden // self.num_heads)
        key, value = others.permute(2, 0, 3, 1, 4)
        is_real_RS = torch.arange(num_steps, device=x_RSH.device) < length_R[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_real_RS[:, None, None, :])
        return self.out(mixed.reshape(num_rows, hidden))


class Block(nn.Module):
    """Pre-norm: U = V + MHSA(LN(V)); V = U + FFN(LN(U)) (A.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_dim
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(config)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_RSH: Tensor, length_R: Tensor) -> Tensor:
        x_RSH = x_RSH + self.dropout(self.attention(self.attention_norm(x_RSH), length_R))
        return x_RSH + self.dropout(self.ffn(self.ffn_norm(x_RSH)))

    def newest(self, x_RSH: Tensor, length_R: Tensor) -> Tensor:
        """Return `forward` at the newest action, hidden_RH; the outputs of the other actions are not computed."""
        mixed_RH = self.attention.newest(self.attention_norm(x_RSH), length_R)
        x_RH = newest_of(x_RSH, length_R) + self.dropout(mixed_RH)
        return x_RH + self.dropout(self.ffn(self.ffn_norm(x_RH)))


def newest_of(x_RSH: Tensor, length_R: Tensor) -> Tensor:
    """Return x_RH, the vector at the newest action of each sequence."""
    return x_RSH[torch.arange(len(length_R), device=length_R.device), length_R - 1]


class PinnerFormer(nn.Module):
    """The two towers: f maps users and g maps pins to unit vectors, which are compared by their cosine (section 3)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        feature_dim: int,
        num_action_types: int,
        num_surfaces: int,
        time_origin_us: int = 0,
        feature_scale: float = 1.0,
    ) -> None:
        super().__init__()
        hidden = config.hidden_dim
        self.config, self.feature_dim, self.feature_scale = config, feature_dim, feature_scale
        self.actions = ActionEncoder(
            config,
            feature_dim=feature_dim,
            num_action_types=num_action_types,
            num_surfaces=num_surfaces,
            time_origin_us=time_origin_us,
        )
        self.project = nn.Linear(self.actions.output_dim, hidden)
        if config.features.position:
            self.position = nn.Embedding(config.sequence_length, hidden)
            nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head_norm = nn.LayerNorm(hidden)
        self.head = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, config.embedding_dim))
        self.pins = nn.Sequential(
            nn.Linear(feature_dim, config.pin_hidden_dim),
            nn.GELU(),
            nn.Linear(config.pin_hidden_dim, config.embedding_dim),
        )
        if config.near_identity_init:
            start_near_identity(self)

    @property
    def slices(self) -> dict[str, tuple[int, int]]:
        """First and last coordinate (exclusive) of each part of a vector: the towers have one part."""
        return {"embedding": (0, self.config.embedding_dim)}

    def encode(self, actions: Sequences) -> Tensor:
        """Return the last hidden state at every position, hidden_RSH."""
        x_RSH = self._project(actions)
        for block in self.blocks:
            x_RSH = block(x_RSH, actions.length_R)
        return x_RSH

    def encode_newest(self, actions: Sequences) -> Tensor:
        """Return `encode` at the newest action, hidden_RH, without most of the last block's work."""
        x_RSH = self._project(actions)
        if len(self.blocks) == 0:
            return newest_of(x_RSH, actions.length_R)
        *others, last = self.blocks
        assert isinstance(last, Block)
        for block in others:
            x_RSH = block(x_RSH, actions.length_R)
        return last.newest(x_RSH, actions.length_R)

    def _project(self, actions: Sequences) -> Tensor:
        scaled = actions._replace(feature_RSF=actions.feature_RSF * self.feature_scale)
        x_RSH = self.project(self.actions(scaled))
        if self.config.features.position:
            steps = torch.arange(x_RSH.shape[1], device=x_RSH.device)
            from_newest_RS = (actions.length_R[:, None] - 1 - steps).clamp(min=0)
            x_RSH = x_RSH + self.position(from_newest_RS)
        return x_RSH

    def embed_positions(self, actions: Sequences, row_Q: Tensor, position_Q: Tensor) -> Tensor:
        """Return the unit vectors user_QD at these positions (indices in the ascending sequence)."""
        return self._head(self.encode(actions)[row_Q, position_Q])

    def embed_users(self, actions: Sequences) -> Tensor:
        """Return e_1 of every sequence, user_RD: the user's embedding after the newest action."""
        return self._head(self.encode_newest(actions))

    def _head(self, hidden_QH: Tensor) -> Tensor:
        return F.normalize(self.head(self.head_norm(hidden_QH)).float(), dim=-1)

    def embed_pins(self, feature_NF: Tensor) -> Tensor:
        """Return the unit vectors pin_ND."""
        return F.normalize(self.pins(feature_NF * self.feature_scale).float(), dim=-1)


@torch.no_grad()
def start_near_identity(model: PinnerFormer) -> None:
    """Initialize both towers to pass content through: users start near the mean of their pins' vectors. Ours.

    GELU(x) - GELU(-x) = x, so a two-layer MLP with mirrored halves is the identity. Values and outputs of the attention
    are identities, and the output of a block's feed-forward network starts small.
    """
    config = model.config
    content_HF = _projection(config.hidden_dim, model.feature_dim)
    content_DF = _projection(config.embedding_dim, model.feature_dim)
    if max(config.hidden_dim, config.embedding_dim) < model.feature_dim:  # project pins as the users are
        content_DF = torch.eye(config.embedding_dim, config.hidden_dim) @ content_HF
    model.project.weight.mul_(0.1)
    model.project.bias.zero_()
    if config.features.pin_feature:
        model.project.weight[:, : model.feature_dim] = content_HF
    for module in model.blocks:
        assert isinstance(module, Block)
        attention = module.attention
        attention.qkv.weight[2 * config.hidden_dim :] = torch.eye(config.hidden_dim)
        attention.out.weight.copy_(torch.eye(config.hidden_dim))
        attention.out.bias.zero_()
        last = module.ffn[2]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(0.1)
        last.bias.zero_()
    _pass_through(model.head, content_DF @ content_HF.T)
    _pass_through(model.pins, content_DF)


def _projection(rows: int, columns: int) -> Tensor:
    """Return the identity if it has enough rows, else a matrix with orthonormal rows."""
    if rows >= columns:
        return torch.eye(rows, columns)
    return nn.init.orthogonal_(torch.empty(rows, columns))


def _pass_through(mlp: nn.Sequential, linear: Tensor) -> None:
    """Make the first hidden units of a two-layer GELU MLP compute `linear`; the other units start small.

    Without room for two mirrored halves, the MLP keeps its own initialization.
    """
    first, last = mlp[0], mlp[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    num_out, num_in = linear.shape
    rank = min(num_out, num_in)
    if first.out_features < 2 * rank:
        return
    for layer in (first, last):
        layer.bias.zero_()
    last.weight.mul_(0.1)
    inner, outer = (linear, torch.eye(num_out)) if num_out <= num_in else (torch.eye(num_in), linear)
    first.weight[:rank], first.weight[rank : 2 * rank] = inner, -inner
    last.weight[:, :rank], last.weight[:, rank : 2 * rank] = outer, -outer
