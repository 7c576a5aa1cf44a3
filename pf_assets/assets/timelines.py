"""Group `timelines`: one row for each user, with all actions of the trailing window."""

import functools

import dagster as dg

from pf_assets.assets.partitions import YESTERDAY, daily_partitions, days_to_check
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.pages import column_schema, record_days
from pf_assets.metadata.timelines import describe_user_timelines
from pf_assets.settings import ENGINE_POOL, start_engine
from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.schemas import user_timelines_schema
from pf_core.timelines.build import build_timelines, timeline_state
from pf_core.timelines.checks import audit_day

GROUP = "timelines"


class TimelineRun(dg.Config):
    """`rebuild`: build the first day of the run from the logs of its whole window, not from the day before."""

    rebuild: bool = False


def user_timelines_asset(site: Site) -> dg.AssetsDefinition:
    actions = site.source.actions

    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=[
            dg.AssetDep("raw_actions"),
            dg.AssetDep("user_timelines", partition_mapping=YESTERDAY),
        ],
        kinds={"lance"},
        metadata={
            "window_days": site.timelines.window_days,
            "max_actions": site.timelines.max_actions,
            "num_buckets": site.timelines.num_buckets,
            "dagster/column_schema": column_schema(user_timelines_schema(actions.user_id.type, actions.pin_id.type)),
        },
    )
    def user_timelines(context: dg.AssetExecutionContext, config: TimelineRun) -> None:
        """Every user's actions of the trailing window in one row, in ascending order, as of the day.

        Training samples its examples from these rows, and inference reads the newest actions of a user from one row
        instead of from a year of logs. A day is built from the day before by updating the users who were active; the
        result equals a rebuild from the logs (paper, section 3.5).
        """
        with start_engine(site) as engine:
            manifests = build_timelines(
                site,
                context.partition_keys,
                engine=engine,
                rebuild=config.rebuild,
                progress=context.log.info,
            )
            describe = functools.partial(describe_user_timelines, site, plotted_ds=context.partition_keys[-1])
            record_days(context, manifests, describe)

    return user_timelines


def timeline_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="user_timelines", blocking=True)
    def timelines_are_sound(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every active user has one row, whose actions are in ascending order and not later than the day."""
        days = days_to_check(context, timeline_state(site).days())
        faults = {ds: audit_day(site, ds) for ds in days}
        results = [CheckResult(ds, fault is None, fault or "no fault found") for ds, fault in faults.items()]
        return asset_check_result(context, results)

    return [timelines_are_sound]
