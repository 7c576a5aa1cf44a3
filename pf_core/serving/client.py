"""For a service: look users up and recommend pins, always from one release.

    serving = Serving(site)              # one in each process (make it after forking), shared by its threads
    release = serving.release()          # one for each request: whatever it gives belongs together
    hits = release.recommend(user_id, k=10)

`release()` looks at the pointer file's stamp, and opens what the pointer names when that has changed. A Release stays
usable as long as somebody has it, whatever is published meanwhile: it holds a lock by which its folder stays. Ids that
a release does not have are an UnknownIdError: for a user, mostly one who came after the release was made.
"""

import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.engine.daily_state import Manifest
from pf_core.errors import PipelineError, materialize_command
from pf_core.schemas import IdType, id_arrow_type
from pf_core.serving.index import PinIndex
from pf_core.serving.releases import DESCRIPTION, hold, pointer_path, read_pointer, release_root, store_of
from pf_core.serving.store import Lookup
from pf_core.storage.files import etag_of, is_remote, read_json

Id = int | str

Stamp = tuple[int, int, int] | str


LOOK_EVERY_S = 5.0
"""At a pointer in object storage."""


class UnknownIdError(PipelineError):
    """A user or pin that is not in the release."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    pin_id: Id
    score: float
    """Inner product of unit vectors: 1 is the same direction."""
    interest: str


class Release:
    """One day's users and pins, of one model. Threads may share it."""

    def __init__(self, site: Site, folder: Path) -> None:
        """FileNotFoundError if the release has been removed."""
        descriptor = hold(folder)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor).atexit = False
        self.manifest: Manifest = read_json(folder / DESCRIPTION)
        self._store = store_of(site, folder, self.manifest)
        self._index_folder = folder / "index"
        self._index: PinIndex | None = None
        self._lock = threading.Lock()

    @property
    def index(self) -> PinIndex:
        """The pins; opened by the first who asks."""
        with self._lock:
            if self._index is None:
                self._index = PinIndex.open(self._index_folder)
            return self._index

    def look_up(self, user_ids: Sequence[Id] | pa.Array) -> Lookup:
        """Embeddings and the days on which they were computed."""
        return self._store.get(_ids(user_ids, self.manifest["user_id"]))

    def embeddings(self, user_ids: Sequence[Id] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """(float32 [N, D], bool [N]): a user who is not in the release has NaN, and False."""
        found = self.look_up(user_ids)
        return found.vectors_ND, found.found_N

    def computed_ds(self, user_ids: Sequence[Id] | pa.Array) -> list[str | None]:
        """The days on which the users' embeddings were computed; None for a user who is not in the release."""
        return self.look_up(user_ids).computed_ds()

    def recommend(self, user_id: Id, k: int = 10) -> list[Hit]:
        """The pins nearest to a user, best first."""
        vectors, is_found = self.embeddings([user_id])
        if not is_found[0]:
            raise UnknownIdError(f"user {user_id!r} is not in release {self.manifest['release']}")
        return self.search(vectors, k)[0]

    def similar(self, pin_id: Id, k: int = 10) -> list[Hit]:
        """The pins nearest to a pin, best first, without itself."""
        row = self.index.row_of(pin_id)
        if row is None:
            raise UnknownIdError(f"pin {pin_id!r} is not in the index of release {self.manifest['release']}")
        hits = self.search(self.index.vectors(np.array([row])), k + 1)[0]
        return [hit for hit in hits if hit.pin_id != pin_id][:k]

    def search(self, vectors_BD: np.ndarray, k: int = 10) -> list[list[Hit]]:
        """The pins nearest to each vector, best first."""
        index = self.index
        label_BK, score_BK = index.search(vectors_BD, k)
        return [
            [
                Hit(pin_id=index.pin_ids[label].as_py(), score=score, interest=index.interests[label].as_py())
                for label, score in zip(labels, scores, strict=True)
            ]
            for labels, scores in zip(label_BK.tolist(), score_BK.tolist(), strict=True)
        ]


def _ids(values: Sequence[Id] | pa.Array, id_type: IdType) -> pa.Array:
    """Nothing is converted: 1.5 and "1" are not the user 1."""
    is_right = pa.types.is_integer if id_type == "int" else pa.types.is_string
    try:
        ids = values if isinstance(values, pa.Array) else pa.array(values)
        if len(ids) and not is_right(ids.type):
            raise PipelineError(f"user ids of this site are of type {id_type}, not {ids.type}")
        ids = ids if ids.type == id_arrow_type(id_type) else ids.cast(id_arrow_type(id_type))
    except (pa.ArrowException, OverflowError) as error:
        raise PipelineError(f"user ids of this site are of type {id_type}: {error}") from error
    if ids.null_count:
        raise PipelineError("a user id is missing")
    return ids


class Serving:
    """The current release of a site, whenever it is asked for."""

    def __init__(self, site: Site) -> None:
        self._site, self._pointer = site, pointer_path(site)
        self._file = None if is_remote(self._pointer) else os.fspath(self._pointer)
        self._looked: tuple[float, Stamp] | None = None
        self._lock = threading.Lock()
        self._opened: tuple[Stamp, Release] | None = None

    def release(self) -> Release:
        stamp = self._stamp()
        opened = self._opened  # a stamp and its release change together
        if opened is None or opened[0] != stamp:
            with self._lock:
                opened = self._reopened()
        return opened[1]

    def _reopened(self) -> tuple[Stamp, Release]:
        while True:
            stamp = self._stamp()
            if self._opened is not None and self._opened[0] == stamp:  # another thread was faster
                return self._opened
            current = read_pointer(self._site).current
            assert current is not None
            is_same = self._opened is not None and self._opened[1].manifest["release"] == current
            if self._opened is not None and is_same and self._file is not None:  # a copy may be of before a deletion
                self._opened = stamp, self._opened[1]
                return self._opened
            try:
                release = Release(self._site, release_root(self._site) / current)
            except FileNotFoundError:
                if stamp == self._stamp():
                    raise PipelineError(
                        f"the current release {current} is gone: publish again, or go back with: pf rollback"
                    ) from None
                continue  # it was replaced and removed between reading the pointer and opening it
            self._opened = stamp, release
            return self._opened

    def _stamp(self) -> Stamp:
        """Of the pointer file: it is always replaced, never written over."""
        if self._file is None:
            return self._remote_stamp()
        try:
            status = os.stat(self._file)  # noqa: PTH116 (on every request: a Path costs more than the call)
        except FileNotFoundError:
            raise self._no_release() from None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _remote_stamp(self) -> Stamp:
        """Not on every request."""
        if self._looked is None or time.monotonic() - self._looked[0] > LOOK_EVERY_S:
            etag = etag_of(self._pointer)
            if etag is None:
                raise self._no_release()
            self._looked = time.monotonic(), etag
        return self._looked[1]

    def _no_release(self) -> PipelineError:
        return PipelineError(
            f"site {self._site.name} has no release yet; publish one with: {materialize_command('release', 'DAY')}"
        )
