"""Data checks of raw_actions: may the rest of the pipeline build on a day's log?

Each reads manifests and returns a CheckResult; pf_assets turns them into asset checks.
"""

import statistics
from collections.abc import Sequence

from pf_core.check_result import CheckResult
from pf_core.config.site import QualityConfig, Site
from pf_core.days import shift_ds
from pf_core.logs.partition import RawManifest, read_manifest


def judge_quarantine(manifest: RawManifest, quality: QualityConfig) -> CheckResult:
    """quarantined / read ≤ max_quarantined_share; a day without rows passes (but fails judge_volume)."""
    counts = manifest["counts"]
    share = counts["quarantined"] / counts["read"] if counts["read"] else 0.0
    reason = f"{share:.2%} of {counts['read']:,} rows quarantined, at most {quality.max_quarantined_share:.2%} allowed"
    if share > quality.max_quarantined_share:
        by_reason = manifest["quarantined_by_reason"]
        reason += f"; most often: {max(by_reason, key=by_reason.__getitem__)}"
    return CheckResult(manifest["ds"], share <= quality.max_quarantined_share, reason)


def judge_volume(manifest: RawManifest, trailing: Sequence[RawManifest], quality: QualityConfig) -> CheckResult:
    """min_volume_ratio ≤ kept / median(kept of the trailing days) ≤ max_volume_ratio.

    A day without actions fails unless min_volume_ratio is 0. With fewer than `min_trailing_days` days to compare with,
    any volume above zero passes.
    """
    kept = manifest["counts"]["kept"]
    if kept == 0:
        reason = "no actions at all; if the site was silent, min_volume_ratio: 0 lets the day pass"
        return CheckResult(manifest["ds"], quality.min_volume_ratio == 0, reason)
    if len(trailing) < quality.min_trailing_days:
        return CheckResult(manifest["ds"], True, f"{kept:,} actions; only {len(trailing)} earlier days to compare with")
    median = statistics.median(day["counts"]["kept"] for day in trailing)
    ratio = kept / median if median else float("inf")
    return CheckResult(
        manifest["ds"],
        quality.min_volume_ratio <= ratio <= quality.max_volume_ratio,
        f"{kept:,} actions, {ratio:.2f} times the median of the {len(trailing)} days before; "
        f"normal is {quality.min_volume_ratio:g} to {quality.max_volume_ratio:g}",
    )


def judge_late_rows(site: Site, manifest: RawManifest) -> CheckResult:
    """All days to which this day sent late or early rows were ingested after its current files had arrived."""
    ds, waiting = manifest["ds"], []
    for own_ds, num_rows in sorted(manifest["sent_to"].items()):
        own = read_manifest(site, own_ds)
        if own is None or not all(file in own["neighbours"] for file in manifest["inputs"]):
            waiting.append((own_ds, num_rows))
    if not waiting:
        return CheckResult(ds, True, f"{sum(manifest['sent_to'].values()):,} rows of other days were received by them")
    days = [own_ds for own_ds, _ in waiting]
    reason = (
        f"{sum(num_rows for _, num_rows in waiting):,} rows belong to {', '.join(days)}, ingested before they arrived; "
        f"ingest them with: pf repair --since {ds} --until {ds}"
    )
    return CheckResult(ds, False, reason)


def trailing_manifests(site: Site, ds: str) -> list[RawManifest]:
    """Return the manifests of the `trailing_days` days before ds that have one."""
    days = [shift_ds(ds, -offset) for offset in range(1, site.quality.trailing_days + 1)]
    return [manifest for day in days if (manifest := read_manifest(site, day)) is not None]
