"""What the pipeline will make of a log, before it runs: who and what is embedded, what preset auto chooses, how long
training takes.

The rules are those of `training/auto.py` itself, on a training set of the actions that were read. The time is a formula
that was fitted to the trainings of docs/quality.md (`pf benchmark LOG --quick`, 2 cores): 34 s for 7,600 pins and 0.1M
actions, 54 s for 12,000 and 0.12M, 74 s for 47,000 and 2.0M, 85 s for 38,000 and 2.2M, 103 s for 92,000 and 1.2M. It is
off by a quarter on these, and by more on other machines.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.days import DAY_US, ds_start_us, shift_ds
from pf_core.errors import PipelineError
from pf_core.logs.readers import find_files
from pf_core.logs.routing import day_number
from pf_core.logs.sample import size_text
from pf_core.logs.training_users import TrainingUsers, read_training_users
from pf_core.onboarding.questions import counted, percent
from pf_core.onboarding.survey import Actions, Survey
from pf_core.pins.catalogue import Catalogue, QuarantinedRow
from pf_core.pins.inputs import read_described_pins, undated_files
from pf_core.timelines.arrays import Timelines, ragged
from pf_core.training.auto import Choice, resolve_auto
from pf_core.training.cut import default_evaluation_days
from pf_core.training.training_set import TrainingSet

MAX_PIN_BYTES = 64 << 20
"""Larger files of pins are not read."""

FIXED_S, PIN_S, ACTION_S = 35.0, 0.6e-3, 10e-6
"""Seconds of a training of 200 steps: at least, for each pin, and for each action."""

MIN_ROWS = 4
"""Users that a day of training needs: that of training/parts/rows.py, which imports torch."""

FITTED_STEPS = 200

SHOWN_CHOICES = ("parts.memory", "parts.window_days", "parts.factor_dim", "parts.content")


@dataclass(frozen=True, kw_only=True)
class KnownPins:
    """The pins that files describe."""

    num: int
    num_in_log: int
    """Pins of the log that were read, and that the files describe."""
    num_candidates: int
    """Pins of the files and of the log that may be recommended."""
    num_with_vector: int
    """Pins of the log that have a content vector."""
    dim: int
    """Length of the content vectors; 0 without any."""
    rejects: list[QuarantinedRow]


def read_pins(site: Site, actions: Actions) -> KnownPins | str | None:
    """Return what the files of pins say; the reason if they are too large to read here, None if there are none."""
    pins = site.source.pins
    if pins.catalogue is None and pins.vectors is None:
        return None
    files = undated_files(site)
    if pins.is_incremental:
        assert pins.catalogue is not None
        files = find_files(pins.catalogue, site.log_root, site.start_ds)
    size = sum(file.stat().st_size for file in files)
    if size > MAX_PIN_BYTES:
        return f"their files have {size_text(size)} and were not read"
    return _known(site, files, actions)


def _known(site: Site, files: list[Path], actions: Actions) -> KnownPins:
    pins = site.source.pins
    tables = [] if pins.catalogue is None else [file for file in files if file.suffix != ".npy"]
    described: Catalogue = read_described_pins(site, tables, dim=None)
    ids = described.rows["pin_id"]
    is_known = pc.is_in(actions.pin, ids).to_numpy(zero_copy_only=False)
    dim, num_with_vector = 0, 0
    if "feature" in described.rows.column_names:
        dim = described.rows.schema.field("feature").type.list_size
        with_vector = described.rows.filter(pc.is_valid(described.rows["feature"]))["pin_id"]
        num_with_vector = int(pc.is_in(actions.pin, with_vector).to_numpy(zero_copy_only=False).sum())
    outsiders = int((~is_known).sum()) if pins.is_candidate is None else 0
    return KnownPins(
        num=len(ids),
        num_in_log=int(is_known.sum()),
        num_candidates=int(pc.sum(described.rows["is_candidate"]).as_py() or 0) + outsiders,
        num_with_vector=num_with_vector,
        dim=dim,
        rejects=described.quarantined,
    )


def describe_pin_files(site: Site, survey: Survey, known: KnownPins | str | None) -> str:
    """Return how many pins are known beside those of the log."""
    if known is None:
        return "none: the pins are those with an action"
    if isinstance(known, str):
        return known
    missing = survey.actions.num_pins - known.num_in_log
    rejects = f"; {len(known.rejects):,} rows quarantined, first: {known.rejects[0][2]}" if known.rejects else ""
    day = f" (of {site.start_ds})" if site.source.pins.is_incremental else ""
    among = f"without {missing:,} of those of the log" if missing else "with all of those of the log"
    return f"{known.num:,} pins{day}, {among}{rejects}"


def describe_embedded(site: Site, survey: Survey, known: KnownPins | str | None) -> list[str]:
    """Return who and what gets a vector and what does not, and why."""
    actions, window = survey.actions, site.timelines.window_days
    last = site.end_ds or max(survey.actions.rows_by_day())
    newest = actions.timelines.ts[actions.timelines.offsets[1:] - 1]
    num_idle = int((newest < ds_start_us(shift_ds(last, 1 - window))).sum())
    least = "" if survey.plan.is_whole else "at least "
    idle = f"; {num_idle:,} have none in the last {window} days and get none" if num_idle else ""
    share = site.training.held_out_share
    held_out = f" ({percent(share)} of them never train, and judge the model)" if share else ""
    users = f"users: {least}{actions.num_users - num_idle:,}, all with an action until {last}{held_out}{idle}"
    if site.training.users is not None:
        num_selected = int(_training_users(site, survey).are_selected(actions.user).sum())
        users += f"; training.users selects {least}{num_selected:,} of them to learn from"
    if survey.tally.num_skipped or survey.tally.num_rejected:
        users += "; rows that are skipped or quarantined count for nobody"
    return [users, f"pins: {_embedded_pins(site, survey, known)}"]


def _embedded_pins(site: Site, survey: Survey, known: KnownPins | str | None) -> str:
    num_log = survey.actions.num_pins
    least = "" if survey.plan.is_whole else "at least "
    if isinstance(known, str):
        return f"those of the log and of the files ({known})"
    if known is None:
        return f"{least}{num_log:,}, all with an action; none has a content vector, and none is needed by preset auto"
    total = known.num + num_log - known.num_in_log
    if site.training.preset != "auto":
        return (
            f"{known.num_with_vector:,} of the {num_log:,} pins of the log; preset {site.training.preset} reads "
            "content vectors, and the others have none"
        )
    not_candidates = total - known.num_candidates
    why = (
        f"; {not_candidates:,} are none: `{site.source.pins.is_candidate}` does not say that they may be recommended"
        if not_candidates
        else ""
    )
    idle = known.num - known.num_in_log
    unused = f"; {idle:,} of them without an action, which rank low" if idle > 0 else ""
    vectors = f"; {known.num_with_vector:,} pins of the log have a content vector" if known.dim else ""
    return f"{least}{known.num_candidates:,} of {total:,} pins of the log and the files{unused}{vectors}{why}"


# Training


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training on this log would be."""

    cut_ds: str
    evaluation_days: int
    num_users: int
    num_actions: int
    num_pins: int
    config: TrainConfig
    chosen: list[Choice]
    is_enough: bool
    """Whether a day has users who can train."""


def foresee_training(site: Site, survey: Survey, known: KnownPins | str | None) -> Training | None:
    """Return the settings that preset auto would choose; None if no action is left for training."""
    days = survey.actions.rows_by_day()
    last = site.end_ds or max(days)
    num_days = site.training.evaluation_days
    if num_days is None:
        num_days = default_evaluation_days(day_number(last) - day_number(site.start_ds) + 1)
    cut_ds = shift_ds(last, -num_days)
    cut_us = ds_start_us(shift_ds(cut_ds, 1))
    train = _before(survey.actions, cut_us, _training_users(site, survey))
    if not len(train.ts):
        return None
    num_actions = round(len(train.ts) * survey.scale)
    num_pins = survey.actions.num_pins + (known.num - known.num_in_log if isinstance(known, KnownPins) else 0)
    dim = known.dim if isinstance(known, KnownPins) else 0
    counts = {
        "train": {
            "users": train.num_users,
            "actions": num_actions,
            "positives": round(int(train.is_positive.sum()) * survey.scale),
        },
        "pins": num_pins,
    }
    manifest = {"counts": counts, "feature_dim": dim, "time_origin_us": int(train.ts.min())}
    data = TrainingSet(
        path=site.directory,
        manifest=cast("Any", manifest),
        train=train,
        held_out=train,
        pin_feature=np.zeros((0, dim), np.float32),
        has_feature=np.zeros(0, bool),
        candidates=np.zeros(0, np.int64),
        action_types=[],
        surfaces=[],
        fingerprint="",
        cut_us=cut_us,
    )
    config, chosen = resolve_auto(data, site.training.changes)
    return Training(
        cut_ds=cut_ds,
        evaluation_days=num_days,
        num_users=train.num_users,
        num_actions=num_actions,
        num_pins=num_pins,
        config=config,
        chosen=chosen,
        is_enough=_can_train(train, config.parts.window_days if config.parts is not None else 1),
    )


def _can_train(train: Timelines, window_days: int) -> bool:
    """Whether on some day MIN_ROWS users have an action before it, and a positive one in the window that it begins."""
    user, _ = ragged(np.diff(train.offsets))
    day = train.ts // DAY_US
    first = day[train.offsets[:-1]]  # timelines are in the order of time
    user, day = user[train.is_positive], day[train.is_positive]
    for start in range(int(first.min()) + 1, int(train.ts.max() // DAY_US) + 1):
        inside = (day >= start) & (day < start + window_days) & (first[user] < start)
        if len(np.unique(user[inside])) >= MIN_ROWS:
            return True
    return False


def too_few(survey: Survey, found: Training | None) -> PipelineError | None:
    """Return why training would stop on this log; None if it would not, or if a sample of a large log does not tell."""
    if not survey.plan.is_whole or (found is not None and found.is_enough):
        return None
    days, timelines = survey.actions.rows_by_day(), survey.actions.timelines
    is_back = timelines.ts[timelines.offsets[:-1]] // DAY_US < timelines.ts[timelines.offsets[1:] - 1] // DAY_US
    once = f" ({percent(float(1 - is_back.mean()))} of the users have all actions on one day, as sessions have)"
    return PipelineError(
        f"the log is too small to train on: {counted(survey.actions.num_users, 'user')} and "
        f"{counted(survey.actions.num_actions, 'action')} on {counted(len(days), 'day')}, and on no day do {MIN_ROWS} "
        "training users have an action before it and a positive one after it"
        + (once if 2 * is_back.sum() < len(is_back) else "")
        + (f", until {found.cut_ds}, where training ends" if found is not None else ""),
        "add days or users, or check source.positive and training.evaluation_days in the site file",
    )


def _training_users(site: Site, survey: Survey) -> TrainingUsers:
    """Return who may be learned from; where a column of the log says so, by the newest rows that were read."""
    if site.answers is None:
        return read_training_users(site)
    share = site.training.held_out_share
    return TrainingUsers(held_out_share=share, listed=survey.agreed, column=site.answers.column)


def _before(actions: Actions, cut_us: int, users: TrainingUsers) -> Timelines:
    """Return the timelines of the training users before the cut."""
    timelines = actions.timelines
    row, _ = ragged(actions.lengths())
    is_kept = (timelines.ts < cut_us) & users.may_train(actions.user)[row]
    lengths = np.bincount(row[is_kept], minlength=actions.num_users)
    return replace(
        timelines,
        offsets=np.concatenate([[0], np.cumsum(lengths[lengths > 0])]),
        **{name: getattr(timelines, name)[is_kept] for name in _ARRAYS},
    )


_ARRAYS = ("pin", "ts", "action_type", "surface", "duration", "is_positive")


def seconds_of(config: TrainConfig, *, num_pins: int, num_actions: int) -> float:
    """Return how long a training of the model of parts takes on 2 cores, roughly."""
    return (FIXED_S + PIN_S * num_pins + ACTION_S * num_actions) * config.optimizer.num_steps / FITTED_STEPS


def describe_training(site: Site, survey: Survey, known: KnownPins | str | None) -> list[str]:
    """Return what preset auto will choose, and roughly how long training will take."""
    preset = site.training.preset
    if preset != "auto":
        machine = ", made for GPUs" if preset == "paper" else ""
        return [f"preset {preset}{machine}: its settings do not depend on the log (pf_core/config/training.py)"]
    found = foresee_training(site, survey, known)
    if too_few(survey, found) is not None:  # pf check ends with the whole sentence
        return ["would stop: the log is too small to train on"]
    if found is None:
        return ["preset auto: no action of a training user lies before the evaluation days; give more days"]
    judged = "no day judges it"
    if found.evaluation_days:
        verb = "judges" if found.evaluation_days == 1 else "judge"
        judged = f"{counted(found.evaluation_days, 'day')} after it {verb} the model"
    trained_on = f"about {found.num_actions:,} actions of {found.num_users:,} users until {found.cut_ds}"
    lines = [f"preset auto, on {trained_on}; {judged}"]
    for choice in found.chosen:
        if choice["setting"] in SHOWN_CHOICES:
            value = choice["value"]
            value = ("on" if value else "off") if isinstance(value, bool) else value
            lines.append(f"{choice['setting'].removeprefix('parts.').replace('_', ' ')} {value}: {choice['reason']}")
    seconds = seconds_of(found.config, num_pins=found.num_pins, num_actions=found.num_actions)
    again = ", and as long again to refit it until the last day" if site.training.refit else ""
    return [*lines, f"roughly {minutes_text(seconds)} on 2 cores without a GPU{again}"]


def minutes_text(seconds: float) -> str:
    """Return a duration in words: 1.5 minutes, 3 hours."""
    if seconds < 3600:
        return f"{max(1.0, seconds / 60):.2g} minutes" if seconds > 90 else "a minute"
    return f"{seconds / 3600:.2g} hours"
