"""The verdict on a manifest: is the candidate below the best baseline, in which question, with which figures?"""

import math
import subprocess
import sys
from typing import cast

from pf_core.evaluation.manifest import Comparison, EvaluationManifest
from pf_core.evaluation.verdict import describe_ratios, describe_vector, judge_baselines


def compared(candidate: float, baseline: float, best: str) -> Comparison:
    difference = candidate - baseline
    return Comparison(
        candidate=candidate, baseline=baseline, best=best, difference_interval=[difference - 0.01, difference + 0.01]
    )


def manifest(**against: Comparison) -> EvaluationManifest:
    found = {"candidate": "model-1", "last_ds": "2026-03-15", "num_pins": 4321, "index": "paper"}
    return cast("EvaluationManifest", found | ({"against_baselines": against} if against else {}))


def test_a_candidate_below_a_count_fails_with_the_figures_of_both_questions() -> None:
    check = judge_baselines(
        manifest(all=compared(0.057, 0.213, "own_frequency"), discovery=compared(0.05, 0.04, "popularity_7d"))
    )
    assert (check.ds, check.passed) == ("2026-03-15", False)
    assert check.reason == (
        "model-1 is below the best baseline in all positives (index paper of 4,321 pins): "
        "all positives: recall@10 0.0570 against 0.2130 of own_frequency "
        "(95 % of the difference: -0.1660 to -0.1460); "
        "discovery: recall@10 0.0500 against 0.0400 of popularity_7d (95 % of the difference: +0.0000 to +0.0200)"
    )


def test_each_question_can_fail() -> None:
    good, bad = compared(0.2, 0.1, "mean_of_20"), compared(0.1, 0.2, "mean_of_20")
    assert judge_baselines(manifest(all=good, discovery=good)).passed
    assert not judge_baselines(manifest(all=good, discovery=bad)).passed
    both = judge_baselines(manifest(all=bad, discovery=bad))
    assert not both.passed
    assert "in all positives and in discovery" in both.reason
    assert judge_baselines(manifest(all=compared(0.1, 0.1, "mean_of_20"), discovery=good)).passed


def test_what_is_not_judged_is_said() -> None:
    nothing = Comparison(
        candidate=math.nan, baseline=math.nan, best="popularity_7d", difference_interval=[math.nan] * 2
    )
    check = judge_baselines(manifest(all=compared(0.2, 0.1, "mean_of_20"), discovery=nothing))
    assert check.passed
    assert check.reason.endswith("discovery: not judged, there are no positives")
    older = judge_baselines(manifest())
    assert older.passed
    assert older.reason.startswith("not judged: ")
    assert "--select offline_evaluation" in older.reason


def test_the_verdict_needs_no_torch() -> None:
    code = "import sys, pf_core.evaluation.verdict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The vector alone


def test_the_vector_alone_and_ratios_to_the_mean() -> None:
    summaries = {
        "new": {"once": {"recall_at_10": 0.3, "discovery_at_10": 0.1}},
        "new vector alone": {"once": {"recall_at_10": 0.25, "discovery_at_10": 0.09}},
        "mean_of_100": {"once": {"recall_at_10": 0.2, "discovery_at_10": 0.05}},
    }
    against = {"all": compared(0.25, 0.28, "own_frequency"), "discovery": compared(0.09, 0.05, "mean_of_100")}
    parts = cast(
        "EvaluationManifest", {"candidate": "new", "summaries": summaries, "vector_against_baselines": against}
    )
    assert describe_vector(parts) == [
        "vector alone, all positives: recall@10 0.2500 against 0.2800 of own_frequency (95 % of the difference: "
        "-0.0400 to -0.0200)",
        "vector alone, discovery: recall@10 0.0900 against 0.0500 of mean_of_100 (95 % of the difference: +0.0300 to "
        "+0.0500)",
    ]
    assert describe_ratios(parts) == [
        f"as served {0.3 / 0.2:.2f} × mean_of_100, {0.1 / 0.05:.2f} × in discovery; "
        f"vector alone {0.25 / 0.2:.2f} × mean_of_100, {0.09 / 0.05:.2f} × in discovery"
    ]
    towers = {"candidate": "new", "summaries": {name: summaries[name] for name in ("new", "mean_of_100")}}
    assert describe_vector(cast("EvaluationManifest", towers)) == []
    assert describe_ratios(cast("EvaluationManifest", towers)) == ["as served 1.50 × mean_of_100, 2.00 × in discovery"]
    nothing_new = {**summaries, "mean_of_100": {"once": {"recall_at_10": 0.2, "discovery_at_10": math.nan}}}
    assert describe_ratios(cast("EvaluationManifest", {"candidate": "new", "summaries": nothing_new})) == [
        "as served 1.50 × mean_of_100; vector alone 1.25 × mean_of_100"
    ]
    without = {"candidate": "new", "summaries": {"new": summaries["new"]}}
    assert describe_ratios(cast("EvaluationManifest", without)) == []  # a site without content vectors
