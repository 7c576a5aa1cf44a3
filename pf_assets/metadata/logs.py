"""Pages of raw_actions, pin_features and user_timelines, made from a partition's manifest."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import MAX_SAMPLE_ROWS, Metadata, picture, table
from pf_core.config.site import Site
from pf_core.logs import partition as raw_actions
from pf_core.pins.features import read_pin_features
from pf_core.timelines.bucket import LENGTH_BINS
from pf_core.timelines.build import timeline_state


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
