"""Metadata of user_embeddings and user_embedding_snapshot, made from a partition's manifest."""

from collections.abc import Mapping
from datetime import date
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state

AGE_BINS = ((0, "today"), (1, "1 day"), (2, "2 days"), (3, "3-6 days"), (7, "1-2 weeks"), (14, "2-4 weeks"))
"""Smallest age in days of each bar of the age plot, and its label."""

OLDEST = (28, "4 weeks or more")


def describe_user_embeddings(manifest: Mapping[str, Any], model_url: str) -> Metadata:
    """How many users were embedded and why, which of their actions the model could not use, and how fast it was."""
    counts, seconds = manifest["counts"], manifest["seconds"]
    computed, positions = counts["embedded"] + counts["reused"], counts["actions"] + counts["padded_actions"]
    return {
        "users": counts["users"],
        "mode": manifest["mode"],
        "why": manifest["reason"],
        "active_users": counts["active_users"],
        "embedded": counts["embedded"],
        "reused": counts["reused"],
        "accounting": table(
            [
                {"users": "embedded", "count": counts["embedded"]},
                {"users": "unchanged since this day was last embedded", "count": counts["reused"]},
                {"users": "without a usable action", "count": counts["without_actions"]},
            ]
        ),
        "left_out_actions": table(
            [
                {"actions": "pin has no feature", "count": counts["no_feature"]},
                {"actions": "action type or surface unknown to the model", "count": counts["unknown_word"]},
            ]
        ),
        "actions_read": counts["actions"],
        "padding": f"{counts['padded_actions'] / max(positions, 1):.1%} of the positions",
        "users_per_s": round(computed / seconds) if seconds else computed,
        "seconds": round(seconds, 2),
        "model_version": manifest["model_version"],
        "model_run": dg.MetadataValue.url(model_url),
        "dagster/row_count": counts["users"],
    }


def describe_snapshot(site: Site, manifest: Mapping[str, Any], model_url: str) -> Metadata:
    """How many users are new, refreshed or carried over, how old their embeddings are, and how far they moved."""
    counts, ds = manifest["counts"], manifest["ds"]
    root = snapshot_state(site).root
    file = root / "plots" / f"{ds}.png"
    ages = _ages(manifest["by_computed_ds"], ds)
    shown: Metadata = {
        "users": counts["users"],
        "new": counts["new"],
        "refreshed": counts["refreshed"],
        "carried_over": counts["carried_over"],
        "forgotten": counts["forgotten"],
        "expired": counts["expired"],
        "built_from": manifest["built_from"],
        "embedding_age": picture(_plot_ages(ages, ds), file),
        "embedding_age_png": dg.MetadataValue.path(str(file)),
        "embedding_age_table": table([{"age": age, "users": users} for age, users in ages.items()]),
        "norm": table([manifest["norm"]] if manifest["norm"] else []),
        "fragments": counts["fragments"],
        "seconds": round(manifest["seconds"], 2),
        "model_version": manifest["model_version"],
        "model_run": dg.MetadataValue.url(model_url),
        "path": dg.MetadataValue.path(str(root)),
        "dagster/row_count": counts["users"],
    }
    change = manifest["change"]
    if change is not None:
        shown["change_of_refreshed_users"] = table(
            [{"sampled": change["sampled"], "mean_distance": change["mean_distance"]} | _named(change["cosine"])]
        )
        shown["cosine_old_new"] = change["cosine"]["p50"]
    return shown


def _named(cosine: Mapping[str, float]) -> Metadata:
    return {f"cosine_{quantile}": value for quantile, value in cosine.items()}


def _ages(by_computed_ds: Mapping[str, int], ds: str) -> dict[str, int]:
    """Return the number of users by the age of their embedding."""
    bins = (*AGE_BINS, OLDEST)
    counts = dict.fromkeys((name for _, name in bins), 0)
    for computed_ds, users in by_computed_ds.items():
        age = (date.fromisoformat(ds) - date.fromisoformat(computed_ds)).days
        counts[next(name for least, name in reversed(bins) if age >= least)] += users
    return counts


def _plot_ages(ages: Mapping[str, int], ds: str) -> Figure:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(list(ages), list(ages.values()), color="#bd081c")
    axes.set(xlabel="computed", ylabel="users", title=f"Age of the embeddings, {ds}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
