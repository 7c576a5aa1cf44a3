"""The evaluation question (paper, section 4.1): the same for every model and baseline.

It has held-out users, their positive actions in the days after the cut, and an index of random candidates. `queries.py`
turns it into the embeddings that are needed, and it is asked in two ways (`manifest.QuestionName`): in `all`, every
positive counts, and pins that the user has seen compete; in `discovery`, pins that the user has seen are no candidates,
and only positives on other pins count.

A positive on a pin that is unknown at the cut (pin_features does not have it) cannot be found by anything that is
evaluated here: it is part of the question, as a miss (`Unaskable`). A pin without a content vector is part of the
question and of the index; what reads content cannot rank it (`embedders.QueryEmbedder.ranks`). Positives that are left
out are counted: those of users who had no timeline at the cut, and those with an action type or a surface that training
never saw; held-out users without any positive are counted, too.

Memory is bounded: at most `promotion.num_users` users with `timelines.max_actions` actions before the cut each, of 25
bytes, their actions in MAX_DAYS days, and the pins of the index.
Suffixes: U users, A actions, Q queries, P positives, N pins of the index.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.log_day import LogDay, open_log_day, refuse_if_changed
from pf_core.logs.partition import ingested_days
from pf_core.logs.positives import positive_mask
from pf_core.pins.lookup import find_pins
from pf_core.progress import Progress
from pf_core.storage.arrays import read_arrow
from pf_core.storage.files import read_parquet
from pf_core.timelines.arrays import Timelines, encode_words, ragged
from pf_core.training.packing import WITHOUT_VECTOR
from pf_core.training.training_set import TrainingSet, sample_below

MAX_DAYS = 14
"""Days after the cut whose positives are searched for, as in the paper."""

ACTIONS_AT_ONCE = 1 << 22
"""Actions that are compared at a time to find the first of each pin."""

SEED = 0

COLUMNS = ("pin", "ts", "action_type", "surface", "duration", "is_positive")


class Unaskable(NamedTuple):
    """Positives of the evaluated users on pins that are unknown at the cut, ascending by user and time."""

    user_P: np.ndarray
    ts_P: np.ndarray
    pin_P: np.ndarray
    """A negative number for each distinct pin, so that it differs from every pin row."""
    action_type_P: np.ndarray
    first_ts_P: np.ndarray
    """Time of the user's first action on the pin."""

    @classmethod
    def none(cls) -> "Unaskable":
        return cls(*(np.zeros(0, np.int64) for _ in cls._fields))


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
    unaskable: Unaskable = field(default_factory=Unaskable.none)
    """Positives after the cut that count as misses."""

    @cached_property
    def first_on_pin(self) -> np.ndarray:
        """Row of the user's first action on the pin of each action."""
        offsets, pin = self.timelines.offsets, self.timelines.pin
        first_A = np.empty(len(pin), np.int32 if len(pin) <= np.iinfo(np.int32).max else np.int64)
        start = 0
        while start < self.num_users:
            end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + ACTIONS_AT_ONCE, side="right")) - 1)
            rows = slice(offsets[start], offsets[end])
            user = np.repeat(np.arange(end - start), np.diff(offsets[start : end + 1]))
            key = user * (int(pin[rows].max(initial=0)) + 1) + pin[rows]
            _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
            first_A[rows] = offsets[start] + first[inverse]
            start = end
        return first_A

    def seen_pins(self, user_Q: np.ndarray, end_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (query, pin) for each distinct pin that a query's user acted on before action `end`;
        a query is its place in `user_Q`."""
        first_Q = self.timelines.offsets[user_Q]
        query, number = ragged(end_Q - first_Q)
        row = first_Q[query] + number
        is_distinct = self.first_on_pin[row] == row
        return query[is_distinct], self.timelines.pin[row[is_distinct]].astype(np.int64)

    @property
    def share_unaskable(self) -> float:
        """Share of the positives on pins that are unknown at the cut; each pin counts once for a user."""
        num_unaskable = int(is_first(self.unaskable.user_P, self.unaskable.pin_P).sum())
        return num_unaskable / max(1, len(self._askable_pins) + num_unaskable)

    @property
    def share_without_vector(self) -> float:
        """Share of the positives on pins without a content vector at the cut; each pin counts once for a user.

        If no pin has one, the share on pins that are unknown at the cut.
        """
        if not self.data.is_content_known:
            return self.share_unaskable
        pin_P = self._askable_pins
        num_unaskable = int(is_first(self.unaskable.user_P, self.unaskable.pin_P).sum())
        num_without = int(np.count_nonzero(~self.data.has_feature[pin_P])) + num_unaskable
        return num_without / max(1, len(pin_P) + num_unaskable)

    @property
    def _askable_pins(self) -> np.ndarray:
        """Pin rows of the positives that can be asked, each pin once for a user."""
        user_A = np.searchsorted(self.timelines.offsets, self.positive_A, side="right") - 1
        pin_A = self.timelines.pin[self.positive_A].astype(np.int64)
        return pin_A[is_first(user_A, pin_A)]

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
        timelines = self.timelines
        for values in (timelines.offsets, timelines.ts, self.positive_A, self.index_pin, *self.unaskable):
            content.update(np.ascontiguousarray(values, np.int64).data)
        return content.hexdigest()[:16]


def open_question(site: Site, data: TrainingSet, *, progress: Progress) -> Question:
    """Read the actions of a training set's held-out users in the days after its cut, from raw_actions.

    `promotion` in the site file limits the number of users and pins; they are drawn from a fixed seed.
    """
    limits = site.serving.promotion
    cut_ds = str(data.manifest["cut_ds"])
    days = [open_log_day(site, ds) for ds in ds_range(shift_ds(cut_ds, 1), _last_day(site, cut_ds))]
    held_out = data.held_out.user_ids()
    with_positives, counts = _users_with_positives(site, data, days, held_out)
    if not len(with_positives):
        raise PipelineError(
            f"no held-out user has a positive action after {cut_ds}: there is nothing to evaluate models with",
            "ingest the days after the cut, or choose an earlier cut",
        )
    rng = np.random.default_rng([SEED, 0x5A3])
    users = with_positives[sample_below(len(with_positives), limits.num_users, rng)]
    user_ids = held_out.take(pa.array(users))
    later, unaskable = _read_later(site, data, days, user_ids)
    command = materialize_command("offline_evaluation")
    refuse_if_changed(site, days, what="the evaluation's question", command=command)
    timelines = _joined(data.held_out, users, later)
    question = Question(
        data=data,
        user_ids=user_ids,
        timelines=timelines,
        positive_A=np.flatnonzero(timelines.is_positive & (timelines.ts >= data.cut_us)),
        index_pin=data.sample_candidates(limits.num_pins, np.random.default_rng([SEED, 0x1DE])),
        num_days=len(days),
        counts=counts,
        unaskable=unaskable,
    )
    counts |= {
        "held_out_users": len(held_out),
        "users_without_positives": len(held_out) - len(with_positives),
        "users": len(users),
        "positives": len(question.positive_A),
        "unaskable_positives": len(unaskable.user_P),
    }
    progress(
        f"{question.share_unaskable:.1%} of the positives are on pins that are unknown at the cut and count as misses "
        f"({len(unaskable.user_P):,} actions): {len(users):,} held-out users with {counts['positives']:,} positives on "
        f"other pins in the {len(days)} days after {cut_ds}, index of {question.num_pins:,} pins"
    )
    return question


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
    site: Site, data: TrainingSet, days: list[LogDay], held_out: pa.Array
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the rows of the held-out users with positives, and counts of the positives that are left out."""
    trained, found = data.train.user_ids(), np.zeros(len(held_out), bool)
    counts = {"positives_of_unknown_users": 0, "positives_with_unknown_words": 0}
    for day in days:
        for path in day.files.values():
            actions = read_parquet(path)
            actions = actions.filter(pa.array(positive_mask(actions, site.source.positive)))
            is_held_out = pc.is_in(actions["user_id"], held_out)
            is_known = pc.or_(is_held_out, pc.is_in(actions["user_id"], trained))
            counts["positives_of_unknown_users"] += pc.sum(pc.invert(is_known)).as_py() or 0
            actions = actions.filter(is_held_out)
            is_known = _has_known_words(data, actions)
            counts["positives_with_unknown_words"] += int((~is_known).sum())
            found[pc.index_in(actions["user_id"].filter(pa.array(is_known)), held_out).to_numpy()] = True
    return np.flatnonzero(found), counts


def _has_known_words(data: TrainingSet, actions: pa.Table) -> np.ndarray:
    """Return which actions have an action type and a surface that training saw."""
    action_type, surface = encode_words(actions["action_type"], data.action_types), actions["surface"]
    return np.asarray((action_type >= 0) & (encode_words(surface, data.surfaces) >= 0))


def _read_later(
    site: Site, data: TrainingSet, days: list[LogDay], user_ids: pa.Array
) -> tuple[dict[str, np.ndarray], Unaskable]:
    """Return the actions of these users after the cut, by column, with the user's place in `user_ids` as `user`; and
    their positives on unknown pins. Actions with unknown words are left out."""
    parts, unknown_pins = [], []
    for day in days:
        for path in day.files.values():
            actions = read_parquet(path, filters=pc.field("user_id").isin(user_ids))
            actions = actions.filter(pa.array(_has_known_words(data, actions)))
            part = {
                "user": pc.index_in(actions["user_id"], user_ids).to_numpy().astype(np.int64),
                "pin": find_pins(data.path / "pins" / "pin_id.arrow", actions["pin_id"].combine_chunks()),
                "ts": actions["ts"].cast(pa.int64()).to_numpy(),
                "action_type": encode_words(actions["action_type"], data.action_types),
                "surface": encode_words(actions["surface"], data.surfaces),
                "duration": actions["duration_s"].to_numpy(),
                "is_positive": positive_mask(actions, site.source.positive),
            }
            unknown_pins.append(actions["pin_id"].filter(pa.array(part["pin"] < 0)).combine_chunks())
            parts.append(part)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    encoded = pa.concat_arrays(unknown_pins).dictionary_encode()
    columns["pin"][columns["pin"] < 0] = -1 - encoded.indices.to_numpy()
    order = np.lexsort((columns["ts"], columns["user"]))
    columns = {name: values[order] for name, values in columns.items()}
    is_askable = columns["pin"] >= 0
    askable, others = ({name: values[mask] for name, values in columns.items()} for mask in (is_askable, ~is_askable))
    before = _earlier_actions(data, user_ids, encoded.dictionary)
    others["first_ts"] = _first_ts(others, before)
    names = ("user", "ts", "pin", "action_type", "first_ts")
    return askable, Unaskable(*(others[name][others["is_positive"]] for name in names))


def _earlier_actions(data: TrainingSet, user_ids: pa.Array, pin_ids: pa.Array) -> dict[str, np.ndarray]:
    """Return the first actions of these users before the cut on these pins, which the training set does not have.

    Training sets of older versions do not have them: the pins then count as new.
    """
    path = data.path / "held_out" / WITHOUT_VECTOR
    if not path.exists():
        return {name: np.zeros(0, np.int64) for name in ("user", "pin", "ts")}
    found = read_arrow(path)
    found = found.filter(pc.and_(pc.is_in(found["user_id"], user_ids), pc.is_in(found["pin_id"], pin_ids)))
    return {
        "user": pc.index_in(found["user_id"], user_ids).to_numpy().astype(np.int64),
        "pin": -1 - pc.index_in(found["pin_id"], pin_ids).to_numpy().astype(np.int64),
        "ts": found["ts"].cast(pa.int64()).to_numpy(),
    }


def _first_ts(actions: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> np.ndarray:
    """Return the time of the user's first action on the pin of each action, which may be one of those before."""
    user, pin, ts = (np.concatenate([before[name], actions[name]]) for name in ("user", "pin", "ts"))
    _, inverse = np.unique(np.stack([user, pin]), axis=1, return_inverse=True)
    first = np.full(inverse.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, inverse.ravel(), ts)
    return first[inverse.ravel()[len(before["ts"]) :]]


def _joined(held_out: Timelines, users: np.ndarray, later: dict[str, np.ndarray]) -> Timelines:
    """Return each user's actions before the cut, followed by the user's `later` ones, which are sorted by user."""
    first_U, last_U = held_out.offsets[users], held_out.offsets[users + 1]
    later_offsets = np.concatenate([[0], np.cumsum(np.bincount(later["user"], minlength=len(users)))])
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        before = np.asarray(getattr(held_out, name))
        parts = [
            part
            for user, (first, last) in enumerate(zip(first_U.tolist(), last_U.tolist(), strict=True))
            for part in (before[first:last], later[name][later_offsets[user] : later_offsets[user + 1]])
        ]
        columns[name] = np.concatenate(parts, dtype=before.dtype, casting="unsafe")
    return Timelines(offsets=np.concatenate([[0], np.cumsum(last_U - first_U)]) + later_offsets, **columns)


def is_first(*columns: np.ndarray) -> np.ndarray:
    """Return for each row whether no row before it is equal."""
    first = np.unique(np.stack(columns), axis=1, return_index=True)[1]
    result = np.zeros(len(columns[0]), bool)
    result[first] = True
    return result
