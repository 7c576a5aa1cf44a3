"""Logits of a day's rows with and without memory, and the likelihoods of their targets.

Suffixes: B rows, M pins of the softmax, P own pins, T targets.
"""

import torch
from torch import Tensor

from pf_core.training.parts.rows import MASKED, DayRows


def with_memory(vector_BM: Tensor, rows: DayRows, strength_P: Tensor) -> Tensor:
    """Return the logits with the memory of own pins mixed in."""
    is_inside_P = rows.own_place_P >= 0
    own = rows.own.row_P[is_inside_P], rows.own_place_P[is_inside_P]
    return vector_BM.index_put(own, torch.logaddexp(vector_BM[own], strength_P[is_inside_P]))


def without_own(vector_BM: Tensor, rows: DayRows) -> tuple[Tensor, Tensor]:
    """Return the logits with own pins masked, and which targets are on other pins."""
    is_inside_P = rows.own_place_P >= 0
    own = rows.own.row_P[is_inside_P], rows.own_place_P[is_inside_P]
    is_own_BM = torch.zeros_like(vector_BM, dtype=torch.bool)
    is_own_BM[own] = True
    return vector_BM.masked_fill(is_own_BM, MASKED), ~is_own_BM[rows.target_row_T, rows.target_place_T]


def log_likelihoods(logits_BM: Tensor, rows: DayRows) -> Tensor:
    """Return the log of each target's share in the softmax of its row; targets themselves are not corrected."""
    targets = rows.target_row_T, rows.target_place_T
    target_T = logits_BM[targets]
    log_sum_B = torch.logsumexp((logits_BM + rows.correction_M).index_put(targets, target_T), dim=1)
    return target_T - log_sum_B[rows.target_row_T]


def own_log_likelihoods(strength_P: Tensor, rows: DayRows) -> Tensor:
    """Return the log of each target's share among the own pins of its row; 0 for a target that is new to the user."""
    row_P, num_rows = rows.own.row_P, rows.own.num_users
    largest_B = strength_P.new_zeros(num_rows).scatter_reduce(0, row_P, strength_P.detach(), "amax", include_self=False)
    sum_B = strength_P.new_zeros(num_rows).index_add(0, row_P, (strength_P - largest_B[row_P]).exp())
    is_own_T = rows.target_own_T >= 0
    row_T = rows.target_row_T[is_own_T]
    log_p = strength_P[rows.target_own_T[is_own_T]] - largest_B[row_T] - sum_B[row_T].log()
    return strength_P.new_zeros(len(is_own_T)).masked_scatter(is_own_T, log_p)
