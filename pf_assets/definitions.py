"""The pipeline in order, for the site of PF_SITE: raw logs, timelines, a model, daily embeddings, a release.

The experiments are a branch after the training set: they test the paper's claims, and nothing is served from them.
"""

import warnings

import dagster as dg

from pf_assets.assets.embeddings import embedding_checks, user_embedding_snapshot_asset, user_embeddings_asset
from pf_assets.assets.evaluation import evaluation_checks, offline_evaluation_asset
from pf_assets.assets.experiments import ablation_runs_asset, paper_report_asset
from pf_assets.assets.logs import log_checks, pin_features_asset, raw_actions_asset
from pf_assets.assets.model import model_checks, pinnerformer_model_asset, training_set_asset
from pf_assets.assets.refit import refit_checks, refitted_model_asset
from pf_assets.assets.serving import pin_embeddings_asset, pin_index_asset, release_asset, serving_checks
from pf_assets.assets.timelines import timeline_checks, user_timelines_asset
from pf_assets.schedules import failure_sensor, schedules
from pf_assets.settings import current_site
from pf_core.config.site import Site


@dg.definitions
def defs() -> dg.Definitions:
    return build_definitions(current_site())


def build_definitions(site: Site) -> dg.Definitions:
    """Return the assets, checks, schedules and sensors of a site."""
    with warnings.catch_warnings():
        # Backfill policies and partitioned checks are marked beta in dagster 1.13; tests pin how they behave.
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return _pipeline(site)


def _pipeline(site: Site) -> dg.Definitions:
    return dg.Definitions(
        assets=[
            raw_actions_asset(site),
            pin_features_asset(site),
            user_timelines_asset(site),
            training_set_asset(site),
            pinnerformer_model_asset(site),
            offline_evaluation_asset(site),
            *([refitted_model_asset(site)] if site.training.refit else []),
            ablation_runs_asset(site),
            paper_report_asset(site),
            user_embeddings_asset(site),
            user_embedding_snapshot_asset(site),
            pin_embeddings_asset(site),
            pin_index_asset(site),
            release_asset(site),
        ],
        asset_checks=[
            *log_checks(site),
            *timeline_checks(site),
            *model_checks(site),
            *evaluation_checks(site),
            *(refit_checks(site) if site.training.refit else []),
            *embedding_checks(site),
            *serving_checks(site),
        ],
        schedules=schedules(site),
        sensors=[failure_sensor()],
        # The heavy work of a step runs in processes of its own; one more for each step only takes time to start.
        executor=dg.in_process_executor,
    )
