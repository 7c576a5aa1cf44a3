"""Group `serving`, second half: pins are embedded and indexed, and a release publishes users and pins together."""

import datetime

import dagster as dg

from pf_assets.metadata.check_results import verdict_result
from pf_assets.metadata.pages import record_days
from pf_assets.metadata.serving import describe_index, describe_pin_embeddings, describe_release, describe_superseded
from pf_assets.settings import ENGINE_POOL, daily_partitions, days_to_check, start_engine
from pf_assets.tracking.served_models import ServedModels
from pf_core.config.site import Site
from pf_core.embeddings.checks import judge_pin_embeddings
from pf_core.embeddings.tables import pin_embedding_state
from pf_core.serving.checks import judge_index, judge_release
from pf_core.storage.builds import MANIFEST

GROUP = "serving"


def pin_embeddings_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=["pin_features", "user_embeddings"],
        kinds={"lance", "pytorch"},
    )
    def pin_embeddings(context: dg.AssetExecutionContext) -> None:
        """Every candidate pin through the pin tower of the model that embedded the day's users (paper, section 3.6).

        It is a small MLP on a feature that is there already, so it is computed from scratch every day.
        """
        from pf_core.embeddings.pins import embed_pin_days  # brings torch, which takes seconds

        models = ServedModels(site)
        with start_engine(site) as engine:
            manifests = embed_pin_days(
                site, context.partition_keys, model_for=models.of_users, engine=engine, progress=context.log.info
            )
            record_days(context, manifests, lambda manifest, _: describe_pin_embeddings(manifest, models.url(manifest)))

    return pin_embeddings


def pin_index_asset(site: Site) -> dg.AssetsDefinition:
    index = site.serving.index

    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=["pin_embeddings", "user_embedding_snapshot"],
        kinds={"hnswlib"},
        metadata={
            "links": index.links,
            "ef_construction": index.ef_construction,
            "num_shards": index.num_shards,
            "target_recall": index.target_recall,
        },
    )
    def pin_index(context: dg.AssetExecutionContext) -> None:
        """The candidates as an HNSW graph, which finds a user's nearest pins in a millisecond (paper, section 3.6).

        How hard a search looks (`ef`) is raised until sampled users of the day's snapshot find what exact search finds.
        Of a range of days, the newest is indexed: that is the one to be released.
        """
        from pf_core.serving.build_index import build_index_days  # brings torch, which takes seconds

        *earlier, newest = context.partition_keys
        with start_engine(site) as engine:
            for manifest in build_index_days(site, [newest], engine=engine, progress=context.log.info):
                context.add_asset_metadata(describe_index(site, manifest), partition_key=newest)
        for ds in earlier:
            context.add_asset_metadata(describe_superseded(newest), partition_key=ds)

    return pin_index


def release_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(
        group_name=GROUP,
        partitions_def=daily_partitions(site),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=ENGINE_POOL,
        deps=["user_embedding_snapshot", "pin_index"],
        kinds={site.serving.store.kind},
        freshness_policy=dg.FreshnessPolicy.time_window(
            fail_window=datetime.timedelta(hours=36), warn_window=datetime.timedelta(hours=28)
        ),
        metadata={"store": site.serving.store.kind, "keep_releases": site.serving.keep_releases},
    )
    def release(context: dg.AssetExecutionContext) -> None:
        """What services read: the users' store and the pin index of one day and one model, published by one pointer.

        It is built aside and verified; the previous releases stay for an instant rollback. Of a range of days, the
        newest is released.
        """
        from pf_core.serving.publish import publish_release

        *earlier, newest = context.partition_keys
        with start_engine(site) as engine:
            manifest = publish_release(site, newest, engine=engine, progress=context.log.info)
        context.add_asset_metadata(describe_release(site, manifest), partition_key=newest)
        for ds in earlier:
            context.add_asset_metadata(describe_superseded(newest), partition_key=ds)

    return release


def serving_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="pin_embeddings", blocking=True)
    def candidates_are_embedded(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every candidate has one embedding of unit norm, of the model of the day's users."""
        days = days_to_check(context, pin_embedding_state(site).days())
        return verdict_result(context, [judge_pin_embeddings(site, ds) for ds in days])

    @dg.asset_check(asset="pin_index", blocking=True)
    def index_finds_the_nearest_pins(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """An index that misses neighbours recommends worse pins, silently."""
        existing = sorted(path.parent.name for path in (site.directory / "pin_index").glob(f"*/{MANIFEST}"))
        newest = [ds for ds in days_to_check(context, existing) if ds in existing][-1:]
        return verdict_result(context, [judge_index(site, ds) for ds in newest])

    @dg.asset_check(asset="release", blocking=True)
    def store_holds_the_snapshot(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every user of the snapshot can be looked up in the current release."""
        return verdict_result(context, [judge_release(site)])

    return [candidates_are_embedded, index_finds_the_nearest_pins, store_holds_the_snapshot]
