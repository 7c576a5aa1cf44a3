"""Negatives, log-Q correction and the sampled softmax (paper, section 3.3 and appendix A.3).

**Pool.** In-batch negatives are the positives of all ranks (capped); random negatives are drawn uniformly from the
candidates. Every rank draws its share, and all ranks see the same pool. A row never competes with a pin that is one of
its user's positives in the batch, whichever row or draw contributed it; its own positive counts once, outside the pool.

**Q.** Q(v) is the expected number of times that v is in the pool: num_in_batch * p(v) + num_random / |candidates|, with
v's share p(v) of the positives estimated by a count-min sketch. Because Q is an expected count, sum(exp(s - log Q))
over the pool estimates the sum over the corpus. This makes `negatives` consistent with the full softmax, and gives it
the same gradient as `corrected` (arXiv 2507.09331: a weight 1 - P(positive) on a loss whose denominator holds only
negatives).

**Misprints.** The paper's equation has s(u_i, u_i) where s(u_i, p_i) is meant; its Q_i(p_i), read literally, is 1.

**Weights.** Every user has the same weight over all ranks: R ranks then give exactly the loss and gradient of one rank
on the union of their batches. (The paper weights users equally within each GPU, which is the same in expectation.)

**Memory.** Only the logits of `chunk_rows` rows exist at a time. The loss is a sum over rows, so the gradient of a
chunk is known as soon as its logits are: it overwrites them in place, and nothing is kept for the backward pass. Logits
stay float32: at a temperature of 0.01 they reach 100, where bfloat16 resolves 0.5.

Tensor suffixes: P pairs of this rank, U users of this rank, N pool entries, D embedding, Q queries, C rows of a chunk,
B positives of all ranks, K distinct pins of this rank's pairs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pf_core.config.training import LossConfig
from pf_core.training.ranks import gather_counts, gather_rows
from pf_core.training.sketch import CountMinSketch

MASKED = -1e4
"""A logit with no weight in a softmax; finite, so that a row without negatives has a gradient."""

MIN_TEMPERATURE = 0.01
"""Lower bound of the learned temperature (section 3.3.2)."""

SHIFT = 0x1E3779B97F4A7C15
"""Odd multiplier that turns the number of positives seen so far into the pseudo-random offset at which pairs draw
their own negative from the pool."""


class Pairs(NamedTuple):
    """The (user embedding, positive pin) pairs of a batch on this rank."""

    query_P: Tensor
    """Row of the user embedding."""
    user_P: Tensor
    """Number of the user on this rank, 0 … num_users - 1."""
    weight_P: Tensor
    """Weight of the pair; the weights of a user sum to 1."""
    pin_P: Tensor
    """Pin row of the positive."""
    is_candidate_P: Tensor
    """Whether the pin can be drawn as a random negative."""
    num_users: int


class Pool(NamedTuple):
    """The negatives that all rows of all ranks share."""

    embedding_ND: Tensor
    pin_N: Tensor
    log_q_N: Tensor
    drawn_P: Tensor
    """A random entry for each of this rank's pairs, for binary cross-entropy; independent of the number of ranks."""


class RetrievalLoss(nn.Module):
    """The loss with its state: the learned temperature and the sketch of the positives."""

    def __init__(self, config: LossConfig, *, num_candidates: int) -> None:
        super().__init__()
        self.config, self.num_candidates = config, num_candidates
        self.temperature = nn.Parameter(torch.tensor(float(config.temperature)))
        self.sketch = CountMinSketch(depth=config.sketch_depth, width=config.sketch_width)

    @torch.no_grad()
    def clamp_temperature(self) -> None:
        """Enforce the lower bound after a step; a bound inside the loss would have no gradient below it."""
        self.temperature.clamp_(min=MIN_TEMPERATURE)

    def forward(
        self, user_QD: Tensor, pairs: Pairs, positive_PD: Tensor, random_ND: Tensor, random_N: Tensor
    ) -> Tensor:
        """Return this rank's share of the loss: the mean over ranks is the mean over all users."""
        pool, log_q_P, num_users = self._gather_pool(pairs, positive_PD, random_ND, random_N)
        weight_P = pairs.weight_P / num_users
        masked_UN = mask_own_positives(pairs, pool.pin_N)
        user_PD = user_QD[pairs.query_P]
        if self.config.kind == "bce":
            return self._binary_cross_entropy(
                user_PD, positive_PD, pool, masked_UN[pairs.user_P, pool.drawn_P], weight_P
            )
        loss: Tensor = _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
            user_PD, positive_PD, pool.embedding_ND, self.temperature, log_q_P, pool.log_q_N, masked_UN,
            pairs.user_P, weight_P, self.config
        )  # fmt: skip
        return loss

    def _gather_pool(
        self, pairs: Pairs, positive_PD: Tensor, random_ND: Tensor, random_N: Tensor
    ) -> tuple[Pool, Tensor, float]:
        """Return the pool, log Q of this rank's own positives, and the mean number of users of a rank."""
        counts = gather_counts(len(pairs.pin_P), len(random_N), pairs.num_users, device=random_N.device)
        sizes = [num_pairs + num_random for num_pairs, num_random, _ in counts]
        pin_N = gather_rows(torch.cat([pairs.pin_P, random_N]), sizes)
        is_candidate_N = gather_rows(
            torch.cat([pairs.is_candidate_P, torch.ones_like(random_N, dtype=torch.bool)]), sizes
        )
        embedding_ND = gather_rows(torch.cat([positive_PD, random_ND]), sizes)
        is_positive = torch.cat([torch.arange(sum(row[:2]), device=pin_N.device) < row[0] for row in counts])
        positive, random = is_positive.nonzero().squeeze(1), (~is_positive).nonzero().squeeze(1)
        self.sketch.add(pin_N[positive])
        pin_B, order_B = pin_N[positive].sort(stable=True)  # an order that does not depend on the number of ranks
        positive = positive[order_B]
        in_batch = positive[spread(len(positive), self.config.max_in_batch, pin_N.device)]
        match self.config.negatives:
            case "in_batch":
                chosen, num_in_batch, num_random = in_batch, len(in_batch), 0
            case "random":
                chosen, num_in_batch, num_random = random, 0, len(random)
            case "mixed":
                chosen, num_in_batch, num_random = torch.cat([in_batch, random]), len(in_batch), len(random)
        log_q_N = self._log_q(pin_N[chosen], is_candidate_N[chosen], num_in_batch, num_random)
        log_q_P = self._log_q(pairs.pin_P, pairs.is_candidate_P, num_in_batch, num_random)
        if self.config.log_q != "all":
            log_q_P = torch.zeros_like(log_q_P)
        place_P = torch.searchsorted(pin_B, pairs.pin_P)
        shift = (
            self.sketch.total * SHIFT >> 20
        ) & 0x7FFFFFFF  # random in each step, equal on all ranks and after a resume
        drawn_P = (place_P * len(chosen) // max(len(pin_B), 1) + shift) % max(len(chosen), 1)
        num_users = max(1, sum(row[2] for row in counts)) / len(counts)
        return Pool(embedding_ND[chosen], pin_N[chosen], log_q_N, drawn_P), log_q_P, num_users

    def _log_q(self, pin: Tensor, is_candidate: Tensor, num_in_batch: int, num_random: int) -> Tensor:
        """Return the log of the expected number of times that each pin is in the pool."""
        if self.config.log_q == "none":
            return torch.zeros(len(pin), device=pin.device)
        at_random = num_random / self.num_candidates
        if num_in_batch == 0:  # random negatives only: Q is the same for all pins, and `all` has no effect
            return torch.full((len(pin),), at_random, device=pin.device).log()
        return (num_in_batch * self.sketch.share(pin) + at_random * is_candidate).log()

    def _binary_cross_entropy(
        self, user_PD: Tensor, positive_PD: Tensor, pool: Pool, is_masked_P: Tensor, weight_P: Tensor
    ) -> Tensor:
        """Return SASRec's original loss (A.4.4): each pair against one negative, which counts unless it is masked."""
        positive_P = (user_PD * positive_PD).sum(-1) / self.temperature
        negative_P = (user_PD * pool.embedding_ND[pool.drawn_P]).sum(-1) / self.temperature
        negative_P = negative_P.masked_fill(is_masked_P, MASKED)
        return (weight_P * (F.softplus(-positive_P) + F.softplus(negative_P))).sum()


def spread(num_rows: int, cap: int, device: torch.device) -> Tensor:
    """Return `cap` evenly spread row numbers; all rows if there are no more."""
    kept = min(num_rows, cap)
    return torch.arange(kept, device=device) * num_rows // max(kept, 1)


def mask_own_positives(pairs: Pairs, pin_N: Tensor) -> Tensor:
    """Return masked_UN: whether the pin of a pool entry is one of the user's positives in the batch (A.3)."""
    known_K, column_P = torch.unique(pairs.pin_P, return_inverse=True)
    num_known = len(known_K)
    has_UK = torch.zeros(max(pairs.num_users, 1), num_known + 1, dtype=torch.bool, device=pin_N.device)
    has_UK[pairs.user_P, column_P] = True
    column_N = torch.searchsorted(known_K, pin_N).clamp(max=max(num_known - 1, 0))
    is_known_N = known_K[column_N] == pin_N if num_known else torch.zeros_like(pin_N, dtype=torch.bool)
    return has_UK[:, torch.where(is_known_N, column_N, num_known)]


class _SampledSoftmax(torch.autograd.Function):
    """Sum over rows of weight * -log softmax, with its gradient, `chunk_rows` rows at a time.

    With lse = logsumexp(negative logits) the loss of a row is softplus(lse - positive), and its gradient is
    g = weight * sigmoid(lse - positive) times (softmax of the negatives, -1 for the positive). `corrected` has the
    loss (1 - P) * (lse - positive), 1 - P = sigmoid(lse - positive) held constant: the same gradient. All logits are
    <u, v> / temperature minus a constant, so d loss / d temperature = -sum <u, d loss / d u> / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        user_PD: Tensor,
        positive_PD: Tensor,
        pool_ND: Tensor,
        temperature: Tensor,
        log_q_P: Tensor,
        log_q_N: Tensor,
        masked_UN: Tensor,
        user_P: Tensor,
        weight_P: Tensor,
        config: LossConfig,
    ) -> Tensor:
        scaled_PD = user_PD / temperature
        positive_P = (scaled_PD * positive_PD).sum(-1) - log_q_P
        d_user_PD, d_positive_PD = torch.empty_like(user_PD), torch.empty_like(positive_PD)
        d_pool_ND = torch.zeros_like(pool_ND)
        loss = torch.zeros((), device=user_PD.device)
        for start in range(0, len(user_PD), config.chunk_rows):
            rows = slice(start, start + config.chunk_rows)
            logits_CN = torch.addmm(log_q_N, scaled_PD[rows], pool_ND.T, beta=-1)
            logits_CN.masked_fill_(masked_UN[user_P[rows]], MASKED)
            highest_C1 = logits_CN.amax(dim=1, keepdim=True)
            sums_C1 = logits_CN.sub_(highest_C1).exp_().sum(dim=1, keepdim=True)
            margin_C = (highest_C1 + sums_C1.log()).squeeze(1) - positive_P[rows]  # lse - positive
            confusion_C = torch.sigmoid(margin_C)
            each_C = confusion_C * margin_C if config.log_q == "corrected" else F.softplus(margin_C)
            loss += (weight_P[rows] * each_C).sum()
            gradient_C1 = (weight_P[rows] * confusion_C).unsqueeze(1)
            logits_CN.mul_(gradient_C1 / sums_C1)  # now the gradient of the negatives' logits
            d_user_PD[rows] = (logits_CN @ pool_ND).addcmul_(gradient_C1, positive_PD[rows], value=-1) / temperature
            d_positive_PD[rows] = -gradient_C1 * scaled_PD[rows]
            d_pool_ND.addmm_(logits_CN.T, scaled_PD[rows])
        d_temperature = -(user_PD * d_user_PD).sum() / temperature
        ctx.save_for_backward(d_user_PD, d_positive_PD, d_pool_ND, d_temperature)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (*(upstream * gradient for gradient in ctx.saved_tensors), *[None] * 6)
