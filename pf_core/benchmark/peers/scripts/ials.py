"""iALS (Hu, Koren and Volinsky, ICDM'08) with `implicit`; a confidence is 1 + alpha x weight.

Test users are folded in: a user's factors are the exact ridge solution for the user's own past and the pins' factors,
which only training users have formed. Pins without a training action are not scored.
"""

import time

import numpy as np
from exchange import Lists, Task, main, user_batches, weight_matrix
from implicit.cpu.als import AlternatingLeastSquares
from scipy import sparse

SEED = 0
RESERVE = 0.2
"""Share of the time that is kept for folding in and ranking."""


def rank(task: Task) -> tuple[Lists, str]:
    log, settings = task.log, task.settings
    train, past = log.train.chosen(settings["actions"]), log.past.chosen(settings["actions"])
    confidence = weight_matrix(train, log.num_train_users, log.num_pins, settings["weights"])
    num_users_N = np.bincount(confidence.indices, minlength=log.num_pins)
    confidence.data = 1 + settings["alpha"] * confidence.data
    model = AlternatingLeastSquares(
        factors=settings["factors"], regularization=settings["regularization"], iterations=1, random_state=SEED
    )
    matrix = sparse.csr_matrix(confidence.astype(np.float32))
    done = 0
    while done < settings["iterations"]:
        started = time.monotonic()
        model.fit(matrix, show_progress=False)  # goes on from the factors that it has
        done += 1
        if task.seconds_left() - 2 * (time.monotonic() - started) < RESERVE * task.budget_s:
            break
    own = weight_matrix(past, log.num_test_users, log.num_pins, settings["weights"])
    own.data = 1 + settings["alpha"] * own.data
    user_factors = model.recalculate_user(np.arange(log.num_test_users), sparse.csr_matrix(own.astype(np.float32)))
    item_factors = model.item_factors
    if task.keep_factors:
        np.savez(task.out.with_name("factors.npz"), user=user_factors, pin=item_factors)

    lists, lengths = Lists(), log.list_lengths()
    pins = np.flatnonzero(num_users_N)
    known = np.diff(own.indptr) > 0
    for users in user_batches(log.num_test_users, len(pins)):
        scores_UN = user_factors[users] @ item_factors[pins].T
        for user in np.flatnonzero(known[users]) + users.start:
            lists.add(user, pins, scores_UN[user - users.start], lengths[user])
    stopped = f"stopped after {done} of {settings['iterations']} iterations" if done < settings["iterations"] else ""
    return lists, stopped


if __name__ == "__main__":
    main(rank, ("implicit",))
