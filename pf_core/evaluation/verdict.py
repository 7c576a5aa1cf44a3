"""Whether a candidate is worth serving: its recall against the best of the baselines, in both questions.

Without torch, so that the asset graph and `pf status` can judge a manifest at once.
"""

import math
from collections.abc import Mapping

from pf_core.check_result import CheckResult
from pf_core.errors import materialize_command
from pf_core.evaluation.manifest import Comparison, EvaluationManifest, QuestionName, vector_alone

MEAN = "mean_of_100"
"""Baseline of the ratios: the mean of the newest 100 content vectors, one vector for a user as a model has."""

QUESTION_TITLES: dict[QuestionName, str] = {"all": "all positives", "discovery": "discovery"}


def judge_baselines(manifest: EvaluationManifest) -> CheckResult:
    """Fail if the candidate's recall@10 is below the best baseline's in one of the two questions.

    A question without any positive is not judged, and neither is a manifest of a version without baselines for both
    questions; the reason says so.
    """
    against = manifest.get("against_baselines")
    if not against:
        reason = (
            "not judged: this evaluation was made by a version that did not compare with the best baseline; evaluate "
            f"again: {materialize_command('offline_evaluation')}"
        )
        return CheckResult(ds=manifest["last_ds"], passed=True, reason=reason)
    faults = lost_questions(against)
    verdict = f"{manifest['candidate']} is below the best baseline in {' and in '.join(faults)}"
    if not faults:
        verdict = f"{manifest['candidate']} is not below the best baseline"
    figures = "; ".join(describe_comparison(name, each) for name, each in against.items())
    index = f"index {manifest.get('index', 'paper')} of {manifest['num_pins']:,} pins"
    return CheckResult(ds=manifest["last_ds"], passed=not faults, reason=f"{verdict} ({index}): {figures}")


def lost_questions(against: Mapping[QuestionName, Comparison]) -> list[str]:
    """Return the titles of the questions in which the best baseline finds more than the candidate."""
    return [QUESTION_TITLES[name] for name, each in against.items() if each["candidate"] < each["baseline"]]


def describe_comparison(question: QuestionName, comparison: Comparison) -> str:
    """Return the figures of one question as a sentence."""
    title = QUESTION_TITLES[question]
    if math.isnan(comparison["candidate"]) or math.isnan(comparison["baseline"]):
        return f"{title}: not judged, there are no positives"
    return "{}: recall@10 {:.4f} against {:.4f} of {} (95 % of the difference: {:+.4f} to {:+.4f})".format(
        title,
        comparison["candidate"],
        comparison["baseline"],
        comparison["best"],
        *comparison["difference_interval"],
    )


def describe_vector(manifest: EvaluationManifest) -> list[str]:
    """Return a sentence for each question about the candidate's vector alone; none if it is not scored."""
    against = manifest.get("vector_against_baselines", {})
    return [f"vector alone, {describe_comparison(question, each)}" for question, each in against.items()]


def describe_ratios(manifest: EvaluationManifest) -> list[str]:
    """Return the recall of the candidate as multiples of the mean's; none without content vectors or positives."""
    summaries, candidate = manifest["summaries"], manifest["candidate"]
    mean = summaries.get(MEAN, {}).get("once")
    if mean is None or not mean["recall_at_10"] > 0:
        return []
    sentences = []
    for label, name in (("as served", candidate), ("vector alone", vector_alone(candidate))):
        ours = summaries.get(name, {}).get("once")
        if ours is not None:
            ratios = f"{label} {ours['recall_at_10'] / mean['recall_at_10']:.2f} × {MEAN}"
            if mean["discovery_at_10"] > 0:
                ratios += f", {ours['discovery_at_10'] / mean['discovery_at_10']:.2f} × in discovery"
            sentences.append(ratios)
    return ["; ".join(sentences)]
