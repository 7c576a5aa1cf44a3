"""Metadata of pin_embeddings, pin_index and release, made from their manifests."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from pf_assets.metadata.pages import Metadata, table
from pf_core.config.site import Site
from pf_core.serving.index import IndexManifest, describe_search, index_dir
from pf_core.serving.releases import release_root


def describe_pin_embeddings(manifest: Mapping[str, Any], model_url: str) -> Metadata:
    """How many pins were embedded, with which model."""
    return {
        "pins": manifest["counts"]["pins"],
        "embedding_dim": manifest["embedding_dim"],
        "norm": table([manifest["norm"]]),
        "seconds": round(manifest["seconds"], 2),
        "model_version": manifest["model_version"],
        "model_run": dg.MetadataValue.url(model_url),
        "dagster/row_count": manifest["counts"]["pins"],
    }


def describe_index(site: Site, manifest: IndexManifest) -> Metadata:
    """The index's recall against exact search, and the parameters that it was built with."""
    return {
        "pins": manifest["counts"]["pins"],
        "recall_at_10": manifest["recall_at_10"],
        "search": describe_search(manifest),
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
    """What was published, and the checks that it passed before."""
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
