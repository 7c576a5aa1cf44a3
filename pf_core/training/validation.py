"""Recall on held-out users during training: a sign of progress that uses nothing after the cut.

The held-out users are embedded as of VALIDATION_DAYS before the cut, and their positives from then to the cut are
retrieved from an index of random candidates (paper, section 4.1, on a smaller scale); pins without a content vector are
neither searched for nor in the index. Whether a model is promoted is decided after training, on the days after the cut
(pf_core/evaluation).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pf_core.config.training import TrainConfig
from pf_core.metrics.recall import embed_in_chunks, recall_at_k
from pf_core.model.sequences import Sequences, collate_sequences, gather_features
from pf_core.model.towers import PinnerFormer
from pf_core.training.ranks import Rank, sum_over_ranks
from pf_core.training.training_set import TrainingSet, sample_below

VALIDATION_DAYS = 14

CHUNK_USERS = 128
"""Users embedded at a time."""

MAX_LOOKED_AT = 20
"""At most this many times `evaluate_users` timelines are read to find users with positives."""


class Embedder(Protocol):
    """Embeds users and pins in one space and returns CPU tensors: a model, or a baseline to compare it with."""

    def users(self, sequences: Sequences) -> Tensor: ...
    def pins(self, pin: np.ndarray) -> Tensor:
        """Embed the pins of these rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelEmbedder:
    """Embeds with both towers of a model on its device."""

    model: PinnerFormer
    data: TrainingSet
    device: torch.device

    def users(self, sequences: Sequences) -> Tensor:
        return self.model.embed_users(sequences.to(self.device)).cpu()

    def pins(self, pin: np.ndarray) -> Tensor:
        return self.model.embed_pins(gather_features(self.data.pin_feature, pin).to(self.device)).cpu()


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """This rank's share of the validation users: their sequences, their later positives, and the index."""

    data: TrainingSet
    device: torch.device
    num_users: int
    """Number of users over all ranks."""
    starts: np.ndarray
    """Row of each user's first action in the held-out timelines."""
    ends: np.ndarray
    """Row of each user's last action."""
    positive_user: np.ndarray
    """User of each positive, as a position in `starts`."""
    positive_pin: np.ndarray
    """Pin row of each positive."""
    index_pin: np.ndarray
    """Pin rows of the index."""

    @classmethod
    def choose(cls, data: TrainingSet, config: TrainConfig, rank: Rank) -> "HeldOut":
        """Draw up to `evaluate_users` users with positives in the validation period; the same on every rank."""
        timelines, rng = data.held_out, np.random.default_rng([config.seed, 0xE7A1])
        split_us = data.cut_us - VALIDATION_DAYS * 86_400_000_000
        starts: list[int] = []
        ends: list[int] = []
        users: list[np.ndarray] = []
        pins: list[np.ndarray] = []
        for user in rng.permutation(sample_below(timelines.num_users, MAX_LOOKED_AT * config.evaluate_users, rng)):
            if len(starts) == config.evaluate_users:
                break
            first, last = int(timelines.offsets[user]), int(timelines.offsets[user + 1])
            split = first + int(np.searchsorted(timelines.ts[first:last], split_us))
            liked = np.unique(timelines.pin[split:last][timelines.is_positive[split:last]])
            liked = liked[data.has_feature[liked]]
            if split > first and len(liked):
                users.append(np.full(len(liked), len(starts)))
                pins.append(liked)
                starts.append(max(first, split - config.model.sequence_length))
                ends.append(split - 1)
        mine = np.arange(rank.number, len(starts), rank.world_size)
        liked_by, liked_pin = (np.concatenate(part) if part else np.zeros(0, np.int64) for part in (users, pins))
        is_mine = liked_by % rank.world_size == rank.number
        return cls(
            data=data,
            device=rank.device,
            num_users=len(starts),
            starts=np.array(starts, np.int64)[mine],
            ends=np.array(ends, np.int64)[mine],
            positive_user=liked_by[is_mine] // rank.world_size,
            positive_pin=liked_pin[is_mine].astype(np.int64),
            index_pin=data.sample_candidates(config.evaluate_pins, rng, only_with_feature=True),
        )

    def recall(self, embedder: Embedder, *, k: int) -> float:
        """Return the mean recall@k over the users of all ranks; NaN if there are none."""
        total = self.recall_by_user(embedder, k=k).sum()
        everyone = sum_over_ranks(total.to(self.device))
        return float(everyone) / self.num_users if self.num_users else float("nan")

    @torch.no_grad()
    def recall_by_user(self, embedder: Embedder, *, k: int) -> Tensor:
        """Return recall@k of each of this rank's users."""
        if not len(self.starts):
            return torch.zeros(0, dtype=torch.float64)
        return recall_at_k(
            embed_in_chunks(lambda rows: self._embed_users(embedder, rows.numpy()), len(self.starts), CHUNK_USERS),
            torch.from_numpy(self.positive_user),
            torch.from_numpy(self.positive_pin),
            embed_in_chunks(lambda rows: embedder.pins(self.positive_pin[rows.numpy()]), len(self.positive_pin)),
            torch.from_numpy(self.index_pin),
            embed_in_chunks(lambda rows: embedder.pins(self.index_pin[rows.numpy()]), len(self.index_pin)),
            k=k,
        )

    def _embed_users(self, embedder: Embedder, rows: np.ndarray) -> Tensor:
        sequences = collate_sequences(self.data.held_out, self.data.pin_feature, self.starts[rows], self.ends[rows])
        return embedder.users(sequences)
