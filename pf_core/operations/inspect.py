"""Reads the newest actions of one user from the timelines."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.hashing import bucket_of
from pf_core.pins.features import pin_state, read_pin_features
from pf_core.schemas import id_arrow_type
from pf_core.timelines.build import read_bucket, timeline_state


def newest_actions(site: Site, ds: str, user_id: int | str, limit: int) -> list[dict[str, Any]]:
    """Return a user's newest actions as of ds, newest first, with the pins' interests; none if the day is not kept."""
    if limit < 1 or timeline_state(site).manifest(ds) is None or pin_state(site).manifest(ds) is None:
        return []
    ids = pa.array([user_id], id_arrow_type(site.source.actions.user_id.type))
    bucket = int(bucket_of(ids, site.timelines.num_buckets)[0])
    columns = ("ts", "pin_id", "action_type")
    found = read_bucket(timeline_state(site), ds, bucket, columns, user_ids=ids).to_pylist()
    if not found:
        return []
    actions = [dict(zip(columns, values, strict=True)) for values in zip(*(found[0][n] for n in columns), strict=True)]
    newest = actions[: -limit - 1 : -1]
    pins = read_pin_features(site, ds, ["pin_id", "interest"])
    wanted = pins.filter(pc.is_in(pins["pin_id"], pa.array([row["pin_id"] for row in newest], pins["pin_id"].type)))
    interest = dict(zip(wanted["pin_id"].to_pylist(), wanted["interest"].to_pylist(), strict=True))
    return [row | {"interest": interest.get(row["pin_id"], "no feature")} for row in newest]
