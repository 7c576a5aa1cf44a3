"""How diverse the retrieved pins are, of one user and over all users (paper, section 4.1).

Results are rows of the index; a place without a result is -1, and does not count.

Suffixes: U users, Q queries, K results of one, N pins of the index.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor


def p90_coverage(top_UK: Tensor, *, index_size: int, share: float = 0.9) -> float:
    """P90 Coverage@K: the smallest share of the index that accounts for 90 % of all users' top K results.

    With the pins sorted by how often they were retrieved, it is the length of the shortest prefix that holds at least
    `share` of the results, over `index_size`. All users seeing the same K pins gives ceil(0.9 K) / index_size; an index
    of which every pin is retrieved equally often gives `share`, rounded up to a pin. It grows with the number of users
    until they fill the index: compare it on the same users alone. Without any result it is undefined (NaN).
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

    p(i) is the share of a query's results whose interest is i. `interest_N` holds the interest's code of each pin of
    the index, -1 where it is unknown: the unknown ones count as an interest of their own. One interest gives 0, K
    different ones log K. A query without any result is undefined (NaN).
    """
    is_result_QK = top_QK >= 0
    nothing = torch.iinfo(torch.int64).max
    code_QK = torch.where(is_result_QK, interest_N.long()[top_QK.clamp(min=0)], nothing)
    sorted_QK = code_QK.sort(dim=1).values
    alike_QK = torch.searchsorted(sorted_QK, code_QK, right=True) - torch.searchsorted(sorted_QK, code_QK)
    num_Q1 = is_result_QK.sum(1, keepdim=True).double()
    # The sum over interests is a mean over results: each brings the log of its own interest's share.
    log_share_QK = torch.where(is_result_QK, (alike_QK / num_Q1).log(), 0.0)
    return (-log_share_QK.sum(1, keepdim=True) / num_Q1).squeeze(1).abs()  # 0 / 0 is NaN; -0.0 is 0.0
