"""Metadata of user_timelines, made from a partition's manifest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.config.site import Site
from pf_core.timelines.bucket import LENGTH_BINS
from pf_core.timelines.build import timeline_state


def describe_user_timelines(site: Site, manifest: Mapping[str, Any], seconds: float, *, plotted_ds: str) -> Metadata:
    """How many users and actions there are, how long the timelines are, and the counts of each bucket.

    Only the timelines of `plotted_ds` are plotted: a plot takes longer than a small day, and days differ little.
    """
    counts, ds = manifest["counts"], manifest["ds"]
    lengths = [sum(bucket["lengths"][index] for bucket in manifest["buckets"]) for index in range(len(LENGTH_BINS))]
    root = timeline_state(site).root
    plot = _plot(lengths, ds, root / "plots" / f"{ds}.png") if ds == plotted_ds else {}
    return {
        "users": counts["users"],
        "actions": counts["actions"],
        "active_users": counts["active_users"],
        "new_users": counts["new_users"],
        "forgotten_users": counts["forgotten_users"],
        "built_from": manifest["built_from"],
        **plot,
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


def _plot(lengths: Sequence[int], ds: str, file: Path) -> Metadata:
    return {
        "timeline_lengths": picture(_plot_lengths(lengths, ds), file),
        "timeline_lengths_png": dg.MetadataValue.path(str(file)),
    }


def _plot_lengths(lengths: Sequence[int], ds: str) -> Figure:
    """Bars of the number of users by timeline length, up to the longest that occurs."""
    last = max((index for index, count in enumerate(lengths) if count), default=0)
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{low}" if low == 1 else f"{low}-{2 * low - 1}" for low in LENGTH_BINS[: last + 1]]
    axes.bar(names, lengths[: last + 1], color="#bd081c")
    axes.set(xlabel="actions in the timeline", ylabel="users", title=f"Timeline lengths, {ds}")
    axes.tick_params(axis="x", rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
