"""Metadata of training_set and pinnerformer_model, and the plot of a training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import MAX_SAMPLE_ROWS, Metadata, picture, shown_json, table
from pf_core.training.auto import Choice
from pf_core.training.cut import EvaluationDays
from pf_core.training.refit import RefitManifest


def describe_training_set(path: Path, manifest: Mapping[str, Any]) -> Metadata:
    """How many users, actions and pins each split has, and what was left out of it."""
    counts = manifest["counts"]
    splits = [{"split": split, **counts[split]} for split in ("train", "held_out")]
    left_out = {
        "users without an action left": counts["users_left_out"],
        "users forgotten": counts["users_forgotten"],
        **{f"actions: {reason}": count for reason, count in counts["dropped"].items()},
    }
    selection: Metadata = {}
    if "users" in manifest:
        selection["users"] = shown_json(manifest["users"])
        selection |= {f"users_{name}": count for name, count in counts["selection"].items()}
    kept: EvaluationDays | None = manifest.get("evaluation_days")
    return {
        "cut_ds": manifest["cut_ds"],
        **({} if kept is None else {"evaluation_days": f"{kept['num_days']} ({kept['reason']})"}),
        "fingerprint": manifest["fingerprint"],
        "train_users": counts["train"]["users"],
        "train_actions": counts["train"]["actions"],
        "train_positives": counts["train"]["positives"],
        "held_out_users": counts["held_out"]["users"],
        **selection,
        "pins": counts["pins"],
        "candidates": counts["candidates"],
        "splits": table(splits),
        "left_out": table([{"what": what, "count": count} for what, count in left_out.items()]),
        "vocabularies": shown_json(manifest["vocabularies"]),
        "inputs": shown_json(manifest["inputs"]),
        "path": dg.MetadataValue.path(str(path)),
        "dagster/row_count": counts["train"]["users"],
    }


LAST_MEASURED = (
    "loss",
    "recall_at_10",
    "vector_recall_at_10",
    "discovery_at_10",
    "validation_loss",
    "chosen_steps",
    "temperature",
)
"""Measurements of a training; those of the other family of models are absent."""


def describe_model(
    run_dir: Path, manifest: Mapping[str, Any], history: Sequence[Mapping[str, float]], mlflow_url: str
) -> Metadata:
    """How the training went (its curves, speed and last measurements), and where model and MLflow run are."""
    result, metrics = manifest["result"], manifest["result"]["metrics"]
    file = run_dir / "training.png"
    return {
        "model_version": manifest["model_version"],
        "registry_version": manifest["mlflow"]["version"] or "not registered",
        "cut_ds": manifest["cut_ds"],
        "training_set": manifest["training_set"],
        "steps": result["num_steps"],
        "seconds": round(result["seconds"], 1),
        "processes": result["num_processes"],
        "parameters": result["num_parameters"],
        **{name: _number(metrics[name]) for name in LAST_MEASURED if name in metrics},
        "examples_per_s": _mean(history, "examples_per_s"),
        "data_wait_share": _mean(history, "data_wait_share"),
        "training": picture(plot_training(history), file),
        "training_png": dg.MetadataValue.path(str(file)),
        "measurements": table(_sparse(history)),
        **({"chosen": table(_chosen(manifest["chosen"]))} if manifest.get("chosen") else {}),
        "config": dg.MetadataValue.json(manifest["config"]),
        "mlflow_run": dg.MetadataValue.url(mlflow_url),
        "path": dg.MetadataValue.path(str(run_dir / "model")),
    }


def describe_refit(
    run_dir: Path, manifest: RefitManifest, history: Sequence[Mapping[str, float]], mlflow_url: str
) -> Metadata:
    """What was refitted until which day, and which model the figures of the evaluation belong to."""
    return {
        "refitted": True,
        "refit_of": manifest["refit_of"],
        "judged_version": manifest["judged_version"],
        "judged_until": manifest["judged_cut_ds"],
        "figures": f"offline_evaluation judged {manifest['refit_of']}; the refit has seen its days and is not judged",
        **describe_model(run_dir, manifest, history, mlflow_url),
    }


def _chosen(choices: Sequence[Choice]) -> list[Metadata]:
    """Return the settings that preset auto chose as rows of a table."""
    return [{**choice, "value": str(choice["value"])} for choice in choices]


def _number(value: float) -> float | str:
    """Return the value, or "undefined" for NaN, which Dagster's pages cannot show."""
    return value if math.isfinite(value) else "undefined"


def _mean(history: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean of a measurement over the steps that have it."""
    values = [measurement[name] for measurement in history if name in measurement]
    return sum(values) / len(values)


def _sparse(history: Sequence[Mapping[str, float]]) -> list[Metadata]:
    """Return a few steps from the first to the last, each with the newest value of every measurement by then."""
    known: dict[int, dict[str, float]] = {}
    latest: dict[str, float] = {}
    for measurement in history:
        latest |= measurement
        known[int(measurement["step"])] = dict(latest)
    steps = sorted(known)
    chosen = {steps[round(row * (len(steps) - 1) / (MAX_SAMPLE_ROWS - 1))] for row in range(MAX_SAMPLE_ROWS)}
    names = (*LAST_MEASURED, "learning_rate", "gradient_norm", "examples_per_s")
    return [
        {"step": step} | {name: f"{known[step][name]:.4g}" if name in known[step] else "" for name in names}
        for step in sorted(chosen)
    ]


def plot_training(history: Sequence[Mapping[str, float]]) -> Figure:
    """Loss (left axis) and recall@10 of users who do not train (right axis) by step."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    for axes, name, label, style in (
        (left, "loss", "loss", {"color": "#bd081c"}),
        (
            right,
            "recall_at_10",
            "recall@10, unseen users",
            {"color": "#0a6b77", "marker": "o", "markersize": 3},
        ),
    ):
        points = [(measurement["step"], measurement[name]) for measurement in history if name in measurement]
        if points:  # a refit has no users who are held out of it to measure recall on
            axes.plot(*zip(*points, strict=True), **style)
        axes.set_ylabel(label, color=style["color"])
        axes.spines["top"].set_visible(False)
    left.set(xlabel="step", title="Training")
    right.set_ylim(bottom=0)
    return figure
