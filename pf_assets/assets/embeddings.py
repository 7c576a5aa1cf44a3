"""Group `serving`, first half: the day's active users are embedded and merged into everybody's embeddings."""

import dagster as dg

from pf_assets.metadata.check_results import verdict_result
from pf_assets.metadata.pages import record_days
from pf_assets.metadata.serving import describe_snapshot, describe_user_embeddings
from pf_assets.settings import ENGINE_POOL, daily_partitions, days_to_check, start_engine
from pf_assets.tracking.served_models import ServedModels
from pf_core.config.site import Site
from pf_core.embeddings.checks import (
    judge_active_coverage,
    judge_drift,
    judge_embeddings,
    judge_one_model,
    judge_users_kept,
)
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.tables import embedding_state, snapshot_state
from pf_core.logs.deletion_list import read_deletion_list

GROUP = "serving"

YESTERDAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)


class EmbeddingRun(dg.Config):
    """`everyone`: embed all users on the first day of the run, not only the active ones.

    `keep_model`: a day that is there keeps the model that it was embedded with; only new days take the champion.
    """

    everyone: bool = False
    keep_model: bool = False


def user_embeddings_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=[
            dg.AssetDep("raw_actions"),
            dg.AssetDep("user_timelines"),
            dg.AssetDep("pin_features"),
            dg.AssetDep("pinnerformer_model"),
            dg.AssetDep("user_embeddings", partition_mapping=YESTERDAY),
        ],
        kinds={"lance", "pytorch"},
        metadata={"device": site.serving.device, "retention_days": site.serving.retention_days},
    )
    def user_embeddings(context: dg.AssetExecutionContext, config: EmbeddingRun) -> None:
        """The users who were active on the day, embedded from their newest actions as of it (paper, section 3.6).

        This is the paper's point: only who was active needs a new embedding. Every row names its model, the champion
        when the run began. On the first day, and when the champion changed, everybody is embedded.
        """
        from pf_core.embeddings.users import embed_days  # brings torch, which takes seconds

        models = ServedModels(site)
        with start_engine(site) as engine:
            manifests = embed_days(
                site,
                context.partition_keys,
                model_for=models.as_before if config.keep_model else models.champion,
                everyone=config.everyone,
                engine=engine,
                forgotten=read_deletion_list(site),
                progress=context.log.info,
            )
            record_days(
                context, manifests, lambda manifest, _: describe_user_embeddings(manifest, models.url(manifest))
            )

    return user_embeddings


def user_embedding_snapshot_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=[
            dg.AssetDep("user_embeddings"),
            dg.AssetDep("user_embedding_snapshot", partition_mapping=YESTERDAY),
        ],
        kinds={"lance"},
        metadata={"retention_days": site.serving.retention_days},
    )
    def user_embedding_snapshot(context: dg.AssetExecutionContext) -> None:
        """Everybody's newest embedding as of the day: the day's embeddings merged into those of the day before.

        No user is lost by being idle, and a day costs what its active users cost. Every day of the retention stays
        readable, so that a bad day can be repaired from the one before it.
        """
        models = ServedModels(site)
        with start_engine(site) as engine:
            manifests = merge_days(
                site,
                context.partition_keys,
                engine=engine,
                forgotten=read_deletion_list(site),
                progress=context.log.info,
            )
            record_days(context, manifests, lambda manifest, _: describe_snapshot(site, manifest, models.url(manifest)))

    return user_embedding_snapshot


def embedding_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="user_embeddings", blocking=True)
    def user_embeddings_are_unit_norm(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """A vector with a NaN or another length breaks every search; one of another model means nothing."""
        days = days_to_check(context, embedding_state(site).days())
        return verdict_result(context, [judge_embeddings(site, ds) for ds in days])

    @dg.asset_check(asset="user_embeddings", blocking=True)
    def active_users_are_embedded(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """If many active users have no usable action, pin features or vocabularies no longer fit the logs."""
        days = days_to_check(context, embedding_state(site).days())
        return verdict_result(context, [judge_active_coverage(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", blocking=True)
    def no_user_is_lost(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The snapshot only grows, but for users who asked to be forgotten."""
        days = days_to_check(context, snapshot_state(site).days())
        return verdict_result(context, [judge_users_kept(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", blocking=True)
    def snapshot_has_one_model(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Vectors of two models cannot be compared."""
        days = days_to_check(context, snapshot_state(site).days())
        return verdict_result(context, [judge_one_model(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", additional_deps=["user_embeddings"])
    def drift_is_normal(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """A day that moves users unlike other days has unusual input: look at it before trusting it."""
        days = [ds for ds in days_to_check(context, snapshot_state(site).days()) if embedding_state(site).manifest(ds)]
        verdicts = [judge_drift(site, ds) for ds in days]
        return verdict_result(context, verdicts, severity=dg.AssetCheckSeverity.WARN)

    return [
        user_embeddings_are_unit_norm,
        active_users_are_embedded,
        no_user_is_lost,
        snapshot_has_one_model,
        drift_is_normal,
    ]
