"""Bias of the sampled softmax's gradient against that of the full softmax, which log Q reduces (section 3.3.2).

A corpus of 50 pins whose popularity falls as 1/rank. Over many batches, each with its own positives and random draw,
the average gradient of the sampled loss is compared with that of the softmax over the whole corpus for the same
positives. The bias is what remains of the difference. Its square is estimated as the inner product of two independent
halves' mean differences, so that the batches' noise cancels instead of adding up.
"""

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pf_core.config.training import LossConfig
from pf_core.training.loss import Pairs, RetrievalLoss

NUM_PINS, NUM_USERS, DIM, BATCH, NUM_RANDOM = 50, 20, 8, 64, 64
BATCHES_OF_A_HALF = 100


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are so small that a second thread only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def setting(*, temperature: float, is_confident: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(users, pins, P(pin | user)). A confident model scores a user's likely pins high; the other knows nothing."""
    random = torch.Generator().manual_seed(0)
    pins = F.normalize(torch.randn(NUM_PINS, DIM, generator=random), dim=1)
    users = F.normalize(torch.randn(NUM_USERS, DIM, generator=random), dim=1)
    popularity = 1 / torch.arange(1, NUM_PINS + 1).expand(NUM_USERS, -1)
    liking = popularity * torch.exp(users @ pins.T / temperature) if is_confident else popularity
    return users, pins, liking / liking.sum(dim=1, keepdim=True)


@cache
def measure_bias(negatives: str, log_q: str, *, temperature: float, is_confident: bool) -> tuple[float, float]:
    """Norm of the mean difference, relative to the full gradient's norm, for (users, pins)."""
    users, pins, likes = setting(temperature=temperature, is_confident=is_confident)
    config = LossConfig(
        negatives=negatives, log_q=log_q, num_random=NUM_RANDOM, temperature=temperature, sketch_width=1 << 14
    )
    loss = RetrievalLoss(config, num_candidates=NUM_PINS)
    loss.sketch.add(torch.arange(NUM_PINS).repeat_interleave((likes.mean(dim=0) * 1e6).round().long()))  # converged
    random = torch.Generator().manual_seed(1)
    user, pin = users.clone().requires_grad_(), pins.clone().requires_grad_()
    difference, full = [], torch.zeros(NUM_USERS + NUM_PINS, DIM)
    for _half in range(2):
        user.grad = pin.grad = None
        exact = torch.zeros(NUM_USERS + NUM_PINS, DIM)
        for _batch in range(BATCHES_OF_A_HALF):
            who = torch.randint(0, NUM_USERS, (BATCH,), generator=random)
            liked = torch.multinomial(likes[who], 1, generator=random).squeeze(1)
            drawn = torch.randint(0, NUM_PINS, (NUM_RANDOM,), generator=random)
            alone = torch.arange(BATCH)  # each pair counts as a user of its own: only its own pin is masked
            pairs = Pairs(who, alone, torch.ones(BATCH), liked, torch.ones(BATCH, dtype=torch.bool), BATCH)
            loss(user, pairs, pin[liked], pin[drawn], drawn).backward()
            error = torch.softmax(users[who] @ pins.T / temperature, dim=1) - F.one_hot(liked, NUM_PINS)
            exact[:NUM_USERS].index_add_(0, who, error @ pins / (temperature * BATCH))
            exact[NUM_USERS:] += error.T @ users[who] / (temperature * BATCH)
        difference.append((torch.cat([user.grad, pin.grad]) - exact) / BATCHES_OF_A_HALF)
        full += exact / (2 * BATCHES_OF_A_HALF)

    def relative(rows: slice) -> float:
        squared = float((difference[0][rows] * difference[1][rows]).sum())
        return math.sqrt(max(squared, 0)) / float(full[rows].norm())

    return relative(slice(0, NUM_USERS)), relative(slice(NUM_USERS, None))


@pytest.mark.parametrize(("negatives", "ratio"), [("in_batch", 5), ("mixed", 8)])
def test_the_correction_removes_most_of_the_bias(negatives: str, ratio: float) -> None:
    """Bias over 1000 batches (users, pins): in_batch 0.49 → 0.06, 0.90 → 0.10; mixed 0.23 → 0.02, 0.44 → 0.03."""
    none = measure_bias(negatives, "none", temperature=0.25, is_confident=False)
    assert min(none) > 0.15
    for log_q in ("negatives", "all"):
        corrected = measure_bias(negatives, log_q, temperature=0.25, is_confident=False)
        assert corrected[0] * ratio < none[0], log_q
        assert corrected[1] * ratio < none[1], log_q


@pytest.mark.parametrize(("negatives", "ratio"), [("in_batch", 3), ("mixed", 4)])
def test_correcting_the_negatives_alone_also_serves_a_confident_model(negatives: str, ratio: float) -> None:
    """`all` does not, in a corpus smaller than the pool: it divides a positive that is always there by its count."""
    none = measure_bias(negatives, "none", temperature=0.1, is_confident=True)
    corrected = measure_bias(negatives, "negatives", temperature=0.1, is_confident=True)
    assert corrected[0] * ratio < none[0]
    assert corrected[1] * ratio < none[1]


def test_a_larger_pool_leaves_less_bias() -> None:
    """Random negatives are uniform: what remains is the finite pool, not a wrong Q."""
    mixed = measure_bias("mixed", "negatives", temperature=0.25, is_confident=False)
    in_batch = measure_bias("in_batch", "negatives", temperature=0.25, is_confident=False)
    assert mixed[0] < in_batch[0]
    assert mixed[1] < in_batch[1]
