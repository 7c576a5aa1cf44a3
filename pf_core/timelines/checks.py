"""Data check of user_timelines: a partition agrees with the logs, and its rows are sound."""

from pf_core.config.site import Site
from pf_core.days import ds_start_us
from pf_core.engine.daily_state import StateDay
from pf_core.logs.partition import RawManifest, digest_of_rows, read_manifest
from pf_core.timelines.assembly import timeline_fault
from pf_core.timelines.build import TimelineManifest, stored_timelines, timeline_state


def audit_day(site: Site, ds: str) -> str | None:
    """Return a sentence about the first fault of the partition, or None if it is sound.

    The partition was built from the day's current raw_actions, every user active on the day is there, and the rows of
    one bucket are sound. The bucket changes from day to day, so that all are checked in turn at the cost of one.
    """
    with timeline_state(site).held(ds) as day:
        return _audit(site, day, read_manifest(site, ds))


def _audit(site: Site, day: StateDay[TimelineManifest], logged: RawManifest | None) -> str | None:
    manifest, ds = day.manifest, day.manifest["ds"]
    if logged is not None and manifest["raw_digests"][ds] != digest_of_rows(logged):
        return "raw_actions was re-run, and the timelines were not"
    present = manifest["counts"]["active_users"] + manifest["counts"]["active_users_forgotten"]
    num_deleted = 0 if logged is None else logged.get("users_deleted", 0)  # before or after the timelines were built
    if logged is not None and not 0 <= present - logged["counts"]["users"] <= num_deleted:
        return f"{present:,} users are active in the timelines and {logged['counts']['users']:,} in raw_actions"
    bucket = ds_start_us(ds) // 86_400_000_000 % manifest["num_buckets"]
    return timeline_fault(stored_timelines(day, bucket).read(), ds=ds, max_actions=site.timelines.max_actions)
