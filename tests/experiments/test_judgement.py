"""The metrics of a judgement as flat numbers, and their means over seeds."""

from typing import Any, cast

import pytest

from pf_core.experiments.judgement import Judgement, flat_metrics, mean_metrics


def judgement(recall: float, *, low: float, high: float) -> Judgement:
    once: dict[str, Any] = {
        "recall_at_10": recall,
        "recall_at_10_interval": [low, high],
        "users_without_embedding": 3,
        "recall_at_10/click": recall / 2,
    }
    return cast("Judgement", {"metrics": {"once": once, "daily": {"recall_at_10": 2 * recall}}})


def test_metrics_become_flat_numbers() -> None:
    assert flat_metrics(judgement(0.2, low=0.1, high=0.4)) == {
        "once/recall_at_10": 0.2,
        "once/recall_at_10_interval_low": 0.1,
        "once/recall_at_10_interval_high": 0.4,
        "once/users_without_embedding": 3,
        "once/recall_at_10/click": 0.2 / 2,
        "daily/recall_at_10": 2 * 0.2,
    }


def test_means_over_seeds_have_no_interval() -> None:
    means = mean_metrics([judgement(0.2, low=0.1, high=0.4), judgement(0.3, low=0.2, high=0.5)])
    assert means == pytest.approx(
        {
            "once/recall_at_10": (0.2 + 0.3) / 2,
            "once/users_without_embedding": 3,
            "once/recall_at_10/click": (0.2 / 2 + 0.3 / 2) / 2,
            "daily/recall_at_10": 2 * (0.2 + 0.3) / 2,
        }
    )
