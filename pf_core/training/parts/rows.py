"""Training rows: a user with a past at the beginning of a calendar day, and the positives of the days after it.

A step has a few days, drawn with a weight that falls with their age, and as many users for each, active on that day or
not: rows of one day share the pins of that day. What a row reads lies before its day: the user's own actions, the
factors of the newest point in time, and the pins' counts. Only targets, and the correction of the sampled softmax for
them, are of the day or later.

A step is a pure function of the training set, the configuration and its number, so that an interrupted run continues
exactly. Every rank plans the whole step and computes its share of the rows.

Suffixes: R rows of a step's day, T targets of all rows, A actions, N pins of the set; the model's: B, P, M, D, F, W.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pf_core.config.training import TrainConfig
from pf_core.days import DAY_US
from pf_core.hashing import mixed, uniform
from pf_core.model.parts.inputs import OwnPins, PinInputs, unit_rows
from pf_core.model.parts.own_pins import OwnPinArrays, own_pins
from pf_core.model.parts.sequence import NewestActions, newest_actions
from pf_core.timelines.arrays import Timelines, ragged
from pf_core.training.parts.prepared import (
    PinsOfDay,
    PointInTime,
    Prepared,
    TrainingDays,
    cached_by_day,
    training_days,
)
from pf_core.training.training_set import TrainingSet

MASKED = -1e4

MAX_DRAWS = 32
"""How often users are drawn until a day has its rows."""

MIN_ROWS = 4
"""A day with fewer rows is left out of its step."""

VALIDATION_SALT = 0x5B117

COUNTED_USERS = 10_000
"""Number of training users that show whether enough validate, and enough train."""


class Pool(NamedTuple):
    """The pins of a day's softmax."""

    pin_M: np.ndarray
    """Pin rows, ascending."""
    inputs: PinInputs
    rates_MW: Tensor
    mean_rate_W: Tensor
    correction_M: Tensor
    """Added to the logits of all but a row's own targets: minus the log of the chance to be in the pool."""


class DayRows(NamedTuple):
    """The rows of one day of a step on one rank."""

    own: OwnPins
    own_inputs: PinInputs
    newest: NewestActions | None
    """For a model with a transformer."""
    keep_P: Tensor
    """Whether each own pin takes part in the weighted sums."""
    own_place_P: Tensor
    """Place of each own pin in the pool; -1 if it is not there."""
    target_row_T: Tensor
    target_place_T: Tensor
    target_own_T: Tensor
    """Own pin of each target; -1 if the target is new to the user."""
    weight_T: Tensor
    """The targets of a row share a weight of 1."""
    num_rows: int
    """Rows of this day over all ranks."""
    pool_inputs: PinInputs
    rates_MW: Tensor
    mean_rate_W: Tensor
    correction_M: Tensor

    def to(self, device: torch.device) -> "DayRows":
        moved: Any = (value if value is None or isinstance(value, int) else value.to(device) for value in self)
        return DayRows(*moved)


Step = list[DayRows]


class Targets(NamedTuple):
    """Users with a past before a day and targets after it."""

    user_R: np.ndarray
    start_R: np.ndarray
    end_R: np.ndarray
    """First action of the day or later: the row's past ends before it."""
    row_T: np.ndarray
    pin_T: np.ndarray
    """Distinct for a row."""


@dataclass(eq=False)
class RowSampler:
    """Plans steps."""

    data: TrainingSet
    config: TrainConfig
    prepared: Prepared
    rank: int = 0
    world_size: int = 1
    days: TrainingDays = field(init=False)
    has_content: bool = field(init=False)
    validation_share: float = field(init=False)
    """0 on a log of so few users that either side would have no rows: then all of them train."""

    def __post_init__(self) -> None:
        assert self.config.parts is not None
        self.parts = self.config.parts
        counted = np.arange(min(self.data.train.num_users, COUNTED_USERS))
        num_validate = int(is_validation(counted, self.parts.validation_share).sum())
        is_enough = min(num_validate, len(counted) - num_validate) >= MIN_ROWS
        self.validation_share = self.parts.validation_share if is_enough else 0.0
        self.days = training_days(self.data, self.parts)
        self.has_content = self.parts.content and self.data.pin_feature.shape[1] > 0
        self.is_candidate_N = np.zeros(self.data.num_pins, bool)
        self.is_candidate_N[self.data.candidates] = True
        self.pins_at = cached_by_day(self._pins_at, self.data.num_pins * 4 * 16)
        self.proposal_at = cached_by_day(self._proposal_at, self.data.num_pins * 8 * 2)

    # Days

    def _pins_at(self, day: int) -> PinsOfDay:
        return self.prepared.pins_of_day(day, self.prepared.point_before(day).factors.log_repeat_N)

    def competing(self, day: int) -> np.ndarray:
        """Return which pins compete on a day: known candidates, and with content vectors all candidates."""
        return self.is_candidate_N if self.has_content else self.is_candidate_N & self.pins_at(day).is_known_N

    def _proposal_at(self, day: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cumulated probabilities from which negatives are drawn, and the share of each pin in targets."""
        pins, competes_N = self.pins_at(day), self.competing(day)
        known_N = competes_N & pins.is_known_N
        root_N = np.sqrt((pins.rates_NW[:, 2] + 0.5 / 28) * known_N)
        q_N = competes_N / max(1, competes_N.sum())
        if known_N.any():
            q_N = 0.05 * q_N + 0.95 * (root_N / root_N.sum() + known_N / known_N.sum()) / 2
        target_N = np.bincount(self.prepared.uses.pins_of(day, self.window_end(day)), minlength=len(q_N))
        return np.cumsum(q_N), target_N / max(1, target_N.sum())

    def window_end(self, day: int) -> int:
        return min(day + self.parts.window_days, self.days.end_day)

    # Steps

    def plan(self, step: int) -> Step:
        """Return this rank's rows of a step."""
        rng = np.random.default_rng([self.config.seed, 0x407, step])
        num_rows = max(1, self.config.batch_users // self.parts.days_per_step)
        result = []
        for number in range(self.parts.days_per_step):
            day = int(rng.choice(self.days.day, p=self.days.share))
            targets = self._draw(day, num_rows, rng)
            if len(targets.user_R) >= MIN_ROWS:
                pool = self.pool(day, targets.pin_T, rng)
                key = int(mixed(mixed(self.config.seed, step), number))
                result.append(self.rows(day, targets, pool, key=key))
        return result

    def _draw(self, day: int, num_rows: int, rng: np.random.Generator) -> Targets:
        """Draw users with a past and a target; fewer than `num_rows` if they are rare."""
        found: list[np.ndarray] = []
        num_found, num_users = 0, self.data.train.num_users
        known: set[int] = set()
        for _ in range(MAX_DRAWS):
            drawn = np.unique(rng.integers(num_users, size=4 * num_rows))
            drawn = drawn[~is_validation(drawn, self.validation_share)]
            drawn = drawn[[user not in known for user in drawn.tolist()]]
            known.update(drawn.tolist())
            targets = self.targets(drawn, day)
            found.append(targets.user_R)
            num_found += len(targets.user_R)
            if num_found >= num_rows or len(known) >= num_users:
                break
        users = np.concatenate(found)
        return self.targets(np.sort(rng.permutation(users)[:num_rows]), day)

    def targets(self, user_R: np.ndarray, day: int) -> Targets:
        """Return those of the users who have a past and a target, with their targets."""
        timelines = self.data.train
        start_R, stop_R = timelines.offsets[user_R], timelines.offsets[user_R + 1]
        end_R = first_at(timelines, start_R, stop_R, day)
        last_R = first_at(timelines, end_R, stop_R, self.window_end(day))
        row_A, number_A = ragged(last_R - end_R)
        at_A = end_R[row_A] + number_A
        pin_A = timelines.pin[at_A].astype(np.int64)
        is_target_A = timelines.is_positive[at_A] & (end_R > start_R)[row_A]
        is_target_A &= np.full(len(pin_A), True) if self.has_content else self.pins_at(day).is_known_N[pin_A]
        key_T = np.unique(row_A[is_target_A] * self.data.num_pins + pin_A[is_target_A])
        row_T, pin_T = np.divmod(key_T, self.data.num_pins)
        if not self.parts.memory:
            is_new_T = ~_is_own(timelines, start_R, end_R, row_T, pin_T)
            row_T, pin_T = row_T[is_new_T], pin_T[is_new_T]
        kept, row_T = np.unique(row_T, return_inverse=True)
        return Targets(user_R[kept], start_R[kept], end_R[kept], row_T, pin_T)

    def pool(self, day: int, pin_T: np.ndarray, rng: np.random.Generator) -> Pool:
        """Return all competing pins if they are few, else a sample of them and the targets."""
        competes_N = self.competing(day)
        if competes_N.sum() <= self.parts.full_softmax_pins:
            pin_M = np.union1d(np.flatnonzero(competes_N), pin_T)
            return self._pool(day, pin_M, np.zeros(len(pin_M)))
        cumulated_N, target_N = self.proposal_at(day)
        draws = np.searchsorted(cumulated_N, rng.random(self.parts.num_negatives) * cumulated_N[-1], side="right")
        pin_M = np.union1d(pin_T, np.minimum(draws, len(cumulated_N) - 1))
        q_M = np.diff(cumulated_N, prepend=0)[pin_M]
        expected_M = self.parts.num_negatives * q_M + len(pin_T) * target_N[pin_M]
        return self._pool(day, pin_M, -np.log(np.maximum(1 - np.exp(-expected_M), 1e-6)))

    def _pool(self, day: int, pin_M: np.ndarray, correction_M: np.ndarray) -> Pool:
        return Pool(pin_M, *self.pin_side(day, pin_M), torch.from_numpy(correction_M).float())

    def pin_side(self, day: int, pin_M: np.ndarray) -> tuple[PinInputs, Tensor, Tensor]:
        """Return the inputs of pins as of a day, their rates, and the mean rates of all pins."""
        pins, point = self.pins_at(day), self.prepared.point_before(day)
        inputs = self._inputs(point, pin_M, pins.statistics_NF)
        return inputs, torch.from_numpy(pins.rates_NW[pin_M]), torch.from_numpy(pins.mean_rate_W)

    def rows(self, day: int, targets: Targets, pool: Pool, *, key: int | None) -> DayRows:
        """Return this rank's share of the rows; without a `key`, nothing is dropped."""
        num_rows = len(targets.user_R)
        mine_R = np.arange(self.rank, num_rows, self.world_size)
        is_mine_T = targets.row_T % self.world_size == self.rank
        row_T, pin_T = targets.row_T[is_mine_T] // self.world_size, targets.pin_T[is_mine_T]
        own = own_pins(self.data.train, targets.start_R[mine_R], targets.end_R[mine_R])
        point = self.prepared.point_before(day)
        distinct_M, place_P = np.unique(own.pin_P, return_inverse=True)
        keep_P = np.ones(len(own.pin_P), bool)
        if key is not None:
            user_bits_R = mixed(key, targets.user_R[mine_R])
            keep_P = uniform(mixed(user_bits_R[own.row_P], own.pin_P)) >= self.parts.pin_drop
        own_place_P = np.searchsorted(pool.pin_M, own.pin_P)
        own_place_P = np.minimum(own_place_P, len(pool.pin_M) - 1)
        own_place_P = np.where(pool.pin_M[own_place_P] == own.pin_P, own_place_P, -1)
        return DayRows(
            own=as_own_pins(own, place_P, num_users=len(mine_R)),
            own_inputs=self._inputs(point, distinct_M, self.pins_at(day).statistics_NF),
            newest=self._newest(targets.start_R[mine_R], targets.end_R[mine_R], distinct_M),
            keep_P=torch.from_numpy(keep_P).float(),
            own_place_P=torch.from_numpy(own_place_P),
            target_row_T=torch.from_numpy(row_T),
            target_place_T=torch.from_numpy(np.searchsorted(pool.pin_M, pin_T)),
            target_own_T=torch.from_numpy(self._own_of(own, row_T, pin_T)),
            weight_T=torch.from_numpy(1 / np.bincount(row_T, minlength=len(mine_R))[row_T]).float(),
            num_rows=num_rows,
            pool_inputs=pool.inputs,
            rates_MW=pool.rates_MW,
            mean_rate_W=pool.mean_rate_W,
            correction_M=pool.correction_M,
        )

    def _own_of(self, own: OwnPinArrays, row_T: np.ndarray, pin_T: np.ndarray) -> np.ndarray:
        """Return the position of each target among the own pins, -1 if it is none of them."""
        if not len(own.pin_P):
            return np.full(len(row_T), -1)
        key_P, key_T = (row * self.data.num_pins + pin for row, pin in ((own.row_P, own.pin_P), (row_T, pin_T)))
        place_T = np.minimum(np.searchsorted(key_P, key_T), len(key_P) - 1)
        return np.where(key_P[place_T] == key_T, place_T, -1)

    def _newest(self, start_R: np.ndarray, end_R: np.ndarray, pin_M: np.ndarray) -> NewestActions | None:
        if not self.parts.transformer_layers:
            return None
        return newest_actions(self.data.train, start_R, end_R, pin_M, num_steps=self.parts.sequence_length)

    def _inputs(self, point: PointInTime, pin_M: np.ndarray, statistics_NF: np.ndarray) -> PinInputs:
        factors, content = point.factors, np.zeros((len(pin_M), 0), np.float32)
        if self.has_content:
            content = unit_rows(np.asarray(self.data.pin_feature[pin_M], np.float32))
        return PinInputs(
            factor_MD=torch.from_numpy(np.asarray(factors.factor_ND[pin_M])),
            trust_M=torch.from_numpy(np.asarray(factors.trust_N[pin_M])),
            statistics_MF=torch.from_numpy(statistics_NF[pin_M]),
            content_MC=torch.from_numpy(content),
        )

    # Validation

    def validation_rows(self) -> tuple[DayRows, int] | None:
        """Return the rows of the validation users on the last day with a whole window, and that day.

        They are evaluated on a sample of at most `evaluate_pins` competing pins. None if there are no rows.
        """
        users = np.arange(self.data.train.num_users)
        users = users[is_validation(users, self.validation_share)]
        day = max(self.days.end_day - self.parts.window_days, int(self.days.day[0]))
        rng = np.random.default_rng([self.config.seed, 0xE7A2])
        users = np.sort(rng.permutation(users)[: 4 * self.config.evaluate_users])
        targets = self.targets(users, day)
        targets = self.targets(targets.user_R[: self.config.evaluate_users], day)
        if len(targets.user_R) < MIN_ROWS:
            return None
        competing = np.flatnonzero(self.competing(day))
        if len(competing) > self.config.evaluate_pins:
            competing = np.sort(rng.permutation(competing)[: self.config.evaluate_pins])
        pin_M = np.union1d(competing, targets.pin_T)
        return self.rows(day, targets, self._pool(day, pin_M, np.zeros(len(pin_M))), key=None), day


def as_own_pins(own: OwnPinArrays, place_P: np.ndarray, *, num_users: int) -> OwnPins:
    """Return own pins as tensors; `place_P` is the place of each pin among the pins that the model is given."""
    return OwnPins(
        num_users=num_users,
        row_P=torch.from_numpy(own.row_P),
        pin_P=torch.from_numpy(place_P.reshape(-1)),
        features_PX=torch.from_numpy(own.features_PX),
        action_type_P=torch.from_numpy(own.action_type_P),
    )


def is_validation(user_R: np.ndarray, share: float) -> np.ndarray:
    """Return which rows of training users choose the number of steps instead of training."""
    return uniform(mixed(VALIDATION_SALT, user_R)) < share


def first_at(timelines: Timelines, start_R: np.ndarray, stop_R: np.ndarray, day: int) -> np.ndarray:
    """Return the first action of each row at or after the beginning of a day, by bisection of all rows at once."""
    low, high, key = start_R.copy(), stop_R.copy(), day * DAY_US
    while True:
        open_R = np.flatnonzero(low < high)
        if not len(open_R):
            return low
        middle = (low[open_R] + high[open_R]) // 2
        is_before = timelines.ts[middle] < key
        low[open_R[is_before]] = middle[is_before] + 1
        high[open_R[~is_before]] = middle[~is_before]


def _is_own(
    timelines: Timelines, start_R: np.ndarray, end_R: np.ndarray, row_T: np.ndarray, pin_T: np.ndarray
) -> np.ndarray:
    """Return which targets are on pins that the row's user has acted on before."""
    row_A, number_A = ragged(end_R - start_R)
    pin_A = timelines.pin[start_R[row_A] + number_A].astype(np.int64)
    num_pins = 1 + max(int(pin_A.max(initial=0)), int(pin_T.max(initial=0)))
    return np.isin(row_T * num_pins + pin_T, row_A * num_pins + pin_A)
