"""From timelines to flat arrays: the files of both splits of a training set, written in the memory of one bucket.

Workers pack one bucket each and return its words (action types and surfaces). When the vocabularies are complete, the
parts are encoded and joined, bucket by bucket. The order of the users depends only on their ids, so that the same data
gives the same bytes, no matter how its partitions were built.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.config.source import Positive
from pf_core.days import ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay
from pf_core.hashing import is_held_out
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.positives import positive_mask
from pf_core.logs.training_users import TrainingUsers
from pf_core.pins.lookup import find_pins
from pf_core.progress import Progress, Throttle
from pf_core.schemas import TIMELINE_LISTS, id_arrow_type
from pf_core.storage.arrays import NpyFile, read_arrow
from pf_core.storage.cache import fetched
from pf_core.storage.files import remove_tree, write_file
from pf_core.timelines.arrays import encode_words
from pf_core.timelines.build import StoredTimelines, TimelineManifest, stored_timelines

WITHOUT_VECTOR = "without_vector.arrow"
"""File of the held-out users' pins that pin_features does not have: user_id, pin_id, and ts, the time of the first
action on it. An evaluation needs them to know what is new to a user."""


class Vocabularies(TypedDict):
    """Words of the actions of the users who train, sorted; the position of a word is its code."""

    action_type: list[str]
    surface: list[str]


class SplitCounts(TypedDict):
    users: int
    actions: int
    positives: int


class SelectionCounts(TypedDict):
    """What `training.users` makes of the users with a timeline."""

    selected: int
    """Users who are selected, held out or not; all users without `training.users`."""
    others: int
    held_out_others: int
    """How many of the others are held out: they are in the set, to judge models."""


class PackedBucket(TypedDict):
    """What a worker returns after packing a bucket."""

    users: int
    users_forgotten: int
    """Users on the deletion list."""
    selection: SelectionCounts
    no_feature: int
    """Actions on pins that pin_features does not have."""
    held_out_no_feature: int
    """Actions of held-out users on such pins."""
    vocabularies: Vocabularies


class JoinedBuckets(TypedDict):
    """What the files of both splits hold."""

    train: SplitCounts
    held_out: SplitCounts
    unknown_action_type: int
    """Actions of held-out users with an action type that no training user has."""
    unknown_surface: int
    first_us: int | None
    """Time of the first action in train."""


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    """The fields of the site that packing reads: a whole site would carry its secrets into every Spark task."""

    bucket: int
    part: Path
    pin_ids: Path
    forgotten: pa.Array
    timelines: StoredTimelines
    positive: Positive
    users: TrainingUsers
    cut_ds: str


def _part_dir(build: Path, bucket: int) -> Path:
    return build / "parts" / f"bucket-{bucket:05d}"


def pack_buckets(
    build: Path,
    site: Site,
    timelines: StateDay[TimelineManifest],
    *,
    users: TrainingUsers,
    engine: Engine,
    progress: Progress,
) -> PackedBucket:
    """Write the part of every bucket; return the sums of their counts, and the vocabularies of all of them."""
    forgotten = read_deletion_list(site)
    tasks = [
        _BucketTask(
            bucket=bucket,
            part=_part_dir(build, bucket),
            pin_ids=build / "pins" / "pin_id.arrow",
            forgotten=forgotten,
            timelines=stored_timelines(timelines, bucket),
            positive=site.source.positive,
            users=users,
            cut_ds=timelines.manifest["ds"],
        )
        for bucket in range(timelines.state.num_buckets)
    ]
    throttled = Throttle(progress)
    parts: list[PackedBucket] = []
    for part in engine.map_buckets(_pack_bucket, tasks, progress):
        parts.append(part)
        throttled(f"training_set: {len(parts)} of {len(tasks)} buckets packed")
    progress(f"training_set: all {len(tasks)} buckets packed")
    words = [part["vocabularies"] for part in parts]
    return {
        "users": sum(part["users"] for part in parts),
        "users_forgotten": sum(part["users_forgotten"] for part in parts),
        "selection": {
            "selected": sum(part["selection"]["selected"] for part in parts),
            "others": sum(part["selection"]["others"] for part in parts),
            "held_out_others": sum(part["selection"]["held_out_others"] for part in parts),
        },
        "no_feature": sum(part["no_feature"] for part in parts),
        "held_out_no_feature": sum(part["held_out_no_feature"] for part in parts),
        "vocabularies": {
            "action_type": sorted({word for known in words for word in known["action_type"]}),
            "surface": sorted({word for known in words for word in known["surface"]}),
        },
    }


def _pack_bucket(task: _BucketTask) -> PackedBucket:
    """Write the users who train or are held out, and their actions on pins that the set has."""
    timelines = task.timelines.read()
    is_forgotten = pc.is_in(timelines["user_id"], value_set=task.forgotten)
    timelines = timelines.filter(pc.invert(is_forgotten))
    selected = task.users.are_selected(timelines["user_id"])
    held_out = is_held_out(timelines["user_id"].combine_chunks(), task.users.held_out_share)
    counts: SelectionCounts = {
        "selected": int(selected.sum()),
        "others": int((~selected).sum()),
        "held_out_others": int((held_out & ~selected).sum()),
    }
    timelines = timelines.filter(pa.array(selected | held_out)).sort_by("user_id")
    actions = pa.table({name: pc.list_flatten(timelines[name]) for name in TIMELINE_LISTS})
    pin = find_pins(fetched(task.pin_ids), actions["pin_id"].combine_chunks())
    user = np.repeat(np.arange(timelines.num_rows), pc.list_value_length(timelines["ts"]).to_numpy())
    held_out = is_held_out(timelines["user_id"].combine_chunks(), task.users.held_out_share)
    is_without_vector = (pin < 0) & held_out[user]
    without_vector = _first_actions(
        timelines["user_id"].take(pa.array(user[is_without_vector])),
        actions.select(["pin_id", "ts"]).filter(pa.array(is_without_vector)),
    )
    actions = actions.append_column("pin", pa.array(pin)).append_column("user", pa.array(user))
    actions = actions.drop_columns(["pin_id"]).filter(pa.array(pin >= 0)).unify_dictionaries()
    actions = actions.append_column("is_positive", pa.array(positive_mask(actions, task.positive)))
    cut_us = ds_start_us(shift_ds(task.cut_ds, 1))
    assert not pc.any(pc.greater_equal(actions["ts"].cast(pa.int64()), cut_us)).as_py()
    users = timelines.select(["user_id"]).append_column("is_held_out", pa.array(held_out))
    trains = actions.filter(pa.array(~held_out[actions["user"].to_numpy()]))
    for name, table in (("users.arrow", users), ("actions.arrow", actions), (WITHOUT_VECTOR, without_vector)):
        with write_file(task.part / name) as path, pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return {
        "users": users.num_rows,
        "users_forgotten": pc.sum(is_forgotten).as_py() or 0,
        "selection": counts,
        "no_feature": int((pin < 0).sum()),
        "held_out_no_feature": int(is_without_vector.sum()),
        "vocabularies": {
            "action_type": trains["action_type"].unique().to_pylist(),
            "surface": trains["surface"].unique().to_pylist(),
        },
    }


def _first_actions(user_id: pa.ChunkedArray, actions: pa.Table) -> pa.Table:
    """Return the time of each user's first action on each pin, sorted by user and pin."""
    actions = actions.append_column("user_id", user_id)
    first = actions.group_by(["user_id", "pin_id"]).aggregate([("ts", "min")]).rename_columns({"ts_min": "ts"})
    return first.select(["user_id", "pin_id", "ts"]).sort_by([("user_id", "ascending"), ("pin_id", "ascending")])


def join_buckets(build: Path, target: Path, site: Site, *, num_pins: int, vocabularies: Vocabularies) -> JoinedBuckets:
    """Append the parts of a build to the files of both splits in `target`, and count what they hold.

    Actions with an unknown word are dropped (paper, section 3.1).
    """
    num_unknown = {"action_type": 0, "surface": 0}
    pin_dtype = np.int32 if num_pins <= np.iinfo(np.int32).max else np.int64
    with ExitStack() as stack:
        train, held_out = (
            stack.enter_context(closing(_Split(target / name, site, pin_dtype))) for name in ("train", "held_out")
        )
        without_vector = None
        for bucket in range(site.timelines.num_buckets):
            part = _part_dir(build, bucket)
            local = fetched(part)
            first_actions = read_arrow(local / WITHOUT_VECTOR)
            if without_vector is None:
                file = target / "held_out" / WITHOUT_VECTOR
                without_vector = stack.enter_context(pa.ipc.new_file(file, first_actions.schema))
            without_vector.write_table(first_actions)
            users, actions = (read_arrow(local / f"{name}.arrow") for name in ("users", "actions"))
            columns = {name: actions[name].to_numpy() for name in ("user", "pin", "is_positive")}
            columns["ts"] = actions["ts"].cast(pa.int64()).to_numpy()
            columns["duration"] = actions["duration_s"].to_numpy()
            is_known = np.ones(actions.num_rows, bool)
            for name, vocabulary in (
                ("action_type", vocabularies["action_type"]),
                ("surface", vocabularies["surface"]),
            ):
                columns[name] = encode_words(actions[name], vocabulary)
                num_unknown[name] += int((is_known & (columns[name] < 0)).sum())  # an action counts once
                is_known &= columns[name] >= 0
            user_is_held_out = users["is_held_out"].to_numpy()
            for split, is_member in ((train, ~user_is_held_out), (held_out, user_is_held_out)):
                is_kept = is_known & is_member[columns["user"]]
                split.append(users["user_id"], {name: values[is_kept] for name, values in columns.items()})
            remove_tree(part)
    return {
        "train": train.counts,
        "held_out": held_out.counts,
        "unknown_action_type": num_unknown["action_type"],
        "unknown_surface": num_unknown["surface"],
        "first_us": train.first_us,
    }


class _Split:
    """The files of one split, written by appending."""

    def __init__(self, folder: Path, site: Site, pin_dtype: npt.DTypeLike) -> None:
        folder.mkdir()
        self._schema = pa.schema([("user_id", id_arrow_type(site.source.actions.user_id.type))])
        self._user_ids = pa.ipc.new_file(folder / "user_id.arrow", self._schema)
        dtypes: dict[str, npt.DTypeLike] = {
            "pin": pin_dtype,
            "ts": np.int64,
            "action_type": np.int16,
            "surface": np.int16,
            "duration": np.float32,
            "is_positive": np.bool_,
        }
        self._arrays = {name: NpyFile(folder / f"{name}.npy", dtype) for name, dtype in dtypes.items()}
        self._offsets = NpyFile(folder / "offsets.npy", np.int64)
        self._offsets.append(np.zeros(1, np.int64))
        self.counts: SplitCounts = {"users": 0, "actions": 0, "positives": 0}
        self.first_us: int | None = None

    def append(self, user_ids: pa.ChunkedArray, columns: dict[str, np.ndarray]) -> None:
        """Append actions, sorted by `user`, which is a position in user_ids; users without an action are left out."""
        num_actions = np.bincount(columns["user"], minlength=len(user_ids))
        ids = user_ids.filter(pa.array(num_actions > 0)).combine_chunks()
        self._user_ids.write_batch(pa.record_batch([ids], schema=self._schema))
        self._offsets.append(self.counts["actions"] + np.cumsum(num_actions[num_actions > 0]))
        for name, array in self._arrays.items():
            array.append(columns[name])
        if len(ids):
            first_us = int(columns["ts"].min())
            self.first_us = first_us if self.first_us is None else min(self.first_us, first_us)
        self.counts["users"] += len(ids)
        self.counts["actions"] += len(columns["user"])
        self.counts["positives"] += int(columns["is_positive"].sum())

    def close(self) -> None:
        for file in (*self._arrays.values(), self._offsets, self._user_ids):
            file.close()
