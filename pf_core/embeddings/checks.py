"""Data checks: is a day of user_embeddings, of the snapshot or of pin_embeddings fit to be served?"""

import contextlib
import statistics

import numpy as np
import pyarrow as pa

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.embeddings.tables import (
    PinEmbeddingManifest,
    SnapshotManifest,
    UserEmbeddingManifest,
    embedding_state,
    pin_embedding_state,
    snapshot_state,
)
from pf_core.embeddings.vectors import embedding_fault, record_fault
from pf_core.engine.daily_state import StateDay
from pf_core.pins.features import PinManifest, pin_state

BATCH_ROWS = 65_536


def judge_embeddings(site: Site, ds: str) -> CheckResult:
    """Pass if every record of the day's user_embeddings is sound, and of the day's model."""
    with embedding_state(site).held(ds) as day:
        manifest = day.manifest
        version = manifest["model_version"]
        for bucket, dataset in enumerate(day.buckets()):
            fault = record_fault(dataset.to_table(), model_version=version, seen_too=True)
            if fault is not None:
                return CheckResult(ds, False, f"bucket {bucket}: {fault}")
    return CheckResult(ds, True, f"{manifest['counts']['users']:,} embeddings of model {version} are sound")


def judge_active_coverage(site: Site, ds: str) -> CheckResult:
    """Pass if active users with an embedding / active users ≥ min_active_coverage, or if nobody was active."""
    counts, least = embedding_state(site).require(ds)["counts"], site.serving.quality.min_active_coverage
    active = counts["active_users"]
    share = counts["active_users_with_embedding"] / active if active else 1.0
    reason = f"{share:.2%} of {active:,} active users have an embedding, at least {least:.0%} must"
    return CheckResult(ds, share >= least, reason)


def judge_users_kept(site: Site, ds: str) -> CheckResult:
    """Pass if the snapshot has the users of the day before and the new ones, without the forgotten and expired ones.

    Users expire on a day on which everyone was embedded: those whose timeline has left the window then have no
    embedding. The number of stored rows must also be the one in the manifest.
    """
    with snapshot_state(site).held(ds) as day:
        counts = day.manifest["counts"]
        stored = sum(dataset.count_rows() for dataset in day.buckets())
    if stored != counts["users"]:
        return CheckResult(ds, False, f"{stored:,} users are stored, the manifest says {counts['users']:,}")
    expected = counts["previous_users"] + counts["new"] - counts["forgotten"] - counts["expired"]
    reason = (
        f"{counts['previous_users']:,} users of the day before + {counts['new']:,} new - {counts['forgotten']:,} "
        f"forgotten - {counts['expired']:,} without a timeline = {expected:,}; stored are {stored:,}"
    )
    return CheckResult(ds, stored == expected, reason)


def judge_one_model(site: Site, ds: str) -> CheckResult:
    """Pass if every row of the snapshot, and the day's user_embeddings, are of one model version."""
    with snapshot_state(site).held(ds) as day:
        version = day.manifest["model_version"]
        others = sum(dataset.count_rows(f"model_version != '{version}'") for dataset in day.buckets())
    delta = embedding_state(site).manifest(ds)
    if delta is not None and delta["model_version"] != version:
        return CheckResult(ds, False, f"the snapshot has model {version}, user_embeddings {delta['model_version']}")
    return CheckResult(ds, others == 0, f"{others:,} rows are of another model than {version}")


def judge_drift(site: Site, ds: str) -> CheckResult:
    """Pass if the day's mean embedding is near that of the days before, and users moved about as far as usual.

    The day is compared with the trailing days of the same model that embedded their active users; if there are none,
    it passes.
    """
    quality = site.serving.quality
    deltas, snapshots = embedding_state(site), snapshot_state(site)
    today = deltas.require(ds)
    days = [shift_ds(ds, -offset) for offset in range(1, quality.trailing_days + 1)]
    trailing = [known for day in days if (known := deltas.manifest(day)) is not None and _is_comparable(known, today)]
    if not _is_comparable(today, today) or not trailing:
        return CheckResult(ds, True, "no earlier day of this model to compare with")
    means = np.array([known["mean_vector"] for known in trailing])
    drift = float(np.linalg.norm(np.array(today["mean_vector"]) - means.mean(axis=0)))
    changes = [change for known in trailing if (change := _change(snapshots.manifest(known["ds"]))) is not None]
    change = _change(snapshots.manifest(ds))
    ratio = change / statistics.median(changes) if change is not None and changes and min(changes) > 0 else 1.0
    reason = (
        f"the mean embedding lies {drift:.3f} from that of {len(trailing)} days before (at most "
        f"{quality.max_mean_drift:g}); users moved {ratio:.2f} times as far as usual (at most "
        f"{quality.max_change_ratio:g})"
    )
    return CheckResult(ds, drift <= quality.max_mean_drift and ratio <= quality.max_change_ratio, reason)


def _is_comparable(manifest: UserEmbeddingManifest, today: UserEmbeddingManifest) -> bool:
    if manifest["mode"] != "active" or manifest["mean_vector"] is None:
        return False
    return manifest["model_version"] == today["model_version"]


def _change(manifest: SnapshotManifest | None) -> float | None:
    if manifest is None or manifest["change"] is None:
        return None
    return manifest["change"]["mean_distance"]


def judge_pin_embeddings(site: Site, ds: str) -> CheckResult:
    """Pass if every candidate has one finite embedding of unit norm, of the same model as the day's users.

    The towers embed the candidates that have a content vector, a model of parts embeds all of them.
    """
    with contextlib.ExitStack() as stack:
        day = stack.enter_context(pin_embedding_state(site).held(ds))
        users = embedding_state(site).manifest(ds)
        is_kept = pin_state(site).manifest(ds) is not None
        pins = stack.enter_context(pin_state(site).held(ds)) if is_kept else None
        return _judge_pins(ds, day, users, pins)


def _judge_pins(
    ds: str,
    day: StateDay[PinEmbeddingManifest],
    users: UserEmbeddingManifest | None,
    pins: StateDay[PinManifest] | None,
) -> CheckResult:
    manifest, num_pins = day.manifest, 0
    version = manifest["model_version"]
    if users is not None and users["model_version"] != version:
        return CheckResult(ds, False, f"pins have model {version}, users {users['model_version']}")
    for batch in day.open_bucket(0).scanner(batch_size=BATCH_ROWS).to_reader():
        table = pa.Table.from_batches([batch])
        fault = embedding_fault(table, key="pin_id", model_version=version)
        if fault is not None:
            return CheckResult(ds, False, fault)
        num_pins += table.num_rows
    expected = num_pins
    if pins is not None:
        is_parts = "pin_counts" in manifest["inputs"]
        expected = pins.open_bucket(0).count_rows("is_candidate" if is_parts else "is_candidate AND has_feature")
    return CheckResult(ds, num_pins == expected, f"{num_pins:,} pins are embedded, {expected:,} are candidates")
