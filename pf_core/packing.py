"""Timelines and pins to flat arrays: the files of a training set, written within the memory of one bucket.

Pins are appended in the order of their ids, a chunk at a time. Workers pack one bucket each, with the words (action
types and surfaces) that it has; when all words are known, the parts are joined bucket by bucket. The order of pins and
users follows from their ids alone, so that the same data gives the same bytes, however its partitions came about.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.contracts import TIMELINE_LISTS, PipelineError, ds_start_us, id_arrow_type, shift_ds
from pf_core.copies import fetched
from pf_core.engine import Engine
from pf_core.pin_features import pin_state
from pf_core.pin_lookup import find_pins
from pf_core.raw_actions import positive_mask, read_deletion_list
from pf_core.shuffle import bucket_of
from pf_core.site import Site
from pf_core.state import Manifest, open_dataset, take_rows
from pf_core.storage import remove_tree, written
from pf_core.timelines import read_bucket

WORDS = ("action_type", "surface")
SPLITS = ("train", "held_out")
HASH_SHARES = 10_000
"""A share of the users is counted in ten-thousandths."""
PIN_BATCH_ROWS = 8192
"""Of every chunk but the last: who looks pins up counts on it."""


def is_held_out(user_ids: pa.Array, share: float) -> np.ndarray:
    """Which users training never sees: by hash of the id, so that a user is held out of every set or of none."""
    return bucket_of(user_ids, HASH_SHARES) < round(share * HASH_SHARES)


class NpyFile:
    """An .npy file that grows by appending; its header is written again at the end, when the length is known."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, *, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype, self._row_shape = np.dtype(dtype), row_shape
        self._length = 0
        self._file = path.open("wb")
        self._write_header()

    def __len__(self) -> int:
        return self._length

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """numpy pads it so that its size does not depend on the number of rows."""
        shape = (self._length, *self._row_shape)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        )


def read_arrow(path: Path) -> pa.Table:
    """An Arrow IPC file, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


# Pins


def pins_by_id(
    dataset: lance.LanceDataset, columns: Sequence[str], *, only_candidates: bool = False
) -> Iterator[pa.Table]:
    """Pins in the order of their ids, a chunk at a time; of all of them, only the ids are in memory."""
    known = dataset.to_table(columns=["pin_id", "is_candidate"])
    is_wanted = known["is_candidate"].to_numpy() if only_candidates else np.ones(known.num_rows, bool)
    rows = np.flatnonzero(is_wanted)
    rows = rows[pc.sort_indices(known["pin_id"].take(pa.array(rows))).to_numpy()]
    for start in range(0, len(rows), PIN_BATCH_ROWS):
        yield take_rows(dataset, rows[start : start + PIN_BATCH_ROWS], columns)


def finite_features(pins: pa.Table, ds: str) -> np.ndarray:
    """The features of these pins, feature_NF; a value that is not finite is an error that names the pin."""
    values = pins["feature"].combine_chunks().flatten().to_numpy().reshape(len(pins), -1)
    is_finite = np.isfinite(values).all(axis=1)
    if not is_finite.all():
        pin_id = pins["pin_id"][int(np.argmin(is_finite))].as_py()
        raise PipelineError(
            f"pin_features {ds}: the feature of pin {pin_id!r} has a value that is not finite. "
            f"Mend its vector, then: {command('pin_features', ds)}"
        )
    return np.asarray(values)


def write_pins(site: Site, pins: Manifest, folder: Path) -> dict[str, int]:
    """Write features, ids, interests and candidates of a pin_features partition by pin id; returns the counts."""
    folder.mkdir(parents=True)
    codes: dict[str, int] = {}
    dataset = open_dataset(pin_state(site).bucket_path(0), version=pins["versions"][0])
    schema = pa.schema([("pin_id", id_arrow_type(site.source.pins.pin_id.type))])
    with (
        closing(NpyFile(folder / "feature.npy", np.float32, row_shape=(pins["dim"],))) as feature,
        closing(NpyFile(folder / "candidates.npy", np.int64)) as candidates,
        closing(NpyFile(folder / "interest.npy", np.int32)) as interest,
        pa.ipc.new_file(folder / "pin_id.arrow", schema) as ids,
    ):
        for chunk in pins_by_id(dataset, ["pin_id", "feature", "interest", "is_candidate"]):
            values = finite_features(chunk, pins["ds"])
            candidates.append(len(feature) + np.flatnonzero(chunk["is_candidate"].to_numpy()))
            feature.append(values)
            interest.append(_number_words(chunk["interest"], codes))
            ids.write_batch(pa.record_batch([chunk["pin_id"].combine_chunks()], schema=schema))
        return {"pins": len(feature), "candidates": len(candidates)}


def _number_words(words: pa.ChunkedArray, codes: dict[str, int]) -> np.ndarray:
    """Each word's number in the order of first sight; `codes` grows by what is new."""
    encoded = words.combine_chunks().dictionary_encode()
    number = np.array([codes.setdefault(word, len(codes)) for word in encoded.dictionary.to_pylist()], np.int32)
    return number[encoded.indices.to_numpy()]


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
    timelines = read_bucket(task.site, task.cut_ds, task.bucket)
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
        with written(task.part / f"{name}.arrow") as path, pa.ipc.new_file(path, table.schema) as writer:
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


def encode_words(words: pa.ChunkedArray, vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """The position of each word, -1 if the vocabulary, or the part of it that is asked for, does not have it."""
    encoded = words.unify_dictionaries().combine_chunks()
    code = recode(encoded.dictionary.to_pylist(), vocabulary, of=of)
    return code[encoded.indices.to_numpy()]


def recode(words: Sequence[str], vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """By word, its position in the vocabulary; -1 if that, or the part of it that is asked for, does not have it."""
    codes = {word: code for code, word in enumerate(vocabulary) if of is None or word in of}
    return np.array([codes.get(word, -1) for word in words], np.int16)


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


def command(asset: str, ds: str | None = None) -> str:
    """What the user types to make an asset's partition."""
    partition = "" if ds is None else f" --partition {ds}"
    return f"dagster asset materialize --select {asset}{partition} -m pf_assets.definitions"
