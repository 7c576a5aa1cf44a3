"""The verdict on a manifest: is the candidate below the best baseline, in which question, with which figures?"""

import math
import subprocess
import sys
from typing import cast

from pf_core.evaluation.manifest import Comparison, EvaluationManifest
from pf_core.evaluation.verdict import judge_baselines


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
