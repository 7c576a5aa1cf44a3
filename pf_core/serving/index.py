"""pin_index: a day's candidates in a graph that finds the pins nearest to a user (HNSW; paper, section 3.6).

A build is a folder with `pins.arrow` (pin_id and interest, by pin_id), a graph for each shard that has pins
(`shard-00000.hnsw`), and `index.json`. A pin's label is its row in pins.arrow, its shard the hash of its id. Here is
how it is read and searched; `index_build` makes it. A service holds the shards that it has searched.
"""

import bisect
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.engine.daily_state import Manifest
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of
from pf_core.storage.arrays import read_arrow
from pf_core.storage.builds import MANIFEST
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_json

DESCRIPTION = "index.json"

PINS = "pins.arrow"

SPACE = "ip"

SCORED_ROWS = 1024
"""Pins that are compared at a time where the graph is not asked."""

Hits = tuple[np.ndarray, np.ndarray]
"""label_BK (int64) and score_BK (float32), best first."""


# Searching


class PinIndex:
    """The pins nearest to a vector, by inner product. Threads may share it; shards are loaded when they are needed."""

    def __init__(self, folder: Path, description: Manifest) -> None:
        pins = read_arrow(fetched(folder / PINS))
        self.folder, self.description = folder, description
        self.pin_ids: pa.ChunkedArray = pins["pin_id"]
        self.interests: pa.ChunkedArray = pins["interest"]
        self._shards: dict[int, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "PinIndex":
        """The index of a build's folder, or of a copy of it."""
        if not (folder / DESCRIPTION).is_file():
            raise PipelineError(f"no pin index in {folder}: materialize pin_index first")
        return cls(folder, read_json(folder / DESCRIPTION))

    def __len__(self) -> int:
        return len(self.pin_ids)

    def search(self, vectors_BD: np.ndarray, k: int) -> Hits:
        """The k pins with the largest score for each vector: labels and scores, best first, ties by label.

        An index of fewer than k pins gives all of them.
        """
        vectors_BD = np.ascontiguousarray(vectors_BD, np.float32)
        dim = self.description["embedding_dim"]
        if vectors_BD.ndim != 2 or vectors_BD.shape[1] != dim:
            raise ValueError(f"vectors of shape {vectors_BD.shape}: the index has rows of {dim}")
        return merge_hits([search_shard(self._shard(number), vectors_BD, k) for number in used(self.description)], k)

    def vectors(self, labels: np.ndarray) -> np.ndarray:
        """The embeddings of pins by label, float32."""
        labels = np.asarray(labels, np.int64)
        shard_N = bucket_of(self.pin_ids.take(pa.array(labels)), self.description["num_shards"])
        vectors = np.empty((len(labels), self.description["embedding_dim"]), np.float32)
        for number in np.unique(shard_N):
            rows = np.flatnonzero(shard_N == number)
            vectors[rows] = self._shard(int(number)).get_items(labels[rows])
        return vectors

    def row_of(self, pin_id: int | str) -> int | None:
        """The label of a pin; None if it is not in the index."""
        row = bisect.bisect_left(range(len(self)), pin_id, key=lambda label: self.pin_ids[label].as_py())
        return row if row < len(self) and self.pin_ids[row].as_py() == pin_id else None

    def _shard(self, number: int) -> Any:
        with self._lock:
            if number not in self._shards:
                self._shards[number] = load_shard(self.folder, self.description, number, ef=self.description["ef"])
            return self._shards[number]


def search_shard(graph: Any, vectors_BD: np.ndarray, k: int) -> Hits:
    """What one graph finds. One that a search would visit nearly whole is compared pin by pin instead."""
    if graph.get_current_count() > max(graph.ef, k):
        with contextlib.suppress(RuntimeError):  # its only sign that fewer than k pins can be reached from the entry
            label_BK, distance_BK = graph.knn_query(vectors_BD, k=k)
            return label_BK.astype(np.int64), 1 - distance_BK
    return _search_whole(graph, vectors_BD, k)


def merge_hits(parts: Sequence[Hits], k: int) -> Hits:
    """The k best of several results: by score, ties by label."""
    label, score = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order = np.lexsort((label, -score))[:, :k]
    return np.take_along_axis(label, order, 1), np.take_along_axis(score, order, 1)


def _search_whole(graph: Any, vectors_BD: np.ndarray, k: int) -> Hits:
    labels = np.array(graph.get_ids_list(), np.int64)
    best = np.empty((len(vectors_BD), 0), np.int64), np.empty((len(vectors_BD), 0), np.float32)
    for start in range(0, len(labels), SCORED_ROWS):
        label_C = labels[start : start + SCORED_ROWS]
        score_BC = vectors_BD @ graph.get_items(label_C).T
        best = merge_hits([best, (np.broadcast_to(label_C, score_BC.shape), score_BC)], k)
    return best


def used(description: Manifest) -> list[int]:
    """Shards that have pins; the others have no file."""
    return [number for number, num_pins in enumerate(description["pins_of_shard"]) if num_pins]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.hnsw"


def load_shard(folder: Path, description: Manifest, number: int, *, ef: int) -> Any:
    path = shard_path(folder, number)
    graph = hnswlib.Index(space=SPACE, dim=description["embedding_dim"])
    try:
        graph.load_index(str(fetched(path)))
    except RuntimeError as error:
        raise PipelineError(f"{path} cannot be read ({error}): is the disk full? Then re-run pin_index") from error
    if graph.get_current_count() != description["pins_of_shard"][number]:
        raise PipelineError(f"{path} has {graph.get_current_count():,} pins, {DESCRIPTION} says otherwise")
    graph.set_ef(ef)
    return graph


# Partitions


def index_manifest(site: Site, ds: str) -> Manifest | None:
    path = index_dir(site, ds) / MANIFEST
    return read_json(path) if path.exists() else None


def require_index(site: Site, ds: str) -> tuple[Manifest, Path]:
    """A day's manifest and the folder of its build."""
    manifest = index_manifest(site, ds)
    if manifest is None:
        raise PipelineError(f"pin_index has no partition {ds}; make it with: {materialize_command('pin_index', ds)}")
    return manifest, index_dir(site, ds) / manifest["build"]


def index_dir(site: Site, ds: str) -> Path:
    """A partition of pin_index: numbered builds and a manifest."""
    return site.directory / "pin_index" / ds
