"""Diversity of the retrieved pins, for one user and over all users (paper, section 4.1).

Results are rows of the index; -1 stands for a missing result and does not count.

Suffixes: U users, Q queries, K results of one query, N pins of the index.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor


def p90_coverage(top_UK: Tensor, *, index_size: int, share: float = 0.9) -> float:
    """P90 Coverage@K: the smallest share of the index that accounts for 90 % of all users' top K results.

    With the pins sorted by how often they were retrieved, it is the length of the shortest prefix that holds at least
    `share` of the results, divided by `index_size`. If all users see the same K pins, it is ceil(0.9 K) / index_size.
    If every pin is retrieved equally often, it is `share`, rounded up to a whole pin. It grows with the number of users
    until their results fill the index: compare only values on the same users. Without any result it is NaN.
    """
    results = top_UK[top_UK >= 0]
    if len(results) == 0:
        return math.nan
    count_N = torch.bincount(results, minlength=index_size).sort(descending=True).values
    wanted = math.ceil(Fraction(str(share)) * len(results))  # 0.07 * 100 is more than 7 in floats
    num_pins = int(torch.searchsorted(count_N.cumsum(0), wanted)) + 1
    return num_pins / index_size


def interest_entropy(top_QK: Tensor, interest_N: Tensor) -> Tensor:
    """entropy_Q: Interest Entropy@K in nats, - sum over interests i of p(i) log p(i).

    p(i) is the share of a query's results whose interest is i. `interest_N` holds the interest code of each pin of the
    index, -1 where it is unknown: unknown interests count as one interest. One interest gives 0, K different interests
    give log K. A query without any result gives NaN.
    """
    is_result_QK = top_QK >= 0
    nothing = torch.iinfo(torch.int64).max
    code_QK = torch.where(is_result_QK, interest_N.long()[top_QK.clamp(min=0)], nothing)
    sorted_QK = code_QK.sort(dim=1).values
    alike_QK = torch.searchsorted(sorted_QK, code_QK, right=True) - torch.searchsorted(sorted_QK, code_QK)
    num_Q1 = is_result_QK.sum(1, keepdim=True).double()
    # The sum over interests equals a mean over results: each contributes the log of its own interest's share.
    log_share_QK = torch.where(is_result_QK, (alike_QK / num_Q1).log(), 0.0)
    return (-log_share_QK.sum(1, keepdim=True) / num_Q1).squeeze(1).abs()  # 0 / 0 is NaN; -0.0 is 0.0
