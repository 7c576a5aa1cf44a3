"""Group `serving`, users: the embeddings of the day's active users, merged into the embeddings of all users."""

import dagster as dg

from pf_assets.assets.partitions import YESTERDAY, daily_partitions, days_to_check
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.embeddings import describe_snapshot, describe_user_embeddings
from pf_assets.metadata.pages import record_days
from pf_assets.settings import ENGINE_POOL, start_engine
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

GROUP = "serving"


class EmbeddingRun(dg.Config):
    """`everyone`: embed all users on the first day of the run, not only the active ones.

    `keep_model`: embed an existing day again with the model that it has; only new days use the champion.
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
            # offline_evaluation chooses the champion, and refitted_model brings it up to date
            dg.AssetDep("refitted_model" if site.training.refit else "offline_evaluation"),
            dg.AssetDep("user_embeddings", partition_mapping=YESTERDAY),
        ],
        kinds={"lance", "pytorch"},
        metadata={"device": site.serving.device, "retention_days": site.serving.retention_days},
    )
    def user_embeddings(context: dg.AssetExecutionContext, config: EmbeddingRun) -> None:
        """New embeddings of the users who were active on the day, from their newest actions (paper, section 3.6).

        Only active users need a new embedding, which makes a daily update affordable. Every row names its model: the
        champion's refit, or the champion, at the start of the run. On the first day, and after this model has changed,
        all users are embedded.
        """
        from pf_core.embeddings.users import embed_days  # brings torch, which takes seconds

        models = ServedModels(site)
        with start_engine(site) as engine:
            manifests = embed_days(
                site,
                context.partition_keys,
                model_for=models.as_before if config.keep_model else models.newest,
                everyone=config.everyone,
                engine=engine,
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
        """The newest embedding of every user as of the day: the day's embeddings merged into the day before.

        It keeps the users who were not active, at the cost of writing only those who were. Every day within the
        retention stays readable, so that a bad day can be rebuilt from the day before it.
        """
        models = ServedModels(site)
        with start_engine(site) as engine:
            manifests = merge_days(
                site,
                context.partition_keys,
                engine=engine,
                progress=context.log.info,
            )
            record_days(context, manifests, lambda manifest, _: describe_snapshot(site, manifest, models.url(manifest)))

    return user_embedding_snapshot


def embedding_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="user_embeddings", blocking=True)
    def user_embeddings_are_unit_norm(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every vector is finite, of unit norm and of the day's model: any other would break the search."""
        days = days_to_check(context, embedding_state(site).days())
        return asset_check_result(context, [judge_embeddings(site, ds) for ds in days])

    @dg.asset_check(asset="user_embeddings", blocking=True)
    def active_users_are_embedded(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Most active users have an embedding: otherwise pin features or vocabularies no longer fit the logs."""
        days = days_to_check(context, embedding_state(site).days())
        return asset_check_result(context, [judge_active_coverage(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", blocking=True)
    def no_user_is_lost(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every user of the day before is still there, except users who were forgotten or whose actions expired."""
        days = days_to_check(context, snapshot_state(site).days())
        return asset_check_result(context, [judge_users_kept(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", blocking=True)
    def snapshot_has_one_model(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """All vectors are of one model: vectors of two models cannot be compared."""
        days = days_to_check(context, snapshot_state(site).days())
        return asset_check_result(context, [judge_one_model(site, ds) for ds in days])

    @dg.asset_check(asset="user_embedding_snapshot", additional_deps=["user_embeddings"])
    def drift_is_normal(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Embeddings moved about as far as on other days: otherwise the day's input is unusual and needs a look."""
        days = [ds for ds in days_to_check(context, snapshot_state(site).days()) if embedding_state(site).manifest(ds)]
        results = [judge_drift(site, ds) for ds in days]
        return asset_check_result(context, results, severity=dg.AssetCheckSeverity.WARN)

    return [
        user_embeddings_are_unit_norm,
        active_users_are_embedded,
        no_user_is_lost,
        snapshot_has_one_model,
        drift_is_normal,
    ]
