"""Metadata of offline_evaluation: metrics by model, embedding frequency and action type, and recall by day."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.evaluation.manifest import EvaluationManifest, MetricSummary, recall_by_type
from pf_core.storage.builds import MANIFEST

FIGURE = "recall_by_day.png"


def describe_evaluation(folder: Path, manifest: EvaluationManifest, urls: Mapping[str, str]) -> Metadata:
    roles = {manifest["candidate"]: "candidate", manifest["champion"]: "champion"}
    if manifest["candidate"] == manifest["champion"]:
        roles[manifest["candidate"]] = "candidate and champion"
    summaries, counts = manifest["summaries"], manifest["counts"]
    candidate = summaries[manifest["candidate"]]["once"]

    def label(name: str) -> str:
        return f"{name} ({roles[name]})" if name in roles else name

    models = [name for name in summaries if name in roles]
    return {
        "candidate": manifest["candidate"],
        "champion_before": manifest["champion"] or "none",
        "decision": ("promoted: " if manifest["decision"]["promote"] else "not promoted: ")
        + manifest["decision"]["reason"],
        "recall_at_10": candidate["recall_at_10"],
        "p90_coverage_at_10": candidate["p90_coverage_at_10"],
        "interest_entropy_at_50": candidate["interest_entropy_at_50"],
        "judged": table([{"who": label(name)} | _row(summary["once"]) for name, summary in summaries.items()]),
        "by_frequency": table(
            [
                {"who": label(name), "embedded": frequency} | _row(summary)
                for name in models
                for frequency, summary in summaries[name].items()
            ]
        ),
        "by_action_type": table(
            [
                {"who": label(name)} | {word: _figure(value) for word, value in recall_by_type(summary["once"]).items()}
                for name, summary in summaries.items()
            ]
        ),
        "recall_by_day": picture(plot_by_day(manifest), folder / FIGURE),
        "days": f"after {manifest['cut_ds']}, until {manifest['last_ds']}",
        "index_pins": manifest["num_pins"],
        **counts,
        "training_set": manifest["training_set"],
        "seconds": round(manifest["seconds"], 1),
        **{name: dg.MetadataValue.url(url) for name, url in urls.items()},
        "path": dg.MetadataValue.path(str(folder / MANIFEST)),
    }


def _row(summary: MetricSummary) -> dict[str, Any]:
    return {
        "recall_at_10": _figure(summary["recall_at_10"]),
        "95 % interval": " to ".join(map(_figure, summary["recall_at_10_interval"])),
        "interest_entropy_at_50": _figure(summary["interest_entropy_at_50"]),
        "p90_coverage_at_10": _figure(summary["p90_coverage_at_10"]),
        "users without embedding": summary["users_without_embedding"],
    }


def _figure(value: float) -> str:
    return f"{value:.4f}"


def plot_by_day(manifest: EvaluationManifest) -> Figure:
    """Plot the share of the positives found on each day after the cut: recall falls as an embedding grows old."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for frequency, values in manifest["by_day"][manifest["candidate"]].items():
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=f"embedded {frequency}")
    axes.set_xlabel("day after the cut")
    axes.set_ylabel("share of positives in the first ten")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure
