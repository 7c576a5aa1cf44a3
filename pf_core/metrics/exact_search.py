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

Two things may change the scores of a few (query, pin) pairs: an increment is added to the inner product, and an
excluded pin is no candidate of that query (its score is -inf). Both are written into a block's scores before the maxima
are taken. With exclusions, rivals are counted twice from the same product: among all pins, and among those left.

Suffixes: Q queries, C queries of a chunk, P positives, N pins of the index, B pins of a block, G groups of a block,
W pins within a group or groups, M groups and X pins whose scores are read, E pairs of a query and a pin, J nearest
found, K nearest requested, D embedding.
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


class Pairs(NamedTuple):
    """Pairs of a query and a row of the index, in any order; `value_E` is empty if the pairs have no value."""

    query_E: Tensor
    row_E: Tensor
    value_E: Tensor = torch.zeros(0)


class Found(NamedTuple):
    top_QK: Tensor
    """Rows of the index, nearest first, the lower row first among equal scores; all rows if there are fewer than k."""
    score_QK: Tensor
    """Scores of these rows."""
    rivals_P: Tensor
    """Number of the k + 1 nearest pins, without the positive's own pin, that score at least as high as the positive.

    This is the number of all rivals if that is below k; otherwise it is k or k + 1.
    """
    rivals_left_P: Tensor
    """The same number among the pins that are not excluded."""


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
    increments: Pairs | None = None,
    positive_increment_P: Tensor | None = None,
    excluded: Pairs | None = None,
    chunk_queries: int | None = None,
) -> Found:
    """Return the k nearest pins of each query by score, and the rivals of each positive.

    The score of a pin is its inner product with the query, plus its increment for this query if there is one. Positives
    are (query, pin, embedding) in any order, `positive_increment_P` their increments; the pins of the index are
    distinct. All tensors are on one device, the vectors float32. `chunk_queries` is the number of queries scored
    together, by default QUERIES_AT_ONCE.
    """
    num_queries, num_pins, device = len(query_QD), len(index_ND), index_ND.device
    num_nearest = min(k + 1, num_pins)
    chunk = max(1, min(num_queries, QUERIES_AT_ONCE if chunk_queries is None else chunk_queries))
    top_QK = torch.empty(num_queries, min(k, num_pins), dtype=torch.int64, device=device)
    score_QK = torch.empty(top_QK.shape, device=device)
    rivals_P = torch.empty(len(positive_query_P), dtype=torch.int64, device=device)
    rivals_left_P = rivals_P if excluded is None else torch.empty_like(rivals_P)
    results = (rivals_P,) if excluded is None else (rivals_P, rivals_left_P)
    changes = _Changes(increments, excluded, chunk=chunk, num_pins=num_pins)
    by_query = torch.argsort(positive_query_P, stable=True)
    positives_at_once = max(1, POSITIVE_NUMBERS_AT_ONCE // max(1, index_ND.shape[1], k))
    bounds = torch.tensor([*range(0, num_queries, chunk), num_queries], device=device)
    positive_bounds = torch.searchsorted(positive_query_P[by_query], bounds)
    for (start, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(positive_bounds.tolist()), strict=True):
        query_CD = query_QD[start:end]
        nearest = _nearest(index_ND, query_CD, num_nearest, changes, start)
        score_QK[start:end], top_QK[start:end] = (values_CJ[:, :k] for values_CJ in nearest[0])
        for chosen in by_query[first:last].split(positives_at_once):
            query = positive_query_P[chosen] - start
            score_P1 = (query_CD[query] * positive_PD[chosen]).sum(-1, keepdim=True)
            if positive_increment_P is not None:
                score_P1 += positive_increment_P[chosen, None]
            for (nearest_CJ, row_CJ), result_P in zip(nearest, results, strict=False):
                is_other = index_pin_N[row_CJ[query]] != positive_pin_P[chosen, None]
                result_P[chosen] = ((nearest_CJ[query] >= score_P1 - ROUNDING) & is_other).sum(1)
    return Found(top_QK, score_QK, rivals_P, rivals_left_P)


class _Changes:
    """Increments and exclusions, sorted by chunk of queries and then by row, so that those of a block are a slice."""

    def __init__(self, increments: Pairs | None, excluded: Pairs | None, *, chunk: int, num_pins: int) -> None:
        self._chunk, self._num_pins = chunk, num_pins
        self._increments, self._excluded = (
            None if each is None else self._sorted(each) for each in (increments, excluded)
        )

    def _sorted(self, pairs: Pairs) -> tuple[Tensor, Pairs]:
        key_E, order = (pairs.query_E // self._chunk * self._num_pins + pairs.row_E).sort(stable=True)
        value_E = pairs.value_E[order] if len(pairs.value_E) else pairs.value_E
        return key_E, Pairs(pairs.query_E[order], pairs.row_E[order], value_E)

    def _within(self, found: tuple[Tensor, Pairs], start: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return row within the block, query within the chunk, and value of the pairs of a block."""
        key_E, pairs = found
        base = start // self._chunk * self._num_pins
        bounds = torch.tensor([base + first, base + min(last, self._num_pins)], device=key_E.device)
        part = slice(*torch.searchsorted(key_E, bounds).tolist())
        return pairs.row_E[part] - first, pairs.query_E[part] - start, pairs.value_E[part]

    def add(self, score_BC: Tensor, start: int, first: int) -> None:
        """Add the increments of a block, whose first row and first query these are, to its scores."""
        if self._increments is not None:
            row_E, query_E, value_E = self._within(self._increments, start, first, first + len(score_BC))
            score_BC.index_put_((row_E, query_E), value_E, accumulate=True)

    def exclude(self, score_BC: Tensor, start: int, first: int) -> bool:
        """Set the scores of the excluded pins of a block to -inf; return whether the search excludes any pins."""
        if self._excluded is None:
            return False
        row_E, query_E, _ = self._within(self._excluded, start, first, first + len(score_BC))
        score_BC[row_E, query_E] = -torch.inf
        return True


def _nearest(
    index_ND: Tensor, query_CD: Tensor, num: int, changes: _Changes, start: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (nearest_CJ, row_CJ), the `num` largest scores of each query and their rows of the index: among all pins,
    and, if pins are excluded, among those that are left. `start` is the first query."""
    num_pins, num_queries = len(index_ND), len(query_CD)
    groups_at_once = max(GROUPS_AT_ONCE, -(-num // GROUP))  # enough rows in the first block
    num_groups = min(groups_at_once, -(-num_pins // GROUP))
    score_GWC = torch.empty(num_groups, GROUP, num_queries, device=index_ND.device)
    score_BC = score_GWC.flatten(0, 1)
    nothing_CJ = torch.empty(num_queries, 0, device=index_ND.device)
    among_all = among_left = nothing_CJ, nothing_CJ.long()
    for first in range(0, num_pins, groups_at_once * GROUP):
        _score(index_ND[first : first + groups_at_once * GROUP], query_CD, score_BC)
        changes.add(score_BC, start, first)
        largest_GC = score_GWC.amax(1)
        among_all = _with_block(among_all, score_GWC, largest_GC, num, first)
        if changes.exclude(score_BC, start, first):
            if first == 0:
                largest_GC = score_GWC.amax(1)
            # In later blocks the maxima with the excluded pins only read a few groups in vain.
            among_left = _with_block(among_left, score_GWC, largest_GC, num, first)
    return among_all, among_left


def _score(index_BD: Tensor, query_CD: Tensor, score_BC: Tensor) -> None:
    """Write the scores of a block. Rows are pins: the scores of one group for all queries are contiguous in memory."""
    score_BC[len(index_BD) :] = -torch.inf  # pad the last block with scores below all others
    torch.matmul(index_BD, query_CD.T, out=score_BC[: len(index_BD)])


def _with_block(
    nearest: tuple[Tensor, Tensor], score_GWC: Tensor, largest_GC: Tensor, num: int, first_row: int
) -> tuple[Tensor, Tensor]:
    """Merge the nearest so far with those of a block."""
    if first_row == 0:
        return _nearest_of_first(score_GWC, largest_GC, num)
    return _with_nearer(*nearest, score_GWC, largest_GC, first_row)


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
