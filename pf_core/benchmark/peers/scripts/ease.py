"""EASE (Steck, WWW'19) in closed form, with and without the user's own history.

X: training users x pins. G = X'X + lambda I, P = inverse(G), B_ij = -P_ij / P_jj and 0 on the diagonal, so that
score(u, j) = (x_u B)_j = x_uj - (x_u P)_j / P_jj: only x_u P of the test users and the diagonal of P are computed.
With fewer users than pins the same numbers come from the dual: P = (I - X' inverse(X X' + lambda I) X) / lambda.

The dense matrix has an order of min(users, pins), at most `max_order`; above 20,000 pins, or where both users and pins
exceed `max_order`, only the most used pins are scored. Above an order of 10,000 it is float32, to halve the time.

`own_weight` w > 0 ("ease_own") adds w x the user's decayed frequency: sum of exp(-age / 120 days) over own actions, for
every own pin, also one that EASE does not score.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from exchange import Lists, Task, main, own_frequency, user_batches, weight_matrix
from scipy import linalg, sparse

MAX_PINS = 20_000
MAX_FLOAT64_ORDER = 10_000
BLOCK = 2_000


@dataclass(frozen=True)
class Inverse:
    """P, as far as scores need it."""

    times: Callable[[sparse.csr_array], np.ndarray]
    """x P for each row x: users x pins."""
    diagonal_N: np.ndarray

    def scores(self, queries: sparse.csr_array) -> np.ndarray:
        """x B for each row x: users x pins."""
        return queries.toarray() - self.times(queries) / self.diagonal_N


def used_pins(matrix: sparse.csr_array, max_order: int) -> np.ndarray:
    """Pins that are scored, ascending: those with training actions, or the most used of them."""
    num_users_N = np.bincount(matrix.indices, minlength=matrix.shape[1])
    limit = MAX_PINS if matrix.shape[0] <= max_order else min(MAX_PINS, max_order)
    pins = np.flatnonzero(num_users_N)
    most_used = np.argsort(-num_users_N[pins], kind="stable")[:limit]
    return np.sort(pins[most_used])


def gram(rows: sparse.csr_array, ridge: float) -> np.ndarray:
    """Dense rows @ rows.T + ridge I, filled block by block; column-major for LAPACK."""
    order = rows.shape[0]
    dtype = np.float64 if order <= MAX_FLOAT64_ORDER else np.float32
    dense = np.empty((order, order), dtype, order="F")
    transposed = rows.T.tocsc()
    for start in range(0, order, BLOCK):
        dense[:, start : start + BLOCK] = (rows @ transposed[:, start : start + BLOCK]).toarray()
    dense[np.diag_indices(order)] += ridge
    return dense


def primal(matrix: sparse.csr_array, ridge: float) -> Inverse:
    factor = linalg.cholesky(gram(matrix.T.tocsr(), ridge), lower=True, overwrite_a=True, check_finite=False)
    (invert,) = linalg.get_lapack_funcs(("trtri",), (factor,))
    root, info = invert(factor, lower=1, overwrite_c=1)  # P = root' root
    assert info == 0, f"trtri: {info}"
    starts = range(0, len(root), BLOCK)
    diagonal = np.concatenate([np.square(root[:, start : start + BLOCK]).sum(axis=0) for start in starts])

    def times(queries: sparse.csr_array) -> np.ndarray:
        return (queries.toarray().astype(root.dtype) @ root.T) @ root

    return Inverse(times, diagonal)


def dual(matrix: sparse.csr_array, ridge: float) -> Inverse:
    factor = linalg.cholesky(gram(matrix, ridge), lower=True, overwrite_a=True, check_finite=False)
    diagonal = np.empty(matrix.shape[1])
    columns = matrix.tocsc()
    for start in range(0, matrix.shape[1], BLOCK):
        block = columns[:, start : start + BLOCK].toarray(order="F")
        half = linalg.solve_triangular(factor, block, lower=True, overwrite_b=True, check_finite=False)
        diagonal[start : start + BLOCK] = (1 - np.square(half).sum(axis=0)) / ridge

    def times(queries: sparse.csr_array) -> np.ndarray:
        explained = (queries @ matrix.T).toarray()  # users x training users
        return (queries.toarray() - linalg.cho_solve((factor, True), explained.T).T @ matrix) / ridge

    return Inverse(times, diagonal)


def invert_gram(matrix: sparse.csr_array, ridge: float) -> Inverse:
    if 0 in matrix.shape:
        return Inverse(lambda queries: np.zeros(queries.shape), np.ones(matrix.shape[1]))
    return (dual if matrix.shape[0] < matrix.shape[1] else primal)(matrix, ridge)


def rank(task: Task) -> tuple[Lists, str]:
    log, settings = task.log, task.settings
    train, past = log.train.chosen(settings["actions"]), log.past.chosen(settings["actions"])
    matrix = weight_matrix(train, log.num_train_users, log.num_pins, settings["weights"])
    own = weight_matrix(past, log.num_test_users, log.num_pins, settings["weights"])
    own_weight = settings.get("own_weight", 0.0)
    frequency = own_frequency(past, log.num_test_users, log.num_pins)
    pins = used_pins(matrix, settings.get("max_order", MAX_PINS))
    num_used = np.count_nonzero(np.bincount(matrix.indices, minlength=log.num_pins))
    matrix, own = matrix[:, pins], own[:, pins]

    lists, lengths = Lists(), log.list_lengths()
    inverse = invert_gram(matrix, settings["ridge"])
    known = np.diff(own.indptr) > 0
    scores = np.empty(log.num_pins)
    for users in user_batches(log.num_test_users, log.num_pins):
        scores_UN = inverse.scores(own[users])
        for user in range(users.start, users.stop):
            scores[:] = -np.inf
            if known[user]:
                scores[pins] = scores_UN[user - users.start]
            if own_weight:
                span = slice(frequency.indptr[user], frequency.indptr[user + 1])
                seen = frequency.indices[span]
                base = np.where(np.isneginf(scores[seen]), 0.0, scores[seen])
                scores[seen] = base + own_weight * frequency.data[span]
            scored = np.flatnonzero(~np.isneginf(scores))
            lists.add(user, scored, scores[scored], lengths[user])
    limited = f"scores the {len(pins):,} most used of {num_used:,} pins" if len(pins) < num_used else ""
    return lists, limited


if __name__ == "__main__":
    main(rank)
