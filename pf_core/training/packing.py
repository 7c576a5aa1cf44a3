"""Timelines and pins to flat arrays: the files of a training set, written within the memory of one bucket.

Pins are appended in the order of their ids, a chunk at a time. Workers pack one bucket each, with the words (action
types and surfaces) that it has; when all words are known, the parts are joined bucket by bucket. The order of pins and
users follows from their ids alone, so that the same data gives the same bytes, however its partitions came about.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.hashing import is_held_out
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.positives import positive_mask
from pf_core.pins.lookup import find_pins
from pf_core.schemas import TIMELINE_LISTS, id_arrow_type
from pf_core.storage.arrays import NpyFile, read_arrow
from pf_core.storage.cache import fetched
from pf_core.storage.files import remove_tree, write_file
from pf_core.timelines.arrays import encode_words
from pf_core.timelines.build import read_bucket, timeline_state

WORDS = ("action_type", "surface")

SPLITS = ("train", "held_out")


# Buckets


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    bucket: int
    part: Path
    pin_ids: Path
    forgotten: pa.Array
    site: Site
    cut_ds: str


def _part_dir(build: Path, bucket: int) -> Path:
    return build / "parts" / f"bucket-{bucket:05d}"


def pack_buckets(
    build: Path, site: Site, cut_ds: str, *, engine: Engine, progress: Callable[[str], None]
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Write every bucket's part; returns counts, and the sorted words of the actions of users who train."""
    forgotten = read_deletion_list(site)
    tasks = [
        _BucketTask(
            bucket=bucket,
            part=_part_dir(build, bucket),
            pin_ids=build / "pins" / "pin_id.arrow",
            forgotten=forgotten,
            site=site,
            cut_ds=cut_ds,
        )
        for bucket in range(site.timelines.num_buckets)
    ]
    counts = {"users": 0, "users_forgotten": 0, "no_feature": 0}
    words: dict[str, set[str]] = {name: set() for name in WORDS}
    for num_done, result in enumerate(engine.map_buckets(_pack_bucket, tasks, progress), 1):
        counts = {name: number + result[name] for name, number in counts.items()}
        words = {name: known.union(result[name]) for name, known in words.items()}
        if num_done * 10 // len(tasks) > (num_done - 1) * 10 // len(tasks):  # ten lines at most
            progress(f"training_set: {num_done} of {len(tasks)} buckets packed")
    return counts, {name: sorted(known) for name, known in words.items()}


def _pack_bucket(task: _BucketTask) -> dict[str, Any]:
    """Write the bucket's users, and those of its actions whose pin has a feature."""
    timelines = read_bucket(timeline_state(task.site), task.cut_ds, task.bucket)
    is_forgotten = pc.is_in(timelines["user_id"], value_set=task.forgotten)
    timelines = timelines.filter(pc.invert(is_forgotten)).sort_by("user_id")
    actions = pa.table({name: pc.list_flatten(timelines[name]) for name in TIMELINE_LISTS})
    pin = find_pins(fetched(task.pin_ids), actions["pin_id"].combine_chunks())
    user = np.repeat(np.arange(timelines.num_rows), pc.list_value_length(timelines["ts"]).to_numpy())
    actions = actions.append_column("pin", pa.array(pin)).append_column("user", pa.array(user))
    actions = actions.drop_columns(["pin_id"]).filter(pa.array(pin >= 0)).unify_dictionaries()
    actions = actions.append_column("is_positive", pa.array(positive_mask(actions, task.site.source.positive)))
    cut_us = ds_start_us(shift_ds(task.cut_ds, 1))
    assert not pc.any(pc.greater_equal(actions["ts"].cast(pa.int64()), cut_us)).as_py()
    held_out = is_held_out(timelines["user_id"].combine_chunks(), task.site.training.held_out_share)
    users = timelines.select(["user_id"]).append_column("is_held_out", pa.array(held_out))
    trains = actions.filter(pa.array(~held_out[actions["user"].to_numpy()]))
    for name, table in (("users", users), ("actions", actions)):
        with write_file(task.part / f"{name}.arrow") as path, pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return {
        "users": users.num_rows,
        "users_forgotten": pc.sum(is_forgotten).as_py() or 0,
        "no_feature": int((pin < 0).sum()),
        **{name: trains[name].unique().to_pylist() for name in WORDS},
    }


def join_buckets(
    build: Path, target: Path, site: Site, *, num_pins: int, vocabularies: dict[str, list[str]]
) -> tuple[dict[str, dict[str, int]], int | None]:
    """Append a build's parts to the files of both splits in `target`; returns counts, and the first time in train.

    The counts are those of each split, and of the actions that are dropped, by reason.
    """
    dropped = dict.fromkeys((f"unknown_{name}" for name in vocabularies), 0)
    pin_dtype = np.int32 if num_pins <= np.iinfo(np.int32).max else np.int64
    with ExitStack() as stack:
        splits = [stack.enter_context(closing(_Split(target / name, site, pin_dtype))) for name in SPLITS]
        for bucket in range(site.timelines.num_buckets):
            part = _part_dir(build, bucket)
            local = fetched(part)
            users, actions = (read_arrow(local / f"{name}.arrow") for name in ("users", "actions"))
            columns = {name: actions[name].to_numpy() for name in ("user", "pin", "is_positive")}
            columns["ts"] = actions["ts"].cast(pa.int64()).to_numpy()
            columns["duration"] = actions["duration_s"].to_numpy()
            is_known = np.ones(actions.num_rows, bool)
            for name, vocabulary in vocabularies.items():
                columns[name] = encode_words(actions[name], vocabulary)
                dropped[f"unknown_{name}"] += int((is_known & (columns[name] < 0)).sum())
                is_known &= columns[name] >= 0
            held_out = users["is_held_out"].to_numpy()
            for split, is_member in zip(splits, (~held_out, held_out), strict=True):
                is_kept = is_known & is_member[columns["user"]]
                split.append(users["user_id"], {name: values[is_kept] for name, values in columns.items()})
            remove_tree(part)
    counts = {name: split.counts for name, split in zip(SPLITS, splits, strict=True)}
    return counts | {"dropped": dropped}, splits[0].first_us


class _Split:
    """The files of one split."""

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
        self.counts = {"users": 0, "actions": 0, "positives": 0}
        self.first_us: int | None = None

    def append(self, user_ids: pa.ChunkedArray, columns: dict[str, np.ndarray]) -> None:
        """Actions in the order of `user`, a position in user_ids; a user without any is left out."""
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
