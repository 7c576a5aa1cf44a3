"""Group `model`: the training set, and the model trained on it.

Both are unpartitioned: there is one training set and one current model, and their manifests name the day of the cut.
The training processes belong to the run: they report to it, and end with it.
"""

import enum
from dataclasses import asdict
from typing import Any

import dagster as dg

from pf_assets.launch.training import set_aside, train_and_register
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.model import describe_model, describe_training_set
from pf_assets.settings import TRAINING_POOL, mlflow_server, start_engine
from pf_assets.tracking.runs import run_url
from pf_core.config.site import Site
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.auto import describe_choice
from pf_core.training.build_set import build_training_set
from pf_core.training.checks import judge_cut, judge_held_out_users, judge_loss
from pf_core.training.plan import code_fingerprint, models_dir, plan_model, write_current_model
from pf_core.training.training_set import latest_training_set

GROUP = "model"


class PresetName(enum.StrEnum):
    """The values of pf_core's Preset: Dagster's configuration does not support Literal."""

    auto = "auto"
    paper = "paper"
    demo = "demo"
    tiny = "tiny"


class TrainingSetRun(dg.Config):
    """`cut_ds`: the last day that training sees; by default, it follows from the site file's training section."""

    cut_ds: str | None = None


class ModelRun(dg.Config):
    """`preset` and `changes`: train another model than the site file's; `retrain`: train it again if it exists."""

    preset: PresetName | None = None
    changes: dict[str, Any] | None = None
    retrain: bool = False


def training_set_asset(site: Site) -> dg.AssetsDefinition:
    newest = dg.LastPartitionMapping()

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        deps=[
            dg.AssetDep("user_timelines", partition_mapping=newest),
            dg.AssetDep("pin_features", partition_mapping=newest),
        ],
        kinds={"numpy", "arrow"},
        metadata={
            "evaluation_days": "by default" if site.training.evaluation_days is None else site.training.evaluation_days,
            "held_out_share": site.training.held_out_share,
        },
    )
    def training_set(context: dg.AssetExecutionContext, config: TrainingSetRun) -> dg.MaterializeResult[None]:
        """The users and days that training may see, fixed once, so that other users and days can evaluate the model.

        Users are split into training and held-out users, and every timeline ends at the day of the cut (paper, section
        3.5). Whole timelines are stored memory-mapped; training samples its examples from them.
        """
        with start_engine(site) as engine:
            manifest = build_training_set(site, cut_ds=config.cut_ds, engine=engine, progress=context.log.info)
        return dg.MaterializeResult(
            metadata=describe_training_set(latest_training_set(site), manifest),
            data_version=dg.DataVersion(manifest["fingerprint"]),
        )

    return training_set


def pinnerformer_model_asset(site: Site) -> dg.AssetsDefinition:
    training = site.training

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        deps=["training_set"],
        kinds={"pytorch", "mlflow"},
        code_version=code_fingerprint(),
        metadata={
            "preset": training.preset,
            "changes": dg.MetadataValue.json(training.changes),
            "processes": training.launch.num_nodes * training.launch.processes_per_node,
        },
    )
    def pinnerformer_model(context: dg.AssetExecutionContext, config: ModelRun) -> dg.MaterializeResult[None]:
        """The trained model, which makes all embeddings of users and pins.

        With preset auto it has parts: taste, content, trend, and a memory of each user's own pins; `chosen` names its
        settings with their reasons. The other presets train the paper's towers (sections 3.1 to 3.4). An interrupted
        training continues from its last checkpoint. A model whose loss fell becomes the candidate.
        """
        with (
            relying_on(latest_training_set(site).parent, "training_set"),
            exclusive(models_dir(site), "pinnerformer_model"),
        ):
            plan = plan_model(site, None if config.preset is None else config.preset.value, config.changes)
            for choice in plan.chosen:
                context.log.info(describe_choice(choice))
            if config.retrain:
                set_aside(plan.run_dir)
            run = train_and_register(context, site, plan)
            manifest = write_current_model(site, plan, mlflow=asdict(run))
        return dg.MaterializeResult(
            metadata=describe_model(plan.run_dir, manifest, plan.history, run_url(run, mlflow_server())),
            data_version=dg.DataVersion(plan.model_version),
        )

    return pinnerformer_model


def model_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="training_set", blocking=True)
    def held_out_users_are_disjoint(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """No held-out user is a training user: a model is evaluated on users whom it has never seen. Nor is a user whom
        `training.users` does not select."""
        return asset_check_result(context, [judge_held_out_users(site, latest_training_set(site))])

    @dg.asset_check(asset="training_set", blocking=True)
    def nothing_is_later_than_the_cut(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """No action is later than the cut: the days after it evaluate the model, and must not train it."""
        return asset_check_result(context, [judge_cut(site)])

    @dg.asset_check(asset="pinnerformer_model", blocking=True)
    def loss_fell_and_is_finite(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The training loss fell and is finite: a model that learned nothing, or diverged, must not be served."""
        return asset_check_result(context, [judge_loss(site)])

    return [held_out_users_are_disjoint, nothing_is_later_than_the_cut, loss_fell_and_is_finite]
