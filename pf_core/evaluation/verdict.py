"""Whether a candidate is worth serving: its recall against the best of the baselines, in both questions.

Without torch, so that the asset graph and `pf status` can judge a manifest at once.
"""

import math

from pf_core.check_result import CheckResult
from pf_core.errors import materialize_command
from pf_core.evaluation.manifest import Comparison, EvaluationManifest, QuestionName

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
    faults = [QUESTION_TITLES[name] for name, each in against.items() if each["candidate"] < each["baseline"]]
    verdict = f"{manifest['candidate']} is below the best baseline in {' and in '.join(faults)}"
    if not faults:
        verdict = f"{manifest['candidate']} is not below the best baseline"
    figures = "; ".join(describe_comparison(name, each) for name, each in against.items())
    index = f"index {manifest.get('index', 'paper')} of {manifest['num_pins']:,} pins"
    return CheckResult(ds=manifest["last_ds"], passed=not faults, reason=f"{verdict} ({index}): {figures}")


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
