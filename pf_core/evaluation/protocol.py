"""The paper's offline evaluation (section 4.1), the same code for models and baselines: a question in, user scores out.

A query with several vectors (PinnerSage) searches each positive with the nearest of them, which is the paper's oracle,
an upper bound; for the diversity metrics, the results of its vectors are blended in turn. A query without any vector
finds nothing, and is counted.

- Recall@10 of a user: the share of the positives that fewer than 10 pins of the index are ranked before. The mean is
  over users who have positives, all with the same weight. Positives on pins that are unknown at the cut, or that the
  embedder cannot rank, are misses.
- Discovery@10: the same, among the pins of the index that the user has not seen, of the positives on such pins.
- Interest Entropy@50, in nats, and P90 Coverage@10: from one embedding for each user (`Queries.shown_U`).

Memory: the embeddings of the index, the question, and a chunk of queries at a time.
Suffixes: U users, Q queries, V vectors of queries, P positives, N pins of the index, K results, D embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pf_core.config.serving import Frequency
from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS, QueryEmbedder, open_model_embedder
from pf_core.evaluation.increments import Increments, QueryVectors
from pf_core.evaluation.manifest import MetricSummary
from pf_core.evaluation.pinnersage import Clusters, ask_oracle, round_robin
from pf_core.evaluation.queries import Queries, ask
from pf_core.evaluation.question import Question
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.evaluation.summary import summarize
from pf_core.metrics.diversity import interest_entropy
from pf_core.metrics.exact_search import Pairs, search
from pf_core.progress import Progress, Throttle
from pf_core.timelines.arrays import ragged

K_RECALL, K_ENTROPY = 10, 50
"""Recall is measured at both."""

NEVER_FOUND = 1 << 30
"""Number of rivals of a positive that nothing searches for."""

CHUNK_QUERIES = 4096

CHUNK_ACTIONS = 1 << 21
"""Actions before the queries of a chunk: the pins that their users have seen are in memory at a time."""

CHUNK_PINS = 8192

REPORT_EVERY_S = 10.0

INDEX_SHARES = (1 / 64, 1 / 16, 1 / 4, 1)
"""Sizes of the index in `recall_by_density`, as shares of all candidates."""

MAX_PINS = 1_000_000


def score_baseline(question: Question, name: str, *, frequencies: Sequence[Frequency], progress: Progress) -> Scores:
    """Score one of BASELINE_EMBEDDERS."""
    embedder = BASELINE_EMBEDDERS[name](question)
    return score_embedder(question, embedder, name, frequencies=frequencies, progress=progress)


def score_model(
    question: Question,
    folder: Path,
    *,
    frequencies: Sequence[Frequency],
    progress: Progress,
    name: str = "model",
    device: torch.device | None = None,
    has_memory: bool = True,
) -> Scores:
    """Score the model of a folder as it is served; `has_memory=False` scores the vectors of a model of parts alone."""
    embedder = open_model_embedder(question, folder, name=name, device=device, has_memory=has_memory)
    return score_embedder(question, embedder, name, frequencies=frequencies, progress=progress)


@torch.inference_mode()
def score_embedder(
    question: Question, embedder: QueryEmbedder, name: str, *, frequencies: Sequence[Frequency], progress: Progress
) -> Scores:
    """Return the scores of every user of the question at each frequency."""
    asked = question
    if embedder.ranks is not None:  # the index without what the embedder cannot rank
        asked = replace(question, index_pin=question.index_pin[embedder.ranks[question.index_pin]])
    if not asked.num_pins:
        raise PipelineError(f"{name} can rank none of the {question.num_pins:,} pins of the index: none has a vector")
    index_ND = _embed_pins(embedder, asked.index_pin)
    scores = {
        frequency: _score_users(asked, frequency, embedder, index_ND, f"{name}, {frequency}", progress)
        for frequency in frequencies
    }
    if asked is not question:
        row_N = np.searchsorted(question.index_pin, asked.index_pin)
        for users in scores.values():
            users.top_10[:] = np.where(users.top_10 >= 0, row_N[users.top_10], -1)
    return Scores(
        question=question.fingerprint,
        index_size=question.num_pins,
        user_ids=question.user_ids,
        frequencies=scores,
    )


def _score_users(
    question: Question,
    frequency: Frequency,
    embedder: QueryEmbedder,
    index_ND: Tensor,
    what: str,
    progress: Progress,
) -> UserScores:
    queries, throttle = ask(question, frequency), Throttle(progress, every_s=REPORT_EVERY_S)
    num_positives = len(queries.query_P)
    rivals = _Rivals(*(np.full(num_positives, NEVER_FOUND, np.int64) for _ in _Rivals._fields))
    top_UK = np.full((question.num_users, K_ENTROPY), -1, np.int64)
    for first, last in pairwise(_chunk_bounds(question, queries)):
        vectors = embedder.embed(queries.user_Q[first:last], queries.end_Q[first:last])
        _find(question, embedder, index_ND, vectors, queries, first, last, rivals, top_UK)
        throttle(f"{what}: {last:,} of {len(queries.user_Q):,} embeddings scored")
    return _by_user(question, queries, rivals, top_UK)


class _Rivals(NamedTuple):
    """Number of rivals of each positive, exact below K_ENTROPY, in both questions; NEVER_FOUND for what is a miss."""

    of_all_P: np.ndarray
    of_discovery_P: np.ndarray


def _chunk_bounds(question: Question, queries: Queries) -> list[int]:
    """Return the bounds of chunks of at most CHUNK_QUERIES queries, whose users have at most CHUNK_ACTIONS actions."""
    actions_Q = np.cumsum(queries.end_Q - question.timelines.offsets[queries.user_Q])
    bounds = [0]
    while bounds[-1] < len(actions_Q):
        start = bounds[-1]
        before = int(actions_Q[start - 1]) if start else 0
        last = int(np.searchsorted(actions_Q, before + CHUNK_ACTIONS, side="right"))
        bounds.append(min(max(last, start + 1), start + CHUNK_QUERIES))
    return bounds


def _find(
    question: Question,
    embedder: QueryEmbedder,
    index_ND: Tensor,
    vectors: QueryVectors,
    queries: Queries,
    first: int,
    last: int,
    rivals: _Rivals,
    top_UK: np.ndarray,
) -> None:
    """Write the rivals of the positives of queries `first` to `last`, and the results of the users who are shown."""
    place_P = np.arange(*np.searchsorted(queries.query_P, (first, last)))
    place_P = place_P[queries.pin_P[place_P] >= 0]
    pin_P, query_P = queries.pin_P[place_P], queries.query_P[place_P] - first
    positive_PD = _embed_pins(embedder, pin_P)
    own = Clusters(vectors.offsets_Q, np.arange(len(vectors.vector_VD)))
    vector_P = ask_oracle(own, vectors.vector_VD, torch.from_numpy(query_P), positive_PD)
    increment_P = _increments_of(vectors.increments, query_P, pin_P)
    is_asked_P = vector_P >= 0
    if embedder.ranks is not None:
        is_asked_P &= torch.from_numpy(embedder.ranks[pin_P])
    if vectors.increments is not None and vectors.increments.is_all:
        is_asked_P &= increment_P > 0
    is_new_P = queries.is_new_P[place_P]
    found = search(
        vectors.vector_VD,
        index_ND,
        index_pin_N=torch.from_numpy(question.index_pin),
        positive_query_P=vector_P[is_asked_P],
        positive_pin_P=torch.from_numpy(pin_P)[is_asked_P],
        positive_PD=positive_PD[is_asked_P],
        k=K_ENTROPY,
        increments=_index_increments(question, vectors),
        positive_increment_P=None if vectors.increments is None else increment_P[is_asked_P],
        excluded=_seen(question, queries, first, vectors, vector_P[is_asked_P & torch.from_numpy(is_new_P)]),
    )
    asked = place_P[is_asked_P.numpy()]
    rivals.of_all_P[asked], rivals.of_discovery_P[asked] = found.rivals_P.numpy(), found.rivals_left_P.numpy()
    top_QK = found.top_QK
    if vectors.increments is not None and vectors.increments.is_all:
        top_QK = torch.where(found.score_QK > 0, top_QK, -1)
    shown = queries.shown_U[slice(*np.searchsorted(queries.shown_U, (first, last)))]
    first_V, last_V = vectors.offsets_Q[shown - first], vectors.offsets_Q[shown - first + 1]
    row_V, number_V = ragged(last_V - first_V)
    offsets_U = np.concatenate([[0], np.cumsum(last_V - first_V)])
    top_UK[queries.user_Q[shown]] = round_robin(top_QK[first_V[row_V] + number_V], offsets_U, K_ENTROPY).numpy()


def _seen(question: Question, queries: Queries, first: int, vectors: QueryVectors, vector_P: Tensor) -> Pairs | None:
    """Return the pins of the index that users have seen before, for the vectors that search for new pins."""
    if not len(vector_P):
        return None
    vector_V = np.unique(vector_P.numpy())
    query_V = first + np.searchsorted(vectors.offsets_Q, vector_V, side="right") - 1
    place, pin = question.seen_pins(queries.user_Q[query_V], queries.end_Q[query_V])
    row, is_in_index = _rows_of(question, pin)
    return Pairs(torch.from_numpy(vector_V[place[is_in_index]]), torch.from_numpy(row[is_in_index]))


def _index_increments(question: Question, vectors: QueryVectors) -> Pairs | None:
    """Return the increments of the pins of the index, for each vector of their query."""
    if vectors.increments is None:
        return None
    query_I, pin_I, value_I, _ = vectors.increments
    row_I, is_in_index = _rows_of(question, pin_I)
    place, number = ragged(np.diff(vectors.offsets_Q)[query_I[is_in_index]])
    vector = vectors.offsets_Q[query_I[is_in_index]][place] + number
    return Pairs(*(torch.from_numpy(each) for each in (vector, row_I[is_in_index][place], value_I[is_in_index][place])))


def _rows_of(question: Question, pin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each pin in the index, and whether it is there."""
    row = np.minimum(np.searchsorted(question.index_pin, pin), question.num_pins - 1)
    return row, question.index_pin[row] == pin


def _increments_of(increments: Increments | None, query_P: np.ndarray, pin_P: np.ndarray) -> Tensor:
    """Return the increment of each positive's score; 0 for a pin without one."""
    if increments is None or not len(increments.pin_I):
        return torch.zeros(len(pin_P))
    num_pins = 1 + max(int(increments.pin_I.max()), int(pin_P.max(initial=0)))
    key_I, key_P = increments.query_I * num_pins + increments.pin_I, query_P * num_pins + pin_P
    place_P = np.minimum(np.searchsorted(key_I, key_P), len(key_I) - 1)
    return torch.from_numpy(np.where(key_I[place_P] == key_P, increments.value_I[place_P], 0).astype(np.float32))


def _by_user(question: Question, queries: Queries, rivals: _Rivals, top_UK: np.ndarray) -> UserScores:
    user_P, num_users = queries.user_Q[queries.query_P], question.num_users
    type_P, day_P = queries.action_type_P, (queries.ts_P - question.data.cut_us) // DAY_US

    def recall(is_found_P: np.ndarray, is_counted_P: np.ndarray) -> np.ndarray:
        count_U = np.bincount(user_P[is_counted_P], minlength=num_users)
        found_U = np.bincount(user_P[is_counted_P & is_found_P], minlength=num_users)
        return np.divide(found_U, count_U, out=np.full(num_users, np.nan), where=count_U > 0)

    def by_day(is_counted_P: np.ndarray) -> np.ndarray:
        cell_P = (user_P * question.num_days + day_P)[is_counted_P]
        counts = np.bincount(cell_P, minlength=num_users * question.num_days)
        return counts.reshape(num_users, question.num_days).astype(np.int32)

    is_counted_P, is_found_P = queries.is_counted_P, rivals.of_all_P < K_RECALL
    is_askable_P, is_new_P = is_counted_P & (queries.pin_P >= 0), is_counted_P & queries.is_new_P
    return UserScores(
        num_positives=np.bincount(user_P[is_counted_P], minlength=num_users),
        num_unaskable=np.bincount(user_P[is_counted_P & ~is_askable_P], minlength=num_users),
        num_new=np.bincount(user_P[is_new_P], minlength=num_users),
        recall_at_10=recall(is_found_P, is_counted_P),
        recall_at_50=recall(rivals.of_all_P < K_ENTROPY, is_counted_P),
        askable_recall_at_10=recall(is_found_P, is_askable_P),
        discovery_at_10=recall(rivals.of_discovery_P < K_RECALL, is_new_P),
        discovery_at_50=recall(rivals.of_discovery_P < K_ENTROPY, is_new_P),
        recall_at_10_by_type={
            word: recall(is_found_P, queries.is_counted_by_type_P & (type_P == code))
            for code, word in enumerate(question.data.action_types)
            if (type_P == code).any()
        },
        interest_entropy_at_50=_entropy(question, top_UK),
        top_10=top_UK[:, :K_RECALL].astype(np.int32),
        hits_UA=by_day(is_found_P),
        positives_UA=by_day(np.ones(len(user_P), bool)),
    )


def _entropy(question: Question, top_UK: np.ndarray) -> np.ndarray | None:
    """Return the interest entropy of each user's results; None if all pins of the site have the same interest."""
    interest = question.data.interests()
    if interest.min() == interest.max():
        return None
    has_top_U, entropy_U = top_UK[:, 0] >= 0, np.full(len(top_UK), np.nan)
    interest_N = torch.from_numpy(interest[question.index_pin].astype(np.int64))
    entropy_U[has_top_U] = interest_entropy(torch.from_numpy(top_UK[has_top_U]), interest_N).numpy()
    return entropy_U


def _embed_pins(embedder: QueryEmbedder, pin_N: np.ndarray) -> Tensor:
    """Embed pins chunk by chunk into one tensor: the index is the largest thing here, and is never held twice."""
    if not len(pin_N):
        return embedder.pins(pin_N)
    result_ND = torch.empty(len(pin_N), embedder.pins(pin_N[:1]).shape[1])
    for start in range(0, len(pin_N), CHUNK_PINS):
        result_ND[start : start + CHUNK_PINS] = embedder.pins(pin_N[start : start + CHUNK_PINS])
    return result_ND


def recall_by_density(
    question: Question, embedder: QueryEmbedder, name: str, *, progress: Progress
) -> dict[str, MetricSummary]:
    """Return the metrics of embeddings made once by the size of the index: INDEX_SHARES of all candidates, at most
    MAX_PINS."""
    num_candidates, summaries = len(question.data.candidates), {}
    for size in [min(math.ceil(share * num_candidates), MAX_PINS) for share in INDEX_SHARES]:
        what = f"{name}, {size:,} pins"
        scores = score_embedder(with_index(question, size), embedder, what, frequencies=("once",), progress=progress)
        summaries[str(size)] = summarize(scores)["once"]
    return summaries


def with_index(question: Question, num_pins: int) -> Question:
    """Return the question with an index of `num_pins` candidates, drawn at random."""
    return replace(question, index_pin=question.data.sample_candidates(num_pins, np.random.default_rng([0, num_pins])))
