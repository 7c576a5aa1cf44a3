"""Metadata of offline_evaluation: both questions by model, baseline and embedding frequency, and recall by day."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.evaluation.manifest import (
    ORACLES,
    EvaluationManifest,
    MetricSummary,
    SelectionSummary,
    VectorCoverage,
    recall_by_type,
    vector_alone,
)
from pf_core.evaluation.verdict import QUESTION_TITLES, describe_ratios, describe_vector, judge_baselines
from pf_core.storage.builds import MANIFEST

FIGURE = "recall_by_day.png"

COLUMNS: dict[str, str] = {
    "recall_at_10": "recall_at_10",
    "recall_at_10_interval": "95 % interval",
    "askable_recall_at_10": "askable_recall_at_10",
    "recall_at_50": "recall_at_50",
    "discovery_at_10": "discovery_at_10",
    "discovery_at_10_interval": "95 % interval, discovery",
    "discovery_at_50": "discovery_at_50",
    "interest_entropy_at_50": "interest_entropy_at_50",
    "p90_coverage_at_10": "p90_coverage_at_10",
    "users_without_embedding": "users without embedding",
}
"""Columns of the tables, by key of a summary; a key that no summary has gets no column."""

SCALARS = tuple(key for key in COLUMNS if key.endswith(("_at_10", "_at_50")))
"""Metrics of the candidate that the page shows outside of the tables, so that Dagster plots them over time."""


def describe_evaluation(folder: Path, manifest: EvaluationManifest, urls: Mapping[str, str]) -> Metadata:
    roles = {manifest["candidate"]: "candidate", manifest["champion"]: "champion"}
    if manifest["candidate"] == manifest["champion"]:
        roles[manifest["candidate"]] = "candidate and champion"
    summaries, counts = manifest["summaries"], manifest["counts"]
    candidate: Mapping[str, Any] = {**summaries[manifest["candidate"]]["once"]}
    alone = vector_alone(manifest["candidate"])
    vector: Mapping[str, Any] = {**summaries[alone]["once"]} if alone in summaries else {}
    vector_lines = [*describe_vector(manifest), *describe_ratios(manifest)]

    def label(name: str) -> str:
        return f"{name} ({roles[name]})" if name in roles else label_baseline(name)

    models = [name for name in summaries if name in roles]
    judged = [({"who": label(name)}, summary["once"]) for name, summary in summaries.items()]
    by_frequency = [
        ({"who": label(name), "embedded": frequency}, summary)
        for name in models
        for frequency, summary in summaries[name].items()
    ]
    return {
        **_without_vector(manifest.get("without_vector")),
        "index": describe_index(manifest),
        "candidate": manifest["candidate"],
        "champion_before": manifest["champion"] or "none",
        "decision": ("promoted: " if manifest["decision"]["promote"] else "not promoted: ")
        + manifest["decision"]["reason"],
        "model_beats_baselines": judge_baselines(manifest).reason,
        **({"vector_alone": "; ".join(vector_lines)} if vector_lines else {}),
        **{key: _number(candidate[key]) for key in SCALARS if key in candidate},
        **{f"vector_{key}": _number(vector[key]) for key in SCALARS if key in vector},
        "judged": table(_rows(judged)),
        "against_baselines": table(comparison_rows(manifest)),
        "by_frequency": table(_rows(by_frequency)),
        **({"by_selection": table(selection_rows(manifest["by_selection"]))} if "by_selection" in manifest else {}),
        "by_action_type": table(
            [
                {"who": label(name)}
                | {_column_of(word): _figure(value) for word, value in recall_by_type(summary["once"]).items()}
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


def selection_rows(by_group: Mapping[str, SelectionSummary]) -> list[dict[str, Any]]:
    """Return a row for the users whom training.users selects, and one for the others."""
    return [
        {
            "users": f"{each['users']:,} {'selected' if group == 'selected' else 'not selected'}",
            "recall_at_10": _figure(each["recall_at_10"]),
            "95 % interval": _cell(each["recall_at_10_interval"]),
            "discovery_at_10": _figure(each["discovery_at_10"]),
            "95 % interval, discovery": _cell(each["discovery_at_10_interval"]),
        }
        for group, each in by_group.items()
    ]


def _column_of(action_type: str) -> str:
    """Return the name of an action type's column: the first column is called "who"."""
    return action_type if action_type != "who" else "who (action type)"


def label_baseline(name: str) -> str:
    """Return the name of a baseline; PinnerSage is named as the oracle that it is."""
    return f"oracle: PinnerSage over {name.removeprefix('pinnersage_')}" if name in ORACLES else name


def describe_index(manifest: EvaluationManifest) -> str:
    kind = {
        "paper": "random candidates (section 4.1)",
        "catalogue": "every pin that was acted on or known before the cut",
    }
    name = manifest.get("index", "paper")
    return f"{name}: {manifest['num_pins']:,} pins, {kind[name]}"


def describe_without_vector(coverage: VectorCoverage) -> str:
    """Return which share of the positives and of the actions has no vector, and the key that changes it."""
    positives, actions = coverage["share_of_positives"], coverage["share_of_actions"]
    shares = (
        f"{_percent(positives)} of the positives, which count as misses, and {_percent(actions)} of the actions before "
        "the cut are on pins without a vector"
    )
    return f"{shares}; see {coverage['remedy']}" if positives or actions else shares


def comparison_rows(manifest: EvaluationManifest) -> list[dict[str, str]]:
    """Return a row for each question: the candidate, the best baseline, and the paired interval.

    They are of the candidate as served, and then of its vector alone, if that is scored.
    """
    scored = (
        ("as served", manifest.get("against_baselines", {})),
        ("vector alone", manifest.get("vector_against_baselines", {})),
    )
    return [
        {
            "candidate": label,
            "question": QUESTION_TITLES[question],
            "recall_at_10": _figure(each["candidate"]),
            "best baseline": each["best"],
            "its recall_at_10": _figure(each["baseline"]),
            "95 % of the difference": " to ".join(map(_signed, each["difference_interval"])),
        }
        for label, against in scored
        for question, each in against.items()
    ]


def _without_vector(coverage: VectorCoverage | None) -> Metadata:
    return {} if coverage is None else {"without_vector": describe_without_vector(coverage)}


def _rows(summaries: Iterable[tuple[dict[str, str], MetricSummary]]) -> list[dict[str, Any]]:
    """Return table rows that all have the same columns, as Dagster requires; what a summary lacks stays empty."""
    found: list[tuple[dict[str, str], Mapping[str, Any]]] = [(name, {**summary}) for name, summary in summaries]
    keys = [key for key in COLUMNS if any(key in summary for _, summary in found)]
    return [name | {COLUMNS[key]: _cell(summary.get(key, "")) for key in keys} for name, summary in found]


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return _figure(value)
    return " to ".join(map(_figure, value)) if isinstance(value, list) else value


def _number(value: float) -> float | str:
    """Return the value, or "undefined" for NaN, which Dagster's pages cannot show."""
    return value if math.isfinite(value) else "undefined"


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "undefined"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "an unknown share"


def _signed(value: float) -> str:
    return f"{value:+.4f}" if math.isfinite(value) else "undefined"


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
