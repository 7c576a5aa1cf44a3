"""The client for services: looks up users and recommends pins, always from one release.

    serving = Serving(site)              # one for each process (create it after forking), shared by its threads
    release = serving.release()          # one for each request: all its results belong together
    hits = release.recommend(user_id, k=10)                 # new_only=True leaves out what the user has seen
    hits = release.popular(k=10)                            # for users whom the release does not know

`release()` compares the stamp of current.json, and opens the release that it names when the stamp has changed. A
Release stays usable as long as it is referenced, whatever is published meanwhile: it holds a lock that keeps its
folder. `recommend` and `similar` raise UnknownIdError for an id that the release does not have, mostly of a user who
came after it was made; `embeddings` marks such a user as not found.

This module and what it imports need the base installation only: no torch, DuckDB, SciPy or Lance.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import refuse_other_layout
from pf_core.schemas import IdType, id_arrow_type
from pf_core.serving.index import PinIndex
from pf_core.serving.ranking import Ranked, rank_new, rank_with_memory
from pf_core.serving.releases import (
    POPULAR,
    ReleaseManifest,
    current_file,
    lock_for_reading,
    read_published,
    read_release,
    release_root,
    store_of,
)
from pf_core.serving.values import Lookup
from pf_core.storage.arrays import read_arrow
from pf_core.storage.cache import fetched
from pf_core.storage.files import etag_of, is_remote

Id = int | str

Source = Literal["vector", "memory", "popular"]
"""Why a pin is a hit: it is near, it is one of the user's own pins, or it is popular."""

Stamp = tuple[int, int, int] | str
"""Changes whenever current.json is replaced: inode, time and size of the file, or the ETag of the object."""

SIMILAR_SEARCHED = 20
"""Pins that `similar` searches for each one that it returns, where the index ranks by more than likeness."""

LOOK_EVERY_S = 5.0
"""Time between two looks at a current.json in object storage."""


class UnknownIdError(PipelineError):
    """A user or pin is not in the release."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    pin_id: Id
    score: float
    """Inner product of unit vectors: 1 means the same direction. For a pin of memory the increment is added; for a
    popular pin it is the number of its user-days."""
    interest: str
    source: Source = "vector"


class Recommendations(list[Hit]):
    """The hits of a user, best first."""

    def __init__(self, hits: Iterable[Hit], *, seen_is_complete: bool) -> None:
        super().__init__(hits)
        self.seen_is_complete = seen_is_complete
        """Whether the release knows every pin that the user has seen: with `new_only`, older ones may be among the hits
        if it does not."""


class Release:
    """The users and pins of one day, embedded by one model. Thread-safe."""

    def __init__(self, site: Site, folder: Path) -> None:
        """Raises FileNotFoundError if the release has been removed."""
        descriptor = lock_for_reading(folder)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor).atexit = False
        self.manifest: ReleaseManifest = read_release(folder)
        command = materialize_command("release", self.manifest["ds"])
        refuse_other_layout("release", self.manifest, what=f"release {self.manifest['release']}", command=command)
        self._store = store_of(site, folder, self.manifest)
        self._folder = folder
        self._index: PinIndex | None = None
        self._popular: list[Hit] | None = None
        self._lock = threading.Lock()

    @property
    def index(self) -> PinIndex:
        """The pins; opened when they are first used."""
        with self._lock:
            if self._index is None:
                self._index = PinIndex.open(self._folder / "index")
            return self._index

    def look_up(self, user_ids: Sequence[Id] | pa.Array) -> Lookup:
        """Return the users' records: embeddings, the days on which they were computed, memory and seen pins."""
        return self._store.get(_ids(user_ids, self.manifest["user_id"]))

    def embeddings(self, user_ids: Sequence[Id] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return (float32 [N, D], bool [N]): NaN and False for a user who is not in the release."""
        found = self.look_up(user_ids)
        return found.vectors_ND, found.found_N

    def computed_ds(self, user_ids: Sequence[Id] | pa.Array) -> list[str | None]:
        """Return the days on which the users' embeddings were computed; None for a user who is not in the release."""
        return self.look_up(user_ids).computed_ds()

    def recommend(self, user_id: Id, k: int = 10, *, new_only: bool = False) -> Recommendations:
        """Return the pins with the largest scores for a user, best first; with `new_only`, without the seen ones."""
        _refuse_no_number(k)
        found = self.look_up([user_id])
        if not found.found_N[0]:
            raise UnknownIdError(f"user {user_id!r} is not in release {self.manifest['release']}")
        lists, rank = found.lists(0), rank_new if new_only else rank_with_memory
        hits = self._hits(rank(self.index, found.vectors_ND[0], lists, k))
        return Recommendations(hits, seen_is_complete=lists.seen_is_complete)

    def popular(self, k: int = 10) -> list[Hit]:
        """Return the candidates with the most user-days of positive engagement in the last week, at most 1,000."""
        _refuse_no_number(k)
        with self._lock:
            if self._popular is None:
                pins = read_arrow(fetched(self._folder / POPULAR)).to_pylist()
                self._popular = [
                    Hit(pin_id=pin["pin_id"], score=float(pin["user_days"]), interest=pin["interest"], source="popular")
                    for pin in pins
                ]
            return self._popular[:k]

    def similar(self, pin_id: Id, k: int = 10) -> list[Hit]:
        """Return the pins that are most like a pin, best first, without the pin itself.

        Trend and slack say how much a pin is used, not what it is like: the score is the cosine of the other parts.
        """
        _refuse_no_number(k)
        row = self.index.row_of(pin_id)
        if row is None:
            raise UnknownIdError(f"pin {pin_id!r} is not in the index of release {self.manifest['release']}")
        other = [part for name, part in self.manifest["slices"].items() if name in ("trend", "slack")]
        vector_1D = _without(self.index.vectors(np.array([row])), other)
        if not other:
            hits = self.search(vector_1D, k + 1)[0]
            return [hit for hit in hits if hit.pin_id != pin_id][:k]
        [label_N], _ = self.index.search(vector_1D, SIMILAR_SEARCHED * (k + 1))
        label_N = label_N[label_N != row]
        score_N = _without(self.index.vectors(label_N), other) @ vector_1D[0]
        order = np.lexsort((label_N, -score_N))[:k]
        return self._hits(Ranked(label_N[order], score_N[order], np.zeros(len(order), bool)))

    def search(self, vectors_BD: np.ndarray, k: int = 10) -> list[list[Hit]]:
        """Return the pins nearest to each vector, best first."""
        _refuse_no_number(k)
        found = zip(*self.index.search(vectors_BD, k), strict=True)
        return [self._hits(Ranked(label_K, score_K, np.zeros(len(label_K), bool))) for label_K, score_K in found]

    def _hits(self, ranked: Ranked) -> list[Hit]:
        index, columns = self.index, zip(*(column.tolist() for column in ranked), strict=True)
        return [
            Hit(
                pin_id=index.pin_ids[label].as_py(),
                score=score,
                interest=index.interests[label].as_py(),
                source="memory" if is_memory else "vector",
            )
            for label, score, is_memory in columns
        ]


def _refuse_no_number(k: int) -> None:
    """Refuse a k that is no number of pins: the index would answer with an error of its own, or with other pins."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise PipelineError(f"k is {k!r}: the number of pins is a whole number from 1")


def _without(vectors_ND: np.ndarray, parts: list[list[int]]) -> np.ndarray:
    """Return the vectors with some parts set to 0, brought to unit norm."""
    left_ND = vectors_ND.copy()
    for start, end in parts:
        left_ND[:, start:end] = 0
    return left_ND / np.maximum(np.linalg.norm(left_ND, axis=1, keepdims=True), 1e-12)


def _ids(values: Sequence[Id] | pa.Array, id_type: IdType) -> pa.Array:
    """Return the ids as an array of the site's id type, without conversion: 1.5 and "1" are not the user 1."""
    is_right = pa.types.is_integer if id_type == "int" else pa.types.is_string
    try:
        ids = values if isinstance(values, pa.Array) else pa.array(values)
        if len(ids) and not is_right(ids.type):
            raise PipelineError(f"user ids of this site are of type {id_type}, not {ids.type}")
        ids = ids if ids.type == id_arrow_type(id_type) else ids.cast(id_arrow_type(id_type))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise PipelineError(f"user ids of this site are of type {id_type}: {error}") from error
    if ids.null_count:
        raise PipelineError("a user id is missing")
    return ids


class Serving:
    """Opens the current release of a site."""

    def __init__(self, site: Site) -> None:
        self._site, self._current_file = site, current_file(site)
        self._local_path = None if is_remote(self._current_file) else os.fspath(self._current_file)
        self._looked: tuple[float, Stamp] | None = None
        self._lock = threading.Lock()
        self._opened: tuple[Stamp, Release] | None = None

    def release(self) -> Release:
        """Return the current release; opens it if it is another one than at the last call."""
        stamp = self._stamp()
        opened = self._opened  # read once: another thread may replace the pair
        if opened is None or opened[0] != stamp:
            with self._lock:
                opened = self._reopened()
        return opened[1]

    def _reopened(self) -> tuple[Stamp, Release]:
        while True:
            stamp = self._stamp()
            if self._opened is not None and self._opened[0] == stamp:  # another thread has opened it
                return self._opened
            current = read_published(self._site).current
            assert current is not None
            is_same = self._opened is not None and self._opened[1].manifest["release"] == current
            if self._opened is not None and is_same and self._local_path is not None:
                # a release in object storage is opened again: the local copy may still have deleted users
                self._opened = stamp, self._opened[1]
                return self._opened
            try:
                release = Release(self._site, release_root(self._site) / current)
            except FileNotFoundError:
                if stamp == self._stamp():
                    raise PipelineError(
                        f"the current release {current} is gone", "publish again, or go back with: pf rollback"
                    ) from None
                continue  # it was replaced and removed after current.json was read
            self._opened = stamp, release
            return self._opened

    def _stamp(self) -> Stamp:
        """Return the stamp of current.json, which is always replaced, never written in place."""
        if self._local_path is None:
            return self._remote_stamp()
        try:
            status = os.stat(self._local_path)  # noqa: PTH116 (on every request: a Path costs more than the call)
        except FileNotFoundError:
            raise self._no_release() from None
        except PermissionError:
            raise PipelineError(
                f"this user may not read {self._local_path}",
                "run the service as the owner of data_dir, or share the folder with its group: chmod g+s",
            ) from None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _remote_stamp(self) -> Stamp:
        """Return the ETag, read at most every LOOK_EVERY_S seconds: a request must not wait for object storage."""
        if self._looked is None or time.monotonic() - self._looked[0] > LOOK_EVERY_S:
            etag = etag_of(self._current_file)
            if etag is None:
                raise self._no_release()
            self._looked = time.monotonic(), etag
        return self._looked[1]

    def _no_release(self) -> PipelineError:
        return PipelineError(
            f"site {self._site.name} has no release yet",
            f"build everything until one with: pf run; or publish one with: {materialize_command('release', 'DAY')}",
        )
