"""Schedules and the failure sensor: a release every morning, a new model every week, advice when a run fails.

A day's logs are complete on the day after, as in the paper. Late rows go to the day on which they happened, so the
morning's run covers every day for which rows can still arrive; days without changes are not rebuilt.
"""

import datetime
from collections.abc import Mapping

import dagster as dg

from pf_assets.failures import reason_of
from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.tables import snapshot_state

DAILY_ASSETS = (
    *("raw_actions", "pin_features", "user_timelines", "user_embeddings", "user_embedding_snapshot"),
    *("pin_embeddings", "pin_index", "release"),
)

TRAINING_ASSETS = ("training_set", "pinnerformer_model", "offline_evaluation", "refitted_model")
"""The weekly assets; a site without `training.refit` does not have the last one."""

KEEP_MODEL = {"ops": {"user_embeddings": {"config": {"keep_model": True}}}}
"""Run configuration: days that are embedded again because of late rows keep their model, new days use the champion."""


def schedules(site: Site) -> list[dg.ScheduleDefinition]:
    daily = dg.define_asset_job(
        "daily_release",
        dg.AssetSelection.assets(*DAILY_ASSETS),
        description="Builds every daily asset, from the logs of a day to its release.",
    )
    training = dg.define_asset_job(
        "weekly_training",
        dg.AssetSelection.assets(*training_assets(site)),
        description="Trains a model on a new training set and evaluates it; a good one becomes the champion, and is "
        "refitted until the newest day.",
    )

    @dg.schedule(
        job=daily,
        cron_schedule=site.serving.daily_cron,
        execution_timezone="UTC",
        description="Releases the day before, whose logs are complete, and rebuilds days that got late rows.",
    )
    def daily_release_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        return request_for(site, context.scheduled_execution_time)

    weekly = dg.ScheduleDefinition(
        name="weekly_training_schedule",
        job=training,
        cron_schedule=site.serving.training_cron,
        execution_timezone="UTC",
        description="Trains a model on the newest days; the evaluation decides whether it is promoted.",
    )
    return [daily_release_schedule, weekly]


def training_assets(site: Site) -> list[str]:
    """Return the weekly assets of a site in their order."""
    return [asset for asset in TRAINING_ASSETS if asset != "refitted_model" or site.training.refit]


def morning_days(site: Site, ds: str) -> list[str]:
    """Return the days that the run on the morning after `ds` builds: `ds`, and days before it that may have late rows.

    If earlier mornings were missed or failed, their days are included.
    """
    source = site.source.actions
    served = [day for day in snapshot_state(site).days() if day < ds]
    first_new = shift_ds(served[-1], 1) if served else ds
    return ds_range(max(site.start_ds, shift_ds(first_new, -source.late_days if source.is_dated else 0)), ds)


def request_for(site: Site, tick: datetime.datetime) -> dg.RunRequest | dg.SkipReason:
    """Request one run for the day before the tick, or skip a day that the site does not have."""
    ds = shift_ds(tick.astimezone(datetime.UTC).date().isoformat(), -1)
    if ds < site.start_ds:
        return dg.SkipReason(f"the site's first day is {site.start_ds}, which is not over yet")
    if site.end_ds is not None and ds > site.end_ds:
        return dg.SkipReason(f"the site's last day was {site.end_ds}; there is nothing to do for {ds}")
    first = morning_days(site, ds)[0]
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": ds, "ds": ds}
    return dg.RunRequest(run_key=ds, tags=tags, run_config=KEEP_MODEL)


def failure_sensor() -> dg.SensorDefinition:
    @dg.run_failure_sensor(
        name="what_to_do",
        description="Logs for every failed run why it failed, what it means for serving, and what to do.",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=30,
    )
    def what_to_do(context: dg.RunFailureSensorContext) -> None:
        failed = [event for event in context.get_step_failure_events() if event.step_key is not None]
        context.log.error(
            advise(
                asset=failed[0].step_key if failed else None,
                reason=reason_of(failed[0]) if failed else "",
                tags=context.dagster_run.tags,
            )
        )

    return what_to_do


def advise(*, asset: str | None, reason: str, tags: Mapping[str, str]) -> str:
    """Return why a run failed, what it means for serving (the last release is still served), and what to do.

    `asset` is the asset that failed; None if the run ended before any asset failed.
    """
    if asset is None:
        return (
            "The run ended before any asset did: its process was killed, or the machine restarted. "
            "Re-execute it in the UI: finished partitions are not built again."
        )
    if asset in TRAINING_ASSETS:
        return (
            f"{asset} failed: {reason}. The champion keeps serving. When this is fixed, re-execute the run: training "
            "continues from its last checkpoint."
        )
    first = tags.get("dagster/asset_partition_range_start") or tags.get("dagster/partition")
    last = tags.get("dagster/asset_partition_range_end") or first
    until = "" if last == first else f" --until {last}"
    repair = "" if first is None else f" (or: pf repair --since {first}{until})"
    return (
        f"{asset} failed: {reason}. The previous release keeps serving. When this is fixed, re-execute the run{repair}."
    )
