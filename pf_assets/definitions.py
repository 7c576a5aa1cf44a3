"""The pipeline, in order: raw logs to user timelines to a trained model, for the site that PF_SITE names."""

import warnings

import dagster as dg

from pf_assets.logs import log_checks, pin_features_asset, raw_actions_asset
from pf_assets.model import model_checks, pinnerformer_model_asset, training_set_asset
from pf_assets.settings import current_site
from pf_assets.timelines import timeline_checks, user_timelines_asset
from pf_core.site import Site


@dg.definitions
def defs() -> dg.Definitions:
    return build_definitions(current_site())


def build_definitions(site: Site) -> dg.Definitions:
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
        ],
        asset_checks=[*log_checks(site), *timeline_checks(site), *model_checks(site)],
        # The heavy work of a step runs in processes of its own: one more for each step only costs its start.
        executor=dg.in_process_executor,
    )
