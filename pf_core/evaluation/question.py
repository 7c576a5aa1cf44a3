"""The evaluation question (paper, section 4.1), and how often embeddings are computed (section 4.2.2).

The question is the same for every model and baseline: held-out users, their positive actions in the days after the cut,
and an index of random candidates. A frequency turns the question into queries. A query is one embedding of a user,
computed from the user's actions before some moment:
- once: all actions until the cut;
- daily: for a positive on the day [x, x + 1 d), all actions until x - 1 d, because logs take a day to arrive; the first
  day is therefore searched with an embedding that is older than the cut;
- realtime: all actions before the positive itself. Each positive then needs an embedding of its own, so that at most
  REALTIME_POSITIVES of each user are drawn at random; the paper takes all.

Positives that cannot be part of the question are counted: those of users who had no timeline at the cut, and those on
pins that had no feature then; held-out users without any positive are counted, too. Such pins, and words that training
never saw, are also missing from the sequences after the cut.

Memory is bounded by the number of users and of pins in the index: of a user's past, MAX_HISTORY actions are held.
Suffixes: U users, A actions, Q queries, P positives, N pins of the index.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.serving import Frequency
from pf_core.config.site import Site
from pf_core.days import DAY_US, ds_range, shift_ds
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import mixed
from pf_core.logs.partition import bucket_files, ingested_days
from pf_core.logs.positives import positive_mask
from pf_core.pins.lookup import find_pins
from pf_core.progress import Progress
from pf_core.storage.files import read_parquet
from pf_core.timelines.arrays import Timelines, encode_words, ragged
from pf_core.training.objectives import draw_distinct
from pf_core.training.training_set import TrainingSet, sample_below

MAX_DAYS = 14
"""Days after the cut whose positives are searched for, as in the paper."""

MAX_HISTORY = 2048
"""Actions before the cut that are held of each user."""

REALTIME_POSITIVES = 10
"""Positives of each user that are searched for in realtime."""

SEED = 0

COLUMNS = ("pin", "ts", "action_type", "surface", "duration", "is_positive")


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    data: TrainingSet
    user_ids: pa.Array
    timelines: Timelines
    """Actions of the evaluated users before and after the cut, encoded with the training set's vocabularies."""
    positive_A: np.ndarray
    """Rows of the actions that an embedder has to find: positives after the cut."""
    index_pin: np.ndarray
    """Rows of the pins of the index, ascending."""
    num_days: int
    """Days after the cut that the positives are from."""
    counts: dict[str, int]
    """Users and positives, of the question and left out of it."""

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_pins(self) -> int:
        return len(self.index_pin)

    @property
    def last_ds(self) -> str:
        return shift_ds(str(self.data.manifest["cut_ds"]), self.num_days)

    @property
    def fingerprint(self) -> str:
        """Hash of users, positives and index: scores of one question can be compared user by user."""
        content = hashlib.sha256(f"{self.data.fingerprint} {self.num_days}".encode())
        content.update(repr(self.user_ids.to_pylist()).encode())
        for values in (self.timelines.offsets, self.timelines.ts, self.positive_A, self.index_pin):
            content.update(np.ascontiguousarray(values, np.int64).data)
        return content.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """A question at some frequency. Queries are sorted by user, and the queries of a user by time."""

    user_Q: np.ndarray
    end_Q: np.ndarray
    """First action of the user's timeline that the embedding does not read."""
    shown_U: np.ndarray
    """One query of each user, drawn at random, that counts for diversity: more embeddings would look more diverse."""
    positive_A: np.ndarray
    """Rows of the positives in the question's timelines, in the order of their queries."""
    query_P: np.ndarray
    """Query that searches for each positive."""
    is_counted_P: np.ndarray
    """Whether a positive is the first of its query on its pin: recall counts distinct pins."""
    is_counted_by_type_P: np.ndarray
    """Whether a positive is the first of its query on its pin with its action type."""


def open_question(site: Site, data: TrainingSet, *, progress: Progress) -> Question:
    """Read the actions of a training set's held-out users in the days after its cut, from raw_actions.

    `promotion` in the site file limits the number of users and pins; they are drawn from a fixed seed.
    """
    limits = site.serving.promotion
    cut_ds = str(data.manifest["cut_ds"])
    days = ds_range(shift_ds(cut_ds, 1), _last_day(site, cut_ds))
    held_out = data.held_out.user_ids()
    with_positives, counts = _users_with_positives(site, data, days, held_out)
    if not len(with_positives):
        raise PipelineError(
            f"no held-out user has a positive action after {cut_ds} on a pin that had a feature then: there is nothing "
            "to evaluate models with",
            "ingest the days after the cut, or choose an earlier cut",
        )
    rng = np.random.default_rng([SEED, 0x5A3])
    users = with_positives[sample_below(len(with_positives), limits.num_users, rng)]
    user_ids = held_out.take(pa.array(users))
    timelines = _joined(data, users, _read_later(site, data, days, user_ids))
    positive_A = np.flatnonzero(timelines.is_positive & (timelines.ts >= data.cut_us))
    counts |= {
        "held_out_users": len(held_out),
        "users_without_positives": len(held_out) - len(with_positives),
        "users": len(users),
        "positives": len(positive_A),
    }
    index_pin = data.sample_candidates(limits.num_pins, np.random.default_rng([SEED, 0x1DE]))
    progress(
        f"{len(users):,} held-out users with {len(positive_A):,} positives in the {len(days)} days after {cut_ds}, "
        f"index of {len(index_pin):,} pins"
    )
    return Question(
        data=data,
        user_ids=user_ids,
        timelines=timelines,
        positive_A=positive_A,
        index_pin=index_pin,
        num_days=len(days),
        counts=counts,
    )


def _last_day(site: Site, cut_ds: str) -> str:
    newest_ds = max(ingested_days(site), default=cut_ds)
    if newest_ds <= cut_ds:
        raise PipelineError(
            f"the training set ends with {cut_ds}, and raw_actions has no day after it to evaluate models with",
            "ingest later days, or end training earlier: set training.evaluation_days in the site file, then: "
            f"{materialize_command('training_set,pinnerformer_model')}",
        )
    return min(newest_ds, shift_ds(cut_ds, MAX_DAYS))


def _users_with_positives(
    site: Site, data: TrainingSet, days: list[str], held_out: pa.Array
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the rows of the held-out users with positives, and counts of the positives that are left out."""
    trained, found = data.train.user_ids(), np.zeros(len(held_out), bool)
    counts = {"positives_of_unknown_users": 0, "positives_on_unknown_pins": 0}
    for ds in days:
        for path in bucket_files(site, ds).values():
            actions = read_parquet(path)
            actions = actions.filter(pa.array(positive_mask(actions, site.source.positive)))
            is_held_out = pc.is_in(actions["user_id"], held_out)
            is_known = pc.or_(is_held_out, pc.is_in(actions["user_id"], trained))
            counts["positives_of_unknown_users"] += pc.sum(pc.invert(is_known)).as_py() or 0
            actions = _coded(data, actions.filter(is_held_out))
            counts["positives_on_unknown_pins"] += actions.num_unknown_pins
            found[pc.index_in(actions.user_id, held_out).to_numpy()] = True
    return np.flatnonzero(found), counts


@dataclass(frozen=True, kw_only=True, eq=False)
class _Actions:
    """Actions encoded with the training set's vocabularies, without those that have no code."""

    user_id: pa.ChunkedArray
    columns: dict[str, np.ndarray] = field(repr=False)
    num_unknown_pins: int


def _coded(data: TrainingSet, actions: pa.Table, is_positive: np.ndarray | None = None) -> _Actions:
    columns: dict[str, Any] = {
        "pin": find_pins(data.path / "pins" / "pin_id.arrow", actions["pin_id"].combine_chunks()),
        "ts": actions["ts"].cast(pa.int64()).to_numpy(),
        "action_type": encode_words(actions["action_type"], data.action_types),
        "surface": encode_words(actions["surface"], data.surfaces),
        "duration": actions["duration_s"].to_numpy(),
        "is_positive": np.ones(actions.num_rows, bool) if is_positive is None else is_positive,
    }
    is_known = (columns["pin"] >= 0) & (columns["action_type"] >= 0) & (columns["surface"] >= 0)
    return _Actions(
        user_id=actions["user_id"].filter(pa.array(is_known)),
        columns={name: values[is_known] for name, values in columns.items()},
        num_unknown_pins=int((columns["pin"] < 0).sum()),
    )


def _read_later(
    site: Site, data: TrainingSet, days: list[str], user_ids: pa.Array
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return all actions of these users after the cut: the place of the user in `user_ids`, and timeline columns."""
    users, parts = [], []
    for ds in days:
        for path in bucket_files(site, ds).values():
            actions = read_parquet(path, filters=pc.field("user_id").isin(user_ids))
            coded = _coded(data, actions, positive_mask(actions, site.source.positive))
            users.append(pc.index_in(coded.user_id, user_ids).to_numpy())
            parts.append(coded.columns)
    return np.concatenate(users), {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def _joined(data: TrainingSet, users: np.ndarray, later: tuple[np.ndarray, dict[str, Any]]) -> Timelines:
    """Join the newest MAX_HISTORY actions before the cut with all `later` ones, which are in order for each user."""
    first_U, last_U = data.held_out.offsets[users], data.held_out.offsets[users + 1]
    first_U = np.maximum(first_U, last_U - MAX_HISTORY)
    user_A, number_A = ragged(last_U - first_U)
    history_A = first_U[user_A] + number_A
    user_all = np.concatenate([user_A, later[0]])
    order = np.argsort(user_all, kind="stable")  # the past comes first, and days ascend
    columns: dict[str, Any] = {
        name: np.concatenate([np.asarray(getattr(data.held_out, name))[history_A], later[1][name]])[order]
        for name in COLUMNS
    }
    offsets = np.concatenate([[0], np.cumsum(np.bincount(user_all, minlength=len(users)))])
    return Timelines(offsets=offsets, **columns)


def ask(question: Question, frequency: Frequency) -> Queries:
    """Return the embeddings that a frequency needs, and the positives that each of them searches for."""
    timelines, positive_A = question.timelines, question.positive_A
    cut_us = question.data.cut_us
    user_P = np.searchsorted(timelines.offsets, positive_A, side="right") - 1
    if frequency == "realtime":
        num_U, key_U = np.bincount(user_P, minlength=question.num_users), mixed(SEED, np.arange(question.num_users))
        user_P, number_P = draw_distinct(num_U, REALTIME_POSITIVES, key_U)
        positive_A = np.sort(positive_A[(np.cumsum(num_U) - num_U)[user_P] + number_P])
    match frequency:
        case "once":
            end_P = _actions_before(timelines, user_P, np.full(len(positive_A), cut_us))
        case "daily":
            day_P = (timelines.ts[positive_A] - cut_us) // DAY_US
            end_P = _actions_before(timelines, user_P, cut_us + (day_P - 1) * DAY_US)
        case "realtime":
            end_P = positive_A
    queries, query_P = np.unique(np.stack([user_P, end_P]), axis=1, return_inverse=True)
    order = np.argsort(query_P.ravel(), kind="stable")
    positive_A, query_P = positive_A[order], query_P.ravel()[order]
    pin_P, type_P = timelines.pin[positive_A].astype(np.int64), timelines.action_type[positive_A].astype(np.int64)
    user_Q = queries[0]
    return Queries(
        user_Q=user_Q,
        end_Q=queries[1],
        shown_U=_one_each(user_Q),
        positive_A=positive_A,
        query_P=query_P,
        is_counted_P=_is_first(query_P, pin_P),
        is_counted_by_type_P=_is_first(query_P, pin_P, type_P),
    )


def _actions_before(timelines: Timelines, user_P: np.ndarray, moment_us_P: np.ndarray) -> np.ndarray:
    """Return the row of the user's first action at or after a moment, or the end of the user's timeline."""
    pairs, inverse = np.unique(np.stack([user_P, moment_us_P]), axis=1, return_inverse=True)
    offsets = timelines.offsets
    ends = [
        offsets[user] + np.searchsorted(timelines.ts[offsets[user] : offsets[user + 1]], moment)
        for user, moment in pairs.T
    ]
    return np.array(ends, np.int64)[inverse.ravel()]


def _one_each(user_Q: np.ndarray) -> np.ndarray:
    """Return one query of each user, all equally likely; the same at every call."""
    first_U, count_U = np.unique(user_Q, return_index=True, return_counts=True)[1:]
    return first_U + (np.random.default_rng([SEED, 0xD1]).random(len(first_U)) * count_U).astype(np.int64)


def _is_first(*columns: np.ndarray) -> np.ndarray:
    """Return for each row whether no row before it is equal."""
    first = np.unique(np.stack(columns), axis=1, return_index=True)[1]
    result = np.zeros(len(columns[0]), bool)
    result[first] = True
    return result
