"""Exact search: the nearest pins of every query in an index, and the number of pins that rank before a known positive.

Recall, coverage and interest entropy (paper, section 4.1) need the same scores, so one matrix product serves all three.
Memory is bounded: the index is multiplied one block at a time, into a buffer that all blocks share and that fits in the
processor's cache. Only the nearest pins so far are kept for each query.

Sorting scores costs more than computing them. Therefore a block is divided into groups of GROUP neighbouring rows, and
one pass finds the maximum of each group. In the first block, the n nearest pins lie in the n groups that come first by
(maximum, lower group): a pin of any other group has the maxima of n groups before it, which are nearer, or equally near
with a lower row. In every later block, only groups count whose maximum is above the last of the n nearest so far: a pin
that is equally near has a higher row. Only the scores of these groups are read, and the longer the index, the fewer
they are.

The order is total: nearest first, and among equal scores the lower row first. A result therefore depends only on the
scores, not on the chunk, the number of threads or the device. (The scores of two pins with the same vector may still
differ in the last bit, because their places in the matrix product differ: rivals are counted with a tolerance.)

Suffixes: Q queries, C queries of a chunk, P positives, N pins of the index, B pins of a block, G groups of a block,
W pins within a group or groups, M groups and X pins whose scores are read, J nearest found, K nearest requested,
D embedding.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Scores of unit vectors that differ by less than this are a tie: two orders of summation differ by as much."""

QUERIES_AT_ONCE = 1024
"""Queries for which the index is read from memory once; with fewer, reading takes as long as the product."""

GROUPS_AT_ONCE = 16
"""Groups of a block: the scores of 1024 queries are then 8 MB, which fit in the last-level cache."""

POSITIVE_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of the positives' embeddings, or of their nearest pins' scores, that are in memory at a time: 64 MB."""

GROUP = 128
"""Rows of a group. The cost is least at about the square root of (pins / nearest requested)."""

LAST_POSITION = (1 << 32) - 1
"""Highest column that fits into the lower half of a 64-bit sort key."""


class Found(NamedTuple):
    top_QK: Tensor
    """Rows of the index, nearest first, the lower row first among equal scores; all rows if there are fewer than k."""
    rivals_P: Tensor
    """Number of the k + 1 nearest pins, without the positive's own pin, that score at least as high as the positive.

    This is the number of all rivals if that is below k; otherwise it is k or k + 1.
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
    """Return the k nearest pins of each query by inner product, and the rivals of each positive.

    Positives are (query, pin, embedding) in any order; the pins of the index are distinct. All tensors are on one
    device, the vectors float32. `chunk_queries` is the number of queries scored together, by default QUERIES_AT_ONCE.
    """
    num_queries, num_pins, device = len(query_QD), len(index_ND), index_ND.device
    num_nearest = min(k + 1, num_pins)
    chunk = max(1, min(num_queries, QUERIES_AT_ONCE if chunk_queries is None else chunk_queries))
    top_QK = torch.empty(num_queries, min(k, num_pins), dtype=torch.int64, device=device)
    rivals_P = torch.empty(len(positive_query_P), dtype=torch.int64, device=device)
    by_query = torch.argsort(positive_query_P, stable=True)
    positives_at_once = max(1, POSITIVE_NUMBERS_AT_ONCE // max(1, index_ND.shape[1], k))
    bounds = torch.tensor([*range(0, num_queries, chunk), num_queries], device=device)
    positive_bounds = torch.searchsorted(positive_query_P[by_query], bounds)
    for (start, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(positive_bounds.tolist()), strict=True):
        query_CD = query_QD[start:end]
        nearest_CJ, row_CJ = _nearest(index_ND, query_CD, num_nearest)
        top_QK[start:end] = row_CJ[:, :k]
        for chosen in by_query[first:last].split(positives_at_once):
            query = positive_query_P[chosen] - start
            score_P1 = (query_CD[query] * positive_PD[chosen]).sum(-1, keepdim=True)
            is_other = index_pin_N[row_CJ[query]] != positive_pin_P[chosen, None]
            rivals_P[chosen] = ((nearest_CJ[query] >= score_P1 - ROUNDING) & is_other).sum(1)
    return Found(top_QK, rivals_P)


def _nearest(index_ND: Tensor, query_CD: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return nearest_CJ and row_CJ: the `num` largest scores of each query, and their rows of the index."""
    num_pins, num_queries = len(index_ND), len(query_CD)
    groups_at_once = max(GROUPS_AT_ONCE, -(-num // GROUP))  # enough rows in the first block
    num_groups = min(groups_at_once, -(-num_pins // GROUP))
    score_GWC = torch.empty(num_groups, GROUP, num_queries, device=index_ND.device)
    nearest_CJ = torch.empty(num_queries, 0, device=index_ND.device)
    row_CJ = torch.empty(num_queries, 0, dtype=torch.int64, device=index_ND.device)
    for first in range(0, num_pins, groups_at_once * GROUP):
        largest_GC = _score(index_ND[first : first + groups_at_once * GROUP], query_CD, score_GWC)
        if first == 0:
            nearest_CJ, row_CJ = _nearest_of_first(score_GWC, largest_GC, num)
        else:
            nearest_CJ, row_CJ = _with_nearer(nearest_CJ, row_CJ, score_GWC, largest_GC, first)
    return nearest_CJ, row_CJ


def _score(index_BD: Tensor, query_CD: Tensor, score_GWC: Tensor) -> Tensor:
    """Return largest_GC, the maximum of each group of a block; the scores are written into `score_GWC`.

    Rows are pins: the scores of one group for all queries are contiguous in memory.
    """
    score_BC = score_GWC.flatten(0, 1)
    score_BC[len(index_BD) :] = -torch.inf  # pad the last block with scores below all others
    torch.matmul(index_BD, query_CD.T, out=score_BC[: len(index_BD)])
    return score_GWC.amax(1)


def _nearest_of_first(score_GWC: Tensor, largest_GC: Tensor, num: int) -> tuple[Tensor, Tensor]:
    num_groups, _, num_queries = score_GWC.shape
    if num_groups <= num:
        group_CJ = torch.arange(num_groups, device=score_GWC.device).expand(num_queries, -1)
    else:
        group_CJ = _first(largest_GC.T.contiguous(), num).sort(1).values  # ascending: a lower place is a lower row
    query_C1 = torch.arange(num_queries, device=score_GWC.device)[:, None]
    in_groups_CW = score_GWC.permute(2, 0, 1)[query_C1, group_CJ].flatten(1)
    place_CJ = _first(in_groups_CW, num)
    return in_groups_CW.gather(1, place_CJ), group_CJ.gather(1, place_CJ // GROUP) * GROUP + place_CJ % GROUP


def _with_nearer(
    nearest_CJ: Tensor, row_CJ: Tensor, score_GWC: Tensor, largest_GC: Tensor, first_row: int
) -> tuple[Tensor, Tensor]:
    """Merge the nearest so far with the pins of a later block that are nearer than the last of them."""
    last_C, (num_queries, num) = nearest_CJ[:, -1], nearest_CJ.shape
    group_M, query_M = torch.nonzero(largest_GC > last_C, as_tuple=True)
    score_MW = score_GWC[group_M, :, query_M]
    group_X, place_X = torch.nonzero(score_MW > last_C[query_M, None], as_tuple=True)
    if not len(group_X):
        return nearest_CJ, row_CJ
    by_query = torch.argsort(query_M[group_X], stable=True)  # within a query, rows stay ascending
    group_X, place_X = group_X[by_query], place_X[by_query]
    query_X = query_M[group_X]
    count_C = torch.bincount(query_X, minlength=num_queries)
    column_X = num + torch.arange(len(query_X), device=query_X.device) - (count_C.cumsum(0) - count_C)[query_X]
    width = num + int(count_C.max())
    score_CW = torch.full((num_queries, width), -torch.inf, device=query_X.device)
    score_CW[:, :num] = nearest_CJ
    score_CW[query_X, column_X] = score_MW[group_X, place_X]
    row_CW = torch.zeros(num_queries, width, dtype=torch.int64, device=query_X.device)
    row_CW[:, :num] = row_CJ
    row_CW[query_X, column_X] = first_row + group_M[group_X] * GROUP + place_X
    place_CJ = _first(score_CW, num)
    return score_CW.gather(1, place_CJ), row_CW.gather(1, place_CJ)


def _first(score_CW: Tensor, num: int) -> Tensor:
    """Return the columns of the `num` largest scores, largest first, the lower column first among equal scores.

    `topk` does not specify which of equal scores it returns. Therefore it gets distinct integers: the upper half holds
    the float's bits, which compare like the float (after flipping those of negative floats), the lower half the column.
    """
    bits_CW = (score_CW + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered_CW = torch.where(bits_CW < 0, bits_CW ^ 0x7FFFFFFF, bits_CW)
    lower_first_W = LAST_POSITION - torch.arange(score_CW.shape[1], device=score_CW.device)
    return ((ordered_CW.long() << 32) | lower_first_W).topk(num, dim=1).indices
