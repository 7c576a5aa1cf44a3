"""Group `model`, last asset: candidate and champion are evaluated, and the rule promotes the candidate or does not."""

import enum
import math
from pathlib import Path

import dagster as dg

from pf_assets.metadata.evaluation import FIGURE, describe_evaluation, plot_by_day
from pf_assets.metadata.pages import save_figure
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.manifest import EvaluationManifest
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.training_set import latest_training_set, open_training_set

GROUP = "model"

SCORES = "scores.parquet"
"""Scores of the candidate for each user."""


class PromoteWhen(enum.StrEnum):
    """What a run does with the candidate: as the rule decides, never promote it, or always promote it."""

    auto = "auto"
    never = "never"
    always = "always"


class EvaluationRun(dg.Config):
    """`promote`: as the rule decides (auto), never, or always; the metrics are the same."""

    promote: PromoteWhen = PromoteWhen.auto


def offline_evaluation_asset(site: Site) -> dg.AssetsDefinition:
    rule = site.serving.promotion

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        deps=[
            "training_set",
            "pinnerformer_model",
            dg.AssetDep("raw_actions", partition_mapping=dg.LastPartitionMapping()),
        ],
        kinds={"pytorch", "mlflow"},
        metadata={"recall_tolerance": rule.recall_tolerance, "coverage_tolerance": rule.coverage_tolerance},
    )
    def offline_evaluation(context: dg.AssetExecutionContext, config: EvaluationRun) -> dg.MaterializeResult[None]:
        """Evaluate candidate and champion on users whom training never saw, in the days after the cut (section 4.1).

        The whole protocol: recall by action type, diversity, embeddings made once, daily and in realtime, baselines.
        A model that is not good enough must not be served, and a good one need not wait for a person. A new champion
        serves from the next new day of user_embeddings on, which embeds all users with it.
        """
        from pf_core.evaluation.promotion import NamedModel, evaluate_and_decide  # brings torch, which takes seconds

        tracking, folder = Tracking(site), evaluation_dir(site)
        candidate, champion = tracking.candidate(), tracking.champion()
        if candidate is None:
            raise PipelineError(
                "no model is registered yet", f"train one: {materialize_command('training_set,pinnerformer_model')}"
            )
        with exclusive(folder, "offline_evaluation"), relying_on(latest_training_set(site).parent, "training_set"):
            manifest = evaluate_and_decide(
                site,
                open_training_set(latest_training_set(site)),
                NamedModel(name=candidate.served_version, path=candidate.path),
                None if champion is None else NamedModel(name=champion.served_version, path=champion.path),
                promote=config.promote.value,
                undone_at=_undone_at(tracking, candidate),
                scores_path=folder / SCORES,
                progress=context.log.info,
            )
            save_figure(plot_by_day(manifest), folder / FIGURE)
            _note(tracking, candidate, manifest)
            tracking.keep(tracking.run_of(candidate), [folder / SCORES, folder / FIGURE])
            if manifest["decision"]["promote"]:
                tracking.promote(candidate.version, because=manifest["decision"]["reason"])
            write_json(folder / MANIFEST, manifest)
        runs = {"mlflow_candidate": candidate} | ({} if champion is None else {"mlflow_champion": champion})
        urls = {name: run_url(tracking.run_of(model), mlflow_server()) for name, model in runs.items()}
        return dg.MaterializeResult(metadata=describe_evaluation(folder, manifest, urls))

    return offline_evaluation


def evaluation_dir(site: Site) -> Path:
    return site.directory / "offline_evaluation"


def _undone_at(tracking: Tracking, model: RegisteredModel) -> str | None:
    """When the model's last promotion was undone; None if it stands or there was none."""
    promotions = [promotion for promotion in tracking.promotions() if promotion.version == model.version]
    return promotions[-1].undone_at if promotions else None


def _note(tracking: Tracking, candidate: RegisteredModel, manifest: EvaluationManifest) -> None:
    """Log all metrics on the candidate's MLflow run, and the primary ones and the decision as registry tags."""
    summaries = manifest["summaries"][candidate.served_version]
    once = summaries["once"]
    primary = {
        "evaluation_recall_at_10": once["recall_at_10"],
        "evaluation_recall_at_10_low": once["recall_at_10_interval"][0],
        "evaluation_recall_at_10_high": once["recall_at_10_interval"][1],
        "evaluation_p90_coverage_at_10": once["p90_coverage_at_10"],
    }
    others = {
        f"evaluation_{metric}_{frequency}": value
        for frequency, summary in summaries.items()
        for metric, value in summary.items()
        if isinstance(value, float) and math.isfinite(value)
    }
    tags = {name: f"{value:.4f}" for name, value in primary.items()}
    decision = manifest["decision"]
    tags["evaluation_decision"] = f"{'promoted' if decision['promote'] else 'not promoted'}: {decision['reason']}"
    tracking.note(candidate, metrics=others | primary, tags=tags)


def evaluation_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="offline_evaluation")
    def candidate_was_promoted() -> dg.AssetCheckResult:
        """A candidate that is not champion waits for a person to look at it."""
        path = evaluation_dir(site) / MANIFEST
        manifest: EvaluationManifest | None = read_json(path) if path.exists() else None
        return dg.AssetCheckResult(
            passed=manifest is not None and manifest["candidate_is_champion"],
            severity=dg.AssetCheckSeverity.WARN,
            description="nothing was evaluated yet" if manifest is None else manifest["decision"]["reason"],
        )

    return [candidate_was_promoted]
