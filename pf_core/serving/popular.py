"""The popular pins of a release, for users who are not in it: most user-days of positive engagement in a week.

User-days are those of pins/counts.py: only users who may be learned from count, so not held-out or forgotten ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.hashing import digest_of
from pf_core.logs.log_day import LogDay, open_log_day
from pf_core.logs.partition import ingested_days
from pf_core.logs.training_users import TrainingUsers, read_training_users
from pf_core.pins.counts import counts_of_days
from pf_core.schemas import id_arrow_type
from pf_core.serving.index import PinIndex

POPULAR_DAYS = 7

NUM_POPULAR = 1000
"""Largest number of pins of the list."""


def open_week(site: Site, ds: str) -> list[LogDay]:
    """Open the days of the week that ends with `ds` of which raw_actions has a partition."""
    days = {*ds_range(shift_ds(ds, 1 - POPULAR_DAYS), ds)} & {*ingested_days(site)}
    return [open_log_day(site, day) for day in sorted(days)]


def popular_digest(site: Site, week: Sequence[LogDay]) -> str:
    """Return a digest of what the counts of a week depend on, beside the deletion list."""
    inputs: dict[str, Any] = {
        "raw_actions": {day.ds: day.digest for day in week},
        "positive": site.source.positive.model_dump(mode="json"),
        "held_out_share": site.training.held_out_share,
    }
    if (selection := _users_of(site, week).selection) is not None:
        inputs["users"] = selection
    return digest_of(inputs)


def popular_pins(site: Site, week: Sequence[LogDay], index_folder: Path, k: int) -> pa.Table:
    """Return the k pins of an index with the most user-days: pin_id, interest, user_days; ties by pin_id."""
    counts = _week_counts(site, week)
    index = PinIndex.open(index_folder)
    label = index.rows_of(counts["pin_id"].combine_chunks())
    known = counts.filter(pa.array(label >= 0))
    label = label[label >= 0]
    order = np.lexsort((label, -known["user_days"].to_numpy()))[:k]
    chosen = pa.array(label[order])
    return pa.table(
        {
            "pin_id": index.ids_of(label[order]),
            "interest": index.interests.take(chosen),
            "user_days": known["user_days"].take(pa.array(order)),
        }
    )


def _users_of(site: Site, week: Sequence[LogDay]) -> TrainingUsers:
    return read_training_users(site, as_of=week[-1].ds if week else None)


def _week_counts(site: Site, week: Sequence[LogDay]) -> pa.Table:
    """Return pin_id and user_days over the week, one row for each pin."""
    none = pa.schema([("pin_id", id_arrow_type(site.source.pins.pin_id.type)), ("user_days", pa.int32())]).empty_table()
    total = pa.concat_tables([none, *counts_of_days(site, week, _users_of(site, week))])
    return total.group_by("pin_id").aggregate([("user_days", "sum")]).rename_columns(["pin_id", "user_days"])
