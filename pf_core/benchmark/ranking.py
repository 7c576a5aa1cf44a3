"""The lists of our model: the pins of the index for each test user, by exact search.

A pin's score is what serving would compute: its cosine with the user's vector, plus the increment of the user's memory,
which may be negative (a pin that is not to be recommended again). The vector alone leaves the increments out. A test
user without an embedding gets the popular list, as from a release.

Suffixes: U test users, V users with a vector, Q users of a chunk, N pins that are ranked, E increments, D embedding,
K pins of a list.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pf_core.benchmark.baselines import popular_list
from pf_core.benchmark.log import BenchmarkLog, RankedLists, list_lengths
from pf_core.evaluation.embedders import open_model_embedder
from pf_core.evaluation.increments import QueryVectors
from pf_core.evaluation.question import Question
from pf_core.metrics.exact_search import Pairs, search
from pf_core.model.device import choose_device
from pf_core.storage.arrays import read_arrow
from pf_core.training.training_set import TrainingSet

NUMBERS_AT_ONCE = 1 << 24
"""Numbers of the nearest pins' embeddings in memory at a time: 64 MB."""


class Ranking(NamedTuple):
    """The lists of a model's test users, as served and by the vector alone."""

    served: RankedLists
    vector_alone: RankedLists
    is_ranked_N: np.ndarray
    """Whether the model has a vector for each pin of the log's index."""
    has_memory: bool
    num_popular: int
    """Number of test users without an embedding, who get the popular list."""


def rank_pins(log: BenchmarkLog, data: TrainingSet, model: Path) -> Ranking:
    """Embed the test users from their actions before the cut, and rank the pins of the index that have a vector."""
    row_U = _held_out_rows(log, data)
    has_past_U = row_U >= 0
    all_pins = np.arange(data.num_pins)
    question = Question(
        data=data,
        user_ids=log.test_user_ids.filter(pa.array(has_past_U)),
        timelines=data.held_out,
        positive_A=np.zeros(0, np.int64),
        index_pin=all_pins,
        num_days=log.num_days,
        counts={},
    )
    embedder = open_model_embedder(question, model, name="benchmark", device=choose_device("auto"))
    pin_row_N, log_pin_N = _pins_in_index(
        log, data, all_pins if embedder.ranks is None else embedder.ranks.nonzero()[0]
    )
    user_V = row_U[has_past_U]
    with torch.no_grad():
        vectors = embedder.embed(user_V, data.held_out.offsets[user_V + 1])
        index_ND = _in_chunks(embedder.pins, pin_row_N)
    has_vector_U = has_past_U.copy()
    has_vector_U[has_past_U] = np.diff(vectors.offsets_Q) > 0
    increments = _increments_in_index(vectors, pin_row_N, data.num_pins)
    popular, wanted_U = popular_list(log), list_lengths(log)
    vector_alone = rank_vectors(vectors.vector_VD, index_ND, log_pin_N, has_vector_U, wanted_U, popular=popular)
    served = vector_alone
    if increments is not None:
        served = rank_vectors(
            vectors.vector_VD, index_ND, log_pin_N, has_vector_U, wanted_U, popular=popular, increments=increments
        )
    is_ranked_N = np.zeros(len(log.pin_ids), bool)
    is_ranked_N[log_pin_N] = True
    return Ranking(served, vector_alone, is_ranked_N, increments is not None, int((~has_vector_U).sum()))


def _increments_in_index(vectors: QueryVectors, pin_row_N: np.ndarray, num_pins: int) -> Pairs | None:
    """Return the increments of the ranked pins by row of vectors and of `pin_row_N`; None if users have no memory."""
    if vectors.increments is None:
        return None
    row_of_pin = np.full(num_pins, -1, np.int64)
    row_of_pin[pin_row_N] = np.arange(len(pin_row_N))
    query_E, pin_E, value_E, _ = vectors.increments
    is_ranked_E = row_of_pin[pin_E] >= 0
    return Pairs(
        query_E=torch.from_numpy(vectors.offsets_Q[query_E[is_ranked_E]].astype(np.int64)),
        row_E=torch.from_numpy(row_of_pin[pin_E[is_ranked_E]]),
        value_E=torch.from_numpy(value_E[is_ranked_E].astype(np.float32)),
    )


def _pins_in_index(log: BenchmarkLog, data: TrainingSet, pin_row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return those of the training set's pin rows that are in the log's index, and their rows there."""
    ids = read_arrow(data.path / "pins" / "pin_id.arrow")["pin_id"].combine_chunks()
    row = pc.index_in(ids, value_set=log.pin_ids).fill_null(-1).to_numpy(zero_copy_only=False)[pin_row]
    return pin_row[row >= 0], row[row >= 0].astype(np.int64)


def _held_out_rows(log: BenchmarkLog, data: TrainingSet) -> np.ndarray:
    """Return each test user's row among the held-out users; -1 for a user without an action that the set has."""
    rows = pc.index_in(log.test_user_ids, value_set=data.held_out.user_ids())
    return rows.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _in_chunks(embed: Callable[[np.ndarray], Tensor], pin_row_N: np.ndarray, *, rows: int = 8192) -> Tensor:
    return torch.cat([embed(pin_row_N[start : start + rows]) for start in range(0, max(1, len(pin_row_N)), rows)])


def rank_vectors(
    vector_VD: Tensor,
    index_ND: Tensor,
    log_pin_N: np.ndarray,
    has_vector_U: np.ndarray,
    wanted_U: np.ndarray,
    *,
    popular: tuple[np.ndarray, np.ndarray],
    increments: Pairs | None = None,
) -> RankedLists:
    """Search the best pins of each vector by cosine plus increment; users without a vector get the popular list.

    `increments` have rows of vector_VD and index_ND, each pair at most once. Users with lists of about the same length
    are searched together. Scores are computed again for the pins found, one product at a time, so that pins with equal
    vectors and increments have equal scores.
    """
    popular_pin_K, popular_score_K = popular
    length_U = np.minimum(wanted_U, np.where(has_vector_U, len(index_ND), len(popular_pin_K)))
    offsets_U = np.concatenate([[0], np.cumsum(length_U)])
    pin, score = np.zeros(offsets_U[-1], np.int32), np.zeros(offsets_U[-1], np.float32)
    for user in np.flatnonzero(~has_vector_U).tolist():
        theirs = slice(offsets_U[user], offsets_U[user + 1])
        pin[theirs], score[theirs] = popular_pin_K[: length_U[user]], popular_score_K[: length_U[user]]
    user_V = np.flatnonzero(has_vector_U)
    by_length = np.argsort(length_U[user_V], kind="stable")
    none = torch.zeros(0, dtype=torch.int64)
    first = 0
    while first < len(by_length) and len(index_ND):
        k = int(length_U[user_V[by_length[min(first + 1023, len(by_length) - 1)]]])
        rows = by_length[first : first + max(1, min(1024, NUMBERS_AT_ONCE // (k * index_ND.shape[1])))]
        k = int(length_U[user_V[rows[-1]]])
        query_QD = vector_VD[torch.from_numpy(rows)]
        theirs_E = None if increments is None else _of_vectors(increments, rows, len(vector_VD))
        top_QK = search(
            query_QD,
            index_ND,
            index_pin_N=torch.arange(len(index_ND)),
            positive_query_P=none,
            positive_pin_P=none,
            positive_PD=index_ND[:0],
            k=k,
            increments=theirs_E,
        ).top_QK
        score_QK = (query_QD[:, None] * index_ND[top_QK]).sum(-1)
        if theirs_E is not None:
            score_QK += _values_at(theirs_E, top_QK, len(index_ND))
        score_QK, order = score_QK.sort(dim=1, descending=True, stable=True)
        top_QK = top_QK.gather(1, order)
        for number, user in enumerate(user_V[rows].tolist()):
            theirs, length = slice(offsets_U[user], offsets_U[user + 1]), int(length_U[user])
            pin[theirs] = log_pin_N[top_QK[number, :length].numpy()]
            score[theirs] = score_QK[number, :length].numpy()
        first += len(rows)
    return RankedLists(offsets_U=offsets_U, pin=pin, score=score)


def _of_vectors(increments: Pairs, rows: np.ndarray, num_vectors: int) -> Pairs:
    """Return the increments of some vectors, which are numbered in the order of `rows`."""
    number_V = torch.full((num_vectors,), -1)
    number_V[torch.from_numpy(rows)] = torch.arange(len(rows))
    number_E = number_V[increments.query_E]
    is_theirs_E = number_E >= 0
    return Pairs(number_E[is_theirs_E], increments.row_E[is_theirs_E], increments.value_E[is_theirs_E])


def _values_at(increments: Pairs, row_QK: Tensor, num_pins: int) -> Tensor:
    """Return the increment of each query at each of its rows; 0 where there is none."""
    if not len(increments.query_E):
        return torch.zeros(row_QK.shape)
    key_E, order = (increments.query_E * num_pins + increments.row_E).sort()
    key_QK = torch.arange(len(row_QK))[:, None] * num_pins + row_QK
    place_QK = torch.searchsorted(key_E, key_QK).clamp(max=len(key_E) - 1)
    return torch.where(key_E[place_QK] == key_QK, increments.value_E[order][place_QK], 0.0)
