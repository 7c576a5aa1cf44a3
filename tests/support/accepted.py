"""A small site whose first model was trained, judged and accepted, and is not refitted; and runs of its assets."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pf_assets.definitions import build_definitions
from pf_core.config.site import Site
from pf_core.config.training_section import LaunchConfig, TrainingConfig
from tests.support.judging import make_judged_site
from tests.support.shared import SharedSites
from tests.support.training_here import RUN_RANKS, run_rank_here

HELD_OUT_SHARE = 0.5


def copy_accepted(shared: SharedSites, target: Path) -> Site:
    return shared.copy("accepted", lambda root: _make(root, shared), target)


def _make(root: Path, shared: SharedSites) -> Site:
    site = shared.add_mlflow(make_judged_site(root))
    training = TrainingConfig(
        evaluation_days=1, held_out_share=HELD_OUT_SHARE, preset="tiny", launch=LaunchConfig(num_workers=0)
    )
    site = site.model_copy(update={"training": training})
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(RUN_RANKS, run_rank_here)
        assert run_assets(site, instance, "pinnerformer_model", "offline_evaluation").success
    return site


def run_assets(
    site: Site, instance: dg.DagsterInstance, *assets: str, **config: dict[str, Any]
) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(site)
    return dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.assets(*assets),
        instance=instance,
        run_config={"ops": {asset: {"config": each} for asset, each in config.items()}},
        raise_on_error=False,
    )
