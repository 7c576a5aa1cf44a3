"""Training within a time: how many steps of a configuration fit into a budget on this machine.

A few steps are measured first. If the budget does not suffice for the configuration's steps, there are fewer, with a
warm-up that is shorter in the same proportion; and if not even MIN_STEPS are left, batches are smaller, too.

A model of parts prepares counts and factors before its first step. The first measurement pays for them, and the
training reads them again. It also evaluates while it trains, which chooses its number of steps: the time of a step
contains its share of an evaluation.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pf_core.config.training import TrainConfig
from pf_core.errors import PipelineError
from pf_core.storage.files import remove_tree
from pf_core.training.trainer import train
from pf_core.training.training_set import TrainingSet

MEASURED_STEPS = 8
"""Steps whose median time counts; one more before them, which pays for what happens only once, is not timed."""

MEASURED_USERS = 4
"""Users of a batch of the first measurement, times the days of a step of a model of parts: a batch of the paper's size
takes minutes on a CPU."""

MEASURED_SHARE = 0.1
"""Largest share of the budget that the second measurement may take."""

MIN_STEPS = 100
"""Batches get smaller when the budget does not suffice for this many of the configured size."""

SAFETY = 0.8
"""Share of the budget that is planned with: the measured steps are few, and other programs use the machine, too."""

FORWARD_SHARE = 1 / 3
"""Share of a training step that embedding a user costs: the backward pass is twice the forward pass."""


def changed(config: TrainConfig, changes: dict[str, Any], **optimizer: Any) -> TrainConfig:
    """Return the configuration with other fields, and with other fields of its optimizer."""
    return config.model_copy(
        update={**changes, "optimizer": config.optimizer.model_copy(update=optimizer)} if optimizer else changes
    )


def fit_to_budget(
    wanted: TrainConfig, measure: Callable[[TrainConfig], float], *, budget_s: float, num_test_users: int
) -> TrainConfig:
    """Return the configuration with as many steps, up to its own number, as the budget allows.

    `measure` returns the seconds of a step, fixed_s + user_s * users. A small batch is measured first, and then the
    largest one that takes little of the budget; with one measurement alone, all its time counts as the users'. What the
    second one takes beyond its steps (opening files, saving the model) happens again in the training.
    """
    started, num_steps = time.monotonic(), wanted.optimizer.num_steps
    small, small_s = _measure_small(wanted, measure)
    fixed_s, user_s, other_s = 0.0, small_s / small, 0.0
    affordable = math.floor(MEASURED_SHARE * budget_s / ((1 + MEASURED_STEPS) * user_s))
    large = min(affordable, wanted.batch_users)
    if large >= 2 * small:
        measured_from = time.monotonic()
        large_s = measure(changed(wanted, {"batch_users": large}))
        other_s = max(0.0, time.monotonic() - measured_from - (1 + MEASURED_STEPS) * large_s)
        user_s = max((large_s - small_s) / (large - small), 0.01 * large_s / large)  # noise may make it negative
        fixed_s = max(0.0, large_s - user_s * large)
    embedding_s = FORWARD_SHARE * user_s * num_test_users
    used_s = time.monotonic() - started
    left_s = SAFETY * (budget_s - used_s) - embedding_s - other_s
    batch_users, steps = wanted.batch_users, math.floor(left_s / (fixed_s + user_s * wanted.batch_users))
    if steps < min(MIN_STEPS, num_steps):
        batch_users = math.floor((left_s / MIN_STEPS - fixed_s) / user_s)
        batch_users = min(max(batch_users, small), wanted.batch_users)
        steps = math.floor(left_s / (fixed_s + user_s * batch_users))
    if steps < 1:
        raise PipelineError(
            f"the budget of {budget_s:.0f} s does not suffice: a step of {batch_users} users takes "
            f"{fixed_s + user_s * batch_users:.1f} s, embedding the {num_test_users:,} test users about "
            f"{embedding_s:.0f} s, and {used_s:.0f} s went into preparing and measuring"
        )
    return with_steps(changed(wanted, {"batch_users": batch_users}), min(num_steps, steps))


def _measure_small(wanted: TrainConfig, measure: Callable[[TrainConfig], float]) -> tuple[int, float]:
    """Return users and seconds of the smallest batch that can be trained: some users have nothing to predict."""
    num_days = 1 if wanted.parts is None else wanted.parts.days_per_step
    users = min(MEASURED_USERS * num_days, wanted.batch_users)
    while True:
        try:
            return users, measure(changed(wanted, {"batch_users": users}))
        except PipelineError:
            if users == wanted.batch_users:
                raise
            users = min(4 * users, wanted.batch_users)


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the configuration with fewer steps and a warm-up that is shorter in the same proportion.

    A model of parts is evaluated as often as before, and the towers, whose evaluations change no weight, only once.
    """
    warmup_steps = round(config.optimizer.warmup_steps * steps / config.optimizer.num_steps)
    evaluate_every = steps if config.parts is None else min(config.evaluate_every, steps)
    changes = {"evaluate_every": evaluate_every, "checkpoint_every": steps}
    return changed(config, changes, num_steps=steps, warmup_steps=warmup_steps)


def seconds_per_step(
    config: TrainConfig, data: TrainingSet, folder: Path, num_workers: int, *, prepared: Path
) -> float:
    """Train a few steps on batches of users with mixed lengths, which take longer than sorted ones; drop the model.

    What a model of parts prepares is left in `prepared`, for further measurements and for the training.
    """
    num_steps = 1 + MEASURED_STEPS
    changes = {"log_every": 1, "shuffle_batches": 1, "evaluate_every": num_steps + 1, "checkpoint_every": num_steps + 1}
    watch = _Stopwatch()
    remove_tree(folder)
    # A rate close to 0: without a warm-up a few steps may diverge, which ends a training.
    short = changed(config, changes, num_steps=num_steps, warmup_steps=0, learning_rate=1e-9)
    train(short, training_set=data.path, run_dir=folder, num_workers=num_workers, observer=watch, prepared=prepared)
    remove_tree(folder)
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(watch.at.values()))
    return step_s if config.parts is None else step_s + watch.evaluation_s / config.evaluate_every


class _Stopwatch:
    """Observer that keeps the time at which each step was measured first, and the time of the last evaluation."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.evaluation_s = 0.0

    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        now = time.perf_counter()
        self.evaluation_s = now - self.at.setdefault(step, now)  # a step's second measurement is its evaluation
