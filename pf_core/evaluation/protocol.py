"""The paper's offline evaluation (section 4.1), the same code for models and baselines: a question in, user scores out.

A query with several vectors (PinnerSage) searches each positive with the nearest of them, which is the paper's oracle,
an upper bound; for the diversity metrics, the results of its vectors are blended in turn. A query without any vector
finds nothing, and is counted.

- Recall@10 of a user: the share of the positives that fewer than 10 pins of the index are ranked before. The mean is
  over users who have positives, all with the same weight.
- Interest Entropy@50, in nats, and P90 Coverage@10: from one embedding for each user (`Queries.shown_U`).

Memory: the embeddings of the index, the question, and CHUNK_QUERIES queries at a time.
Suffixes: U users, Q queries, V vectors of queries, P positives, N pins of the index, K results, D embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pf_core.config.serving import Frequency
from pf_core.days import DAY_US
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS, QueryEmbedder, QueryVectors, open_model_embedder
from pf_core.evaluation.manifest import MetricSummary
from pf_core.evaluation.pinnersage import Clusters, ask_oracle, round_robin
from pf_core.evaluation.question import Queries, Question, ask
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.evaluation.summary import summarize
from pf_core.metrics.diversity import interest_entropy
from pf_core.metrics.exact_search import search
from pf_core.progress import Progress, Throttle
from pf_core.timelines.arrays import ragged

K_RECALL, K_ENTROPY = 10, 50

CHUNK_QUERIES = 4096

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
) -> Scores:
    """Score the model of a folder."""
    embedder = open_model_embedder(question, folder, name=name, device=device)
    return score_embedder(question, embedder, name, frequencies=frequencies, progress=progress)


@torch.inference_mode()
def score_embedder(
    question: Question, embedder: QueryEmbedder, name: str, *, frequencies: Sequence[Frequency], progress: Progress
) -> Scores:
    """Return the scores of every user of the question at each frequency."""
    index_ND = _embed_pins(embedder, question.index_pin)
    return Scores(
        question=question.fingerprint,
        index_size=question.num_pins,
        user_ids=question.user_ids,
        frequencies={
            frequency: _score_users(question, frequency, embedder, index_ND, f"{name}, {frequency}", progress)
            for frequency in frequencies
        },
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
    is_found_P = np.zeros(len(queries.query_P), bool)
    top_UK = np.full((question.num_users, K_ENTROPY), -1, np.int64)
    for first in range(0, len(queries.user_Q), CHUNK_QUERIES):
        last = min(first + CHUNK_QUERIES, len(queries.user_Q))
        vectors = embedder.embed(queries.user_Q[first:last], queries.end_Q[first:last])
        theirs = slice(*np.searchsorted(queries.query_P, (first, last)))
        shown = queries.shown_U[slice(*np.searchsorted(queries.shown_U, (first, last)))]
        is_found_P[theirs], top_UK[queries.user_Q[shown]] = _find(
            question, embedder, index_ND, vectors, queries, theirs, first, shown
        )
        throttle(f"{what}: {last:,} of {len(queries.user_Q):,} embeddings scored")
    return _by_user(question, queries, is_found_P, top_UK)


def _find(
    question: Question,
    embedder: QueryEmbedder,
    index_ND: Tensor,
    vectors: QueryVectors,
    queries: Queries,
    theirs: slice,
    first: int,
    shown: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return which positives these queries find, and the results of the queries that are shown.

    `theirs` selects the positives of the queries, `first` is the first query, `shown` are the queries that count for
    diversity.
    """
    pin_P = question.timelines.pin[queries.positive_A[theirs]].astype(np.int64)
    positive_PD = _embed_pins(embedder, pin_P)
    query_P = torch.from_numpy(queries.query_P[theirs] - first)
    own = Clusters(vectors.offsets_Q, np.arange(len(vectors.vector_VD)))
    vector_P = ask_oracle(own, vectors.vector_VD, query_P, positive_PD)
    is_asked_P = vector_P >= 0
    found = search(
        vectors.vector_VD,
        index_ND,
        index_pin_N=torch.from_numpy(question.index_pin),
        positive_query_P=vector_P[is_asked_P],
        positive_pin_P=torch.from_numpy(pin_P)[is_asked_P],
        positive_PD=positive_PD[is_asked_P],
        k=K_ENTROPY,
    )
    is_found_P = torch.zeros(len(pin_P), dtype=torch.bool)
    is_found_P[is_asked_P] = found.rivals_P < K_RECALL
    first_V, last_V = vectors.offsets_Q[shown - first], vectors.offsets_Q[shown - first + 1]
    row_V, number_V = ragged(last_V - first_V)
    blended = round_robin(
        found.top_QK[first_V[row_V] + number_V], np.concatenate([[0], np.cumsum(last_V - first_V)]), K_ENTROPY
    )
    return is_found_P.numpy(), blended.numpy()


def _by_user(question: Question, queries: Queries, is_found_P: np.ndarray, top_UK: np.ndarray) -> UserScores:
    user_P = queries.user_Q[queries.query_P]
    num_users, timelines = question.num_users, question.timelines
    type_P = timelines.action_type[queries.positive_A]
    day_P = (timelines.ts[queries.positive_A] - question.data.cut_us) // DAY_US

    def recall(is_counted_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count_U = np.bincount(user_P[is_counted_P], minlength=num_users)
        found_U = np.bincount(user_P[is_counted_P & is_found_P], minlength=num_users)
        return count_U, np.divide(found_U, count_U, out=np.full(num_users, np.nan), where=count_U > 0)

    def by_day(is_counted_P: np.ndarray) -> np.ndarray:
        cell_P = (user_P * question.num_days + day_P)[is_counted_P]
        counts = np.bincount(cell_P, minlength=num_users * question.num_days)
        return counts.reshape(num_users, question.num_days).astype(np.int32)

    num_positives, recall_at_10 = recall(queries.is_counted_P)
    has_top_U = top_UK[:, 0] >= 0
    entropy_U = np.full(num_users, np.nan)
    interest_N = torch.from_numpy(question.data.interests()[question.index_pin].astype(np.int64))
    entropy_U[has_top_U] = interest_entropy(torch.from_numpy(top_UK[has_top_U]), interest_N).numpy()
    return UserScores(
        num_positives=num_positives,
        recall_at_10=recall_at_10,
        recall_at_10_by_type={
            word: recall(queries.is_counted_by_type_P & (type_P == code))[1]
            for code, word in enumerate(question.data.action_types)
            if (type_P == code).any()
        },
        interest_entropy_at_50=entropy_U,
        top_10=top_UK[:, :K_RECALL].astype(np.int32),
        hits_UA=by_day(is_found_P),
        positives_UA=by_day(np.ones(len(user_P), bool)),
    )


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
