"""What a person sees on an asset's page: counts, tables and plots made from a partition's manifest."""

import base64
import io
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_core import raw_actions
from pf_core.pin_features import read_pin_features
from pf_core.site import Site
from pf_core.timelines import LENGTH_BINS, timeline_state

Metadata = dict[str, Any]
MAX_SAMPLE_ROWS = 12


def record_days(
    context: dg.AssetExecutionContext,
    manifests: Iterable[Mapping[str, Any]],
    describe: Callable[[Mapping[str, Any], float], Metadata],
) -> None:
    """Build day after day, and give each partition its own metadata: what a range run returns goes to all alike."""
    started = time.monotonic()
    for manifest in manifests:
        context.add_asset_metadata(describe(manifest, time.monotonic() - started), partition_key=manifest["ds"])
        started = time.monotonic()


def describe_raw_actions(site: Site, manifest: Mapping[str, Any]) -> Metadata:
    counts = manifest["counts"]
    ds = manifest["ds"]
    num_bytes = sum(entry["num_bytes"] for entry in manifest["files"])
    return {
        "actions": counts["kept"],
        "users": counts["users"],
        "positive_actions": counts["positive"],
        "rows_read": counts["read"],
        "accounting": table(
            [
                {"rows": "read from the day's files", "count": counts["read"]},
                {"rows": "+ received from other days' files", "count": counts["received"]},
                {"rows": "- sent to their own day", "count": counts["sent"]},
                {"rows": "- exact duplicates", "count": counts["duplicates"]},
                {"rows": "- skipped by a rule", "count": counts["skipped"]},
                {"rows": "- of forgotten users", "count": counts["forgotten"]},
                {"rows": "- quarantined", "count": counts["quarantined"]},
                {"rows": "= kept", "count": counts["kept"]},
            ]
        ),
        "actions_by_type": _shares("action_type", manifest["by_type"]),
        "actions_by_surface": _shares("surface", manifest["by_surface"]),
        "quarantine": _shares("reason", manifest["quarantined_by_reason"]),
        "quarantine_sample": table(_sample(site, raw_actions.read_quarantine(site, ds))),
        "rows_outside_site_days": manifest["outside_site_days"],
        "bytes": num_bytes,
        "seconds": manifest["seconds"],
        "path": dg.MetadataValue.path(str(raw_actions.partition_dir(site, ds) / manifest["build"])),
        "dagster/row_count": counts["kept"],
    }


def describe_pin_features(site: Site, manifest: Mapping[str, Any], seconds: float) -> Metadata:
    counts = manifest["counts"]
    interests = read_pin_features(site, manifest["ds"], ["interest"])["interest"].value_counts().to_pylist()
    by_interest = {row["values"]: row["counts"] for row in interests}
    return {
        "pins": counts["pins"],
        "candidates": counts["candidates"],
        "new_pins": counts["new"],
        "updated_pins": counts["updated"],
        "feature_dim": manifest["dim"],
        "interests": len(by_interest),
        "largest_interests": _shares("interest", by_interest),
        "quarantine": _shares("reason", manifest["quarantined_by_reason"]),
        "seconds": round(seconds, 2),
        "lance_version": manifest["versions"][0],
        "dagster/row_count": counts["pins"],
    }


def describe_user_timelines(site: Site, manifest: Mapping[str, Any], seconds: float) -> Metadata:
    counts, ds = manifest["counts"], manifest["ds"]
    lengths = [sum(bucket["lengths"][index] for bucket in manifest["buckets"]) for index in range(len(LENGTH_BINS))]
    root = timeline_state(site).root
    file = root / "plots" / f"{ds}.png"
    return {
        "users": counts["users"],
        "actions": counts["actions"],
        "active_users": counts["active_users"],
        "new_users": counts["new_users"],
        "forgotten_users": counts["forgotten_users"],
        "built_from": manifest["built_from"],
        "timeline_lengths": picture(_plot_lengths(lengths, ds), file),
        "timeline_lengths_png": dg.MetadataValue.path(str(file)),
        "buckets": table(
            [
                {key: bucket[key] for key in ("bucket", "users", "actions", "active_users", "version", "fragments")}
                for bucket in manifest["buckets"]
            ]
        ),
        "seconds": round(seconds, 2),
        "path": dg.MetadataValue.path(str(root)),
        "dagster/row_count": counts["users"],
    }


def describe_training_set(path: Path, manifest: Mapping[str, Any]) -> Metadata:
    counts = manifest["counts"]
    splits = [{"split": split, **counts[split]} for split in ("train", "held_out")]
    left_out = {
        "users without an action left": counts["users_left_out"],
        "users forgotten": counts["users_forgotten"],
        **{f"actions: {reason}": count for reason, count in counts["dropped"].items()},
    }
    return {
        "cut_ds": manifest["cut_ds"],
        "fingerprint": manifest["fingerprint"],
        "train_users": counts["train"]["users"],
        "train_actions": counts["train"]["actions"],
        "train_positives": counts["train"]["positives"],
        "held_out_users": counts["held_out"]["users"],
        "pins": counts["pins"],
        "candidates": counts["candidates"],
        "splits": table(splits),
        "left_out": table([{"what": what, "count": count} for what, count in left_out.items()]),
        "vocabularies": dg.MetadataValue.json(manifest["vocabularies"]),
        "inputs": dg.MetadataValue.json(manifest["inputs"]),
        "path": dg.MetadataValue.path(str(path)),
        "dagster/row_count": counts["train"]["users"],
    }


def describe_model(
    run_dir: Path, manifest: Mapping[str, Any], history: Sequence[Mapping[str, float]], mlflow_url: str
) -> Metadata:
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
        "loss": metrics["loss"],
        "temperature": metrics["temperature"],
        "recall_at_10": _number(metrics["recall_at_10"]),
        "examples_per_s": _mean(history, "examples_per_s"),
        "data_wait_share": _mean(history, "data_wait_share"),
        "training": picture(plot_training(history), file),
        "training_png": dg.MetadataValue.path(str(file)),
        "measurements": table(_sparse(history)),
        "config": dg.MetadataValue.json(manifest["config"]),
        "mlflow_run": dg.MetadataValue.url(mlflow_url),
        "path": dg.MetadataValue.path(str(run_dir / "model")),
    }


def _number(value: float) -> float | str:
    """Dagster's pages cannot show NaN."""
    return value if math.isfinite(value) else "undefined"


def _mean(history: Sequence[Mapping[str, float]], name: str) -> float:
    values = [measurement[name] for measurement in history if name in measurement]
    return sum(values) / len(values)


def _sparse(history: Sequence[Mapping[str, float]]) -> list[Metadata]:
    """A few rows from the first to the last step, each with what was known by then."""
    known: dict[int, dict[str, float]] = {}
    latest: dict[str, float] = {}
    for measurement in history:
        latest |= measurement
        known[int(measurement["step"])] = dict(latest)
    steps = sorted(known)
    chosen = {steps[round(row * (len(steps) - 1) / (MAX_SAMPLE_ROWS - 1))] for row in range(MAX_SAMPLE_ROWS)}
    names = ("loss", "recall_at_10", "temperature", "learning_rate", "gradient_norm", "examples_per_s")
    return [
        {"step": step} | {name: f"{known[step][name]:.4g}" if name in known[step] else "" for name in names}
        for step in sorted(chosen)
    ]


def column_schema(schema: Any) -> dg.TableSchema:
    """An Arrow schema for the asset's definition page."""
    return dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in schema])


def _sample(site: Site, quarantine: Any) -> list[Metadata]:
    """A few quarantined rows, narrow enough to read."""
    rows = quarantine.slice(0, MAX_SAMPLE_ROWS).to_pylist()
    for row in rows:
        row["source_file"] = row["source_file"].removeprefix(f"{site.log_root}/")
    return [{name: row[name] for name in ("reason", "row_number", "source_file", "raw")} for row in rows]


def _shares(name: str, counts: Mapping[str, int]) -> dg.MetadataValue:
    total = sum(counts.values())
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_SAMPLE_ROWS]
    return table([{name: key, "count": count, "share": f"{count / total:.2%}"} for key, count in largest])


def table(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue:
    if not rows:
        return dg.MetadataValue.text("none")
    return dg.MetadataValue.table([dg.TableRecord({k: _plain(v) for k, v in row.items()}) for row in rows])


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")  # a table is there to be read
    return value if isinstance(value, str | int | bool) else str(value)


def _plot_lengths(lengths: Sequence[int], ds: str) -> Figure:
    last = max((index for index, count in enumerate(lengths) if count), default=0)
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{low}" if low == 1 else f"{low}-{2 * low - 1}" for low in LENGTH_BINS[: last + 1]]
    axes.bar(names, lengths[: last + 1], color="#bd081c")
    axes.set(xlabel="actions in the timeline", ylabel="users", title=f"Timeline lengths, {ds}")
    axes.tick_params(axis="x", rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_training(history: Sequence[Mapping[str, float]]) -> Figure:
    figure = Figure(figsize=(7, 3), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    for axes, name, label, style in (
        (left, "loss", "loss", {"color": "#bd081c"}),
        (right, "recall_at_10", "recall@10, held-out users", {"color": "#0a6b77", "marker": "o", "markersize": 3}),
    ):
        points = [(measurement["step"], measurement[name]) for measurement in history if name in measurement]
        axes.plot(*zip(*points, strict=True), **style)
        axes.set_ylabel(label, color=style["color"])
        axes.spines["top"].set_visible(False)
    left.set(xlabel="step", title="Training")
    right.set_ylim(bottom=0)
    return figure


def picture(figure: Figure, path: Path) -> dg.MetadataValue:
    """The figure inline; it is kept as a file, too, because the page shows Markdown only behind a link."""
    encoded = base64.b64encode(save_figure(figure, path)).decode()
    return dg.MetadataValue.md(f"![{path.stem}](data:image/png;base64,{encoded})")


def save_figure(figure: Figure, path: Path) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return content.getvalue()
