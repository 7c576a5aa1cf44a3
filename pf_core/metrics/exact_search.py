"""Exact search: for every query the nearest pins of an index, and how many of them stand before a known positive.

Recall, coverage and interest entropy (paper, section 4.1) all ask the same scores, so one matrix product answers them
together. Memory is bounded: the index is multiplied a block at a time, and the scores of a block, which every block
uses again, never leave the processor's cache. What is kept of a query is its nearest pins so far.

Sorting scores costs more than computing them. So a block is cut into groups of GROUP neighbouring rows, and is read
once for the maximum of every group. In the first block the n nearest pins lie in the n groups that are first by
(maximum, lower group): a pin of any other group has the maxima of n groups before it, nearer than itself or as near
with a lower row. In every other block only groups matter whose maximum is above the last of the n nearest so far: a pin
that is as near as that one has the higher row. Only these groups are looked into, and the longer the index, the fewer
they are.

Order is total: nearest first, and of equal scores the lower row. So a result depends on the scores alone, whatever the
chunk, the number of threads or the device. (The scores of two pins with one and the same vector may still differ in the
last bit, as their places in the matrix product do: rivals are counted with a tolerance.)

Suffixes: Q queries, C queries of a chunk, P positives, N pins of the index, B pins of a block, G groups of them, W pins
within a group or groups, M groups and X pins that are looked into, J nearest found, K nearest asked for, D embedding.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Scores of unit vectors that are nearer than this are a tie: two ways to sum them differ by as much."""

QUERIES_AT_ONCE = 1024
"""The index is read from memory once for so many; with fewer, that takes as long as the product."""

GROUPS_AT_ONCE = 16
"""A block: the scores of so many queries are 8 MB, which the last cache holds."""

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
    on one device, the vectors float32. `chunk_queries` is how many are scored together, QUERIES_AT_ONCE if it is None.
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
    """nearest_CJ, row_CJ: the `num` largest scores of each query, and their rows of the index."""
    num_pins, num_queries = len(index_ND), len(query_CD)
    groups_at_once = max(GROUPS_AT_ONCE, -(-num // GROUP))  # the first block has enough
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
    """largest_GC, the maximum of each group of a block; the scores themselves are written into `score_GWC`.

    Pins stand along the rows: a group's scores of all queries are one piece of memory.
    """
    score_BC = score_GWC.flatten(0, 1)
    score_BC[len(index_BD) :] = -torch.inf  # the last block is filled up with scores that nothing is below
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
    """The nearest so far and those pins of a later block that are nearer than the last of them."""
    last_C, (num_queries, num) = nearest_CJ[:, -1], nearest_CJ.shape
    group_M, query_M = torch.nonzero(largest_GC > last_C, as_tuple=True)
    score_MW = score_GWC[group_M, :, query_M]
    group_X, place_X = torch.nonzero(score_MW > last_C[query_M, None], as_tuple=True)
    if not len(group_X):
        return nearest_CJ, row_CJ
    by_query = torch.argsort(query_M[group_X], stable=True)  # within a query, rows go on ascending
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
    """The columns of the `num` largest scores, largest first, of equal ones the lower column first.

    `topk` leaves open which of equal scores it takes. So it gets distinct integers: a float's bits, read as a number
    (those of a negative one turned over), are in the float's order, and the column stands below them.
    """
    bits_CW = (score_CW + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered_CW = torch.where(bits_CW < 0, bits_CW ^ 0x7FFFFFFF, bits_CW)
    lower_first_W = LAST_POSITION - torch.arange(score_CW.shape[1], device=score_CW.device)
    return ((ordered_CW.long() << 32) | lower_first_W).topk(num, dim=1).indices
