"""Convert flat actions to one row per user and back: table in, table out, no files.

Sorting is by user alone. The lists are cut from the sorted columns where the user changes, without a copy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.days import ds_start_us, shift_ds
from pf_core.engine.shuffle import rank_ids
from pf_core.schemas import TIMELINE_LISTS


@dataclass(frozen=True)
class Bounds:
    """Which actions of a user are kept: those from `since_us` on, and of these the newest `max_actions`."""

    since_us: int
    max_actions: int


def assemble(actions: pa.Table, bounds: Bounds) -> pa.Table:
    """Convert flat actions, ascending in time for each user, to one row per user, sorted by user_id."""
    lists = [name for name in TIMELINE_LISTS if name in actions.column_names]
    if actions.num_rows:
        rank = rank_ids(actions["user_id"])
        if (rank[1:] < rank[:-1]).any():
            position = np.arange(len(rank), dtype=np.uint64)
            order = np.sort((rank.astype(np.uint64) << np.uint64(32)) | position) & np.uint64(0xFFFFFFFF)
            actions, rank = actions.take(pa.array(order.astype(np.int64))), rank[order]
        keep = _kept(rank, actions["ts"].to_numpy().astype(np.int64), bounds)
        if not keep.all():
            actions, rank = actions.filter(pa.array(keep)), rank[keep]
    if actions.num_rows == 0:
        starts = np.empty(0, np.int64)
    else:
        starts = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    offsets = pa.array(np.append(starts, actions.num_rows).astype(np.int32))
    columns: dict[str, Any] = {"user_id": actions["user_id"].take(pa.array(starts))}
    for name in lists:
        columns[name] = pa.ListArray.from_arrays(offsets, actions[name].unify_dictionaries().combine_chunks())
    return pa.table(columns)


def _kept(rank: np.ndarray, ts_us: np.ndarray, bounds: Bounds) -> np.ndarray:
    num_actions = np.bincount(rank)
    num_old = np.bincount(rank, weights=ts_us < bounds.since_us).astype(np.int64)
    num_dropped = np.maximum(num_old, num_actions - bounds.max_actions)
    first = np.concatenate([[0], np.cumsum(num_actions)[:-1]])
    return np.arange(len(rank)) >= (first + num_dropped)[rank]


def flatten(timelines: pa.Table) -> pa.Table:
    """Convert one row per user back to one row per action."""
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    users = timelines["user_id"].take(pa.array(np.repeat(np.arange(timelines.num_rows), lengths)))
    columns: dict[str, Any] = {"user_id": users}
    for name in timelines.column_names[1:]:
        chunks = [chunk.flatten() for chunk in timelines[name].chunks]
        columns[name] = pa.chunked_array(chunks, timelines.schema.field(name).type.value_type)
    return pa.table(columns)


def timeline_fault(timelines: pa.Table, *, ds: str, max_actions: int) -> str | None:
    """Return a sentence about the first fault in these rows of partition ds, or None if they are sound."""
    if len(timelines["user_id"].unique()) != timelines.num_rows or timelines["user_id"].null_count:
        return "a user has two rows, or a row has no user"
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    for name in TIMELINE_LISTS:
        if not np.array_equal(pc.list_value_length(timelines[name]).to_numpy(), lengths):
            return f"the lists of {name} and ts differ in length"
    if timelines.num_rows == 0:
        return None
    if lengths.min() < 1 or lengths.max() > max_actions:
        return (
            f"timelines have {lengths.min():,} to {lengths.max():,} actions, "
            f"allowed are 1 to timelines.max_actions = {max_actions:,}"
        )
    ts_us = pc.list_flatten(timelines["ts"]).cast(pa.int64()).to_numpy()
    if ts_us.max() >= ds_start_us(shift_ds(ds, 1)):
        return f"an action is later than {ds}"
    descends = ts_us[1:] < ts_us[:-1]
    descends[np.cumsum(lengths)[:-1] - 1] = False  # from one user to the next
    if descends.any():
        return "a user's actions are not in ascending order"
    return None
