"""PinnerSage (Pal et al., KDD 2020), the baseline of section 4.2.1: a user is several of the pins of their actions.

The content vectors of a user's recent actions are clustered by Ward's method, the tree is cut at a distance, and each
cluster is represented by its medoid, which is a pin. Clusters are ordered by importance: a cluster's actions, each
weighing less the older it is. Nothing is learned; users and pins are compared by the pins' content.

Several embeddings need two rules that one embedding does not. For recall, an oracle chooses, among a user's first c
embeddings, the one that is nearest to the positive. For diversity, the results of all embeddings are blended in turn.

Suffixes: U users, A actions of one user, C clusters (of all users, or of one), P positives, K results, D content.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from pf_core.days import DAY_US
from pf_core.timelines.arrays import Timelines

NUMBERS_AT_ONCE = 1 << 24
"""Numbers of the cluster vectors that the oracle gathers at a time: 64 MB."""


@dataclass(frozen=True, kw_only=True)
class PinnerSage:
    """Days, decay and the kind of clustering are the paper's; it leaves the distance of the cut to the vectors."""

    num_days: int = 90
    max_actions: int = 500
    """Newest actions that are clustered; the time that one user takes grows with the square of this number."""
    decay_per_day: float = 0.01
    max_distance: float = 1.35
    """Distance at which the tree of Ward's method on unit vectors is cut: clusters s and t are
    sqrt(2 |s||t| / (|s| + |t|)) |mean_s - mean_t| apart.

    Two single pins are as far apart as their vectors: unrelated ones (cosine 0) 1.41. Two halves of one interest are
    no farther apart than two of its pins, however large they are, because their means come nearer as they grow; two
    interests move apart as they grow. So a cut below 1.41 keeps unrelated pins apart and leaves interests whole: 1.35
    joins two pins of cosine .09 and more.
    """

    def __post_init__(self) -> None:
        if min(self.num_days, self.max_actions) < 1:
            raise ValueError("PinnerSage needs at least one day and one action")
        if min(self.decay_per_day, self.max_distance) < 0:
            raise ValueError("decay_per_day and max_distance must not be negative")


class Clusters(NamedTuple):
    """The clusters of user row u are offsets_U[u] to offsets_U[u + 1] of pin_C, most important first."""

    offsets_U: np.ndarray
    """First cluster of each user, and the end of the last one's."""
    pin_C: np.ndarray
    """Pin rows of the medoids."""

    def first(self, num: int) -> "Clusters":
        """Return the `num` most important clusters of each user."""
        count_U = np.diff(self.offsets_U)
        place_C = np.arange(len(self.pin_C)) - np.repeat(self.offsets_U[:-1], count_U)
        return Clusters(_to_offsets(np.minimum(count_U, num)), self.pin_C[place_C < num])


def cluster_users(
    timelines: Timelines,
    pin_feature: np.ndarray,
    start_U: np.ndarray,
    end_U: np.ndarray,
    at_us: int | np.ndarray,
    config: PinnerSage,
) -> Clusters:
    """Return the clusters of each user's actions `start` to `end` (included) as of `at_us`: one moment, or one a user.

    Only the actions of the `num_days` days before `at_us` count. A user without any has no cluster.
    """
    pins = [np.zeros(0, np.int64)]
    at_us_U = np.broadcast_to(at_us, len(start_U))
    for start, end, now_us in zip(start_U.tolist(), end_U.tolist(), at_us_U.tolist(), strict=True):
        ts_A = timelines.ts[start : end + 1]
        first, last = np.searchsorted(ts_A, (now_us - config.num_days * DAY_US, now_us)).tolist()
        first = max(first, last - config.max_actions)
        pin_A = np.asarray(timelines.pin[start + first : start + last])
        weight_A = np.exp(-config.decay_per_day / DAY_US * (now_us - ts_A[first:last]))
        pins.append(pin_A[_medoids(_to_unit(pin_feature[pin_A]), weight_A, config.max_distance)])
    return Clusters(_to_offsets(np.array([len(pin_C) for pin_C in pins[1:]], np.int64)), np.concatenate(pins))


def _medoids(vector_AD: np.ndarray, weight_A: np.ndarray, max_distance: float) -> np.ndarray:
    """Return one user's medoids as numbers of the user's actions (ascending in time), by importance of their cluster.

    A medoid is the member with the smallest sum of squared distances to the others; on a tie (as in every cluster of
    two) the newest one. On a tie of importance, the cluster with the newest action comes first.
    """
    if not len(vector_AD):
        return np.zeros(0, np.int64)
    cluster_A = _cut_tree(vector_AD, max_distance)
    count_C = np.bincount(cluster_A)
    first_C = np.cumsum(count_C) - count_C
    # |x - y|^2 summed over the members y is n |x|^2 - 2 <x, sum of y> + a term that is the same for all x.
    sum_CD = np.add.reduceat(vector_AD[np.argsort(cluster_A, kind="stable")], first_C)
    distance_A = count_C[cluster_A] * (vector_AD**2).sum(1) - 2 * (vector_AD * sum_CD[cluster_A]).sum(1)
    age_A = -np.arange(len(vector_AD))
    medoid_C = np.lexsort((age_A, np.round(distance_A, 6), cluster_A))[first_C]
    newest_C = np.lexsort((age_A, cluster_A))[first_C]
    importance_C = np.bincount(cluster_A, weight_A)
    return medoid_C[np.lexsort((-newest_C, -importance_C))]


def _cut_tree(vector_AD: np.ndarray, max_distance: float) -> np.ndarray:
    """Return the number of each action's cluster, counted from 0."""
    num_actions = len(vector_AD)
    if num_actions == 1:
        return np.zeros(1, np.int64)
    square_A = (vector_AD**2).sum(1)
    squared_AA = square_A[:, None] + square_A - 2 * (vector_AD @ vector_AD.T)
    distances = np.sqrt(np.maximum(squared_AA[np.triu_indices(num_actions, 1)], 0))
    tree = linkage(distances, "ward")
    # A row of the tree joins two nodes into node num_actions + row; distances ascend, so the cut is a number of rows.
    # scipy's `fcluster` does the same, and takes longer for it than `linkage` for the tree.
    joined = tree[: np.searchsorted(tree[:, 2], max_distance, side="right"), :2].astype(np.int64).tolist()
    cluster = list(range(num_actions + len(joined)))
    for row, (left, right) in reversed(list(enumerate(joined))):
        cluster[left] = cluster[right] = cluster[num_actions + row]
    return np.unique(cluster[:num_actions], return_inverse=True)[1]


def _to_unit(vector_AD: np.ndarray) -> np.ndarray:
    """Normalize in float64, so that equal pins are 1e-8 apart and not 1e-4; a vector of zeros stays zero."""
    vector_AD = np.asarray(vector_AD, np.float64)
    return vector_AD / np.maximum(np.linalg.norm(vector_AD, axis=1, keepdims=True), 1e-12)


def _to_offsets(count_U: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64)


def ask_oracle(clusters: Clusters, cluster_CD: Tensor, positive_user_P: Tensor, positive_PD: Tensor) -> Tensor:
    """Return cluster_P: for each positive, the row of its user's nearest cluster among all clusters.

    If the clusters are the queries of `search`, this is the query that searches for the positive. On a tie, the most
    important cluster is taken; -1 if the user has no cluster.
    """
    offset_U = torch.from_numpy(clusters.offsets_U)
    most = int(np.diff(clusters.offsets_U).max(initial=0))
    result_P = torch.full((len(positive_user_P),), -1)
    if most == 0:
        return result_P
    at_once = max(1, NUMBERS_AT_ONCE // (most * cluster_CD.shape[1]))
    for chosen in torch.arange(len(positive_user_P)).split(at_once):
        user = positive_user_P[chosen]
        row_PC = offset_U[user, None] + torch.arange(most)
        is_theirs_PC = row_PC < offset_U[user + 1, None]
        row_PC = row_PC.clamp(max=len(cluster_CD) - 1)
        score_PC = torch.einsum("pcd,pd->pc", cluster_CD[row_PC], positive_PD[chosen])
        score_PC = torch.where(is_theirs_PC, score_PC, -torch.inf)
        best_P1 = score_PC.argmax(1, keepdim=True)
        result_P[chosen] = torch.where(is_theirs_PC, row_PC, -1).gather(1, best_P1).squeeze(1)
    return result_P


def round_robin(top_CK: Tensor, offsets_U: np.ndarray, k: int) -> Tensor:
    """Return top_UK: each user's k results, blended from the results of the user's clusters; -1 where there are none.

    The first result is the first cluster's nearest pin, the second is the second cluster's, and so on; after the last
    cluster, the first has its turn again. A cluster gives its nearest pin that was not taken before, and is skipped
    when it has none left.
    """
    result_UK = torch.full((len(offsets_U) - 1, k), -1)
    for user, (start, end) in enumerate(zip(offsets_U[:-1].tolist(), offsets_U[1:].tolist(), strict=True)):
        taken = _take_turns(top_CK[start:end].tolist(), k)
        result_UK[user, : len(taken)] = torch.tensor(taken, dtype=torch.int64)
    return result_UK


def _take_turns(lists: list[list[int]], k: int) -> list[int]:
    taken: dict[int, None] = {}  # in order
    waiting = [iter(results) for results in lists]
    while waiting:
        still_waiting = []
        for results in waiting:
            if len(taken) == k:
                return list(taken)
            pin = next((pin for pin in results if pin not in taken), None)
            if pin is not None:
                taken[pin] = None
                still_waiting.append(results)
        waiting = still_waiting
    return list(taken)
