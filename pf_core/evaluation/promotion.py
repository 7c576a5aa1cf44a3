"""A candidate against the champion: asked the same question, then decided by rule.

A candidate is promoted unless it is worse by more than is tolerated. Of recall, that is a loss that chance does not
explain: the two are compared user by user, and a loss whose 95 % interval reaches zero is none. Coverage has no such
interval, and a wide tolerance instead.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pf_core.config.serving import PromotionConfig
from pf_core.config.site import Site
from pf_core.evaluation.embedders import BASELINES
from pf_core.evaluation.protocol import judge_baseline, judge_model
from pf_core.evaluation.question import Question, open_question
from pf_core.evaluation.scores import Scores
from pf_core.evaluation.summary import bootstrap_interval, summarize
from pf_core.training.training_set import TrainingSet


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What was asked, and how everybody did: the models at every frequency, the baselines once."""

    question: Question
    models: dict[str, Scores]
    baselines: dict[str, Scores]


@dataclass(frozen=True, kw_only=True)
class Decision:
    promote: bool
    reason: str


def evaluate_models(
    site: Site, data: TrainingSet, models: Mapping[str, Path], *, progress: Callable[[str], None]
) -> Evaluation:
    """Judge the models in these folders, and the baselines, by the days after the training set's cut."""
    question = open_question(site, data, progress=progress)
    device, frequencies = _device(site), site.serving.promotion.frequencies
    judged: dict[str, Scores] = {}
    for name, folder in models.items():
        judged[name] = judge_model(
            question, folder, name=name, frequencies=frequencies, device=device, progress=progress
        )
        progress(describe(name, judged[name]))
    baselines: dict[str, Scores] = {}
    for name in BASELINES:
        baselines[name] = judge_baseline(question, name, frequencies=("once",), progress=progress)
        progress(describe(name, baselines[name]))
    return Evaluation(question=question, models=judged, baselines=baselines)


def describe(name: str, scores: Scores) -> str:
    """The primary figures in a sentence."""
    summary = summarize(scores)["once"]
    return "{}: recall@10 {:.4f} (95 %: {:.4f} to {:.4f}), P90 coverage@10 {:.4f}".format(
        name, summary["recall_at_10"], *summary["recall_at_10_interval"], summary["p90_coverage_at_10"]
    )


def _device(site: Site) -> torch.device:
    wanted = site.serving.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def decide(candidate: str, champion: str | None, judged: Mapping[str, Scores], config: PromotionConfig) -> Decision:
    """Promote, unless the candidate surely loses a larger share of the champion's recall or coverage than is tolerated.

    Both have answered the same question.
    """
    if champion is None:
        return Decision(promote=True, reason="there is no champion yet")
    if candidate == champion:
        return Decision(promote=False, reason=f"{candidate} is the champion already")
    ours, theirs = (summarize(judged[name])["once"] for name in (candidate, champion))
    ours_U, theirs_U = (judged[name].frequencies["once"].recall_at_10 for name in (candidate, champion))
    low, high = bootstrap_interval(ours_U - theirs_U)
    compared = {
        "recall_at_10": f"recall@10 {ours['recall_at_10']:.4f} against the champion's {theirs['recall_at_10']:.4f} "
        f"(95 % of the difference: {low:+.4f} to {high:+.4f})",
        "p90_coverage_at_10": f"P90 coverage@10 {ours['p90_coverage_at_10']:.4f} against the champion's "
        f"{theirs['p90_coverage_at_10']:.4f}",
    }
    tolerance = {"recall_at_10": config.recall_tolerance, "p90_coverage_at_10": config.coverage_tolerance}
    faults = []
    for metric, sentence in compared.items():
        least = (1 - tolerance[metric]) * theirs[metric]
        is_by_chance = metric == "recall_at_10" and high >= 0
        if math.isnan(ours[metric]) or (ours[metric] < least and not is_by_chance):
            faults.append(f"{sentence}, of which it may lose {100 * tolerance[metric]:g} %: it needs {least:.4f}")
    return Decision(promote=not faults, reason="; ".join(faults or compared.values()))
