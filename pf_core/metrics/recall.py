"""Recall@k by exact search (paper, section 4.1).

Recall@k(U) is the share of U's positives P with |{N in index : d(U, P) >= d(U, N)}| < k. For unit vectors a smaller
distance is a larger inner product. Ties count against P; a P that is in the index does not compete with itself. The
recall of a user without positives is NaN.

Suffixes: U users, P positives, N pins of the index, D embedding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pf_core.metrics.exact_search import search


def recall_at_k(
    user_UD: Tensor,
    positive_user_P: Tensor,
    positive_pin_P: Tensor,
    positive_PD: Tensor,
    index_pin_N: Tensor,
    index_ND: Tensor,
    *,
    k: int,
    chunk_users: int | None = None,
) -> Tensor:
    """Return recall_U. Positives are (user, pin, embedding) in any order."""
    found = search(
        user_UD,
        index_ND,
        index_pin_N=index_pin_N,
        positive_query_P=positive_user_P,
        positive_pin_P=positive_pin_P,
        positive_PD=positive_PD,
        k=k,
        chunk_queries=chunk_users,
    )
    return share_found(found.rivals_P, positive_user_P, num_users=len(user_UD), k=k)


def share_found(rivals_P: Tensor, positive_user_P: Tensor, *, num_users: int, k: int) -> Tensor:
    """Return recall_U from the positives' rivals, as a search with this k or a larger one counts them."""
    hits_U = torch.zeros(num_users, dtype=torch.float64, device=rivals_P.device)
    hits_U.index_add_(0, positive_user_P, (rivals_P < k).double())
    return hits_U / torch.bincount(positive_user_P, minlength=num_users)  # 0 / 0 is NaN


def embed_in_chunks(embed: Callable[[Tensor], Tensor], num_rows: int, chunk_rows: int = 8192) -> Tensor:
    """Call `embed` with the row numbers of one chunk after the other, and concatenate the results."""
    return torch.cat([embed(rows) for rows in torch.arange(num_rows).split(chunk_rows)])
