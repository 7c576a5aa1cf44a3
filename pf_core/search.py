"""Exact search: for every query the nearest pins of an index, and how many of them stand before a known positive.

Recall, coverage and interest entropy (paper, section 4.1) all ask the same scores, so one matrix product answers them
together. Memory is bounded: at most SCORES_AT_ONCE scores, or those of one query, stand in one buffer, which every
chunk of queries uses again.

Sorting a row of a million scores costs more than computing it. So the index is cut into groups of GROUP neighbouring
rows, and a row of scores is read once for the maximum of every group. The n nearest pins lie in the n groups that are
first by (maximum, lower group): a pin of any other group has the maxima of n groups before it, nearer than itself or as
near with a lower row. Only these groups are sorted.

Order is total: nearest first, and of equal scores the lower row. So a result depends on the scores alone, whatever the
chunk, the number of threads or the device. (The scores of two pins with one and the same vector may still differ in the
last bit, as their places in the matrix product do: rivals are counted with a tolerance.)

Suffixes: Q queries, C queries of a chunk, P positives, N pins of the index, G groups of them, W pins within a group or
groups, J nearest found, K nearest asked for, D embedding.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Scores of unit vectors that are nearer than this are a tie: two ways to sum them differ by as much."""

SCORES_AT_ONCE = 1 << 28
"""A gigabyte, if the index has a million pins and more; a smaller one needs less."""

QUERIES_AT_ONCE = 256
"""Enough for a matrix product at full speed."""

GROUPS_AT_ONCE = 64
"""Multiplied together: their scores, 8 MB, are still in the last cache when the maxima are taken."""

POSITIVE_NUMBERS_AT_ONCE = 1 << 24
"""Of the positives' embeddings, or of their nearest pins' scores: 64 MB."""

GROUP = 128
"""Rows of the index whose maximum is taken first; about the root of (pins / nearest asked for) costs least."""

LAST_POSITION = (1 << 32) - 1


class Found(NamedTuple):
    top_QK: Tensor
    """Rows of the index, nearest first, of equal scores the lower row first; all of them if there are fewer than k."""
    rivals_P: Tensor
    """How many of the k + 1 nearest, the positive's own pin left out, score at least what the positive scores.

    It is the number of all rivals as long as that is below k; otherwise it is k or k + 1.
    """


@torch.no_grad()
def search(
    query_QD: Tensor,
    index_ND: Tensor,
    *,
    index_pin_N: Tensor,
    positive_query_P: Tensor,
    positive_pin_P: Tensor,
    positive_PD: Tensor,
    k: int,
    chunk_queries: int | None = None,
) -> Found:
    """The k nearest pins of each query by inner product, and the rivals of each positive.

    Positives are listed as (query, pin, embedding) in any order; the pins of the index are distinct. All tensors are
    on one device, the vectors float32. `chunk_queries` is how many are scored together, as many as the bounds allow if
    it is None.
    """
    num_queries, num_pins, device = len(query_QD), len(index_ND), index_ND.device
    num_groups = -(-num_pins // GROUP)
    fitting = min(QUERIES_AT_ONCE, SCORES_AT_ONCE // max(1, num_groups * GROUP))
    chunk = max(1, min(num_queries, fitting if chunk_queries is None else chunk_queries))
    buffer = torch.empty(num_groups * GROUP * chunk, device=device)
    top_QK = torch.empty(num_queries, min(k, num_pins), dtype=torch.int64, device=device)
    rivals_P = torch.empty(len(positive_query_P), dtype=torch.int64, device=device)
    by_query = torch.argsort(positive_query_P, stable=True)
    positives_at_once = max(1, POSITIVE_NUMBERS_AT_ONCE // max(1, index_ND.shape[1], k))
    bounds = torch.tensor([*range(0, num_queries, chunk), num_queries], device=device)
    positive_bounds = torch.searchsorted(positive_query_P[by_query], bounds)
    for (start, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(positive_bounds.tolist()), strict=True):
        query_CD = query_QD[start:end]
        score_GWC = buffer[: num_groups * GROUP * len(query_CD)].view(num_groups, GROUP, len(query_CD))
        largest_GC = _score(index_ND, query_CD, score_GWC)
        nearest_CJ, row_CJ = _nearest(score_GWC, largest_GC, min(k + 1, num_pins))
        top_QK[start:end] = row_CJ[:, :k]
        for chosen in by_query[first:last].split(positives_at_once):
            query = positive_query_P[chosen] - start
            score_P1 = (query_CD[query] * positive_PD[chosen]).sum(-1, keepdim=True)
            is_other = index_pin_N[row_CJ[query]] != positive_pin_P[chosen, None]
            rivals_P[chosen] = ((nearest_CJ[query] >= score_P1 - ROUNDING) & is_other).sum(1)
    return Found(top_QK, rivals_P)


def _score(index_ND: Tensor, query_CD: Tensor, score_GWC: Tensor) -> Tensor:
    """largest_GC, the maximum of each group; the scores themselves are written into `score_GWC`.

    Pins stand along the rows: so a part of the index is a part of the result, and both are one piece of memory.
    """
    num_pins, num_groups = len(index_ND), len(score_GWC)
    score_NC = score_GWC.flatten(0, 1)
    score_NC[num_pins:] = -torch.inf  # the last group is filled up with scores that nothing is below
    largest_GC = torch.empty(num_groups, len(query_CD), device=index_ND.device)
    for first in range(0, num_groups, GROUPS_AT_ONCE):
        last = min(first + GROUPS_AT_ONCE, num_groups)
        pins = slice(first * GROUP, min(last * GROUP, num_pins))
        torch.matmul(index_ND[pins], query_CD.T, out=score_NC[pins])
        torch.amax(score_GWC[first:last], 1, out=largest_GC[first:last])
    return largest_GC


def _nearest(score_GWC: Tensor, largest_GC: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """nearest_CJ, row_CJ: the `num` largest scores of each query, and their rows of the index."""
    num_groups, _, num_queries = score_GWC.shape
    if num_groups <= num:
        group_CJ = torch.arange(num_groups, device=score_GWC.device).expand(num_queries, -1)
    else:
        group_CJ = _first(largest_GC.T.contiguous(), num).sort(1).values  # ascending: a lower place is a lower row
    query_C1 = torch.arange(num_queries, device=score_GWC.device)[:, None]
    in_groups_CW = score_GWC.permute(2, 0, 1)[query_C1, group_CJ].flatten(1)
    place_CJ = _first(in_groups_CW, num)
    return in_groups_CW.gather(1, place_CJ), group_CJ.gather(1, place_CJ // GROUP) * GROUP + place_CJ % GROUP


def _first(score_CW: Tensor, num: int) -> Tensor:
    """The columns of the `num` largest scores, largest first, of equal ones the lower column first.

    `topk` leaves open which of equal scores it takes. So it gets distinct integers: a float's bits, read as a number
    (those of a negative one turned over), are in the float's order, and the column stands below them.
    """
    bits_CW = (score_CW + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered_CW = torch.where(bits_CW < 0, bits_CW ^ 0x7FFFFFFF, bits_CW)
    lower_first_W = LAST_POSITION - torch.arange(score_CW.shape[1], device=score_CW.device)
    return ((ordered_CW.long() << 32) | lower_first_W).topk(num, dim=1).indices
