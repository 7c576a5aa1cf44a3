"""Which pins a user gets: the index's best, merged with the user's memory; or only pins that the user has not seen.

The score of a pin is the cosine of the vectors, plus the increment if the pin is in memory. Results are exact given
what the index finds.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.serving.index import PinIndex
from pf_core.serving.values import PinLists


class Ranked(NamedTuple):
    """Pins of the index, best first, ties by label."""

    label_K: np.ndarray
    score_K: np.ndarray
    is_memory_K: np.ndarray


def rank_with_memory(index: PinIndex, vector_D: np.ndarray, lists: PinLists, k: int) -> Ranked:
    """Return the k pins of the index with the largest scores. A pin of memory that is not in the index has no score.

    A pin outside memory that is not among the index's k best has at least k pins above it, as long as no increment is
    negative; so k pins are enough, and one more for each negative increment.
    """
    label_M = index.rows_of(lists.memory_pin_ids)
    is_known_M = label_M >= 0
    label_M, increment_M = label_M[is_known_M], lists.memory_increments[is_known_M]
    [label_K], [score_K] = index.search(vector_D[None], k + int((increment_M < 0).sum()))
    is_other_K = ~np.isin(label_K, label_M)
    label = np.concatenate([label_M, label_K[is_other_K]])
    score = np.concatenate([index.vectors(label_M) @ vector_D + increment_M, score_K[is_other_K]])
    order = np.lexsort((label, -score))[:k]
    return Ranked(label[order], score[order], order < len(label_M))


def rank_new(index: PinIndex, vector_D: np.ndarray, lists: PinLists, k: int) -> Ranked:
    """Return the k nearest pins that are neither among the seen ones nor in memory, whose pins were seen too.

    More and more pins are searched until k are left or the index has no more. The first search takes as many as cost
    nothing more, those that hnswlib examines anyway.
    """
    known = pa.concat_arrays([lists.memory_pin_ids, lists.seen_pin_ids])
    num_searched = max(2 * k, min(index.description["ef"], k + len(known)))
    while True:
        [label_N], [score_N] = index.search(vector_D[None], num_searched)
        is_new_N = ~pc.is_in(index.ids_of(label_N), known).to_numpy(zero_copy_only=False)
        if is_new_N.sum() >= k or num_searched >= len(index):
            label_K, score_K = label_N[is_new_N][:k], score_N[is_new_N][:k]
            return Ranked(label_K, score_K, np.zeros(len(label_K), bool))
        num_searched *= 2
