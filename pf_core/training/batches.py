"""The on-the-fly dataset (section 3.5): samples sequences, pairs and random pins of each step from the timelines.

- The batch of step k is a pure function of (training set, configuration, k). Ranks divide it: each takes every
  world_size-th user and a contiguous share of the random pins. Workers can compute steps in any order, and resuming at
  step k means counting from there.
- The order of users is a keyed permutation that is computed for the users of a pool only: no array has an entry for
  every user.
- Batches are length-aware: a pool holds the shuffled users of `shuffle_batches` batches, and users with sequences of
  about the same length form a batch, so that little is padded. The exact length depends on where a timeline has
  positives, which would mean reading the whole pool; `expected_length` estimates it from the offsets alone. The batches
  of a pool come in random order.
- An epoch consists of the full batches that the users fill, or of one smaller batch with all users. The users that are
  left over change from epoch to epoch. A user without a usable position takes a place in the batch and yields no pair,
  so a rank may have no pair at all: then the first dimension of every tensor is 0, and the second of sequences is 1.
- Features are copied once, from the memory map into the tensor's memory, which a worker shares with the trainer.

Suffixes: U users, R sequences, S actions of the longest sequence, F content vector, A actions of the users' timelines,
Q queries, P pairs, N random pins.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pf_core.config.training import TrainConfig
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import Ints, Keys, below, mixed, permuted
from pf_core.model.sequences import (
    Allocate,
    Sequences,
    collate_sequences,
    copy_to_tensor,
    gather_features,
    gather_values,
)
from pf_core.parent_process import end_with_parent
from pf_core.timelines.arrays import ragged
from pf_core.training.objectives import expected_length, is_allowed, lay_out, sample_pairs, sample_sequences
from pf_core.training.training_set import TrainingSet, open_training_set

FOR_USERS, FOR_POOL, FOR_SAMPLES, FOR_RANDOM_PINS = range(4)
"""Purposes of random numbers; part of the hash."""

ALIGNMENT = 64
"""Each tensor of a batch starts at a multiple of this many bytes."""

COLUMN_BYTES = 64
"""Upper bound of the bytes of an action, a pair or a random pin, without its feature."""


class Batch(NamedTuple):
    """One rank's part of a step. A query is a distinct (sequence, position) whose embedding predicts pins."""

    sequences: Sequences
    query_row_Q: Tensor
    """Sequence of each query; queries are sorted by sequence, then position."""
    query_position_Q: Tensor
    """Position of each query: index in the ascending sequence."""
    pair_query_P: Tensor
    """Query of each pair."""
    pair_user_P: Tensor
    """Number of the pair's user among this rank's users that have a pair."""
    pair_weight_P: Tensor
    """Weight of each pair. A user's weights sum to 1; they are equal unless the objective weights its pairs."""
    pair_pin_P: Tensor
    """Pin row of the target."""
    pair_is_candidate_P: Tensor
    """Whether that pin can be drawn as a random negative, too."""
    pair_feature_PF: Tensor
    random_pin_N: Tensor
    """Pin rows drawn uniformly from the candidates with a content vector, with replacement; empty if all negatives are
    in-batch."""
    random_feature_NF: Tensor
    num_users: int
    """Number of users with at least one pair."""

    def to(self, device: torch.device) -> "Batch":
        moved = (tensor.to(device, non_blocking=True) for tensor in self[1:-1])
        return Batch._make([self.sequences.to(device), *moved, self.num_users])

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [*self.sequences, *self[1:-1]]
        storage = self.query_row_Q.untyped_storage()
        if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
            return Batch._make, (tuple(self),)
        layout = [(tensor.storage_offset() * tensor.itemsize, tensor.dtype, tensor.shape) for tensor in tensors]
        return _restore, (torch.empty(0, dtype=torch.uint8).set_(storage), layout, self.num_users)


class BatchPlan:
    """Decides which users form the batch of a step."""

    def __init__(self, offsets: np.ndarray, config: TrainConfig) -> None:
        self._offsets, self._config = offsets, config
        self._num_users = len(offsets) - 1
        self.batches_per_epoch = max(self._num_users // config.batch_users, 1)
        self._pool: tuple[tuple[int, int], Ints] | None = None

    def epoch_of(self, step: int) -> int:
        return step // self.batches_per_epoch

    def user_keys(self, epoch: int, user_U: Ints) -> Keys:
        """Return the key of each user's random numbers in an epoch."""
        return mixed(mixed(mixed(self._config.seed, FOR_SAMPLES), epoch), user_U)

    def users(self, step: int) -> Ints:
        """Return the user rows of the batch, sorted by the expected length of their sequences."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        pool, batch = divmod(batch, self._config.shuffle_batches)
        if self._pool is None or self._pool[0] != (epoch, pool):
            self._pool = (epoch, pool), self._users_of_pool(epoch, pool)
        batch_users = self._config.batch_users
        user_U = self._pool[1]
        shuffled = np.argsort(mixed(self._key(FOR_POOL, epoch, pool), np.arange(max(len(user_U) // batch_users, 1))))
        return user_U[shuffled[batch] * batch_users :][:batch_users]

    def _users_of_pool(self, epoch: int, pool: int) -> Ints:
        """Return the user rows of a pool, sorted by the expected length of their sequences."""
        config = self._config
        size = config.shuffle_batches * config.batch_users
        stop = min((pool + 1) * size, self.batches_per_epoch * config.batch_users, self._num_users)
        user_U = permuted(np.arange(pool * size, stop), self._num_users, self._key(FOR_USERS, epoch))
        length_U = self._offsets[user_U + 1] - self._offsets[user_U]
        keys = self.user_keys(epoch, user_U)
        length_U = expected_length(length_U, keys, config.sampling, config.model.sequence_length)
        return user_U[np.argsort(length_U, kind="stable")]

    def _key(self, *parts: int) -> int:
        key: Any = self._config.seed
        for part in parts:
            key = mixed(key, part)
        return int(key)


class TrainingBatches(Dataset[Batch]):
    """Batches by step. It holds no data: each process maps the files at its first batch."""

    def __init__(self, training_set: Path, config: TrainConfig, *, rank: int, world_size: int) -> None:
        self._path, self._config = training_set, config
        self._rank, self._world_size = rank, world_size
        self._opened: tuple[TrainingSet, BatchPlan] | None = None
        opened = open_training_set(training_set)
        _chosen_types(config, opened.action_types)  # refuse unknown types before the start
        if not len(opened.content_candidates):
            raise PipelineError(
                "no candidate has a content vector, which this model reads",
                f"fix source.pins in the site file, then: {materialize_command('pin_features', 'DAY')}, or set "
                "training.preset to auto",
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def __len__(self) -> int:
        return self._config.optimizer.num_steps

    def __getitem__(self, step: int) -> Batch:
        if self._opened is None:
            opened = open_training_set(self._path)
            self._opened = opened, BatchPlan(np.asarray(opened.train.offsets), self._config)
        training_set, plan = self._opened
        user_U = plan.users(step)[self._rank :: self._world_size]
        key_U = plan.user_keys(plan.epoch_of(step), user_U)
        return sample_batch(
            training_set, user_U, key_U, self._random_pins(training_set.content_candidates, step), self._config
        )

    def _random_pins(self, candidates: np.ndarray, step: int) -> Ints:
        loss = self._config.loss
        num_random = 0 if loss.negatives == "in_batch" else loss.num_random
        share = np.array_split(np.arange(num_random), self._world_size)[self._rank]
        key = mixed(mixed(self._config.seed, FOR_RANDOM_PINS), step)
        return gather_values(candidates, below(len(candidates), mixed(key, share))).astype(np.int64)


def open_batches(
    training_set: Path,
    config: TrainConfig,
    *,
    rank: int,
    world_size: int,
    first_step: int,
    num_workers: int,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Load the batches of steps first_step … num_steps - 1, in order; `num_workers` processes sample ahead."""
    ahead: dict[str, Any] = {}
    if num_workers > 0:
        ahead = {
            "multiprocessing_context": "forkserver",
            "prefetch_factor": 4,
            "persistent_workers": True,
            "worker_init_fn": _start_worker,
        }
    return DataLoader(
        TrainingBatches(training_set, config, rank=rank, world_size=world_size),
        batch_size=None,
        sampler=range(first_step, config.optimizer.num_steps),
        num_workers=num_workers,
        pin_memory=pin_memory,
        **ahead,
    )


def _start_worker(number: int) -> None:
    end_with_parent()
    torch.set_num_threads(1)


def sample_batch(
    training_set: TrainingSet, user_U: Ints, key_U: Keys, random_pin_N: Ints, config: TrainConfig
) -> Batch:
    """Draw sequences and pairs from these users' timelines."""
    timelines, sampling = training_set.train, config.sampling
    is_target, is_read = _chosen_types(config, training_set.action_types)
    first_U = gather_values(timelines.offsets, user_U)
    length_U = gather_values(timelines.offsets, user_U + 1) - first_U
    user_A, number_A = ragged(length_U)
    action_A = first_U[user_A] + number_A  # row in the split's arrays of each action of the block
    type_A = gather_values(timelines.action_type, action_A)
    if is_read is not None:
        kept = is_read[type_A]
        action_A, type_A, length_U = action_A[kept], type_A[kept], np.bincount(user_A[kept], minlength=len(user_U))
    offsets = np.concatenate([[0], np.cumsum(length_U)])
    is_positive_A = gather_values(timelines.is_positive, action_A)
    if not training_set.all_have_feature:  # a pin without a content vector is read as zeros and never predicted
        is_positive_A &= gather_values(training_set.has_feature, gather_values(timelines.pin, action_A))
    if is_target is not None:
        is_positive_A &= is_target[type_A]
    block = lay_out(offsets, gather_values(timelines.ts, action_A), is_positive_A, sampling)

    user_R, start_R, end_R = sample_sequences(block, key_U, sampling, config.model.sequence_length)
    pairs = sample_pairs(block, mixed(key_U[user_R], end_R - offsets[user_R]), start_R, end_R, sampling)
    pin_P = gather_values(timelines.pin, action_A[pairs.target_P]).astype(np.int64)
    query_Q, pair_query_P = np.unique(pairs.row_P * (offsets[-1] + 1) + pairs.position_P, return_inverse=True)
    query_row_Q, query_action_Q = np.divmod(query_Q, offsets[-1] + 1)
    users_with_pairs, pair_user_P = np.unique(user_R[pairs.row_P], return_inverse=True)
    weight_P = pairs.weight_P / np.bincount(pair_user_P, pairs.weight_P)[pair_user_P]

    feature = training_set.pin_feature
    num_rows = len(start_R) * int((end_R - start_R + 1).max(initial=1)) + len(pin_P) + len(random_pin_N)
    empty = _allocate_in_one_block(num_rows * (feature.shape[1] * 4 + COLUMN_BYTES))
    return Batch(
        sequences=collate_sequences(timelines, feature, start_R, end_R, action_A=action_A, empty=empty),
        query_row_Q=copy_to_tensor(query_row_Q, empty),
        query_position_Q=copy_to_tensor(query_action_Q - start_R[query_row_Q], empty),
        pair_query_P=copy_to_tensor(pair_query_P, empty),
        pair_user_P=copy_to_tensor(pair_user_P, empty),
        pair_weight_P=copy_to_tensor(weight_P.astype(np.float32), empty),
        pair_pin_P=copy_to_tensor(pin_P, empty),
        pair_is_candidate_P=copy_to_tensor(_is_member(pin_P, training_set.content_candidates), empty),
        pair_feature_PF=gather_features(feature, pin_P, empty=empty),
        random_pin_N=copy_to_tensor(random_pin_N, empty),
        random_feature_NF=gather_features(feature, random_pin_N, empty=empty),
        num_users=len(users_with_pairs),
    )


def _chosen_types(
    config: TrainConfig, action_types: list[str]
) -> tuple[npt.NDArray[np.bool_] | None, npt.NDArray[np.bool_] | None]:
    """Return, for each action type code, whether it may be predicted and whether it is read; None if all are."""
    is_target = is_allowed("sampling.positive_types", config.sampling.positive_types, action_types)
    return is_target, is_allowed("model.sequence_types", config.model.sequence_types, action_types)


def _is_member(values: Ints, members: np.ndarray) -> np.ndarray:
    """Return whether each value is among the members, which ascend."""
    place = np.searchsorted(np.asarray(members), values)
    return gather_values(members, np.minimum(place, len(members) - 1)) == values


# A worker hands a batch to the trainer as one block of shared memory: each block costs a round trip between them (half
# a millisecond or more), and a tensor outside of shared memory is copied into it.


def _allocate_in_one_block(num_bytes: int) -> Allocate:
    """Return an allocator of tensors within one block of memory, which is shared if this is a worker."""
    memory = torch.empty(0, dtype=torch.uint8)
    num_bytes += (len(Sequences._fields) + len(Batch._fields)) * ALIGNMENT
    if get_worker_info() is None:
        memory.resize_(num_bytes)
    else:
        memory.set_(torch.UntypedStorage._new_shared(num_bytes))
    used = 0

    def empty(shape: Sequence[int], /, *, dtype: torch.dtype) -> Tensor:
        nonlocal used
        result = _view(memory, used, dtype, shape)
        used += -(-result.nbytes // ALIGNMENT) * ALIGNMENT
        return result

    return empty


def _view(memory: Tensor, first: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the tensor that starts at byte `first` of the block."""
    return memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _restore(memory: Tensor, layout: list[tuple[int, torch.dtype, torch.Size]], num_users: int) -> Batch:
    """Rebuild a batch from its block of memory, in another process."""
    tensors = [_view(memory, *place) for place in layout]
    num_columns = len(Sequences._fields)
    return Batch._make([Sequences(*tensors[:num_columns]), *tensors[num_columns:], num_users])
