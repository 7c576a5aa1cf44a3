"""What a person sees on the pages of the serving assets."""

from collections.abc import Mapping
from datetime import date
from typing import Any

import dagster as dg
from matplotlib.figure import Figure

from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.serving.index import index_dir
from pf_core.serving.releases import release_root

AGE_BINS = ((0, "today"), (1, "1 day"), (2, "2 days"), (3, "3-6 days"), (7, "1-2 weeks"), (14, "2-4 weeks"))

OLDEST = (28, "4 weeks or more")


def describe_user_embeddings(manifest: Mapping[str, Any], model_url: str) -> Metadata:
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
    """Users by the age of their embedding."""
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


def describe_pin_embeddings(manifest: Mapping[str, Any], model_url: str) -> Metadata:
    return {
        "pins": manifest["counts"]["pins"],
        "embedding_dim": manifest["embedding_dim"],
        "norm": table([manifest["norm"]]),
        "seconds": round(manifest["seconds"], 2),
        "model_version": manifest["model_version"],
        "model_run": dg.MetadataValue.url(model_url),
        "dagster/row_count": manifest["counts"]["pins"],
    }


def describe_index(site: Site, manifest: Mapping[str, Any]) -> Metadata:
    return {
        "pins": manifest["counts"]["pins"],
        "recall_at_10": manifest["recall_at_10"],
        "ef": manifest["ef"],
        "judged_users": manifest["judged_users"],
        "ef_tried": table(manifest["ef_tried"]),
        "parameters": dg.MetadataValue.json(
            {name: manifest[name] for name in ("space", "embedding_dim", "links", "ef_construction", "num_shards")}
        ),
        "seconds": round(manifest["seconds"], 2),
        "model_version": manifest["model_version"],
        "path": dg.MetadataValue.path(str(index_dir(site, manifest["ds"]) / manifest["build"])),
        "dagster/row_count": manifest["counts"]["pins"],
    }


def describe_release(site: Site, manifest: Mapping[str, Any]) -> Metadata:
    return {
        "release": manifest["release"],
        "published": True,
        "users": manifest["counts"]["users"],
        "pins": manifest["counts"]["pins"],
        "store": manifest["store"]["kind"],
        "model_version": manifest["model_version"],
        "verified": table([{"check": name, "result": result} for name, result in manifest["checks"].items()]),
        "look_at_it": dg.MetadataValue.md("`pf recommend USER`, `pf similar PIN`, `pf releases`, `pf rollback`"),
        "path": dg.MetadataValue.path(str(release_root(site) / manifest["release"])),
        "dagster/row_count": manifest["counts"]["users"],
    }


def describe_superseded(newest: str) -> Metadata:
    return {"published": False, "why": f"the same run made that of {newest}, which is newer"}
