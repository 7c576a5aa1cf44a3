"""Group `serving`, pins and releases: pin embeddings, the index over them, and the release of users and pins."""

import datetime

import dagster as dg

from pf_assets.assets.partitions import daily_partitions, days_to_check
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.pages import record_days, record_newest
from pf_assets.metadata.serving import describe_index, describe_pin_embeddings, describe_release
from pf_assets.settings import ENGINE_POOL, start_engine
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
        """The embedding of every candidate pin, by the model that embedded the day's users.

        Users and pins can be compared only if one model embedded both (paper, section 3.6). The pin tower is a small
        MLP on existing features, so all pins are embedded every day.
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
        """The candidate pins as an HNSW graph, which finds the nearest pins of a user in a millisecond.

        The search effort (`ef`) is raised until sampled users of the day's snapshot find what exact search finds; where
        no effort suffices, every search scores all pins. A run over several days indexes only the newest, because only
        that one is released (paper, section 3.6).
        """
        from pf_core.serving.build_index import build_index_days  # brings torch, which takes seconds

        newest = context.partition_keys[-1:]
        with start_engine(site) as engine:
            for manifest in build_index_days(site, newest, engine=engine, progress=context.log.info):
                record_newest(context, describe_index(site, manifest))

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
        """What services read: the users' store and the pin index of one day and one model, published together.

        It is built and verified before it becomes the current release, in one step; previous releases are kept, so that
        a rollback takes an instant. A run over several days releases only the newest.
        """
        from pf_core.serving.publish import publish_release

        newest = context.partition_keys[-1]
        with start_engine(site) as engine:
            manifest = publish_release(site, newest, engine=engine, progress=context.log.info)
        record_newest(context, describe_release(site, manifest))

    return release


def serving_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="pin_embeddings", blocking=True)
    def candidates_are_embedded(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every candidate pin has one embedding of unit norm, by the model of the day's users."""
        days = days_to_check(context, pin_embedding_state(site).days())
        return asset_check_result(context, [judge_pin_embeddings(site, ds) for ds in days])

    @dg.asset_check(asset="pin_index", blocking=True)
    def index_finds_the_nearest_pins(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The index finds what exact search finds: one that misses pins makes recommendations worse silently."""
        existing = sorted(path.parent.name for path in (site.directory / "pin_index").glob(f"*/{MANIFEST}"))
        newest = [ds for ds in days_to_check(context, existing) if ds in existing][-1:]
        return asset_check_result(context, [judge_index(site, ds) for ds in newest])

    @dg.asset_check(asset="release", blocking=True)
    def store_holds_the_snapshot(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Every user of the snapshot can be looked up in the current release."""
        return asset_check_result(context, [judge_release(site)])

    return [candidates_are_embedded, index_finds_the_nearest_pins, store_holds_the_snapshot]
