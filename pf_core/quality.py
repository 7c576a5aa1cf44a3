"""Is a day's log fit to build on? Judgements of manifests, free of any orchestrator."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pf_core.contracts import shift_ds
from pf_core.pin_features import feature_coverage
from pf_core.raw_actions import Manifest, read_manifest
from pf_core.site import QualityConfig, Site


@dataclass(frozen=True)
class Verdict:
    """`reason` is a sentence for the person on call."""

    ds: str
    passed: bool
    reason: str


def judge_quarantine(manifest: Manifest, quality: QualityConfig) -> Verdict:
    """quarantined / read ≤ max_quarantined_share; a day on which nothing was read passes (its volume does not)."""
    counts = manifest["counts"]
    share = counts["quarantined"] / counts["read"] if counts["read"] else 0.0
    reason = f"{share:.2%} of {counts['read']:,} rows quarantined, at most {quality.max_quarantined_share:.2%} allowed"
    if share > quality.max_quarantined_share:
        worst = max(manifest["quarantined_by_reason"], key=manifest["quarantined_by_reason"].get)
        reason += f"; most often: {worst}"
    return Verdict(manifest["ds"], share <= quality.max_quarantined_share, reason)


def judge_volume(manifest: Manifest, trailing: Sequence[Manifest], quality: QualityConfig) -> Verdict:
    """kept / median of the trailing days' kept within [min_volume_ratio, max_volume_ratio]; an empty day fails, unless
    min_volume_ratio is 0.

    With fewer than `min_trailing_days` days to compare with, any volume above zero passes.
    """
    kept = manifest["counts"]["kept"]
    if kept == 0:
        reason = "no actions at all; if the site was silent, min_volume_ratio: 0 lets the day pass"
        return Verdict(manifest["ds"], quality.min_volume_ratio == 0, reason)
    if len(trailing) < quality.min_trailing_days:
        return Verdict(manifest["ds"], True, f"{kept:,} actions; only {len(trailing)} earlier days to compare with")
    median = statistics.median(day["counts"]["kept"] for day in trailing)
    ratio = kept / median if median else float("inf")
    return Verdict(
        manifest["ds"],
        quality.min_volume_ratio <= ratio <= quality.max_volume_ratio,
        f"{kept:,} actions, {ratio:.2f} times the median of the {len(trailing)} days before; "
        f"normal is {quality.min_volume_ratio:g} to {quality.max_volume_ratio:g}",
    )


def judge_late_rows(site: Site, manifest: Manifest) -> Verdict:
    """Every day that rows of this day's files belong to was ingested with these very files at hand."""
    ds, waiting = manifest["ds"], []
    for own_ds, num_rows in sorted(manifest["sent_to"].items()):
        own = read_manifest(site, own_ds)
        if own is None or not all(file in own["neighbours"] for file in manifest["inputs"]):
            waiting.append((own_ds, num_rows))
    if not waiting:
        return Verdict(ds, True, f"{sum(manifest['sent_to'].values()):,} rows of other days were received by them")
    days = [own_ds for own_ds, _ in waiting]
    reason = (
        f"{sum(num_rows for _, num_rows in waiting):,} rows belong to {', '.join(days)}, ingested before they arrived; "
        f"take them in with: pf repair --since {ds} --until {ds}"
    )
    return Verdict(ds, False, reason)


def judge_coverage(site: Site, ds: str) -> Verdict:
    """The share of the day's actions whose pin has a feature is at least min_feature_coverage; no actions pass."""
    share = feature_coverage(site, ds)
    reason = (
        f"{share:.2%} of the day's actions have a pin feature, expected are {site.quality.min_feature_coverage:.0%}"
    )
    return Verdict(ds, not share < site.quality.min_feature_coverage, reason)


def trailing_manifests(site: Site, ds: str) -> list[Manifest]:
    """The manifests of the days before ds, as far as they exist."""
    days = [shift_ds(ds, -offset) for offset in range(1, site.quality.trailing_days + 1)]
    return [manifest for day in days if (manifest := read_manifest(site, day)) is not None]
