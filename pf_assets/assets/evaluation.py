"""Group `model`, its end: the candidate is judged beside the champion, and takes its place if the rule says so."""

import enum
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from pf_assets.metadata.evaluation import FIGURE, describe_evaluation, plot_by_day
from pf_assets.metadata.pages import save_figure
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import Promotion, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.scores import recall_by_day
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.training_set import latest_training_set, open_training_set

if TYPE_CHECKING:
    from pf_core.evaluation.promotion import Decision


GROUP = "model"

SCORES = "scores.parquet"
"""Of the candidate, by user."""


class PromoteWhen(enum.StrEnum):
    """What a run does with the rule's decision."""

    auto = "auto"
    never = "never"
    always = "always"


class EvaluationRun(dg.Config):
    """`promote`: as the rule decides (auto), never, or always; the judgement is the same."""

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
        """Candidate and champion on users whom training never saw, in the days after the cut (paper, section 4.1).

        The whole protocol: recall by action type, diversity, embeddings made once, daily and in real time, baselines.
        A model that is not good enough must not reach anybody, and one that is need not wait for a person. A new
        champion serves from the next new day of user_embeddings on, which embeds everybody with it.
        """
        from pf_core.evaluation.promotion import decide, evaluate_models  # brings torch, which takes seconds
        from pf_core.evaluation.summary import summarize

        started, tracking = time.monotonic(), Tracking(site)
        candidate, champion = tracking.candidate(), tracking.champion()
        if candidate is None:
            raise PipelineError(
                f"no model is registered yet. Train one: {materialize_command('training_set,pinnerformer_model')}"
            )
        models = {model.served_version: model.path for model in (candidate, champion) if model is not None}
        folder = evaluation_dir(site)
        with (
            exclusive(folder, "offline_evaluation"),
            relying_on(latest_training_set(site).parent, "training_set"),
        ):
            data = open_training_set(latest_training_set(site))
            evaluation = evaluate_models(site, data, models, progress=context.log.info)
            before = None if champion is None else champion.served_version
            decision = decide(candidate.served_version, before, evaluation.models, rule)
            if candidate != champion:
                decision = _as_asked(decision, config.promote, _undone(tracking, candidate))
            context.log.info(f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}")
            question = evaluation.question
            judged = evaluation.models | evaluation.baselines
            manifest = {
                "training_set": data.fingerprint,
                "question": question.fingerprint,
                "cut_ds": data.manifest["cut_ds"],
                "last_ds": question.last_ds,
                "num_pins": question.num_pins,
                "counts": question.counts,
                "summaries": {name: summarize(scores) for name, scores in judged.items()},
                "by_day": {name: recall_by_day(scores) for name, scores in evaluation.models.items()},
                "candidate": candidate.served_version,
                "champion": before,
                "candidate_is_champion": decision.promote or candidate == champion,
                "decision": asdict(decision) | {"asked_for": config.promote.value},
                "seconds": time.monotonic() - started,
            }
            evaluation.models[candidate.served_version].write(folder / SCORES)
            save_figure(plot_by_day(manifest), folder / FIGURE)
            _note(tracking, candidate, manifest, decision)
            tracking.keep(tracking.run_of(candidate), [folder / SCORES, folder / FIGURE])
            if decision.promote:
                tracking.promote(candidate.version, because=decision.reason)
            write_json(folder / MANIFEST, manifest)
        runs = {"mlflow_candidate": candidate} | ({} if champion is None else {"mlflow_champion": champion})
        urls = {name: run_url(tracking.run_of(model), mlflow_server()) for name, model in runs.items()}
        return dg.MaterializeResult(metadata=describe_evaluation(folder, manifest, urls))

    return offline_evaluation


def evaluation_dir(site: Site) -> Path:
    return site.directory / "offline_evaluation"


def _as_asked(decision: "Decision", wish: PromoteWhen, undone: Promotion | None) -> "Decision":
    """What the run asks for has precedence over the rule, and so has a person who undid this model's promotion."""
    if wish == PromoteWhen.auto and undone is not None:
        wish, said = (
            PromoteWhen.never,
            f"its promotion was undone at {undone.undone_at}",
        )
    else:
        said = f"promote: {wish} was asked for"
    if wish == PromoteWhen.auto or decision.promote == (wish == PromoteWhen.always):
        return decision
    return replace(decision, promote=not decision.promote, reason=f"{said} (the rule finds: {decision.reason})")


def _undone(tracking: Tracking, model: RegisteredModel) -> Promotion | None:
    promotions = [promotion for promotion in tracking.promotions() if promotion.version == model.version]
    return promotions[-1] if promotions and promotions[-1].undone_at is not None else None


def _note(tracking: Tracking, candidate: RegisteredModel, manifest: Mapping[str, Any], decision: "Decision") -> None:
    """Keep the judgement with the model: numbers as metrics of its run, the primary ones as tags of the registry."""
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
    tags["evaluation_decision"] = f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}"
    tracking.note(candidate, metrics=others | primary, tags=tags)


def evaluation_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="offline_evaluation")
    def candidate_was_promoted() -> dg.AssetCheckResult:
        """A candidate that is not champion waits for somebody to look at it."""
        path = evaluation_dir(site) / MANIFEST
        manifest = read_json(path) if path.exists() else None
        return dg.AssetCheckResult(
            passed=manifest is not None and manifest["candidate_is_champion"],
            severity=dg.AssetCheckSeverity.WARN,
            description="nothing was judged yet" if manifest is None else manifest["decision"]["reason"],
        )

    return [candidate_was_promoted]
