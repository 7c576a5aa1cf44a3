"""pin_index: a day's candidate pins in an HNSW graph, which finds the pins nearest to a user (paper, section 3.6).

A build is a folder with `pins.arrow` (pin_id and interest, sorted by pin_id), one graph for each shard that has pins
(`shard-00000.hnsw`), and `index.json`, its manifest. A pin's label is its row in pins.arrow; its shard is the hash of
its id. This module reads and searches an index, `build_index.py` makes it. A service keeps the shards that it has
searched in memory.
"""

import bisect
import contextlib
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import hnswlib
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, combined
from pf_core.layouts import refuse_other_layout
from pf_core.storage.arrays import read_arrow
from pf_core.storage.builds import MANIFEST
from pf_core.storage.cache import fetched
from pf_core.storage.files import find_json, read_json

DESCRIPTION = "index.json"

PINS = "pins.arrow"

SPACE = "ip"
"""hnswlib's name for the inner product."""

SCORES_AT_ONCE = 1 << 24
"""Number of scores in memory at a time where all pins are scored without the graph."""

Hits = tuple[np.ndarray, np.ndarray]
"""label_BK (int64) and score_BK (float32), best first."""


# Manifests


class IndexInputs(TypedDict):
    pin_embeddings: str
    """Digest of the day's pin_embeddings."""
    snapshot: str
    """Digest of the day's user_embedding_snapshot, whose users judge the index."""
    parameters: dict[str, Any]


class IndexCounts(TypedDict):
    pins: int


class TriedEf(TypedDict):
    ef: int
    recall_at_10: float
    queries_per_s: float


class GraphManifest(TypedDict):
    """What is known of an index when its pins are linked, before it is judged."""

    layout: NotRequired[int]
    """Not in manifests of earlier versions, which are of layout 1."""
    ds: str
    build: str
    """Name of the build's folder in the partition."""
    model_version: str
    vectors_of: NotRequired[list[str]]
    """Distinct models that the rows of the linked vectors name; absent in an index of an older version."""
    embedding_dim: int
    digest: str
    inputs: IndexInputs
    graph: str
    """Digest of the pins and of the linking parameters; days with the same one share their graph files."""
    space: str
    links: int
    ef_construction: int
    num_shards: int
    pins_of_shard: list[int]
    counts: IndexCounts


class IndexQuality(TypedDict):
    """What was measured when the index was judged."""

    ef: int
    """Number of candidates that a search keeps; the smallest one tried that reaches the target. The number of all pins,
    if none does: then every search scores all of them."""
    recall_at_10: float
    judged_users: int
    """Number of users whose results were compared with exact search."""
    ef_tried: list[TriedEf]


class IndexManifest(GraphManifest, IndexQuality):
    """Content of `index.json` and of the partition's manifest."""

    seconds: float


def scores_all(manifest: IndexManifest) -> bool:
    """Return whether every search scores all pins, because the graph does not find enough."""
    return bool(manifest["ef"] > manifest["inputs"]["parameters"]["max_ef"])


def describe_search(manifest: IndexManifest) -> str:
    """Return how the pins are found, as the end of a sentence."""
    if not scores_all(manifest):
        return f"at ef {manifest['ef']}"
    before = manifest["ef_tried"][-2]
    return f"by scoring all pins (the graph finds {before['recall_at_10']:.1%} at ef {before['ef']})"


# Searching


class PinIndex:
    """Finds the pins nearest to a vector, by inner product. Thread-safe; loads a shard when it is first searched."""

    def __init__(self, folder: Path, description: IndexManifest) -> None:
        pins = read_arrow(fetched(folder / PINS))
        self.folder, self.description = folder, description
        self.pin_ids: pa.ChunkedArray = pins["pin_id"]
        self.interests: pa.ChunkedArray = pins["interest"]
        self._ids: pa.Array | None = None
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "PinIndex":
        """Open the index in a build's folder, or in a copy of one."""
        if not (folder / DESCRIPTION).is_file():
            raise PipelineError(f"no pin index in {folder}", f"make it with: {materialize_command('pin_index', 'DAY')}")
        description: IndexManifest = read_json(folder / DESCRIPTION)
        command = materialize_command("pin_index", "DAY")
        refuse_other_layout("pin_index", description, what=f"the pin index in {folder}", command=command)
        return cls(folder, description)

    def __len__(self) -> int:
        return len(self.pin_ids)

    def search(self, vectors_BD: np.ndarray, k: int) -> Hits:
        """Return the labels and scores of the k pins with the largest score for each vector, best first, ties by label.

        An index of fewer than k pins returns all of them.
        """
        vectors_BD = np.ascontiguousarray(vectors_BD, np.float32)
        dim = self.description["embedding_dim"]
        if vectors_BD.ndim != 2 or vectors_BD.shape[1] != dim:
            raise ValueError(f"vectors of shape {vectors_BD.shape}: the index has rows of {dim}")
        shards = used_shards(self.description["pins_of_shard"])
        return merge_hits([self._shard(number).search(vectors_BD, k) for number in shards], k)

    def vectors(self, labels: np.ndarray) -> np.ndarray:
        """Return the embeddings of the pins with these labels, float32."""
        labels = np.asarray(labels, np.int64)
        num_shards = self.description["num_shards"]
        shard_N = bucket_of(self.ids_of(labels), num_shards) if num_shards > 1 else np.zeros(len(labels), np.int64)
        vectors = np.empty((len(labels), self.description["embedding_dim"]), np.float32)
        for number in np.unique(shard_N):
            rows = np.flatnonzero(shard_N == number)
            vectors[rows] = self._shard(int(number)).graph.get_items(labels[rows])
        return vectors

    def row_of(self, pin_id: int | str) -> int | None:
        """Return the label of a pin, or None if it is not in the index. An id of another type is refused."""
        is_int = pa.types.is_integer(self.pin_ids.type)
        if not isinstance(pin_id, (int, np.integer) if is_int else str) or isinstance(pin_id, bool):
            raise PipelineError(f"pin ids of this site are of type {self.pin_ids.type}, not {type(pin_id).__name__}")
        row = bisect.bisect_left(range(len(self)), pin_id, key=lambda label: self.pin_ids[label].as_py())
        return row if row < len(self) and self.pin_ids[row].as_py() == pin_id else None

    def rows_of(self, pin_ids: pa.Array) -> np.ndarray:
        """Return the label of each pin, -1 for a pin that is not in the index."""
        if not len(pin_ids) or not len(self):
            return np.full(len(pin_ids), -1)
        ids, wanted = self._all_ids(), pin_ids.cast(self._all_ids().type)
        if pa.types.is_integer(ids.type):
            label_N = np.searchsorted(ids.to_numpy(), wanted.to_numpy())
        else:
            label_N = _lower_bounds(ids, wanted)
        label_N = np.minimum(label_N, len(ids) - 1)
        return np.where(pc.equal(ids.take(pa.array(label_N)), wanted).to_numpy(zero_copy_only=False), label_N, -1)

    def ids_of(self, labels: np.ndarray) -> pa.Array:
        """Return the ids of the pins with these labels."""
        return self._all_ids().take(pa.array(labels, pa.int64())).cast(self.pin_ids.type)

    def _all_ids(self) -> pa.Array:
        """Return the ids in one array, which is made when it is first used; strings with 64-bit offsets."""
        with self._lock:
            if self._ids is None:
                is_integer = pa.types.is_integer(self.pin_ids.type)
                self._ids = combined(self.pin_ids if is_integer else self.pin_ids.cast(pa.large_string()))
            return self._ids

    def _shard(self, number: int) -> "Shard":
        with self._lock:
            if number not in self._shards:
                self._shards[number] = load_shard(self.folder, self.description, number, ef=self.description["ef"])
            return self._shards[number]


def _lower_bounds(ids: pa.Array, wanted: pa.Array) -> np.ndarray:
    """Return the first row of the ascending ids that is not less than each of the wanted ones; all searched at once."""
    low_N, width = np.zeros(len(wanted), np.int64), len(ids)
    while width:  # the result is in the `width` rows from low, or right after them
        half = (width + 1) // 2
        is_less_N = pc.less(ids.take(pa.array(low_N + half - 1)), wanted)
        low_N += half * is_less_N.to_numpy(zero_copy_only=False)
        width -= half
    return low_N


class Shard:
    """The graph of a shard in memory. If a search would visit nearly all of its pins, all of them are scored instead,
    which takes their vectors in memory once more."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def search(self, vectors_BD: np.ndarray, k: int) -> Hits:
        if self.graph.get_current_count() > max(self.graph.ef, k):
            with contextlib.suppress(RuntimeError):  # hnswlib's only sign that fewer than k pins can be reached
                label_BK, distance_BK = self.graph.knn_query(vectors_BD, k=k)
                return label_BK.astype(np.int64), 1 - distance_BK
        return self._score_all(vectors_BD, k)

    def _score_all(self, vectors_BD: np.ndarray, k: int) -> Hits:
        label_N, vector_ND = self._everything
        k = min(k, len(label_N))
        label_BK = np.empty((len(vectors_BD), k), np.int64)
        score_BK = np.empty((len(vectors_BD), k), np.float32)
        step = max(1, SCORES_AT_ONCE // len(label_N))
        for start in range(0, len(vectors_BD), step):
            for row, score_N in enumerate(vectors_BD[start : start + step] @ vector_ND.T, start):
                least = np.partition(score_N, len(score_N) - k)[len(score_N) - k]
                best = np.flatnonzero(score_N >= least)  # all that tie with the last one
                best = best[np.lexsort((best, -score_N[best]))[:k]]
                label_BK[row], score_BK[row] = label_N[best], score_N[best]
        return label_BK, score_BK

    @cached_property
    def _everything(self) -> tuple[np.ndarray, np.ndarray]:
        """The labels, ascending, and their vectors."""
        label_N = np.sort(np.array(self.graph.get_ids_list(), np.int64))
        return label_N, np.asarray(self.graph.get_items(label_N), np.float32)


def merge_hits(parts: Sequence[Hits], k: int) -> Hits:
    """Return the k best of several results: by score, ties by label."""
    label, score = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order = np.lexsort((label, -score))[:, :k]
    return np.take_along_axis(label, order, 1), np.take_along_axis(score, order, 1)


def used_shards(pins_of_shard: Sequence[int]) -> list[int]:
    """Return the numbers of the shards that have pins; the others have no file."""
    return [number for number, num_pins in enumerate(pins_of_shard) if num_pins]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.hnsw"


def load_shard(folder: Path, description: GraphManifest, number: int, *, ef: int) -> Shard:
    path = shard_path(folder, number)
    graph = hnswlib.Index(space=SPACE, dim=description["embedding_dim"])
    try:
        graph.load_index(str(fetched(path)))
    except RuntimeError as error:
        raise PipelineError(
            f"{path} cannot be read ({error})", "check that the disk is not full, then re-run pin_index"
        ) from error
    expected = description["pins_of_shard"][number]
    if graph.get_current_count() != expected:
        raise PipelineError(
            f"{path} has {graph.get_current_count():,} pins, but {DESCRIPTION} has {expected:,}", "re-run pin_index"
        )
    graph.set_ef(ef)
    return Shard(graph)


# Partitions


def index_root(site: Site) -> Path:
    return site.directory / "pin_index"


def index_dir(site: Site, ds: str) -> Path:
    """Folder of a partition of pin_index: numbered builds and a manifest."""
    return index_root(site) / ds


def index_days(site: Site) -> list[str]:
    """Days of pin_index that are published, ascending."""
    return sorted(path.parent.name for path in index_root(site).glob(f"????-??-??/{MANIFEST}"))


def index_manifest(site: Site, ds: str) -> IndexManifest | None:
    manifest: IndexManifest | None = find_json(index_dir(site, ds) / MANIFEST)
    return manifest


def require_index(site: Site, ds: str) -> tuple[IndexManifest, Path]:
    """Return a day's manifest and the folder of its build."""
    manifest = index_manifest(site, ds)
    if manifest is None:
        raise PipelineError(f"pin_index has no partition {ds}", f"make it with: {materialize_command('pin_index', ds)}")
    command = materialize_command("pin_index", ds)
    refuse_other_layout("pin_index", manifest, what=f"pin_index {ds}", command=command)
    return manifest, index_dir(site, ds) / manifest["build"]
