"""Group `model`: the cut that training may see, and the model trained on it.

Both are unpartitioned: there is one training set and one current model, and their manifests say of which day. The
processes that train belong to the run: they report to it, and end with it.
"""

import enum
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.launch.training import model_tags, source_tags, train_planned
from pf_assets.metadata.model import describe_model, describe_training_set, plot_training
from pf_assets.metadata.pages import save_figure
from pf_assets.settings import TRAINING_POOL, mlflow_server, start_engine
from pf_assets.tracking.tracking import TrackedRun, Tracking, run_url
from pf_core.config.site import Site
from pf_core.hashing import is_held_out
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, remove_tree, rename_folder, write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.plan import (
    PlannedModel,
    code_fingerprint,
    current_model,
    models_dir,
    plan_model,
    read_history,
    training_fault,
)
from pf_core.training.training_set import DESCRIPTION, build_training_set, latest_training_set, open_training_set

GROUP = "model"


class PresetName(enum.StrEnum):
    """pf_core's Preset; Dagster's configuration takes no Literal."""

    paper = "paper"
    demo = "demo"
    tiny = "tiny"


class TrainingSetRun(dg.Config):
    """`cut_ds`: the last day that training sees; by default, what the site file's training section says."""

    cut_ds: str | None = None


class ModelRun(dg.Config):
    """`preset` and `changes`: another model than the site file's; `retrain`: train it although it is there."""

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
            "evaluation_days": site.training.evaluation_days,
            "held_out_share": site.training.held_out_share,
        },
    )
    def training_set(context: dg.AssetExecutionContext, config: TrainingSetRun) -> dg.MaterializeResult[None]:
        """The cut: which users and which days training may see (paper, section 3.5).

        It fixes what a model was trained on, so that the days after it and the users left out can judge the model.
        Whole timelines, memory-mapped: examples are sampled from them on the fly.
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
        """The user tower and the pin tower, trained with the dense all-action loss (paper, sections 3.1 to 3.4).

        One transformer turns a user's newest actions into the embedding that everything downstream serves. A training
        that was interrupted goes on from its last checkpoint.
        """
        plan = plan_model(site, None if config.preset is None else config.preset.value, config.changes)
        with (
            exclusive(models_dir(site), "pinnerformer_model"),
            relying_on(plan.training_set.parent, "training_set"),
        ):
            if config.retrain:
                _set_aside(plan.run_dir)
            run = _train_and_register(context, site, plan)
            manifest = {
                "model_version": plan.model_version,
                "cut_ds": plan.manifest["cut_ds"],
                "training_set": plan.manifest["fingerprint"],
                "config": plan.config.model_dump(mode="json"),
                "result": read_json(plan.run_dir / "result.json"),
                "mlflow": asdict(run),
            }
            write_json(models_dir(site) / MANIFEST, manifest)
        return dg.MaterializeResult(
            metadata=describe_model(plan.run_dir, manifest, plan.history, run_url(run, mlflow_server())),
            data_version=dg.DataVersion(plan.model_version),
        )

    return pinnerformer_model


def _set_aside(run_dir: Path) -> None:
    """Nothing is lost if training it anew fails: what was there stays beside it, until the next time."""
    aside = run_dir.with_name(f"{run_dir.name}.before-retrain")
    if run_dir.exists():
        remove_tree(aside)
        rename_folder(run_dir, aside)


def _train_and_register(context: dg.AssetExecutionContext, site: Site, plan: PlannedModel) -> TrackedRun:
    tracking = Tracking(site)
    run = tracking.find(plan.run_dir)
    if plan.is_trained:
        context.log.info(
            f"model {plan.model_version} is trained already: this configuration, training set and code gave "
            f"{plan.run_dir}. Nothing is trained; the run configuration retrain: true trains it anew"
        )
    if run is None or run.version is None or not plan.is_trained:
        tags = source_tags(context, site) | model_tags(site, plan)
        params = plan.config.model_dump(mode="json")
        run = tracking.start(plan.run_dir, name=plan.model_version, params=params, tags=tags)
        context.log.info(f"model {plan.model_version}; MLflow run {run_url(run, mlflow_server())}")
        with tracking.watching(run):
            train_planned(context, site, plan, tracking, run)
            save_figure(plot_training(plan.history), plan.run_dir / "training.png")
            names = ("model", "result.json", "history.jsonl", "training.png")
            tracking.keep(run, [*(plan.run_dir / name for name in names), plan.training_set / DESCRIPTION])
    fault = training_fault(plan.history)
    if fault is not None:
        context.log.error(f"model {plan.model_version} is not registered: {fault}")
        return run
    return tracking.register(run, plan.run_dir, model_version=plan.model_version)


def model_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="training_set", blocking=True)
    def held_out_users_are_disjoint() -> dg.AssetCheckResult:
        """A model is judged on users whom it has never seen."""
        data = open_training_set(latest_training_set(site))
        share, train, held_out = data.manifest["held_out_share"], data.train.user_ids(), data.held_out.user_ids()
        num_wrong = int(is_held_out(train, share).sum()), int((~is_held_out(held_out, share)).sum())
        return dg.AssetCheckResult(
            passed=num_wrong == (0, 0),
            description=f"of {len(train):,} users to train on, {num_wrong[0]:,} should be held out; "
            f"of {len(held_out):,} held out, {num_wrong[1]:,} should not",
        )

    @dg.asset_check(asset="training_set", blocking=True)
    def nothing_is_later_than_the_cut() -> dg.AssetCheckResult:
        """What happened after the cut judges the model, and must not teach it."""
        data = open_training_set(latest_training_set(site))
        num_later = sum(int((split.ts >= data.cut_us).sum()) for split in (data.train, data.held_out))
        return dg.AssetCheckResult(
            passed=num_later == 0, description=f"{num_later:,} actions after {data.manifest['cut_ds']}"
        )

    @dg.asset_check(asset="pinnerformer_model", blocking=True)
    def loss_fell_and_is_finite() -> dg.AssetCheckResult:
        """A model that learned nothing, or diverged, must not reach anybody."""
        manifest = current_model(site)
        if manifest is None:
            return dg.AssetCheckResult(passed=False, description="there is no model")
        fault = training_fault(read_history(models_dir(site) / manifest["model_version"]))
        description = f"model {manifest['model_version']}: {fault or 'no fault found'}"
        return dg.AssetCheckResult(passed=fault is None, description=description)

    return [held_out_users_are_disjoint, nothing_is_later_than_the_cut, loss_fell_and_is_finite]
