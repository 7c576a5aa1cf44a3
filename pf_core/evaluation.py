"""Judging a model by the days after its cut (paper, section 4.1), and the baselines that it must beat.

Held-out users are embedded at the cut, and everything that they engage with positively in the days after it is looked
for in an index of random candidates. What cannot be asked is counted: users who were not there at the cut, and pins
that had no feature then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from pf_core.contracts import PipelineError, ds_range, shift_ds
from pf_core.model import Sequences
from pf_core.packing import find_pins
from pf_core.raw_actions import bucket_files, positive_mask
from pf_core.site import Site
from pf_core.training_set import TrainingSet
from pf_core.validation import HeldOut


class Future(NamedTuple):
    """The distinct (held-out user, pin) positives after the cut, by row of the training set."""

    user: np.ndarray
    pin: np.ndarray
    num_unknown_users: int
    """Positives of users who were not there at the cut, trained-on users not counted."""
    num_unknown_pins: int


def read_future(site: Site, data: TrainingSet, num_days: int) -> Future:
    """Positives of held-out users in the `num_days` days after the cut, from raw_actions."""
    cut_ds = str(data.manifest["cut_ds"])
    held_out, train = data.held_out.user_ids(), data.train.user_ids()
    users, pins = [], []
    num_unknown_users = num_unknown_pins = 0
    for ds in ds_range(shift_ds(cut_ds, 1), shift_ds(cut_ds, num_days)):
        for path in bucket_files(site, ds).values():
            actions = pq.read_table(path)
            actions = actions.filter(pa.array(positive_mask(actions, site.source.positive)))
            is_known = pc.is_in(actions["user_id"], held_out)
            num_unknown_users += pc.sum(pc.invert(pc.or_(is_known, pc.is_in(actions["user_id"], train)))).as_py() or 0
            actions = actions.filter(is_known)
            pin = find_pins(data.path / "pins" / "pin_id.arrow", actions["pin_id"].combine_chunks())
            num_unknown_pins += int((pin < 0).sum())
            users.append(pc.index_in(actions["user_id"], held_out).to_numpy()[pin >= 0])
            pins.append(pin[pin >= 0])
    nobody = np.zeros(0, np.int64)
    pairs = np.stack([np.concatenate([nobody, *users]), np.concatenate([nobody, *pins])]).astype(np.int64)
    pairs = np.unique(pairs, axis=1)
    return Future(pairs[0], pairs[1], num_unknown_users, num_unknown_pins)


def at_the_cut(data: TrainingSet, future: Future, *, sequence_length: int, num_pins: int, seed: int) -> HeldOut:
    """The held-out users with a future, embedded from their newest actions, against an index of random candidates."""
    users, number = np.unique(future.user, return_inverse=True)
    if not len(users):
        raise PipelineError(
            f"no held-out user has a positive action after {data.manifest['cut_ds']}: nothing to judge by. Ingest the "
            "days after the cut, or choose an earlier cut"
        )
    ends = data.held_out.offsets[users + 1] - 1
    return HeldOut(
        data=data,
        device=torch.device("cpu"),
        num_users=len(users),
        starts=np.maximum(data.held_out.offsets[users], ends - sequence_length + 1),
        ends=ends,
        positive_user=number,
        positive_pin=future.pin,
        index_pin=data.sample_candidates(num_pins, np.random.default_rng([seed, 0x1DE])),
    )


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """The same for everybody: pins by their number of positives in the training set's last days."""

    count: np.ndarray

    @classmethod
    def of(cls, data: TrainingSet, *, num_days: int) -> "Popularity":
        recent = data.train.is_positive & (data.train.ts >= data.cut_us - num_days * 86_400_000_000)
        return cls(count=np.bincount(data.train.pin[recent], minlength=len(data.pin_feature)))

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


def baselines(
    data: TrainingSet, *, popular_days: Sequence[int], recent: Sequence[int]
) -> dict[str, Popularity | MeanOfRecent]:
    return {f"popularity, {days} days": Popularity.of(data, num_days=days) for days in popular_days} | {
        f"mean of {count} newest pins": MeanOfRecent(data=data, num_actions=count) for count in recent
    }
