"""The sampled softmax over the paper's pool (5000 + 8192), in chunks, against the plain one.

The plain version is what one writes first: all logits at once, masked, `cross_entropy`, autograd. Each runs in a
process of its own; memory is the growth of the resident set at its peak over what the inputs take.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measuring import measure, report, say
from torch import Tensor

from pf_core.config.training import LossConfig
from pf_core.training.loss import Pairs, RetrievalLoss, mask_own_positives

EMBEDDING_DIM = 256
NUM_CANDIDATES = 1_000_000
PAIRS_PER_USER = 32
REPEATS = 5


def inputs(num_pairs: int, num_in_batch: int, num_random: int) -> tuple[Tensor, Pairs, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, EMBEDDING_DIM, generator=generator), dim=-1)

    user = torch.arange(num_pairs) // PAIRS_PER_USER
    pairs = Pairs(
        query_P=torch.arange(num_pairs),
        user_P=user,
        weight_P=torch.full((num_pairs,), 1 / PAIRS_PER_USER),
        pin_P=torch.randint(NUM_CANDIDATES, (num_pairs,), generator=generator),
        is_candidate_P=torch.ones(num_pairs, dtype=torch.bool),
        num_users=int(user[-1]) + 1,
    )
    random_N = torch.randint(NUM_CANDIDATES, (num_random,), generator=generator)
    return unit(num_pairs), pairs, unit(num_pairs), unit(num_random), random_N


def plain_loss(
    loss: RetrievalLoss, user: Tensor, pairs: Pairs, positive: Tensor, random: Tensor, pin: Tensor
) -> Tensor:
    pool, log_q_P, _ = loss._gather_pool(pairs, positive, random, pin)
    negative_PN = user @ pool.embedding_ND.T / loss.temperature - pool.log_q_N
    negative_PN = negative_PN.masked_fill(mask_own_positives(pairs, pool.pin_N)[pairs.user_P], -1e4)
    positive_P1 = ((user * positive).sum(-1) / loss.temperature - log_q_P).unsqueeze(1)
    target = torch.zeros(len(user), dtype=torch.int64)
    each_P = F.cross_entropy(torch.cat([positive_P1, negative_PN], dim=1), target, reduction="none")
    return (each_P * pairs.weight_P).sum() / pairs.num_users


def run(kind: str, num_pairs: int, num_random: int, chunk_rows: int) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and the peak's growth in gigabytes."""
    config = LossConfig(num_random=num_random, chunk_rows=chunk_rows)
    loss = RetrievalLoss(config, num_candidates=NUM_CANDIDATES)
    user, pairs, positive, random, pin = inputs(num_pairs, config.max_in_batch, num_random)
    leaves = [tensor.requires_grad_() for tensor in (user, positive, random)]
    function: Callable[..., Tensor] = loss if kind == "chunked" else lambda *given: plain_loss(loss, *given)
    (user[:512] @ positive[:512].T).sum().item()  # starts the threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        torch.autograd.grad(function(leaves[0], pairs, leaves[1], leaves[2], pin), [*leaves, loss.temperature])
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(times), (peak - before) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    sizes = (512, 1024) if quick else (4096, 16_384)
    num_random = 512 if quick else LossConfig().num_random
    chunk_rows = 64 if quick else LossConfig().chunk_rows
    results = {}
    for num_pairs in sizes:
        for kind in ("chunked", "plain"):
            seconds, growth_gb = measure(run, kind, num_pairs, num_random, chunk_rows).outcome
            results[kind, num_pairs] = seconds, growth_gb
            say(f"{kind}, {num_pairs:,} pairs: {seconds:.2f} s, {growth_gb:.2f} GB")
    small, large = sizes
    report(
        "softmax.plain_time_over_chunked", results["plain", small][0] / results["chunked", small][0], "x", bar=">= 1"
    )
    report("softmax.plain_memory_over_chunked", results["plain", small][1] / results["chunked", small][1], "x")
    growth = results["chunked", large][1] / max(results["chunked", small][1], 1e-3)
    report("softmax.chunked_memory_growth_on_4x_pairs", growth, "x", bar="<= 2")
    return 0


if __name__ == "__main__":
    sys.exit(main())
