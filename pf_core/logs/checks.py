"""Is a day's log fit to build on? Judgements of manifests, free of any orchestrator."""

import statistics
from collections.abc import Sequence

from pf_core.check_result import CheckResult
from pf_core.config.site import QualityConfig, Site
from pf_core.days import shift_ds
from pf_core.logs.partition import Manifest, read_manifest


def judge_quarantine(manifest: Manifest, quality: QualityConfig) -> CheckResult:
    """quarantined / read ≤ max_quarantined_share; a day on which nothing was read passes (its volume does not)."""
    counts = manifest["counts"]
    share = counts["quarantined"] / counts["read"] if counts["read"] else 0.0
    reason = f"{share:.2%} of {counts['read']:,} rows quarantined, at most {quality.max_quarantined_share:.2%} allowed"
    if share > quality.max_quarantined_share:
        worst = max(manifest["quarantined_by_reason"], key=manifest["quarantined_by_reason"].get)
        reason += f"; most often: {worst}"
    return CheckResult(manifest["ds"], share <= quality.max_quarantined_share, reason)


def judge_volume(manifest: Manifest, trailing: Sequence[Manifest], quality: QualityConfig) -> CheckResult:
    """kept / median of the trailing days' kept within [min_volume_ratio, max_volume_ratio]; an empty day fails, unless
    min_volume_ratio is 0.

    With fewer than `min_trailing_days` days to compare with, any volume above zero passes.
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


def judge_late_rows(site: Site, manifest: Manifest) -> CheckResult:
    """Every day that rows of this day's files belong to was ingested with these very files at hand."""
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
        f"take them in with: pf repair --since {ds} --until {ds}"
    )
    return CheckResult(ds, False, reason)


def trailing_manifests(site: Site, ds: str) -> list[Manifest]:
    """The manifests of the days before ds, as far as they exist."""
    days = [shift_ds(ds, -offset) for offset in range(1, site.quality.trailing_days + 1)]
    return [manifest for day in days if (manifest := read_manifest(site, day)) is not None]
