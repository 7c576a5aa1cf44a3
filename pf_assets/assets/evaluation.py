"""Group `model`: candidate and champion are evaluated, and the rule promotes the candidate or does not.

Training makes no champion, not even of the first model: without an evaluation, or `pf promote`, nothing is served.
"""

import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.metadata.evaluation import (
    FIGURE,
    comparison_rows,
    describe_evaluation,
    describe_index,
    describe_without_vector,
    plot_by_day,
)
from pf_assets.metadata.pages import save_figure, table
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking.runs import run_url
from pf_assets.tracking.tracking import DECISION_TAG, VERDICT_TAG, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.manifest import EvaluationManifest, vector_alone
from pf_core.evaluation.verdict import judge_baselines
from pf_core.layouts import refuse_other_layout
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.training_set import latest_training_set, open_training_set

GROUP = "model"

SCORES = "scores.parquet"
"""Scores of the candidate for each user."""

NOT_EVALUATED = "nothing was evaluated yet"

PRIMARY = (
    *("recall_at_10", "recall_at_50", "askable_recall_at_10", "discovery_at_10", "discovery_at_50"),
    "p90_coverage_at_10",
)
"""Metrics of embeddings made once that are logged without the name of the frequency, and as tags of the model."""


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
        metadata={
            "first": rule.first,
            "recall_tolerance": rule.recall_tolerance,
            "coverage_tolerance": rule.coverage_tolerance,
        },
    )
    def offline_evaluation(context: dg.AssetExecutionContext, config: EvaluationRun) -> dg.MaterializeResult[None]:
        """Evaluate candidate and champion on users whom training never saw, in the days after the cut (section 4.1).

        Two questions: all positives, and discovery, where only pins that are new to the user count. Recall by action
        type, diversity, embeddings made once, daily and in realtime, baselines. A model that is not good enough must
        not be served, and a good one need not wait for a person. A new champion, which refitted_model first trains
        until the newest day, serves from the next new day of user_embeddings on: that day embeds all users with it.
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
            if tracking.champion() != champion:
                raise PipelineError(
                    f"another model became the champion while {candidate.served_version} was compared with the one "
                    "before it; nothing was decided",
                    f"run again: {materialize_command('offline_evaluation')}",
                )
            save_figure(plot_by_day(manifest), folder / FIGURE)
            _note(tracking, candidate, manifest)
            tracking.keep(tracking.run_of(candidate), [folder / SCORES, folder / FIGURE])
            if manifest["decision"]["promote"]:
                tracking.promote(candidate.version, because=manifest["decision"]["reason"])
            write_json(folder / MANIFEST, manifest)
        verdict = judge_baselines(manifest)
        if not verdict.passed:
            serves = (
                "It is the champion all the same (serving.promotion). " if manifest["candidate_is_champion"] else ""
            )
            context.log.warning(
                f"model_beats_baselines failed: {verdict.reason}. {serves}`pf status` has exit code 1, and this run 0"
            )
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
    """Log all metrics on the candidate's MLflow run, and the primary ones, verdict and decision as registry tags."""
    summaries = manifest["summaries"][candidate.served_version]
    primary = _primary_metrics(manifest)
    others = {
        f"evaluation_{metric}_{frequency}": value
        for frequency, summary in summaries.items()
        for metric, value in summary.items()
        if isinstance(value, float)
    }
    metrics = {name: value for name, value in (others | primary).items() if math.isfinite(value)}
    tags = {name: f"{value:.4f}" for name, value in primary.items() if math.isfinite(value)}
    decision, verdict = manifest["decision"], judge_baselines(manifest)
    tags |= {
        DECISION_TAG: f"{'promoted' if decision['promote'] else 'not promoted'}: {decision['reason']}",
        "evaluation_index": describe_index(manifest),
        VERDICT_TAG: f"{'passed' if verdict.passed else 'failed'}: {verdict.reason}",
    }
    if "without_vector" in manifest:
        tags["evaluation_without_vector"] = describe_without_vector(manifest["without_vector"])
    tracking.note(candidate, metrics=metrics, tags=tags)


def _primary_metrics(manifest: EvaluationManifest) -> dict[str, float]:
    """Return the candidate's metrics with embeddings made once, and those that explain or judge them."""
    once: Mapping[str, Any] = {**manifest["summaries"][manifest["candidate"]]["once"]}
    found = {name: once[name] for name in PRIMARY if name in once}
    for name in ("recall_at_10", "discovery_at_10"):
        if f"{name}_interval" in once:
            found[f"{name}_low"], found[f"{name}_high"] = once[f"{name}_interval"]
    alone = manifest["summaries"].get(vector_alone(manifest["candidate"]))
    if alone is not None:
        vector: Mapping[str, Any] = {**alone["once"]}
        found |= {f"vector_{name}": vector[name] for name in PRIMARY if name in vector}
    for question, each in manifest.get("against_baselines", {}).items():
        found[f"{question}_best_baseline"] = each["baseline"]
        found[f"{question}_difference_low"], found[f"{question}_difference_high"] = each["difference_interval"]
    if "without_vector" in manifest:
        found["positives_without_vector"] = manifest["without_vector"]["share_of_positives"]
        found["actions_without_vector"] = manifest["without_vector"]["share_of_actions"]
    return {f"evaluation_{name}": value for name, value in found.items()}


def read_evaluation(site: Site) -> EvaluationManifest | None:
    """Return the manifest of the newest evaluation, or None if nothing was evaluated yet."""
    path = evaluation_dir(site) / MANIFEST
    if not path.exists():
        return None
    manifest: EvaluationManifest = read_json(path)
    command = materialize_command("offline_evaluation")
    refuse_other_layout("offline_evaluation", manifest, what="offline_evaluation", command=command)
    return manifest


def evaluation_checks(site: Site) -> list[dg.AssetChecksDefinition]:
    @dg.asset_check(asset="offline_evaluation")
    def candidate_was_promoted() -> dg.AssetCheckResult:
        """A candidate that is not champion waits for a person to look at it."""
        manifest = read_evaluation(site)
        return dg.AssetCheckResult(
            passed=manifest is not None and manifest["candidate_is_champion"],
            severity=dg.AssetCheckSeverity.WARN,
            description=NOT_EVALUATED if manifest is None else manifest["decision"]["reason"],
        )

    @dg.asset_check(asset="offline_evaluation")
    def model_beats_baselines() -> dg.AssetCheckResult:
        """A model that finds less than a count of pins, or than a mean of vectors, is not worth serving.

        In both questions the candidate is compared with the best of the baselines, user by user; PinnerSage is an
        oracle and does not count.
        """
        manifest = read_evaluation(site)
        if manifest is None:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description=NOT_EVALUATED)
        verdict = judge_baselines(manifest)
        return dg.AssetCheckResult(
            passed=verdict.passed,
            severity=dg.AssetCheckSeverity.WARN,
            description=verdict.reason,
            metadata={"questions": table(comparison_rows(manifest))},
        )

    return [candidate_was_promoted, model_beats_baselines]
