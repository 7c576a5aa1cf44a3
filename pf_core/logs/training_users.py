"""Who may be learned from: the users whom `training.users` in the site file selects, without those who are held out.

Everybody is embedded and released, and anybody may be held out to judge a model. What a model is made of comes from
these users alone: the training rows, the vocabularies, the factors, the counts of pins, and which pins nobody but the
log describes.

A choice is read once for each thing that is made from it, so that a list that changes meanwhile is not mixed.
"""

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.hashing import combined, hashed_uniform, is_held_out
from pf_core.logs.deletion_list import EXAMPLE, read_ids
from pf_core.storage.files import path_of, reaching

KEY = "training.users.file"

SELECTION_KEY = 20_260_102
"""Key of the hash that selects a share: another one than those of samples, so that all are independent."""


class Selection(TypedDict):
    """A choice of users, as manifests have it."""

    share: NotRequired[float]
    listed: NotRequired[int]
    """Number of distinct ids in the file."""
    digest: NotRequired[str]
    """Digest of these ids; their order and the form of the lines do not count."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingUsers:
    """Which users a model may learn from. It is pickled and sent to the workers."""

    held_out_share: float
    share: float | None = None
    """Share of the users, chosen by hash; None if all of them are selected, or a list selects them."""
    listed: pa.Array | None = None
    """Ids of the selected users, ascending."""

    def are_selected(self, user_ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Return which users are selected; they may be held out all the same."""
        users = combined(user_ids).dictionary_encode()
        distinct = users.dictionary
        if self.listed is not None:
            is_selected = _are_among(self.listed, distinct)
        elif self.share is not None:
            is_selected = hashed_uniform(distinct, SELECTION_KEY) < self.share
        else:
            is_selected = np.ones(len(distinct), bool)
        return np.asarray(is_selected[users.indices.to_numpy()])

    def may_train(self, user_ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Return which users a model may learn from: those that are selected and not held out."""
        user_ids = combined(user_ids)
        return self.are_selected(user_ids) & ~is_held_out(user_ids, self.held_out_share)

    @cached_property
    def selection(self) -> Selection | None:
        """What decides the choice; None if all users are selected."""
        if self.listed is not None:
            return {"listed": len(self.listed), "digest": _digest(self.listed)}
        return None if self.share is None else {"share": self.share}


def read_training_users(site: Site) -> TrainingUsers:
    """Return the choice of a site file; a list that is missing, empty or not readable is a PipelineError."""
    held_out_share, chosen = site.training.held_out_share, site.training.users
    if chosen is None:
        return TrainingUsers(held_out_share=held_out_share)
    if chosen.file is None:
        return TrainingUsers(held_out_share=held_out_share, share=chosen.share)
    return TrainingUsers(held_out_share=held_out_share, listed=_read_list(site, path_of(chosen.file)))


def _read_list(site: Site, path: Path) -> pa.Array:
    id_type = site.source.actions.user_id.type
    with reaching(path):
        if not path.is_file():
            raise PipelineError(
                f"{KEY}: no file at {path}",
                f"write one with a line for each user who may be learned from, such as {EXAMPLE[id_type]}, or delete "
                "training.users from the site file to learn from everybody",
            )
    user_ids = read_ids(path, id_type, key=KEY)
    if not len(user_ids):
        raise PipelineError(
            f"{KEY}: {path} names no user, so nobody may be learned from",
            f"add a line for each user who may be, such as {EXAMPLE[id_type]}, or delete training.users from the site "
            "file to learn from everybody",
        )
    return user_ids


def _are_among(listed: pa.Array, wanted: pa.Array) -> np.ndarray:
    """Return which wanted ids are among the ascending ones: by bisection, as a list may be longer than a file's users.

    Hashing the list instead would cost its length for each bucket of each day.
    """
    if pa.types.is_integer(wanted.type):
        values, ids = listed.to_numpy(), wanted.to_numpy()
        place = np.minimum(np.searchsorted(values, ids), len(values) - 1)
        return np.asarray(values[place] == ids)
    if len(listed) <= len(wanted):
        return np.asarray(pc.is_in(wanted, value_set=listed).to_numpy(zero_copy_only=False))
    rows = range(len(listed))

    def is_listed(text: str) -> bool:
        row = bisect_left(rows, text, key=lambda row: listed[row].as_py())
        return row < len(listed) and listed[row].as_py() == text

    return np.array([is_listed(text) for text in wanted.to_pylist()], bool)


def _digest(listed: pa.Array) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(listed), 1 << 16):
        digest.update("".join(f"{user_id!r}\n" for user_id in listed[start : start + (1 << 16)].to_pylist()).encode())
    return digest.hexdigest()[:16]
