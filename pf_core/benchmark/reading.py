"""Reading a site's log for the benchmark from raw_actions and the pins known at the cut, one bucket of users at a time.

Memory is bounded: the reader keeps 13 bytes for each action of a sampled user, and each distinct id once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.benchmark.log import Actions, BenchmarkLog, distinct_pairs, rows_of, split_askable
from pf_core.config.site import Site
from pf_core.days import ds_range, parse_ds, shift_ds
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import hashed_uniform, is_held_out
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.partition import bucket_files, ingested_days, require_manifest
from pf_core.logs.positives import positive_mask
from pf_core.logs.training_users import read_training_users
from pf_core.pins.features import pin_state, read_pin_features
from pf_core.pins.inputs import undated_catalogue_pins
from pf_core.progress import Progress, Throttle
from pf_core.schemas import id_arrow_type
from pf_core.storage.files import read_parquet

MAX_ACTIONS = 20_000_000
"""Actions up to the cut that a log may have; with more, users are sampled. As arrays they are about 300 MB."""

SAMPLE_KEY = 20_260_101
"""Key of the hash that samples users; another one than any seed that `tuning_log` is likely to get."""


def read_log(
    site: Site, *, name: str, cut_ds: str, num_days: int, progress: Progress, max_actions: int = MAX_ACTIONS
) -> BenchmarkLog:
    """Read the log of a site from raw_actions: all days up to the cut, and `num_days` days after it.

    The test users are the held-out users of the site's training set, and contenders learn from the other users, as far
    as `training.users` selects them. With more than `max_actions` actions up to the cut, a sample of the users is kept,
    by hash; the index still has the pins of all users.
    """
    days = _days_to_read(site, cut_ds, num_days)
    num_actions = sum(require_manifest(site, ds)["counts"]["kept"] for ds in days if ds <= cut_ds)
    share = min(1.0, max_actions / max(num_actions, 1))
    files = {ds: bucket_files(site, ds) for ds in days}
    reader = _Reader(site, cut_ds=cut_ds, share=share)
    throttled, num_buckets = Throttle(progress), site.timelines.num_buckets
    for bucket in range(num_buckets):
        reader.add_bucket({ds: paths[bucket] for ds, paths in files.items() if bucket in paths})
        throttled(f"benchmark: bucket {bucket + 1} of {num_buckets} is read")
    notes = []
    if share < 1:
        notes.append(
            f"{share:.1%} of the users were sampled by hash, test users too: the log has {num_actions:,} actions up to "
            f"the cut, more than {max_actions:,}."
        )
    catalogue, note = _known_pins(site, cut_ds)
    notes += [] if note is None else [note]
    log = reader.finish(name=name, num_days=num_days, catalogue=catalogue, notes=notes)
    progress(
        f"benchmark: {len(log.train.user):,} actions of {len(log.train_user_ids):,} training users, "
        f"{len(log.test_user_ids):,} test users, {len(log.pin_ids):,} pins"
    )
    return log


def _known_pins(site: Site, cut_ds: str) -> tuple[pa.Array | None, str | None]:
    """Return the pins of pin_features at the cut, with a vector or without, and a note about them."""
    known = None
    if pin_state(site).manifest(cut_ds) is not None:
        known = read_pin_features(site, cut_ds, ["pin_id"])["pin_id"].combine_chunks()
    undated = undated_catalogue_pins(site)
    if undated is not None:
        known = undated if known is None else pa.concat_arrays([undated, known.cast(undated.type)])
        return known.unique(), "The catalogue has no dates: all its pins count as known at the cut."
    if known is None:
        return None, f"pin_features has no partition {cut_ds}: the index has only pins with an action up to the cut."
    return known, None


def _days_to_read(site: Site, cut_ds: str, num_days: int) -> list[str]:
    """Return all days from the first ingested one to the last day of positives; a missing one is an error."""
    ingested, last_ds = ingested_days(site), shift_ds(cut_ds, num_days)
    if num_days < 1 or not any(cut_ds < ds <= last_ds for ds in ingested):
        raise PipelineError(
            f"raw_actions has no day after the cut {cut_ds}, so there is no positive to find",
            "choose an earlier cut, or make later days of raw_actions",
        )
    if ingested[0] > cut_ds:
        raise PipelineError(
            f"raw_actions begins with {ingested[0]}, after the cut {cut_ds}: nothing is left to learn from",
            "choose a later cut, or make earlier days of raw_actions",
        )
    days = ds_range(ingested[0], last_ds)
    missing = sorted(set(days) - set(ingested))
    if missing:
        raise PipelineError(
            f"raw_actions lacks {len(missing)} of the days {days[0]} to {last_ds}, the first is {missing[0]}",
            f"make them with: {materialize_command('raw_actions', missing[0], until=missing[-1])}",
        )
    return days


@dataclass
class _Part:
    """Actions of one kind of user, collected bucket by bucket; users and pins are codes of the reader."""

    user: list[np.ndarray] = field(default_factory=list)
    pin: list[np.ndarray] = field(default_factory=list)
    day: list[np.ndarray] = field(default_factory=list)
    is_positive: list[np.ndarray] = field(default_factory=list)

    def add(self, user: np.ndarray, pin: np.ndarray, day: np.ndarray, is_positive: np.ndarray) -> None:
        for values, each in zip(
            (self.user, self.pin, self.day, self.is_positive), (user, pin, day, is_positive), strict=True
        ):
            values.append(each)

    def joined(self, row_of_user: np.ndarray, row_of_pin: np.ndarray) -> Actions:
        """Return the actions with rows instead of codes, without those of users whose row is -1."""
        user = row_of_user[_concatenated(self.user, np.int32)]
        order = np.argsort(user, kind="stable")  # a user's actions are in one bucket, in the order of time
        order = order[np.searchsorted(user, 0, sorter=order) :]
        return Actions(
            user=user[order],
            pin=row_of_pin[_concatenated(self.pin, np.int32)[order]],
            day=_concatenated(self.day, np.int32)[order],
            is_positive=_concatenated(self.is_positive, np.bool_)[order],
        )


class _Reader:
    """Reads buckets one after the other; keeps codes of 4 bytes, and each distinct id once."""

    def __init__(self, site: Site, *, cut_ds: str, share: float) -> None:
        self._positive, self._users = site.source.positive, read_training_users(site, as_of=cut_ds)
        self._forgotten, self._cut_ds, self._share = read_deletion_list(site), cut_ds, share
        self._pin_ids = pa.array([], id_arrow_type(site.source.actions.pin_id.type))
        """Distinct pin ids in the order of first appearance: code -> id."""
        self._has_past: list[np.ndarray] = []
        """Codes of the pins that anybody acted on up to the cut."""
        self._user_ids = [pa.array([], id_arrow_type(site.source.actions.user_id.type))]
        self._is_test: list[np.ndarray] = [np.zeros(0, bool)]
        self._trains: list[np.ndarray] = [np.zeros(0, bool)]
        self._num_users = 0
        self._before, self._after = _Part(), _Part()
        self._num_positives_after = 0

    def add_bucket(self, paths: Mapping[str, Path]) -> None:
        """Read the files of one bucket, by day."""
        tables, days = [], []
        for ds, path in sorted(paths.items()):
            actions = read_parquet(path, columns=["user_id", "pin_id", "action_type", "surface", "duration_s"])
            is_positive = positive_mask(actions, self._positive)
            actions = actions.select(["user_id", "pin_id"]).append_column("is_positive", pa.array(is_positive))
            actions = actions.filter(pc.invert(pc.is_in(actions["user_id"], value_set=self._forgotten)))
            tables.append(actions)
            days.append(np.full(actions.num_rows, (parse_ds(ds) - parse_ds(self._cut_ds)).days - 1, np.int32))
        if tables:
            self._add(pa.concat_tables(tables), np.concatenate(days))

    def _add(self, actions: pa.Table, day: np.ndarray) -> None:
        users = actions["user_id"].combine_chunks().dictionary_encode()
        is_test_user = is_held_out(users.dictionary, self._users.held_out_share)
        is_sampled = hashed_uniform(users.dictionary, SAMPLE_KEY) < self._share
        user, is_positive = users.indices.to_numpy(), actions["is_positive"].to_numpy()
        pin = self._pin_codes(actions["pin_id"].combine_chunks())
        is_before = day < 0
        self._has_past.append(np.unique(pin[is_before]))
        self._num_positives_after += int((is_positive & ~is_before).sum())
        is_kept = is_sampled[user] & (is_before | (is_positive & is_test_user[user]))
        code = (user + self._num_users).astype(np.int32)
        for part, chosen in ((self._before, is_kept & is_before), (self._after, is_kept & ~is_before)):
            part.add(code[chosen], pin[chosen], day[chosen], is_positive[chosen])
        self._user_ids.append(users.dictionary)
        self._is_test.append(is_test_user)
        self._trains.append(self._users.may_train(users.dictionary))
        self._num_users += len(users.dictionary)

    def _pin_codes(self, pin_ids: pa.Array) -> np.ndarray:
        """Return the code of each pin; new pins get the next codes."""
        encoded = pin_ids.dictionary_encode()
        is_new = pc.invert(pc.is_in(encoded.dictionary, value_set=self._pin_ids))
        self._pin_ids = pa.concat_arrays([self._pin_ids, encoded.dictionary.filter(is_new)])
        code = pc.index_in(encoded.dictionary, value_set=self._pin_ids).to_numpy(zero_copy_only=False)
        return code.astype(np.int32)[encoded.indices.to_numpy()]

    def finish(self, *, name: str, num_days: int, catalogue: pa.Array | None, notes: list[str]) -> BenchmarkLog:
        """Give users and pins their rows, ascending by id; `catalogue` has the pins known at the cut."""
        pin_ids, is_cold_pin, row_of_pin = self._index(catalogue)
        user_ids, is_test = pa.concat_arrays(self._user_ids), np.concatenate(self._is_test)
        is_asked, has_past = np.zeros((2, len(user_ids)), bool)
        is_asked[_concatenated(self._after.user, np.int32)] = True
        has_past[_concatenated(self._before.user, np.int32)] = True
        self._refuse_if_useless(is_test, is_asked, num_days)
        train_user_ids, row_of_train = rows_of(user_ids, has_past & np.concatenate(self._trains))
        if self._users.selection is not None:
            notes = [
                *notes,
                f"training.users selects the users who may be learned from: every contender learns from "
                f"{len(train_user_ids):,} of the {int((has_past & ~is_test).sum()):,} users who are not test users.",
            ]
        test_user_ids, row_of_test = rows_of(user_ids, is_asked)
        if len(train_user_ids) == 0:
            notes = [*notes, "No training user has an action up to the cut: nothing can be learned from others."]
        positive = self._after.joined(row_of_test, np.arange(len(self._pin_ids), dtype=np.int32))
        user_P, code_P = distinct_pairs(positive.user, positive.pin, num_pins=len(self._pin_ids))
        user, pin, num_unaskable = split_askable(user_P, row_of_pin[code_P], num_users=len(test_user_ids))
        return BenchmarkLog(
            name=name,
            cut_ds=self._cut_ds,
            num_days=num_days,
            pin_ids=pin_ids,
            is_cold_pin=is_cold_pin,
            train_user_ids=train_user_ids,
            train=self._before.joined(row_of_train, row_of_pin),
            test_user_ids=test_user_ids,
            past=self._before.joined(row_of_test, row_of_pin),
            positive_user_P=user,
            positive_pin_P=pin,
            num_unaskable_U=num_unaskable,
            notes=tuple(notes),
        )

    def _index(self, catalogue: pa.Array | None) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """Return the ids of the index, which of them are cold, and the row of each code (-1: not in the index)."""
        is_known = np.zeros(len(self._pin_ids), bool)
        is_known[_concatenated(self._has_past, np.int32)] = True
        acted_on = self._pin_ids.filter(pa.array(is_known))
        pin_ids = acted_on if catalogue is None else pa.concat_arrays([acted_on, catalogue.cast(acted_on.type)])
        pin_ids = pin_ids.unique()
        pin_ids = pin_ids.take(pc.sort_indices(pin_ids))
        is_cold_pin = ~pc.is_in(pin_ids, value_set=acted_on).to_numpy(zero_copy_only=False)
        row = pc.index_in(self._pin_ids, value_set=pin_ids).fill_null(-1).to_numpy(zero_copy_only=False)
        return pin_ids, is_cold_pin, row.astype(np.int32)

    def _refuse_if_useless(self, is_test: np.ndarray, is_asked: np.ndarray, num_days: int) -> None:
        days = f"the {num_days} days after the cut {self._cut_ds}"
        if self._num_positives_after == 0:
            raise PipelineError(
                f"no action in {days} is positive, so there is nothing to find",
                "fix source.positive in the site file, or choose another cut",
            )
        if not is_test.any():
            raise PipelineError(
                f"none of the {self._num_users:,} users is held out, so there is no test user",
                f"raise training.held_out_share in the site file, which is {self._users.held_out_share}",
            )
        if not is_asked.any():
            raise PipelineError(
                f"none of the {int(is_test.sum()):,} held-out users has a positive action in {days}, so there is no "
                "test user",
                "raise training.held_out_share in the site file, or choose another cut",
            )


def _concatenated(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])
