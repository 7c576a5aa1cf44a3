"""Reports for each daily asset which days exist, are missing, or are older than their inputs; reads manifests only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pf_core.config.site import Site
from pf_core.days import days_text, ds_range, shift_ds
from pf_core.embeddings.tables import (
    PinEmbeddingManifest,
    UserEmbeddingManifest,
    embedding_state,
    pin_embedding_state,
    snapshot_state,
)
from pf_core.engine.daily_state import DailyState
from pf_core.errors import materialize_command
from pf_core.layouts import layout_fault
from pf_core.logs.checks import judge_late_rows
from pf_core.logs.partition import ingested_days, partition_dir, raw_digest, read_manifest
from pf_core.pins.features import content_name, pin_state
from pf_core.serving.index import index_days, index_manifest, require_index
from pf_core.serving.releases import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.timelines.build import content_digest, timeline_state

DailyAsset = Literal[
    "raw_actions",
    "pin_features",
    "user_timelines",
    "user_embeddings",
    "user_embedding_snapshot",
    "pin_embeddings",
    "pin_index",
    "release",
]

STATES: dict[str, Callable[[Site], DailyState[Any]]] = {
    "pin_features": pin_state,
    "user_timelines": timeline_state,
    "user_embeddings": embedding_state,
    "user_embedding_snapshot": snapshot_state,
    "pin_embeddings": pin_embedding_state,
}

ONLY_NEWEST = ("pin_index", "release")
"""Assets of which a run over several days makes the newest only, so earlier days do not count as missing."""


@dataclass(frozen=True, kw_only=True)
class AssetStatus:
    asset: str
    days: list[str]
    """Days that can be read, ascending."""
    missing: list[str] = field(default_factory=list)
    """Days that are missing between the asset's first day and the newest day of any daily asset."""
    stale: dict[str, str] = field(default_factory=dict)
    """For each stale day, which of its inputs changed since it was built, or that it is stored in another layout."""


def asset_statuses(site: Site) -> list[AssetStatus]:
    """Return the status of every daily asset, in pipeline order; the day of `release` is that of the current one."""
    days: dict[DailyAsset, list[str]] = {
        "raw_actions": ingested_days(site),
        "pin_features": pin_state(site).days(),
        "user_timelines": timeline_state(site).days(),
        "user_embeddings": embedding_state(site).days(),
        "user_embedding_snapshot": snapshot_state(site).days(),
        "pin_embeddings": pin_embedding_state(site).days(),
        "pin_index": index_days(site),
        "release": [release["ds"] for release in list_releases(site) if release["is_current"]],
    }
    newest = max((built[-1] for built in days.values() if built), default=site.start_ds)
    reasons: dict[DailyAsset, StaleReason] = {
        "raw_actions": _stale_raw_actions,
        "user_timelines": _stale_timelines,
        "user_embeddings": _stale_embeddings,
        "user_embedding_snapshot": _stale_snapshot,
        "pin_embeddings": _stale_pin_embeddings,
        "pin_index": _stale_index,
        "release": _stale_release,
    }
    return [
        AssetStatus(
            asset=asset,
            days=built,
            missing=_missing(built, newest, only_newest=asset in ONLY_NEWEST),
            stale=_stale(site, built[-1:] if asset in ONLY_NEWEST else built, asset, reasons.get(asset)),
        )
        for asset, built in days.items()
    ]


def _missing(built: list[str], newest: str, *, only_newest: bool) -> list[str]:
    if not built:
        return []
    return sorted(set(ds_range(built[-1] if only_newest else built[0], newest)) - set(built))


StaleReason = Callable[[Site, str], str | None]
"""Returns why a day of an asset is stale, or None if it is not."""


def _stale(site: Site, days: Sequence[str], asset: DailyAsset, reason_of: StaleReason | None) -> dict[str, str]:
    found = {}
    for ds in days:
        reason = _layout_reason(site, asset, ds)
        if reason is None and reason_of is not None:
            reason = reason_of(site, ds)
        if reason is not None:
            found[ds] = reason
    return found


def _layout_reason(site: Site, asset: DailyAsset, ds: str) -> str | None:
    """Return a reason if a day is stored in a layout that this code does not read: its manifest says no more then."""
    manifest: Mapping[str, Any] | None
    match asset:
        case "raw_actions":
            manifest = read_json(partition_dir(site.directory, ds) / MANIFEST)
        case "pin_index":
            manifest = index_manifest(site, ds)
        case "release":
            manifest = next(release for release in list_releases(site) if release["is_current"])
        case _:
            manifest = STATES[asset](site).manifest(ds)
    assert manifest is not None
    fault = layout_fault(asset, manifest)
    return None if fault is None else f"it {fault}: rebuild it with {_rebuild_command(site, asset, ds)}"


def _rebuild_command(site: Site, asset: DailyAsset, ds: str) -> str:
    state = STATES.get(asset)
    return materialize_command(asset, ds) if state is None else state(site).rebuild_command(ds)


def _stale_raw_actions(site: Site, ds: str) -> str | None:
    manifest = read_manifest(site, ds)
    assert manifest is not None
    verdict = judge_late_rows(site, manifest)
    return None if verdict.passed else verdict.reason


def _stale_timelines(site: Site, ds: str) -> str | None:
    manifest = timeline_state(site).require(ds)
    since = shift_ds(ds, 1 - manifest["settings"]["window_days"])
    changed = [
        log_ds
        for log_ds, digest in sorted(manifest["raw_digests"].items())
        if log_ds >= since and read_manifest(site, log_ds) is not None and raw_digest(site, log_ds) != digest
    ]
    return f"raw_actions changed on {days_text(changed)}" if changed else None


def _stale_embeddings(site: Site, ds: str) -> str | None:
    inputs = embedding_state(site).require(ds)["inputs"]
    timelines, pins = timeline_state(site).manifest(ds), pin_state(site).manifest(ds)
    if timelines is not None and content_digest(timelines) != inputs["timelines"]:
        return "user_timelines changed"
    if pins is not None and content_name(pins) != inputs["pin_features_version"]:
        return "pin_features changed"
    return None


def _stale_snapshot(site: Site, ds: str) -> str | None:
    inputs, state = snapshot_state(site).require(ds)["inputs"], snapshot_state(site)
    delta, previous = embedding_state(site).manifest(ds), state.manifest(shift_ds(ds, -1))
    if delta is not None and delta["digest"] != inputs["user_embeddings"]:
        return "user_embeddings changed"
    if inputs["previous"] is not None and previous is not None and previous["digest"] != inputs["previous"]:
        return "the snapshot of the day before changed"
    return None


def _stale_pin_embeddings(site: Site, ds: str) -> str | None:
    manifest, pins = pin_embedding_state(site).require(ds), pin_state(site).manifest(ds)
    if pins is not None and content_name(pins) != manifest["inputs"]["pin_features_version"]:
        return "pin_features changed"
    return _another_model(manifest, embedding_state(site).manifest(ds))


def _stale_index(site: Site, ds: str) -> str | None:
    (manifest, _), pins = require_index(site, ds), pin_embedding_state(site).manifest(ds)
    if pins is not None and pins["digest"] != manifest["inputs"]["pin_embeddings"]:
        return "pin_embeddings changed"
    return None


def _stale_release(site: Site, ds: str) -> str | None:
    release = next(release for release in list_releases(site) if release["is_current"])
    snapshot, index = snapshot_state(site).manifest(ds), index_manifest(site, ds)
    if snapshot is not None and snapshot["digest"] != release["inputs"]["snapshot"]:
        return "user_embedding_snapshot changed"
    if index is not None and index["digest"] != release["inputs"]["pin_index"]:
        return "pin_index changed"
    return None


def _another_model(manifest: PinEmbeddingManifest, users: UserEmbeddingManifest | None) -> str | None:
    if users is not None and users["model_version"] != manifest["model_version"]:
        return f"user_embeddings has model {users['model_version']}, this has {manifest['model_version']}"
    return None
