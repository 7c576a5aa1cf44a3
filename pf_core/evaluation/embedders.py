"""Embedders that the offline evaluation can score (paper, section 4.1): models, and the baselines of section 4.2.1.

A query is a user at some moment. A `QueryEmbedder` computes the vectors of a query from the user's actions before that
moment, and places pins in the same space. A model gives a query one vector, PinnerSage gives it several, and a query
without any readable action has none. A query may also have increments: a pin's score is then its inner product with the
vector, plus its increment. `OwnFrequency` consists of increments alone. What reads content vectors cannot rank a pin
without one (`ranks`): models read zeros for it, and the baselines of content vectors leave it out.

What is counted over all users comes from the training users' actions before the cut (`TrainingSet.train`); the past of
an evaluated user enters that user's queries and nothing else.

Models, popularity and means of content vectors read a sequence of the newest actions: `SequenceQueryEmbedder` cuts the
sequences and passes them to an `Embedder`, the interface that validation during training uses, too. A model may be
older than the training set: it then reads with its own vocabularies and leaves out actions with a word that it does not
know, as it does when it serves. PinnerSage clusters the user's actions instead: `ClusterQueryEmbedder`.

Suffixes: Q queries, V vectors of queries, I increments, A actions, R rows of a batch, S steps of a sequence, F content,
D embedding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pf_core.days import DAY_US
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.increments import Increments, QueryVectors
from pf_core.evaluation.parts_embedder import open_parts_embedder
from pf_core.evaluation.pinnersage import Clusters, PinnerSage, cluster_users
from pf_core.evaluation.question import Question
from pf_core.model.checkpoint import load_model, read_description, reads_vectors_of
from pf_core.model.sequences import Sequences, collate_sequences
from pf_core.timelines.arrays import Timelines, ragged, recode
from pf_core.training.training_set import TrainingSet
from pf_core.training.validation import Embedder, ModelEmbedder

CHUNK_SEQUENCES = 256

ACTIONS_AT_ONCE = 1 << 22
"""Actions of the training set that are counted at a time."""


class QueryEmbedder(Protocol):
    """Anything that places queries and pins in one space."""

    @property
    def ranks(self) -> np.ndarray | None:
        """Whether it can rank each pin row; None: it can rank all. Any other pin is neither a result nor found."""
        ...

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        """Return the vectors of each user's actions before action `end` of the question's timelines."""
        ...

    def pins(self, pin: np.ndarray) -> Tensor:
        """Return the vectors of pins, by pin row."""
        ...


# Embedders that read sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceQueryEmbedder:
    """One vector for each query, from the newest actions whose words the embedder knows, in the embedder's codes."""

    question: Question
    embedder: Embedder
    sequence_length: int
    action_types: Sequence[str]
    surfaces: Sequence[str]
    sequence_types: Sequence[str] | None = None
    ranks: np.ndarray | None = None
    is_content_alone: bool = False
    """Whether the embedder reads nothing but content vectors: then actions on pins without one are not readable."""
    _timelines: Timelines = field(init=False)
    """The question's timelines, in the embedder's codes."""
    _readable_A: np.ndarray = field(init=False)
    """Rows of the readable actions in the timelines."""
    _before_A: np.ndarray = field(init=False)
    """Number of readable actions before each action."""

    def __post_init__(self) -> None:
        timelines, data = self.question.timelines, self.question.data
        type_code = recode(data.action_types, self.action_types, of=self.sequence_types)[timelines.action_type]
        surface_code = recode(data.surfaces, self.surfaces)[timelines.surface]
        is_readable_A = (type_code >= 0) & (surface_code >= 0)
        if self.is_content_alone and not data.all_have_feature:
            is_readable_A &= data.has_feature[timelines.pin]
        set_once = object.__setattr__
        set_once(self, "_timelines", replace(timelines, action_type=type_code, surface=surface_code))
        set_once(self, "_readable_A", np.flatnonzero(is_readable_A))
        set_once(self, "_before_A", np.concatenate([[0], np.cumsum(is_readable_A)]))

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        last_Q = self._before_A[end_Q]
        first_Q = np.maximum(self._before_A[self._timelines.offsets[user_Q]], last_Q - self.sequence_length)
        length_Q = last_Q - first_Q
        by_length = np.argsort(length_Q, kind="stable")  # a chunk of similar lengths has little padding
        by_length = by_length[length_Q[by_length] > 0]
        parts = []
        for start in range(0, len(by_length), CHUNK_SEQUENCES):
            rows = by_length[start : start + CHUNK_SEQUENCES]
            sequences = collate_sequences(
                self._timelines,
                self.question.data.pin_feature,
                first_Q[rows],
                last_Q[rows] - 1,
                action_A=self._readable_A,
            )
            parts.append(self.embedder.users(sequences))
        offsets_Q = np.concatenate([[0], np.cumsum(length_Q > 0)])
        if not parts:
            return QueryVectors(offsets_Q, torch.zeros(0, self.pins(np.zeros(1, np.int64)).shape[1]))
        vector_VD = torch.empty(len(by_length), parts[0].shape[1])
        vector_VD[torch.from_numpy(offsets_Q[by_length])] = torch.cat(parts)
        return QueryVectors(offsets_Q, vector_VD)

    def pins(self, pin: np.ndarray) -> Tensor:
        return self.embedder.pins(pin)


def open_model_embedder(
    question: Question, folder: Path, *, name: str, device: torch.device | None = None, has_memory: bool = True
) -> QueryEmbedder:
    """Load the model of a folder; raise PipelineError if the question cannot evaluate it fairly.

    `has_memory=False` evaluates the vectors of a model of parts without its memory.
    """
    device, description = device or torch.device("cpu"), read_description(folder)
    cut_ds, feature_dim = question.data.manifest["cut_ds"], question.data.pin_feature.shape[1]
    if description["cut_ds"] > cut_ds:
        raise PipelineError(
            f"model {name} was trained on days until {description['cut_ds']}, and the training set ends with {cut_ds}: "
            "the model has seen days that would evaluate it",
            f"make a newer training set: {materialize_command('training_set')}",
        )
    if not reads_vectors_of(description, feature_dim):
        raise PipelineError(
            f"model {name} reads vectors of {description['feature_dim']} numbers, the training set has {feature_dim}: "
            "it cannot be evaluated",
            "if the site's vectors have changed for good, promote a model that reads them: "
            "pf promote VERSION --because TEXT",
        )
    if description.get("family", "towers") == "parts":
        return open_parts_embedder(question, folder, device=device, has_memory=has_memory)
    model, _ = load_model(folder)
    return SequenceQueryEmbedder(
        question=question,
        embedder=ModelEmbedder(model=model.to(device), data=question.data, device=device),
        sequence_length=model.config.sequence_length,
        action_types=description["action_types"],
        surfaces=description["surfaces"],
        sequence_types=model.config.sequence_types,
        ranks=_with_content(question),
    )


def _with_content(question: Question) -> np.ndarray | None:
    """Return which pins an embedder of content vectors can rank; None if all have one."""
    return None if question.data.all_have_feature else question.data.has_feature


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """The same vector for all users: pins are ranked by their number of training users' positives in the last days."""

    count: np.ndarray
    """Number of positives, by pin row."""

    @classmethod
    def of(cls, data: TrainingSet, *, num_days: int | None) -> "Popularity":
        """Count the last `num_days` days before the cut, or all days."""
        train, since_us = data.train, 0 if num_days is None else data.cut_us - num_days * DAY_US
        count = np.zeros(len(data.pin_feature), np.int64)
        for first in range(0, len(train.ts), ACTIONS_AT_ONCE):
            part = slice(first, first + ACTIONS_AT_ONCE)
            is_recent = train.is_positive[part] & (train.ts[part] >= since_us)
            count += np.bincount(train.pin[part][is_recent], minlength=len(count))
        return cls(count=count)

    def users(self, sequences: Sequences) -> Tensor:
        return torch.ones(len(sequences.length_R), 1)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.from_numpy(self.count[pin]).float().unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class MeanOfRecent:
    """The mean content vector of the newest actions, compared with the content vectors of pins: nothing is learned."""

    data: TrainingSet
    num_actions: int

    def users(self, sequences: Sequences) -> Tensor:
        step = torch.arange(sequences.ts_RS.shape[1])
        from_newest = sequences.length_R[:, None] - 1 - step
        is_counted = (from_newest >= 0) & (from_newest < self.num_actions)
        unit_RSF = F.normalize(sequences.feature_RSF, dim=-1)
        return F.normalize((unit_RSF * is_counted[..., None]).sum(1), dim=-1)

    def pins(self, pin: np.ndarray) -> Tensor:
        return F.normalize(torch.from_numpy(self.data.pin_feature[pin]), dim=-1)


# PinnerSage, which reads clusters


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterQueryEmbedder:
    """The medoids of the user's most important clusters (PinnerSage), in the space of the content vectors."""

    question: Question
    num_clusters: int
    config: PinnerSage = field(default_factory=PinnerSage)
    _known: dict[bytes, Clusters] = field(default_factory=dict, init=False)
    """Clusters by their queries: clustering takes most of the time, and every size of the index needs the same ones."""

    @property
    def ranks(self) -> np.ndarray | None:
        return _with_content(self.question)

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        key = np.stack([user_Q, end_Q]).tobytes()
        if key not in self._known:
            self._known[key] = self._cluster(user_Q, end_Q)
        clusters = self._known[key]
        return QueryVectors(clusters.offsets_U, self.pins(clusters.pin_C))

    def _cluster(self, user_Q: np.ndarray, end_Q: np.ndarray) -> Clusters:
        timelines, data = self.question.timelines, self.question.data
        start_Q = timelines.offsets[user_Q]
        at_us_Q = np.maximum(data.cut_us, timelines.ts[np.maximum(end_Q - 1, 0)] + 1)
        if not data.all_have_feature:
            has_feature_A = data.has_feature[timelines.pin]
            before_A = np.concatenate([[0], np.cumsum(has_feature_A)])
            start_Q, end_Q = before_A[start_Q], before_A[end_Q]
            timelines = replace(timelines, ts=timelines.ts[has_feature_A], pin=timelines.pin[has_feature_A])
        clusters = cluster_users(timelines, data.pin_feature, start_Q, end_Q - 1, at_us_Q, self.config)
        return clusters.first(self.num_clusters)

    def pins(self, pin: np.ndarray) -> Tensor:
        return F.normalize(torch.from_numpy(self.question.data.pin_feature[pin]), dim=-1)


# Own frequency, which has increments alone


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnFrequency:
    """The pins that the user has acted on, ranked by the number of these actions; nothing else is found.

    With `decay_days`, an action weighs exp(-age / decay_days), its age counted from the cut. The increment of a pin is
    its place among the user's own pins from the end, equal for equal weights: sums of old actions are too small for the
    tolerance of the search.
    """

    question: Question
    decay_days: float | None = None
    ranks: np.ndarray | None = None

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        timelines, data = self.question.timelines, self.question.data
        first_Q = timelines.offsets[user_Q]
        query_A, number_A = ragged(end_Q - first_Q)
        row_A, num_pins = first_Q[query_A] + number_A, len(data.pin_feature)
        age_A = (data.cut_us - timelines.ts[row_A]) / DAY_US
        weight_A = np.ones(len(row_A)) if self.decay_days is None else np.exp(-age_A / self.decay_days)
        own_I, own_A = np.unique(query_A * num_pins + timelines.pin[row_A], return_inverse=True)
        query_I, pin_I = np.divmod(own_I, num_pins)
        place_I = _place_from_the_end(query_I, np.bincount(own_A, weight_A, minlength=len(own_I)))
        increments = Increments(query_I, pin_I, place_I, is_all=True)
        return QueryVectors(np.arange(len(user_Q) + 1), torch.zeros(len(user_Q), 1), increments)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.zeros(len(pin), 1)


def _place_from_the_end(query_I: np.ndarray, weight_I: np.ndarray) -> np.ndarray:
    """Return 1 for the smallest weight of each query, 2 for the next, and so on; equal weights have equal places."""
    order = np.lexsort((weight_I, query_I))
    query, weight = query_I[order], weight_I[order]
    is_larger = np.append(True, (weight[1:] != weight[:-1]) | (query[1:] != query[:-1]))[: len(order)]
    number = np.cumsum(is_larger)
    place_I = np.empty(len(order), np.float32)
    place_I[order] = number - number[np.searchsorted(query, query)] + 1
    return place_I


# The baselines by name


def _popularity(question: Question, num_days: int | None) -> SequenceQueryEmbedder:
    return _of_training_set(question, Popularity.of(question.data, num_days=num_days), 1)


def _mean(question: Question, num_actions: int) -> SequenceQueryEmbedder:
    mean = MeanOfRecent(data=question.data, num_actions=num_actions)
    return _of_training_set(question, mean, num_actions, is_content_alone=True)


def _of_training_set(
    question: Question, embedder: Embedder, sequence_length: int, *, is_content_alone: bool = False
) -> SequenceQueryEmbedder:
    """An embedder that reads with the training set's own vocabularies."""
    return SequenceQueryEmbedder(
        question=question,
        embedder=embedder,
        sequence_length=sequence_length,
        action_types=question.data.action_types,
        surfaces=question.data.surfaces,
        ranks=_with_content(question) if is_content_alone else None,
        is_content_alone=is_content_alone,
    )


BASELINE_EMBEDDERS: dict[str, Callable[[Question], QueryEmbedder]] = {
    "popularity_7d": lambda question: _popularity(question, 7),
    "popularity_28d": lambda question: _popularity(question, 28),
    "popularity_ever": lambda question: _popularity(question, None),
    "own_frequency": lambda question: OwnFrequency(question=question),
    "own_frequency_120d": lambda question: OwnFrequency(question=question, decay_days=120),
    "mean_of_20": lambda question: _mean(question, 20),
    "mean_of_100": lambda question: _mean(question, 100),
    "pinnersage_5": lambda question: ClusterQueryEmbedder(question=question, num_clusters=5),
    "pinnersage_20": lambda question: ClusterQueryEmbedder(question=question, num_clusters=20),
}
"""All are in every evaluation of a site with content vectors; manifest.ORACLES are upper bounds."""

CONTENT_BASELINES = ("mean_of_20", "mean_of_100", "pinnersage_5", "pinnersage_20")
"""Baselines that need content vectors."""


def baselines_of(data: TrainingSet) -> list[str]:
    """Return the names of the baselines that a training set allows."""
    has_content = len(data.content_candidates) > 0
    return [name for name in BASELINE_EMBEDDERS if has_content or name not in CONTENT_BASELINES]
