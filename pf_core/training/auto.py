"""Preset `auto`: the settings of a model of parts, chosen from what the training set holds.

`resolve_auto` returns a complete configuration and, for each setting that it chose, the reason. The reasons are
printed, kept in the model's manifest and shown on the page of the asset. A setting that `training.changes` names is
taken from there; the others are chosen with it in mind (the window decides what a repeat is).

Decisions, each measured on several logs (docs/LOG.md):
- Memory is on where users come back to their pins: a log without repeats has nothing to remember.
- The window of targets is 14 days, or a third of a shorter log: rows of several days must fit into it.
- Factors have 32 to 256 dimensions, more where users have more positive actions: on long histories longer factors find
  more, on short ones they are noise. Beside content vectors 64 suffice. A quarter of the pins or users is the limit.
- A user has 4 weighted sums of own pins beside content vectors, else 2.
- The transformer is off: at the size of these logs it adds nothing measurable.
- The number of steps is an upper bound: the training chooses the best by its validation users.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import numpy as np

from pf_core.config.parts import PartsConfig
from pf_core.config.training import TrainConfig, auto, change_auto
from pf_core.days import DAY_US
from pf_core.timelines.arrays import Timelines, ragged
from pf_core.training.training_set import TrainingSet

MIN_REPEAT_SHARE = 0.02
"""Memory is on if at least this share of the targets is on pins that the user had acted on before."""

MAX_WINDOW_DAYS = 14
"""Largest number of days of targets."""

MATRIX_PULL = 20.0
"""Pull of the matrices to their start on logs without repeats."""

FACTOR_DIMS = (32, 64, 128, 256)
"""Lengths of the factors: the smallest that has DIMS_FOR_A_POSITIVE for each positive action of a training user."""

DIMS_FOR_A_POSITIVE = 16

MAX_FACTOR_DIM_WITH_CONTENT = 64
"""Largest length of the factors beside content vectors."""

SAMPLED_USERS = 100_000
"""Number of training users, evenly spaced, whose targets measure the share of repeats."""

ACTIONS_AT_ONCE = 1 << 22
"""Number of actions in memory at a time while repeats are counted; a user's actions stay together."""


class Choice(TypedDict):
    """A setting that was chosen, and why."""

    setting: str
    """Path in TrainConfig, such as parts.memory."""
    value: Any
    reason: str


class Repeats(TypedDict):
    """Targets of some training users in the last days before the cut, and how many of them are repeats."""

    targets: int
    """Distinct pairs of a user and a pin with a positive action in the window."""
    repeats: int
    """Targets whose pin the user had acted on before the window."""


def resolve_auto(data: TrainingSet, changes: dict[str, Any]) -> tuple[TrainConfig, list[Choice]]:
    """Return the configuration that preset `auto` has on this training set, with `changes`, and the reasons."""
    asked = change_auto(auto(), changes)  # refuses unknown settings before anything is measured
    assert asked.parts is not None
    changed = _leaves(changes)
    chosen = list(_choose(data, asked.parts, changed))
    resolved = change_auto(auto(), _nested({choice["setting"]: choice["value"] for choice in chosen}))
    return change_auto(resolved, changes), [
        *(_overridden(choice, changed) for choice in chosen),
        *(
            Choice(setting=setting, value=value, reason="training.changes")
            for setting, value in changed.items()
            if setting not in {choice["setting"] for choice in chosen}
        ),
    ]


def describe_choice(choice: Choice) -> str:
    """Return a choice as a line for a log."""
    return f"auto: {choice['setting']} = {choice['value']}: {choice['reason']}"


def _choose(data: TrainingSet, asked: PartsConfig, changed: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the settings that follow from the data; `asked` has the values of those that are `changed`."""
    counts, feature_dim = data.manifest["counts"], data.manifest["feature_dim"]
    num_users, num_pins = counts["train"]["users"], counts["pins"]
    num_days = math.ceil((data.cut_us - data.manifest["time_origin_us"]) / DAY_US)

    window_days = max(1, min(MAX_WINDOW_DAYS, num_days // 3))
    yield {
        "setting": "parts.window_days",
        "value": window_days,
        "reason": f"{MAX_WINDOW_DAYS} days suffice, and the training set has {num_days}"
        if window_days == MAX_WINDOW_DAYS
        else f"a third of the training set's {_count(num_days, 'day')}",
    }
    if "parts.window_days" in changed:
        window_days = asked.window_days
    yield {
        "setting": "parts.min_window_days",
        "value": max(1, window_days // 2),
        "reason": f"half of the window of {_count(window_days, 'day')}",
    }

    found = count_repeats(data.train, cut_us=data.cut_us, window_days=window_days)
    num_targets = found["targets"]
    share = found["repeats"] / num_targets if num_targets else 0.0
    yield {
        "setting": "parts.memory",
        "value": share >= MIN_REPEAT_SHARE,
        "reason": f"{100 * share:.1f} % of the {num_targets:,} targets in the last {_count(window_days, 'day')} are "
        f"on pins that the user had acted on before; memory needs {100 * MIN_REPEAT_SHARE:g} %",
    }

    pull = MATRIX_PULL if share < MIN_REPEAT_SHARE else 0.0
    yield {
        "setting": "parts.matrix_pull",
        "value": pull,
        "reason": "logs without repeats have few actions of a user: matrices stay near their start"
        if pull
        else "repeats show what matrices should do",
    }

    actions, positives = counts["train"]["actions"], counts["train"]["positives"]
    mean_positives = positives / max(1, num_users)
    wanted = DIMS_FOR_A_POSITIVE * mean_positives
    largest = next((dim for dim in FACTOR_DIMS if dim >= wanted), FACTOR_DIMS[-1])
    why = f"training users have {mean_positives:,.1f} positive actions on average"
    if feature_dim and largest > MAX_FACTOR_DIM_WITH_CONTENT:
        largest, why = MAX_FACTOR_DIM_WITH_CONTENT, "more is not needed beside content vectors"
    factor_dim = min(largest, num_pins // 4, num_users // 4)
    yield {
        "setting": "parts.factor_dim",
        "value": factor_dim,
        "reason": why
        if factor_dim == largest
        else f"a quarter of the smaller of {num_pins:,} pins and {num_users:,} training users",
    }
    yield {
        "setting": "parts.content",
        "value": feature_dim > 0,
        "reason": f"the pins have content vectors of {feature_dim} numbers" if feature_dim else "no pin has a vector",
    }
    yield {
        "setting": "parts.heads",
        "value": 4 if feature_dim else 2,
        "reason": "sums of content vectors over several ages tell interests apart"
        if feature_dim
        else "more sums of factors overfit",
    }
    base = auto()
    yield {
        "setting": "parts.transformer_layers",
        "value": 0,
        "reason": "a transformer adds nothing measurable to the parts at this size (docs/LOG.md)",
    }
    yield {
        "setting": "optimizer.num_steps",
        "value": base.optimizer.num_steps,
        "reason": "an upper bound: the training keeps the step that is best for its validation users",
    }
    yield {
        "setting": "batch_users",
        "value": base.batch_users,
        "reason": f"the same on all logs; this one has {num_users:,} training users with {actions:,} actions, "
        f"{positives:,} of them positive",
    }


def count_repeats(timelines: Timelines, *, cut_us: int, window_days: int) -> Repeats:
    """Count the targets in the last `window_days` days before the cut, and those that are repeats.

    With more than SAMPLED_USERS users, a sample of them is counted, evenly spaced among the rows.
    """
    start_us, total = cut_us - window_days * DAY_US, Repeats(targets=0, repeats=0)
    for user_row in _blocks(timelines):
        start, end = timelines.offsets[user_row], timelines.offsets[user_row + 1]
        user, index = ragged(end - start)
        action = start[user] + index
        pin, is_late = timelines.pin[action].astype(np.int64), timelines.ts[action] >= start_us
        key = user * (int(pin.max(initial=0)) + 1) + pin
        targets = np.unique(key[is_late & timelines.is_positive[action]])
        total["targets"] += len(targets)
        total["repeats"] += int(np.isin(targets, key[~is_late]).sum())
    return total


def _blocks(timelines: Timelines) -> Iterator[np.ndarray]:
    """Yield the rows of the sampled users, in blocks of about ACTIONS_AT_ONCE actions."""
    step = max(1, math.ceil(timelines.num_users / SAMPLED_USERS))
    rows = np.arange(0, timelines.num_users, step)
    if len(rows) == 0:
        return
    done = np.cumsum(timelines.offsets[rows + 1] - timelines.offsets[rows])
    first_of_block = np.flatnonzero(np.diff(done // ACTIONS_AT_ONCE)) + 1
    yield from np.split(rows, first_of_block)


def _overridden(choice: Choice, changed: Mapping[str, Any]) -> Choice:
    """Return the choice with the value of training.changes, if it has one, and a reason that names both."""
    setting = choice["setting"]
    if setting not in changed:
        return choice
    reason = f"training.changes; auto would choose {choice['value']}: {choice['reason']}"
    return {"setting": setting, "value": changed[setting], "reason": reason}


def _leaves(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested changes by their path: `{"parts": {"memory": False}}` as `{"parts.memory": False}`."""
    leaves: dict[str, Any] = {}
    for key, value in changes.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by path as nested changes, the inverse of `_leaves`."""
    nested: dict[str, Any] = {}
    for path, value in leaves.items():
        *folders, name = path.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return nested


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
