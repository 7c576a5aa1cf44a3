"""How diverse the retrieved pins are over all users (paper, section 4.1).

Suffixes: U users, C users of a chunk, K results of a user, N pins of the index, D embedding.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor


def top_k(user_UD: Tensor, index_ND: Tensor, *, k: int, chunk_users: int = 256) -> Tensor:
    """top_UK: the rows of each user's k nearest pins by exact search, nearest first; all of them if there are fewer.

    Memory is bounded by `chunk_users` rows of scores.
    """
    k = min(k, len(index_ND))
    return torch.cat([(user_CD @ index_ND.T).topk(k, dim=1).indices for user_CD in user_UD.split(chunk_users)])


def p90_coverage(top_UK: Tensor, *, index_size: int, share: float = 0.9) -> float:
    """P90 Coverage@K: the smallest share of the index that accounts for 90 % of all users' top K results.

    With the pins sorted by how often they were retrieved, it is the length of the shortest prefix that holds at least
    `share` of the results, over `index_size`. All users seeing the same K pins gives ceil(0.9 K) / index_size; an index
    of which every pin is retrieved equally often gives `share`, rounded up to a pin. It grows with the number of users
    until they fill the index: compare it on the same users alone. Without any result it is undefined (NaN).
    """
    if top_UK.numel() == 0:
        return math.nan
    count_N = torch.bincount(top_UK.flatten(), minlength=index_size).sort(descending=True).values
    wanted = math.ceil(Fraction(str(share)) * top_UK.numel())  # 0.07 * 100 is more than 7 in floats
    num_pins = int(torch.searchsorted(count_N.cumsum(0), wanted)) + 1
    return num_pins / index_size
