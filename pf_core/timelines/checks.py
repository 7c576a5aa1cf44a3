"""Data check of user_timelines: a partition agrees with the logs, and its rows are sound."""

from pf_core.config.site import Site
from pf_core.days import ds_start_us
from pf_core.logs.partition import raw_digest, read_manifest
from pf_core.timelines.assembly import timeline_fault
from pf_core.timelines.build import read_bucket, timeline_state


def audit_day(site: Site, ds: str) -> str | None:
    """Return a sentence about the first fault of the partition, or None if it is sound.

    The partition was built from the day's current raw_actions, every user active on the day is there, and the rows of
    one bucket are sound. The bucket changes from day to day, so that all are checked in turn at the cost of one.
    """
    state = timeline_state(site)
    manifest, logged = state.require(ds), read_manifest(site, ds)
    if logged is not None and manifest["raw_digests"][ds] != raw_digest(site, ds):
        return "raw_actions was re-run, and the timelines were not"
    present = manifest["counts"]["active_users"] + manifest["counts"]["active_users_forgotten"]
    if logged is not None and present != logged["counts"]["users"]:
        return f"{present:,} users are active in the timelines and {logged['counts']['users']:,} in raw_actions"
    bucket = ds_start_us(ds) // 86_400_000_000 % manifest["num_buckets"]
    return timeline_fault(read_bucket(state, ds, bucket), ds=ds, max_actions=site.timelines.max_actions)
