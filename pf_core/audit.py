"""Looking at a partition of user_timelines from the outside: does it agree with the logs, is it sound, who is in it?"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.assembly import find_fault
from pf_core.contracts import ds_start_us, id_arrow_type
from pf_core.pin_features import pin_state, read_pin_features
from pf_core.raw_actions import raw_digest, read_manifest
from pf_core.shuffle import bucket_of
from pf_core.site import Site
from pf_core.timelines import read_bucket, timeline_state


def audit_day(site: Site, ds: str) -> str | None:
    """A fault in the partition, or None: every active user is there, and one bucket, another each day, is sound."""
    manifest, logged = timeline_state(site).require(ds), read_manifest(site, ds)
    if logged is not None and manifest["raw_digests"][ds] != raw_digest(site, ds):
        return "raw_actions was re-run, and the timelines were not"
    present = manifest["counts"]["active_users"] + manifest["counts"]["active_users_forgotten"]
    if logged is not None and present != logged["counts"]["users"]:
        return f"{present:,} users are active in the timelines and {logged['counts']['users']:,} in raw_actions"
    bucket = ds_start_us(ds) // 86_400_000_000 % manifest["num_buckets"]
    return find_fault(read_bucket(site, ds, bucket), site, ds)


def newest_actions(site: Site, ds: str, user_id: int | str, limit: int) -> list[dict[str, Any]]:
    """A user's newest actions as of ds, newest first, with the pins' interests; none if the day is no longer there."""
    if limit < 1 or timeline_state(site).manifest(ds) is None or pin_state(site).manifest(ds) is None:
        return []
    ids = pa.array([user_id], id_arrow_type(site.source.actions.user_id.type))
    bucket = int(bucket_of(ids, site.timelines.num_buckets)[0])
    columns = ("ts", "pin_id", "action_type")
    found = read_bucket(site, ds, bucket, columns, user_ids=ids).to_pylist()
    if not found:
        return []
    actions = [dict(zip(columns, values, strict=True)) for values in zip(*(found[0][n] for n in columns), strict=True)]
    newest = actions[: -limit - 1 : -1]
    pins = read_pin_features(site, ds, ["pin_id", "interest"])
    wanted = pins.filter(pc.is_in(pins["pin_id"], pa.array([row["pin_id"] for row in newest], pins["pin_id"].type)))
    interest = dict(zip(wanted["pin_id"].to_pylist(), wanted["interest"].to_pylist(), strict=True))
    return [row | {"interest": interest.get(row["pin_id"], "no feature")} for row in newest]
