"""When things run: every morning yesterday is embedded and released, every week a model is trained and judged.

The paper's lag: a day's logs are complete on the day after. Late rows go to the day on which they happened, so the
morning's run covers the days that rows can still arrive for; what did not change is left as it is.
"""

import datetime
from collections.abc import Mapping

import dagster as dg

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.tables import snapshot_state

DAILY_ASSETS = (
    *("raw_actions", "pin_features", "user_timelines", "user_embeddings", "user_embedding_snapshot"),
    *("pin_embeddings", "pin_index", "release"),
)

TRAINING_ASSETS = ("training_set", "pinnerformer_model", "offline_evaluation")

KEEP_MODEL = {"ops": {"user_embeddings": {"config": {"keep_model": True}}}}
"""A day that is embedded again because of late rows keeps its model; the newest takes the champion."""


def schedules(site: Site) -> list[dg.ScheduleDefinition]:
    daily = dg.define_asset_job(
        "daily_release",
        dg.AssetSelection.assets(*DAILY_ASSETS),
        description="Yesterday's logs to a release.",
    )
    training = dg.define_asset_job(
        "weekly_training",
        dg.AssetSelection.assets(*TRAINING_ASSETS),
        description="A new cut, a new model, and its judgement: better or as good, it becomes the champion.",
    )

    @dg.schedule(
        job=daily,
        cron_schedule=site.serving.daily_cron,
        execution_timezone="UTC",
        description="Embeds and releases the day before: its logs are complete now.",
    )
    def daily_release_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        return request_for(site, context.scheduled_execution_time)

    weekly = dg.ScheduleDefinition(
        name="weekly_training_schedule",
        job=training,
        cron_schedule=site.serving.training_cron,
        execution_timezone="UTC",
        description="Trains on the newest cut; the evaluation decides whether the model is promoted.",
    )
    return [daily_release_schedule, weekly]


def morning_days(site: Site, ds: str) -> list[str]:
    """What the morning after ds runs: ds, and the days before it that late rows may have arrived for.

    After mornings that were missed or failed, it begins where the last good one ended.
    """
    source = site.source.actions
    served = [day for day in snapshot_state(site).days() if day < ds]
    first_new = shift_ds(served[-1], 1) if served else ds
    return ds_range(max(site.start_ds, shift_ds(first_new, -source.late_days if source.is_dated else 0)), ds)


def request_for(site: Site, tick: datetime.datetime) -> dg.RunRequest | dg.SkipReason:
    """One run for the day before the tick."""
    ds = shift_ds(tick.astimezone(datetime.UTC).date().isoformat(), -1)
    if ds < site.start_ds:
        return dg.SkipReason(f"the site's first day is {site.start_ds}, which is not over yet")
    if site.end_ds is not None and ds > site.end_ds:
        return dg.SkipReason(f"the site's last day was {site.end_ds}; there is nothing to do for {ds}")
    first = morning_days(site, ds)[0]
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": ds, "ds": ds}
    return dg.RunRequest(run_key=ds, tags=tags, run_config=KEEP_MODEL)


def failure_sensor(site: Site) -> dg.SensorDefinition:
    @dg.run_failure_sensor(
        name="what_to_do",
        description="Says in a sentence what a failed run means for serving, and what to do.",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=30,
    )
    def what_to_do(context: dg.RunFailureSensorContext) -> None:
        failed = [event for event in context.get_step_failure_events() if event.step_key is not None]
        context.log.error(
            advise(
                asset=failed[0].step_key if failed else None,
                reason=_first_line(failed[0]) if failed else context.failure_event.message or "",
                tags=context.dagster_run.tags,
            )
        )

    return what_to_do


def _first_line(event: dg.DagsterEvent) -> str:
    error = event.step_failure_data.error
    while error is not None and error.cause is not None:
        error = error.cause
    return "" if error is None else error.message.strip().removeprefix("pf_core.errors.PipelineError: ")


def advise(*, asset: str | None, reason: str, tags: Mapping[str, str]) -> str:
    """The last release keeps serving, whatever failed; what to do depends on what failed."""
    first = tags.get("dagster/asset_partition_range_start") or tags.get("dagster/partition")
    last = tags.get("dagster/asset_partition_range_end") or first
    if asset is None:
        what = "The run ended before any asset did (was its process killed, or the machine restarted?)."
        todo = "Re-execute it in the UI: what was finished is left as it is."
    elif asset in TRAINING_ASSETS:
        what = f"{asset} failed: {reason}"
        todo = "The champion keeps serving. Mend what the reason names and re-execute; training goes on where it was."
    else:
        what = f"{asset} failed: {reason}"
        rerun = (
            "" if first is None else f" (or: pf repair --since {first}{'' if last == first else f' --until {last}'})"
        )
        todo = f"The previous release keeps serving. Mend what the reason names, then re-execute the run{rerun}."
    return f"{what} {todo}"
