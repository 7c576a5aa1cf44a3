"""Does a partition of user_timelines agree with the logs, and is it sound?"""

from pf_core.config.site import Site
from pf_core.days import ds_start_us
from pf_core.logs.partition import raw_digest, read_manifest
from pf_core.timelines.assembly import find_fault
from pf_core.timelines.build import read_bucket, timeline_state


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
