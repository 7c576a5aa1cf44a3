"""What is there, what is missing, and what no longer follows from its inputs: read from the manifests alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.tables import (
    PinEmbeddingManifest,
    UserEmbeddingManifest,
    embedding_state,
    pin_embedding_state,
    snapshot_state,
)
from pf_core.logs.checks import judge_late_rows
from pf_core.logs.partition import ingested_days, raw_digest, read_manifest
from pf_core.pins.features import content_name, pin_state
from pf_core.serving.index import index_dir
from pf_core.serving.publish import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.timelines.build import content_digest, timeline_state

ONLY_NEWEST = ("pin_index", "release")
"""Of a range of days, only the newest is made; earlier ones are not missed."""


@dataclass(frozen=True, kw_only=True)
class AssetStatus:
    asset: str
    days: list[str]
    """Readable ones, ascending."""
    missing: list[str] = field(default_factory=list)
    """Between the first and the newest that some daily asset has."""
    stale: dict[str, str] = field(default_factory=dict)
    """Day to why it no longer follows from its inputs."""


def asset_statuses(site: Site) -> list[AssetStatus]:
    """Every daily asset, in pipeline order; the release as the day of the current one."""
    days = {
        "raw_actions": ingested_days(site),
        "pin_features": pin_state(site).days(),
        "user_timelines": timeline_state(site).days(),
        "user_embeddings": embedding_state(site).days(),
        "user_embedding_snapshot": snapshot_state(site).days(),
        "pin_embeddings": pin_embedding_state(site).days(),
        "pin_index": sorted(path.parent.name for path in (site.directory / "pin_index").glob(f"*/{MANIFEST}")),
        "release": [str(release["ds"]) for release in list_releases(site) if release["is_current"]],
    }
    newest = max((built[-1] for built in days.values() if built), default=site.start_ds)
    whys = {
        "raw_actions": _late_rows_wait,
        "user_timelines": _why_timelines,
        "user_embeddings": _why_embeddings,
        "user_embedding_snapshot": _why_snapshot,
        "pin_embeddings": _why_pin_embeddings,
        "pin_index": _why_index,
        "release": _why_release,
    }
    return [
        AssetStatus(
            asset=asset,
            days=built,
            missing=_missing(built, newest, only_newest=asset in ONLY_NEWEST),
            stale=_stale(site, built[-1:] if asset in ONLY_NEWEST else built, whys.get(asset)),
        )
        for asset, built in days.items()
    ]


def _missing(built: list[str], newest: str, *, only_newest: bool) -> list[str]:
    if not built:
        return []
    return sorted(set(ds_range(built[-1] if only_newest else built[0], newest)) - set(built))


Why = Callable[[Site, str], str | None]


def _stale(site: Site, days: Sequence[str], why: Why | None) -> dict[str, str]:
    if why is None:
        return {}
    return {ds: reason for ds in days if (reason := why(site, ds)) is not None}


def _late_rows_wait(site: Site, ds: str) -> str | None:
    manifest = read_manifest(site, ds)
    assert manifest is not None
    verdict = judge_late_rows(site, manifest)
    return None if verdict.passed else verdict.reason


def _why_timelines(site: Site, ds: str) -> str | None:
    manifest = timeline_state(site).require(ds)
    since = shift_ds(ds, 1 - manifest["settings"]["window_days"])
    changed = [
        log_ds
        for log_ds, digest in sorted(manifest["raw_digests"].items())
        if log_ds >= since and read_manifest(site, log_ds) is not None and raw_digest(site, log_ds) != digest
    ]
    return f"raw_actions changed on {', '.join(changed)}" if changed else None


def _why_embeddings(site: Site, ds: str) -> str | None:
    inputs = embedding_state(site).require(ds)["inputs"]
    timelines, pins = timeline_state(site).manifest(ds), pin_state(site).manifest(ds)
    if timelines is not None and content_digest(timelines) != inputs["timelines"]:
        return "user_timelines changed"
    if pins is not None and content_name(pins) != inputs["pin_features_version"]:
        return "pin_features changed"
    return None


def _why_snapshot(site: Site, ds: str) -> str | None:
    inputs, state = snapshot_state(site).require(ds)["inputs"], snapshot_state(site)
    delta, previous = embedding_state(site).manifest(ds), state.manifest(shift_ds(ds, -1))
    if delta is not None and delta["digest"] != inputs["user_embeddings"]:
        return "user_embeddings changed"
    if inputs["previous"] is not None and previous is not None and previous["digest"] != inputs["previous"]:
        return "the snapshot of the day before changed"
    return None


def _why_pin_embeddings(site: Site, ds: str) -> str | None:
    manifest, pins = pin_embedding_state(site).require(ds), pin_state(site).manifest(ds)
    if pins is not None and content_name(pins) != manifest["inputs"]["pin_features_version"]:
        return "pin_features changed"
    return _other_model(manifest, embedding_state(site).manifest(ds))


def _why_index(site: Site, ds: str) -> str | None:
    manifest, pins = read_json(index_dir(site, ds) / MANIFEST), pin_embedding_state(site).manifest(ds)
    if pins is not None and pins["digest"] != manifest["inputs"]["pin_embeddings"]:
        return "pin_embeddings changed"
    return None


def _why_release(site: Site, ds: str) -> str | None:
    release = next(release for release in list_releases(site) if release["is_current"])
    snapshot, index = snapshot_state(site).manifest(ds), index_dir(site, ds) / MANIFEST
    if snapshot is not None and snapshot["digest"] != release["inputs"]["snapshot"]:
        return "user_embedding_snapshot changed"
    if index.exists() and read_json(index)["digest"] != release["inputs"]["pin_index"]:
        return "pin_index changed"
    return None


def _other_model(manifest: PinEmbeddingManifest, users: UserEmbeddingManifest | None) -> str | None:
    if users is not None and users["model_version"] != manifest["model_version"]:
        return f"user_embeddings has model {users['model_version']}, this has {manifest['model_version']}"
    return None
