"""Group `logs`: the actions and pins of the site's logs, in the pipeline's schemas."""

import functools

import dagster as dg

from pf_assets.assets.partitions import YESTERDAY, daily_partitions, days_to_check
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.logs import describe_pin_features, describe_raw_actions
from pf_assets.metadata.pages import column_schema, record_days
from pf_assets.settings import ENGINE_POOL, start_engine
from pf_core.config.site import Site
from pf_core.logs.checks import is_newest_day, judge_late_rows, judge_quarantine, judge_volume, trailing_manifests
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import ingested_days, require_manifest
from pf_core.logs.purge import purge_if_listed_since
from pf_core.pins.checks import judge_coverage
from pf_core.pins.features import build_pin_features, pin_state
from pf_core.schemas import raw_actions_schema

GROUP = "logs"


def raw_actions_asset(site: Site) -> dg.AssetsDefinition:
    actions = site.source.actions

    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        kinds={"parquet", "duckdb"},
        metadata={
            "source": f"{site.source.root}/{actions.path}",
            "dagster/column_schema": column_schema(raw_actions_schema(actions.user_id.type, actions.pin_id.type)),
        },
    )
    def raw_actions(context: dg.AssetExecutionContext) -> None:
        """The actions of one day from the site's logs, as one typed table that all other assets can rely on.

        Rows are mapped as the site file describes, validated, de-duplicated, bucketed by user and sorted. A row that
        cannot be used goes to the quarantine with its file, row number and reason; a late row goes to the day on which
        it happened.
        """
        days, forgotten = context.partition_keys, read_deletion_list(site)
        with start_engine(site) as engine:
            manifests = ingest_days(site, days, engine=engine, forgotten=forgotten, progress=context.log.info)
            record_days(context, manifests, lambda manifest, _: describe_raw_actions(site, manifest))
        purge_if_listed_since(site, days, forgotten)

    return raw_actions


def pin_features_asset(site: Site) -> dg.AssetsDefinition:
    vectors = site.source.pins.vectors

    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=[dg.AssetDep("raw_actions"), dg.AssetDep("pin_features", partition_mapping=YESTERDAY)],
        kinds={"lance"},
        metadata={"vectors": "none" if vectors is None else "given by the site"},
    )
    def pin_features(context: dg.AssetExecutionContext) -> None:
        """Every pin of the catalogue and of the log up to the day: its content vector if it has one, its interest, and
        whether it is a candidate, which is a pin that Homefeed may show.
        """
        with start_engine(site) as engine:
            manifests = build_pin_features(site, context.partition_keys, engine=engine, progress=context.log.info)
            record_days(context, manifests, functools.partial(describe_pin_features, site))

    return pin_features


def log_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="raw_actions", blocking=True)
    def quarantined_share_is_normal(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The share of unusable rows is below the limit: above it, the log or the mapping is broken, not a few rows."""
        days = days_to_check(context, ingested_days(site))
        return asset_check_result(context, [judge_quarantine(require_manifest(site, ds), site.quality) for ds in days])

    @dg.asset_check(asset="raw_actions", blocking=True)
    def volume_is_normal(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The day has about as many actions as the same weekday before: otherwise it is incomplete or doubled.

        The site's newest day blocks. An abnormal day in the past, as in a backfill, is a warning.
        """
        days = days_to_check(context, ingested_days(site))
        results = [judge_volume(require_manifest(site, ds), trailing_manifests(site, ds), site.quality) for ds in days]
        blocks = any(is_newest_day(site, result.ds) for result in results if not result.passed)
        severity = dg.AssetCheckSeverity.ERROR if blocks else dg.AssetCheckSeverity.WARN
        return asset_check_result(context, results, severity=severity)

    @dg.asset_check(asset="raw_actions")
    def late_rows_are_received(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """No late row waits in its file for a re-run of the day on which it happened."""
        days = days_to_check(context, ingested_days(site))
        results = [judge_late_rows(site, require_manifest(site, ds)) for ds in days]
        return asset_check_result(context, results, severity=dg.AssetCheckSeverity.WARN)

    @dg.asset_check(asset="pin_features", additional_deps=["raw_actions"])
    def actions_have_pin_features(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Most actions have a pin with a content vector, if the site has vectors: models that read content see nothing
        of the other pins."""
        days = days_to_check(context, pin_state(site).days())
        results = [judge_coverage(site, ds) for ds in days]
        return asset_check_result(context, results, severity=dg.AssetCheckSeverity.WARN)

    return [quarantined_share_is_normal, volume_is_normal, late_rows_are_received, actions_have_pin_features]
