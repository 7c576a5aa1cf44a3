"""Packed pins: a pin_features partition as flat arrays on disk, memory-mapped by training and inference.

    feature.npy         float32 (pins, dim), in ascending order of pin_id; a pin is known by its row here. Zeros where a
                        pin has no content vector; dim is 0 if no pin has one
    has_feature.npy     whether each pin has a content vector
    pin_id.arrow        the ids in the same order; `lookup.find_pins` finds the row of an id
    candidates.npy      rows of the pins that Homefeed may show
    interest.npy        number of each pin's interest, in the order of first appearance
    feature_hash.npy    64-bit hash of each feature (only in packs for inference)

A training set holds a copy of its own, written by `write_pins`. Inference (embeddings.users) packs each version of
pin_features once, with `pack_pins`, and opens it in every task, with `open_pins`. Embedding the pins themselves
(embeddings.pins) streams them with `pins_by_id` and needs no files.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.engine.daily_state import Manifest, open_dataset, take_rows
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import hash_slices
from pf_core.layouts import is_current, marked
from pf_core.pins.catalogue import UNKNOWN_INTEREST
from pf_core.pins.content import norms
from pf_core.pins.features import PinManifest, pin_state
from pf_core.progress import Progress
from pf_core.schemas import id_arrow_type
from pf_core.storage.arrays import NpyFile
from pf_core.storage.cache import fetched
from pf_core.storage.files import is_remote, read_json, remove_tree, write_folder, write_json
from pf_core.storage.locks import exclusive
from pf_core.storage.retention import mark_used, time_of

PIN_BATCH_ROWS = 8192
"""Rows of every chunk but the last. `lookup` relies on all record batches of pin_id.arrow but the last being equal."""

HASH_BATCH_ROWS = 16_384
"""Features hashed at a time."""

PACKS_KEPT = 3
"""Versions of pin_features whose packs are kept for inference: the last used ones."""


# Streaming


def pins_by_id(
    dataset: lance.LanceDataset,
    columns: Sequence[str],
    *,
    only_candidates: bool = False,
    only_with_feature: bool = False,
    log_pins: pa.Array | None = None,
) -> Iterator[pa.Table]:
    """Yield the pins in ascending order of pin_id, in chunks; only the ids of all pins are held in memory.

    With `log_pins`, a pin without content vector and interest is left out unless it is one of them. `feature` is not in
    the chunks if no pin has one.
    """
    columns_of_all = ["pin_id", "is_candidate", "has_feature", *([] if log_pins is None else ["interest"])]
    known = dataset.to_table(columns=columns_of_all)
    is_wanted = np.ones(known.num_rows, bool)
    if log_pins is not None:
        is_described = pc.or_(known["has_feature"], pc.not_equal(known["interest"], UNKNOWN_INTEREST))
        is_wanted &= pc.or_(is_described, pc.is_in(known["pin_id"], value_set=log_pins)).to_numpy()
    for name, is_needed in (("is_candidate", only_candidates), ("has_feature", only_with_feature)):
        if is_needed:
            is_wanted &= known[name].to_numpy()
    rows = np.flatnonzero(is_wanted)
    rows = rows[pc.sort_indices(known["pin_id"].take(pa.array(rows))).to_numpy()]
    columns = [name for name in columns if name != "feature" or name in dataset.schema.names]
    for start in range(0, len(rows), PIN_BATCH_ROWS):
        yield take_rows(dataset, rows[start : start + PIN_BATCH_ROWS], columns)


def finite_features(pins: pa.Table, ds: str) -> np.ndarray:
    """Return the features of these pins, feature_NF, zeros where a pin has none.

    A vector whose norm is not finite is an error that names the pin: earlier versions stored them.
    """
    if "feature" not in pins.column_names:
        return np.zeros((len(pins), 0), np.float32)
    feature = pins["feature"].combine_chunks()
    values = feature.flatten().to_numpy().reshape(-1, feature.type.list_size)
    if feature.null_count:
        given, values = values, np.zeros((len(pins), feature.type.list_size), np.float32)
        values[feature.is_valid().to_numpy(zero_copy_only=False)] = given
    is_finite = np.isfinite(norms(values))
    if not is_finite.all():
        row = int(np.argmin(is_finite))
        problem = "is too long" if np.isfinite(values[row]).all() else "has a value that is not finite"
        raise PipelineError(
            f"pin_features {ds}: the feature of pin {pins['pin_id'][row].as_py()!r} {problem}",
            f"fix its vector, then: {materialize_command('pin_features', ds)}",
        )
    return np.asarray(values)


# Writing


def write_pins(
    site: Site, pins: PinManifest | Manifest, folder: Path, *, log_pins: pa.Array | None = None
) -> dict[str, int]:
    """Write the arrays of a pin_features partition to a new folder; `log_pins` as in `pins_by_id`.

    Return the numbers of pins, of candidates, and of pins with a feature.
    """
    folder.mkdir(parents=True, exist_ok=True)
    codes: dict[str, int] = {}
    dataset = open_dataset(pin_state(site).bucket_path(0), version=pins["versions"][0])
    schema = pa.schema([("pin_id", id_arrow_type(site.source.pins.pin_id.type))])
    with (
        closing(NpyFile(folder / "feature.npy", np.float32, row_shape=(pins["dim"],))) as feature,
        closing(NpyFile(folder / "has_feature.npy", np.bool_)) as has_feature,
        closing(NpyFile(folder / "candidates.npy", np.int64)) as candidates,
        closing(NpyFile(folder / "interest.npy", np.int32)) as interest,
        pa.ipc.new_file(folder / "pin_id.arrow", schema) as ids,
    ):
        num_with_feature = 0
        columns = ["pin_id", "feature", "interest", "is_candidate", "has_feature"]
        for chunk in pins_by_id(dataset, columns, log_pins=log_pins):
            values = finite_features(chunk, pins["ds"])
            candidates.append(len(feature) + np.flatnonzero(chunk["is_candidate"].to_numpy()))
            feature.append(values)
            has_feature.append(chunk["has_feature"].to_numpy())
            num_with_feature += pc.sum(chunk["has_feature"]).as_py()
            interest.append(_number_words(chunk["interest"], codes))
            ids.write_batch(pa.record_batch([chunk["pin_id"].combine_chunks()], schema=schema))
        return {"pins": len(feature), "candidates": len(candidates), "with_feature": num_with_feature}


def _number_words(words: pa.ChunkedArray, codes: dict[str, int]) -> np.ndarray:
    """Return the number of each word in the order of first appearance; new words are added to `codes`."""
    encoded = words.combine_chunks().dictionary_encode()
    number = np.array([codes.setdefault(word, len(codes)) for word in encoded.dictionary.to_pylist()], np.int32)
    return number[encoded.indices.to_numpy()]


# Packs for inference


def pack_pins(site: Site, pins: PinManifest | Manifest, progress: Progress) -> Path:
    """Return the folder with the packed pins of a pin_features partition; pack them if this version is not there.

    A pack is complete when the JSON file of its name exists; that file's time is the time of the last use.
    """
    folder = pin_state(site).root / "packed"
    name = f"v{pins['versions'][0]}"
    path, used = folder / name, folder / f"{name}.json"
    with exclusive(folder, "the packed pins"):
        if not (used.exists() and is_current("packed_pins", read_json(used))):
            progress(f"packing the features of {pins['counts']['pins']:,} pins, pin_features {pins['ds']}")
            for leftover in folder.glob("*v*"):  # of a run that was killed while it packed, or removed an old pack
                if leftover.name.startswith(".") or not leftover.with_suffix(".json").exists():
                    remove_tree(leftover)
            with write_folder(path) as partial:
                write_pins(site, pins, partial)
                _hash_features(partial)
        write_json(used, {"last_by": pins["ds"], **marked("packed_pins")})
        packs = list(folder.glob("v*.json"))
        if not is_remote(folder):
            mark_used(used, packs)
        for old in sorted((pack for pack in packs if pack != used), key=time_of)[: -(PACKS_KEPT - 1)]:
            old.unlink()
            remove_tree(old.with_suffix(""))
    return path


def _hash_features(folder: Path) -> None:
    feature = np.load(folder / "feature.npy", mmap_mode="r")
    with closing(NpyFile(folder / "feature_hash.npy", np.int64)) as file:
        for first in range(0, len(feature), HASH_BATCH_ROWS):
            rows = np.ascontiguousarray(feature[first : first + HASH_BATCH_ROWS])
            file.append(hash_slices(rows, np.arange(len(rows) + 1) * rows.shape[1] * rows.itemsize))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPins:
    """An opened pack; the arrays are memory-mapped and in the order of the pins' rows."""

    ids: Path
    """File for `lookup.find_pins`."""
    feature: np.ndarray
    """Content vectors, feature_NF; zeros where a pin has none."""
    has_feature: np.ndarray
    """Whether each pin has a content vector."""
    feature_hash: np.ndarray


def open_pins(path: Path) -> PackedPins:
    """Open a pack; one in object storage is copied to this machine's cache first."""
    path = fetched(path)
    arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ("feature", "has_feature", "feature_hash")}
    return PackedPins(ids=path / "pin_id.arrow", **arrays)
