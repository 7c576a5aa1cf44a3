"""Who may be learned from: the users whom `training.users` in the site file selects, without those who are held out.

Everybody is embedded and released, and anybody may be held out to judge a model. What a model is made of comes from
these users alone: the training rows, the vocabularies, the factors, the counts of pins, and which pins nobody but the
log describes.

A choice is read once for each thing that is made from it, so that a list that changes meanwhile is not mixed.

Where a column of the log decides, what is made as of a day may use a user whose newest answer up to that day agrees,
and who has not revoked it since: a later answer never adds a user, and a later no leaves the user out.
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
from pf_core.days import days_text, shift_ds
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import combined, hashed_uniform, is_held_out
from pf_core.logs.answers import agreed_users, is_made_of
from pf_core.logs.deletion_list import EXAMPLE, read_deletion_list, read_ids
from pf_core.logs.partition import ingested_days, partition_dir, require_manifest
from pf_core.storage.files import path_of, reaching

KEY = "training.users.file"

SELECTION_KEY = 20_260_102
"""Key of the hash that selects a share: another one than those of samples, so that all are independent."""


HASHED_PER_ID = 50
"""Texts of a list that are hashed in the time in which one id is found in it by bisection."""


class Selection(TypedDict):
    """A choice of users, as manifests have it."""

    share: NotRequired[float]
    column: NotRequired[str]
    """Column of the log that decides."""
    listed: NotRequired[int]
    """Number of distinct ids in the file, or of users who agreed in the column."""
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
    column: str | None = None
    """Column of the log that the ids are from; None if they are not from the log."""

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
            return _selection_of(self.listed, self.column)
        return None if self.share is None else {"share": self.share}

    def selection_among(self, user_ids: pa.Array) -> Selection:
        """Return who is selected among distinct users: what is made of them alone does not depend on other users."""
        chosen = user_ids.filter(pa.array(self.are_selected(user_ids)))
        return _selection_of(chosen.take(pc.sort_indices(chosen)), self.column)


def _selection_of(listed: pa.Array, column: str | None) -> Selection:
    selection: Selection = {"listed": len(listed), "digest": _digest(listed)}
    return selection if column is None else {"column": column, **selection}


def read_training_users(site: Site, *, as_of: str | None = None) -> TrainingUsers:
    """Return the choice of a site file; a list that is missing, empty or not readable is a PipelineError.

    Where a column of the log decides, it is the choice as of a day, by default the newest day of raw_actions.
    """
    held_out_share, chosen = site.training.held_out_share, site.training.users
    if chosen is None:
        return TrainingUsers(held_out_share=held_out_share)
    if chosen.column is not None:
        return TrainingUsers(held_out_share=held_out_share, listed=_read_answers(site, as_of), column=chosen.column)
    if chosen.file is None:
        return TrainingUsers(held_out_share=held_out_share, share=chosen.share)
    return TrainingUsers(held_out_share=held_out_share, listed=_read_list(site, path_of(chosen.file)))


def _read_answers(site: Site, as_of: str | None) -> pa.Array:
    """Return who agreed, of the users with an action in the window of timelines that ends with the day."""
    assert site.answers is not None
    days = ingested_days(site)
    last = as_of or (days[-1] if days else site.start_ds)
    days = [ds for ds in days if ds > shift_ds(last, -site.timelines.window_days)]
    manifests = {ds: require_manifest(site, ds) for ds in days}
    without = [ds for ds, manifest in manifests.items() if not is_made_of(manifest.get("answers"), site.answers)]
    if without:
        values = ", ".join(map(repr, site.answers.values))
        raise PipelineError(
            f"training.users.column: raw_actions has {days_text(without)} without the answers of column "
            f"{site.answers.column!r} with the values {values}: who may be learned from is not known",
            f"ingest again: {materialize_command('raw_actions', without[0], until=without[-1])}",
        )
    paths = {
        ds: partition_dir(site.directory, ds) / manifest["build"] / manifest["answers"]["name"]
        for ds, manifest in manifests.items()
    }
    before, after = [paths[ds] for ds in days if ds <= last], [paths[ds] for ds in days if ds > last]
    agreed = agreed_users(before, after, site.source.actions.user_id.type)
    return agreed.filter(pc.invert(pc.is_in(agreed, value_set=read_deletion_list(site))))


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
    if not len(listed):
        return np.zeros(len(wanted), bool)
    if pa.types.is_integer(wanted.type):
        values, ids = listed.to_numpy(), wanted.to_numpy()
        place = np.minimum(np.searchsorted(values, ids), len(values) - 1)
        return np.asarray(values[place] == ids)
    if len(listed) <= HASHED_PER_ID * len(wanted):
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
