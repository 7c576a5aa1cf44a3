"""Recall@k by exact search (paper, section 4.1).

Recall@k(U) is the share of U's positives P with |{N in index : d(U, P) >= d(U, N)}| < k. For unit vectors a smaller
distance is a larger inner product. Ties count against P; P itself, if it is in the index, does not compete with itself.
Users without positives are undefined (NaN). Memory is bounded by `chunk_users` rows of scores.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Scores of unit vectors that are nearer than this are a tie: two ways to sum them differ by as much."""


def recall_at_k(
    user_UD: Tensor,
    positive_user_P: Tensor,
    positive_pin_P: Tensor,
    positive_PD: Tensor,
    index_pin_N: Tensor,
    index_ND: Tensor,
    *,
    k: int,
    chunk_users: int = 256,
) -> Tensor:
    """recall_U; positives are listed as (user, pin, embedding) in any order."""
    hits_U = torch.zeros(len(user_UD), dtype=torch.float64)
    counts_U = torch.bincount(positive_user_P, minlength=len(user_UD))
    by_user = torch.argsort(positive_user_P, stable=True)
    bounds = torch.searchsorted(positive_user_P[by_user].contiguous(), torch.arange(len(user_UD) + 1))
    for start in range(0, len(user_UD), chunk_users):
        users_CD = user_UD[start : start + chunk_users]
        # k + 1 nearest decide: one of them may be P itself, and the others are at least as near as all that follow.
        nearest = (users_CD @ index_ND.T).topk(min(k + 1, len(index_ND)), dim=1)
        chosen = by_user[bounds[start] : bounds[start + len(users_CD)]]
        row = positive_user_P[chosen] - start
        score_P1 = (users_CD[row] * positive_PD[chosen]).sum(-1, keepdim=True)
        is_other = index_pin_N[nearest.indices[row]] != positive_pin_P[chosen, None]
        rivals_P = ((nearest.values[row] >= score_P1 - ROUNDING) & is_other).sum(1)
        hits_U.index_add_(0, positive_user_P[chosen], (rivals_P < k).double())
    return hits_U / counts_U  # 0 / 0 is NaN


def mean_recall(recall_U: Tensor) -> float:
    """Over the users who have positives; NaN if nobody has."""
    return float(recall_U.nanmean())


def embed_in_chunks(embed: Callable[[Tensor], Tensor], num_rows: int, chunk_rows: int = 8192) -> Tensor:
    """`embed(row numbers)` for all rows, a chunk at a time."""
    return torch.cat([embed(rows) for rows in torch.arange(num_rows).split(chunk_rows)])
