"""The promotion rule: candidate and champion answer the same question, and the rule compares their scores.

A candidate is promoted unless it is worse than the champion by more than the tolerance of the site file. A loss of
recall counts only if chance does not explain it: the two are compared user by user, and a loss whose 95 % interval
reaches zero is none. Coverage has no such interval, and a wide tolerance instead. Models are scored as they are served,
with memory, and the question of all positives decides. Discovery is shown, and so is the vector alone of a candidate of
parts. The first model is promoted, or only if it beats the baselines, as the site file chooses. A run can overrule the
rule, and so does a person who has undone a promotion of the same model.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pf_core.config.serving import PromotionConfig
from pf_core.config.site import Site
from pf_core.evaluation.embedders import baselines_of
from pf_core.evaluation.manifest import (
    ORACLES,
    Comparison,
    DecisionRecord,
    EvaluationManifest,
    Promote,
    QuestionName,
    vector_alone,
)
from pf_core.evaluation.protocol import score_baseline, score_model
from pf_core.evaluation.question import Question, open_question
from pf_core.evaluation.scores import Scores, UserScores, recall_by_day
from pf_core.evaluation.selection import by_selection, describe_selection
from pf_core.evaluation.summary import summarize
from pf_core.evaluation.vector_coverage import vector_coverage
from pf_core.evaluation.verdict import describe_comparison, lost_questions
from pf_core.layouts import LAYOUTS
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.metrics.bootstrap import bootstrap_interval, mean
from pf_core.model.checkpoint import read_description
from pf_core.model.device import choose_device
from pf_core.progress import Progress
from pf_core.training.training_set import TrainingSet


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that is evaluated: its name, and its folder (model.safetensors, model.json)."""

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The question, and the scores of everything that answered it: models at every frequency, the others once."""

    question: Question
    models: dict[str, Scores]
    """As served, with the memory of a model of parts."""
    vectors: dict[str, Scores]
    """By name of the model, the vector alone, of models of parts."""
    baselines: dict[str, Scores]


@dataclass(frozen=True, kw_only=True)
class Decision:
    promote: bool
    reason: str


def evaluate_and_decide(
    site: Site,
    data: TrainingSet,
    candidate: NamedModel,
    champion: NamedModel | None,
    *,
    promote: Promote = "auto",
    undone_at: str | None = None,
    scores_path: Path,
    progress: Progress,
) -> EvaluationManifest:
    """Score candidate, champion and baselines, decide whether the candidate is promoted, and return the manifest.

    `promote` and `undone_at` (when a promotion of the candidate was undone) overrule the rule. The candidate's scores
    are written to `scores_path`. Nothing is promoted here.
    """
    started = time.monotonic()
    models = {model.name: model.path for model in (candidate, champion) if model is not None}
    evaluation = evaluate_models(site, data, models, alone=[candidate.name], progress=progress)
    before, is_champion = None if champion is None else champion.name, candidate == champion
    against = compare_with_baselines(evaluation.models[candidate.name], evaluation.baselines)
    decision = decide_promotion(candidate.name, before, evaluation.models, against, site.serving.promotion)
    if not is_champion:
        decision = overrule(decision, promote, undone_at=undone_at)
    progress(f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}")
    evaluation.models[candidate.name].write(scores_path, forgotten=read_deletion_list(site))
    question = evaluation.question
    vector_scores = evaluation.vectors.get(candidate.name)
    scores = {candidate.name: evaluation.models[candidate.name]}
    if vector_scores is not None:
        scores[vector_alone(candidate.name)] = vector_scores
    scores |= evaluation.models | evaluation.baselines
    manifest = EvaluationManifest(
        layout=LAYOUTS["offline_evaluation"],
        training_set=data.fingerprint,
        question=question.fingerprint,
        cut_ds=data.manifest["cut_ds"],
        last_ds=question.last_ds,
        num_pins=question.num_pins,
        counts=question.counts,
        summaries={name: summarize(each) for name, each in scores.items()},
        index="paper",
        without_vector=vector_coverage(site, question, needs_content=not is_of_parts(candidate.path)),
        against_baselines=against,
        by_day={name: recall_by_day(scores) for name, scores in evaluation.models.items()},
        candidate=candidate.name,
        champion=before,
        candidate_is_champion=decision.promote or is_champion,
        decision=DecisionRecord(promote=decision.promote, reason=decision.reason, asked_for=promote),
        seconds=time.monotonic() - started,
    )
    groups = by_selection(site, evaluation.models[candidate.name], as_of=data.manifest["cut_ds"])
    if groups is not None:
        manifest["by_selection"] = groups
        progress(describe_selection(groups))
    if vector_scores is not None:
        manifest["vector_against_baselines"] = compare_with_baselines(vector_scores, evaluation.baselines)
    return manifest


def evaluate_models(
    site: Site, data: TrainingSet, models: Mapping[str, Path], *, alone: Collection[str] = (), progress: Progress
) -> Evaluation:
    """Score the models in these folders, and the baselines, on the days after the training set's cut.

    The models of parts that `alone` names are scored a second time, without their memory.
    """
    question = open_question(site, data, progress=progress)
    device, frequencies = choose_device(site.serving.device), site.serving.promotion.frequencies
    of_models: dict[str, Scores] = {}
    for name, folder in models.items():
        of_models[name] = score_model(
            question, folder, name=name, frequencies=frequencies, device=device, progress=progress
        )
        progress(describe(name, of_models[name]))
    vectors: dict[str, Scores] = {}
    for name in (name for name in alone if is_of_parts(models[name])):
        what = vector_alone(name)
        vectors[name] = score_model(
            question, models[name], name=what, frequencies=("once",), device=device, has_memory=False, progress=progress
        )
        progress(describe(what, vectors[name]))
    of_baselines: dict[str, Scores] = {}
    for name in baselines_of(question.data):
        of_baselines[name] = score_baseline(question, name, frequencies=("once",), progress=progress)
        progress(describe(name, of_baselines[name]))
    return Evaluation(question=question, models=of_models, vectors=vectors, baselines=of_baselines)


def is_of_parts(folder: Path) -> bool:
    """Return whether the model of a folder is a model of parts."""
    return read_description(folder).get("family", "towers") == "parts"


def describe(name: str, scores: Scores) -> str:
    """Return the primary metrics as a sentence."""
    summary = summarize(scores)["once"]
    return (
        "{}: recall@10 {:.4f} (95 %: {:.4f} to {:.4f}; {:.4f} of the pins known at the cut), discovery {:.4f}, P90 "
        "coverage@10 {:.4f}"
    ).format(
        f"{name} (an oracle)" if name in ORACLES else name,
        summary["recall_at_10"],
        *summary["recall_at_10_interval"],
        summary["askable_recall_at_10"],
        summary["discovery_at_10"],
        summary["p90_coverage_at_10"],
    )


def compare_with_baselines(candidate: Scores, baselines: Mapping[str, Scores]) -> dict[QuestionName, Comparison]:
    """Compare the candidate with the best baseline in each question; the intervals are paired by user."""
    return {
        "all": _compare(candidate, baselines, lambda users: users.recall_at_10),
        "discovery": _compare(candidate, baselines, lambda users: users.discovery_at_10),
    }


def _compare(
    candidate: Scores, baselines: Mapping[str, Scores], recall_of: Callable[[UserScores], np.ndarray]
) -> Comparison:
    ours_U = recall_of(candidate.frequencies["once"])
    theirs = {name: recall_of(scores.frequencies["once"]) for name, scores in baselines.items() if name not in ORACLES}
    recall = {name: mean(recall_U) for name, recall_U in theirs.items()}
    best = max(recall, key=lambda name: recall[name])  # NaN for all or for none: the same users have positives
    return Comparison(
        candidate=mean(ours_U),
        baseline=recall[best],
        best=best,
        difference_interval=list(bootstrap_interval(ours_U - theirs[best])),
    )


def decide_promotion(
    candidate: str,
    champion: str | None,
    scores: Mapping[str, Scores],
    against: Mapping[QuestionName, Comparison],
    config: PromotionConfig,
) -> Decision:
    """Promote, unless the candidate loses a larger share of the champion's recall or coverage than is tolerated.

    `scores` has the scores of both, on the same question; `against` compares the candidate with the best baseline.
    """
    if champion is None:
        return _decide_first(against, config)
    if candidate == champion:
        return Decision(promote=False, reason=f"{candidate} is the champion already")
    ours, theirs = (summarize(scores[name])["once"] for name in (candidate, champion))
    ours_U, theirs_U = (scores[name].frequencies["once"].recall_at_10 for name in (candidate, champion))
    low, high = bootstrap_interval(ours_U - theirs_U)
    recall = (
        f"recall@10 {ours['recall_at_10']:.4f} against the champion's {theirs['recall_at_10']:.4f} "
        f"(95 % of the difference: {low:+.4f} to {high:+.4f})"
    )
    coverage = (
        f"P90 coverage@10 {ours['p90_coverage_at_10']:.4f} against the champion's {theirs['p90_coverage_at_10']:.4f}"
    )
    discovery = "discovery: there are no positives on new pins"
    if not math.isnan(ours["discovery_at_10"]):
        discovery = (
            f"discovery@10 {ours['discovery_at_10']:.4f} against the champion's {theirs['discovery_at_10']:.4f} "
            "does not decide"
        )
    faults = [
        *_loss(recall, ours["recall_at_10"], theirs["recall_at_10"], config.recall_tolerance, is_by_chance=high >= 0),
        *_loss(coverage, ours["p90_coverage_at_10"], theirs["p90_coverage_at_10"], config.coverage_tolerance),
    ]
    return Decision(promote=not faults, reason="; ".join([*(faults or (recall, coverage)), discovery]))


def _decide_first(against: Mapping[QuestionName, Comparison], config: PromotionConfig) -> Decision:
    """Decide about the first model."""
    is_better = against["all"]["candidate"] > against["all"]["baseline"]
    figures = "; ".join(describe_comparison(name, each) for name, each in against.items())
    rule = f" and serving.promotion.first is {config.first}"
    if config.first == "always" and (lost := lost_questions(against)):
        rule += f", although a baseline is better in {' and in '.join(lost)}"
    return Decision(promote=config.first == "always" or is_better, reason=f"there is no champion yet{rule}; {figures}")


def _loss(comparison: str, ours: float, theirs: float, tolerance: float, *, is_by_chance: bool = False) -> list[str]:
    """Return a sentence if the loss is larger than is tolerated, or the metric is undefined."""
    least = (1 - tolerance) * theirs
    if math.isnan(ours) or (ours < least and not is_by_chance):
        return [f"{comparison}, of which it may lose {100 * tolerance:g} %: it needs {least:.4f}"]
    return []


def overrule(decision: Decision, promote: Promote, *, undone_at: str | None) -> Decision:
    """Return the decision that the run requests instead of the rule's.

    With `auto`, a model whose promotion was undone (at `undone_at`) is not promoted again.
    """
    because = f"promote: {promote} was asked for"
    if promote == "auto" and undone_at is not None:
        promote, because = "never", f"its promotion was undone at {undone_at}"
    if promote == "auto" or decision.promote == (promote == "always"):
        return decision
    return replace(decision, promote=not decision.promote, reason=f"{because} (the rule finds: {decision.reason})")
