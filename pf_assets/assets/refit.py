"""Group `model`, last asset: an accepted model is trained once more until the newest day, and that version serves.

Only where the site file says `training: {refit: true}`, which is the default. Without it, the judged model serves.
"""

from dataclasses import asdict

import dagster as dg

from pf_assets.launch.training import train_and_register
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.model import describe_refit
from pf_assets.settings import TRAINING_POOL, mlflow_server, start_engine
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import DECISION_TAG, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.storage.locks import exclusive
from pf_core.training.plan import code_fingerprint
from pf_core.training.refit import (
    judge_refit,
    planned_refit,
    read_judged,
    reason_not_to_refit,
    refits_dir,
    write_current_refit,
)

GROUP = "model"


class RefitRun(dg.Config):
    """`champion`: refit the champion, although the newest candidate was not accepted."""

    champion: bool = False


def refitted_model_asset(site: Site) -> dg.AssetsDefinition:
    newest = dg.LastPartitionMapping()

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        deps=[
            "pinnerformer_model",
            "offline_evaluation",
            dg.AssetDep("user_timelines", partition_mapping=newest),
            dg.AssetDep("pin_features", partition_mapping=newest),
        ],
        kinds={"pytorch", "mlflow"},
        code_version=code_fingerprint(),
    )
    def refitted_model(context: dg.AssetExecutionContext, config: RefitRun) -> dg.MaterializeResult[None]:
        """The accepted model, trained once more until the newest day: the version that serves.

        A judged model has not seen the days that judged it, which are the newest. The refit has the same settings and
        number of steps, and these days; held-out users stay out. It is never evaluated: figures are those of the judged
        model, and a promotion compares judged models only. A rejected candidate is not refitted.
        """
        tracking = Tracking(site)
        judged, why_not = choose_judged(tracking, champion=config.champion)
        if judged is None:
            return _nothing(context, why_not)
        recipe = read_judged(judged.path, served_version=judged.served_version, version=judged.version)
        nothing_new = reason_not_to_refit(site, recipe)
        if nothing_new is not None:
            return _nothing(context, nothing_new)
        with exclusive(refits_dir(site), "refitted_model"), start_engine(site) as engine:
            with planned_refit(site, recipe, engine=engine, progress=context.log.info) as plan:
                run = train_and_register(context, site, plan, refit_of=judged)
            manifest = write_current_refit(site, plan, recipe, mlflow=asdict(run))
        return dg.MaterializeResult(
            metadata=describe_refit(plan.run_dir, manifest, plan.history, run_url(run, mlflow_server())),
            data_version=dg.DataVersion(plan.model_version),
        )

    return refitted_model


def choose_judged(tracking: Tracking, *, champion: bool) -> tuple[RegisteredModel | None, str]:
    """Return the accepted candidate, or the champion if it is wanted; without one, None and the reason."""
    newest, accepted = tracking.candidate(), tracking.champion()
    if accepted is None:
        return None, "no model was accepted yet"
    if champion or newest is None or newest == accepted:
        return accepted, ""
    served, decision = tracking.served() or accepted, newest.tags.get(DECISION_TAG, "it was not evaluated yet")
    reason = f"candidate {newest.served_version} is not the champion ({decision})"
    return None, f"{reason}; {served.served_version} keeps serving"


def _nothing(context: dg.AssetExecutionContext, reason: str) -> dg.MaterializeResult[None]:
    context.log.info(f"nothing is refitted: {reason}")
    return dg.MaterializeResult(metadata={"refitted": False, "reason": reason})


def refit_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="refitted_model")
    def refit_loss_fell_and_is_finite(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """The refit's loss fell and is finite: otherwise it is not registered, and the judged model serves."""
        return asset_check_result(context, [judge_refit(site)])

    return [refit_loss_fell_and_is_finite]
