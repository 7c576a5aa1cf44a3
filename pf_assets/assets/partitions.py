"""Partitions of the daily assets, and the days that a check run is about."""

from collections.abc import Sequence

import dagster as dg

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds

YESTERDAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
"""Dependency of a daily asset on the day before."""


def daily_partitions(site: Site) -> dg.DailyPartitionsDefinition:
    """Partitions of every daily asset, from the site's first day to its last, if it has one."""
    end_date = None if site.end_ds is None else shift_ds(site.end_ds, 1)  # dagster excludes it
    return dg.DailyPartitionsDefinition(start_date=site.start_ds, end_date=end_date)


def days_to_check(context: dg.AssetCheckExecutionContext, existing: Sequence[str]) -> list[str]:
    """Return the days that a check run is about, without those that retention has removed.

    These are the run's partitions; a check that is run alone is about the newest day.
    """
    tags = context.run.tags
    if "dagster/asset_partition_range_start" in tags:
        days = ds_range(tags["dagster/asset_partition_range_start"], tags["dagster/asset_partition_range_end"])
        return [ds for ds in days if ds in existing]
    if "dagster/partition" in tags:
        return [tags["dagster/partition"]]
    return list(existing[-1:])
