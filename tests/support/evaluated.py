"""Manifests of offline_evaluation made by hand: what the page, the check, `pf status` and the demo show of one."""

import math
from typing import Any, cast

from pf_assets.assets.evaluation import evaluation_dir
from pf_core.config.site import Site
from pf_core.evaluation.manifest import Comparison, EvaluationManifest, MetricSummary
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import write_json

REMEDY = "source.pins.vectors.min_actions in the site file"

BELOW = Comparison(candidate=0.0435, baseline=0.0457, best="own_frequency", difference_interval=[-0.0081, 0.0036])
ABOVE = Comparison(candidate=0.0312, baseline=0.0183, best="popularity_7d", difference_interval=[0.0052, 0.0201])
UNDEFINED = Comparison(candidate=math.nan, baseline=math.nan, best="popularity_7d", difference_interval=[math.nan] * 2)


def make_summary(recall: float, **changes: Any) -> MetricSummary:
    """A summary with every optional key; a change to None leaves the key out."""
    summary: dict[str, Any] = {
        "recall_at_10": recall,
        "recall_at_10_interval": [recall - 0.01, recall + 0.01],
        "recall_at_50": 2 * recall,
        "askable_recall_at_10": recall / 0.5,
        "discovery_at_10": recall / 4,
        "discovery_at_10_interval": [recall / 8, recall / 2],
        "discovery_at_50": recall / 3,
        "p90_coverage_at_10": 0.25,
        "interest_entropy_at_50": 1.5,
        "users_without_embedding": 3,
        "recall_at_10/closeup": recall,
    }
    return cast("MetricSummary", {key: value for key, value in (summary | changes).items() if value is not None})


def make_manifest(candidate: str = "new-2", **changes: Any) -> EvaluationManifest:
    """The candidate is below the best baseline in all positives, and above it in discovery.

    A change to None leaves an optional key out, as in manifests of older versions.
    """
    manifest: dict[str, Any] = {
        "training_set": "abc",
        "question": "def",
        "cut_ds": "2026-01-10",
        "last_ds": "2026-01-14",
        "num_pins": 1200,
        "counts": {"users": 50, "positives": 400},
        "summaries": {
            candidate: {"once": make_summary(0.0435), "daily": make_summary(0.05)},
            "own_frequency": {"once": make_summary(0.0457)},
            "pinnersage_20": {"once": make_summary(0.142)},
        },
        "index": "paper",
        "without_vector": {"share_of_actions": 0.125, "share_of_positives": 0.46, "remedy": REMEDY},
        "against_baselines": {"all": BELOW, "discovery": ABOVE},
        "by_day": {candidate: {"once": [0.1, 0.05], "daily": [0.1, 0.1]}},
        "candidate": candidate,
        "champion": None,
        "candidate_is_champion": True,
        "decision": {"promote": True, "reason": "there is no champion yet", "asked_for": "auto"},
        "seconds": 1.0,
    }
    optional = ("index", "without_vector", "against_baselines")
    merged = {key: value for key, value in (manifest | changes).items() if value is not None or key not in optional}
    return cast("EvaluationManifest", merged)


def write_evaluation(site: Site, manifest: EvaluationManifest) -> None:
    write_json(evaluation_dir(site) / MANIFEST, manifest)
