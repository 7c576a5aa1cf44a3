"""Item-kNN: a pin's score is the sum of its similarities to the user's pins.

sim(j, i) = <x_j, x_i> / (|x_j| |x_i| + shrinkage), x_i being pin i's column of the weight matrix of training users, or
of its BM25 weights; each pin j keeps its `num_neighbours` most similar pins. score(u, i) = sum over the user's own pins
j of w_uj sim(j, i). With `keep_self`, a pin is among its own neighbours, with similarity |x_j|^2 / (|x_j|^2 +
shrinkage), so that history counts.
"""

import numpy as np
from exchange import Lists, Task, main, weight_matrix
from scipy import sparse

BM25_K1, BM25_B = 1.2, 0.75
MAX_PRODUCTS = 50_000_000
"""Multiplications of a block of the similarity matrix; bounds its entries, too."""


def bm25(matrix: sparse.csr_array) -> sparse.csr_array:
    """w (k1 + 1) / (w + k1 (1 - b + b length / mean length)) log(1 + N / n_i); a user is a document, a pin a term."""
    coo = matrix.tocoo()
    users, pins = coo.coords
    length = np.bincount(users, coo.data, minlength=matrix.shape[0])
    num_users = max(1, np.count_nonzero(length))
    norm = 1 - BM25_B + BM25_B * length / max(length.sum() / num_users, 1e-12)
    idf = np.log1p(num_users / np.maximum(1, np.bincount(pins, minlength=matrix.shape[1])))
    data = coo.data * (BM25_K1 + 1) / (coo.data + BM25_K1 * norm[users]) * idf[pins]
    return sparse.csr_array((data, (users, pins)), shape=matrix.shape)


def row_blocks(cost: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of consecutive rows whose cost is at most MAX_PRODUCTS, or single rows."""
    blocks, start, total = [], 0, 0.0
    for row, products in enumerate(cost):
        if row > start and total + products > MAX_PRODUCTS:
            blocks.append((start, row))
            start, total = row, 0.0
        total += products
    return [*blocks, (start, len(cost))]


def neighbours(
    matrix: sparse.csr_array, pins: np.ndarray, num_neighbours: int, shrinkage: float, *, keep_self: bool
) -> sparse.csr_array:
    """len(pins) x all pins: row r has sim(j, i) for the neighbours i of j = pins[r]; of equals, the first pins."""
    by_pin = matrix.T.tocsr()
    norm = np.sqrt(np.asarray(by_pin.multiply(by_pin).sum(axis=1)).ravel())
    rows = by_pin[pins]
    # A row of the product costs the number of pins of each of its users.
    cost = rows.astype(bool).astype(np.float64) @ np.diff(matrix.indptr)
    kept_pins, kept_values = [np.empty(0, np.int64)], [np.empty(0)]
    num_kept = np.zeros(len(pins), np.int64)
    for start, stop in row_blocks(cost):
        product = rows[start:stop] @ matrix
        for row in range(start, stop):
            span = slice(product.indptr[row - start], product.indptr[row - start + 1])
            near = product.indices[span]
            values = product.data[span] / (norm[pins[row]] * norm[near] + shrinkage)
            if not keep_self:
                near, values = near[near != pins[row]], values[near != pins[row]]
            if len(values) > num_neighbours:
                best = best_of(near, values, num_neighbours)
                near, values = near[best], values[best]
            num_kept[row] = len(near)
            kept_pins.append(near)
            kept_values.append(values)
    indptr = np.concatenate([[0], np.cumsum(num_kept)])
    shape = (len(pins), matrix.shape[1])
    return sparse.csr_array((np.concatenate(kept_values), np.concatenate(kept_pins), indptr), shape=shape)


def best_of(pins: np.ndarray, values: np.ndarray, number: int) -> np.ndarray:
    """Positions of the largest values; of equal ones, those of the first pins."""
    least = np.partition(values, len(values) - number)[len(values) - number]
    above, ties = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.concatenate([above, ties[np.argsort(pins[ties])][: number - len(above)]])


def rank(task: Task) -> tuple[Lists, str]:
    log, settings = task.log, task.settings
    train, past = log.train.chosen(settings["actions"]), log.past.chosen(settings["actions"])
    matrix = weight_matrix(train, log.num_train_users, log.num_pins, settings["weights"])
    if settings["weighting"] == "bm25":
        matrix = bm25(matrix)
    own = weight_matrix(past, log.num_test_users, log.num_pins, settings["weights"])
    pins = np.unique(own.indices)  # the neighbours of pins that no test user has are not needed
    similar = neighbours(
        matrix, pins, settings["num_neighbours"], settings["shrinkage"], keep_self=settings.get("keep_self", True)
    )
    own = own[:, pins]
    lists, lengths = Lists(), log.list_lengths()
    for user in range(log.num_test_users):
        scores = own[[user]] @ similar
        lists.add(user, scores.indices, scores.data, lengths[user])
    return lists, ""


if __name__ == "__main__":
    main(rank)
