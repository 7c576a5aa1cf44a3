"""What a model must beat without learning anything: popularity, and the mean of a user's newest pins."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pf_core.model import Sequences
from pf_core.objectives import DAY_US
from pf_core.training_set import TrainingSet

ACTIONS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """The same for everybody: pins by their number of positives in the training set's last days."""

    count: np.ndarray

    @classmethod
    def of(cls, data: TrainingSet, *, num_days: int) -> "Popularity":
        train, since_us = data.train, data.cut_us - num_days * DAY_US
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
    """The mean of the newest actions' content vectors, compared with the pins' own: no learning at all."""

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
