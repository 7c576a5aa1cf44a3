"""Data checks of raw_actions: may the rest of the pipeline build on a day's log?

Each reads manifests and returns a CheckResult; pf_assets turns them into asset checks.
"""

import calendar
import statistics
from collections.abc import Mapping, Sequence

from pf_core.check_result import CheckResult
from pf_core.config.site import QualityConfig, Site
from pf_core.days import days_text, ds_range, parse_ds, shift_ds
from pf_core.logs.partition import RawManifest, ingested_days, read_manifest, rows_not_kept
from pf_core.logs.readers import find_files

MIN_WEEKS_TO_BE_CLOSED = 2
"""A weekday can be closed as usual only if it is known for this many weeks: a single one may have been an outage."""

DAYS_SEARCHED_FOR_LOGS = 7
"""Number of days after a day in which is_newest_day looks for logs."""


def judge_quarantine(manifest: RawManifest, quality: QualityConfig) -> CheckResult:
    """quarantined / read ≤ max_quarantined_share; a day without rows passes (but fails judge_volume)."""
    return judge_rejects(manifest["ds"], manifest["counts"]["read"], manifest["quarantined_by_reason"], quality)


def judge_rejects(ds: str, num_read: int, by_reason: Mapping[str, int], quality: QualityConfig) -> CheckResult:
    """judge_quarantine on the numbers themselves, for rows that are not in a partition."""
    share = sum(by_reason.values()) / num_read if num_read else 0.0
    reason = f"{share:.2%} of {num_read:,} rows quarantined, at most {quality.max_quarantined_share:.2%} allowed"
    if share > quality.max_quarantined_share:
        reason += f"; most often: {max(by_reason, key=by_reason.__getitem__)}"
    return CheckResult(ds, share <= quality.max_quarantined_share, reason)


def judge_volume(manifest: RawManifest, earlier: Sequence[RawManifest], quality: QualityConfig) -> CheckResult:
    """min ≤ kept / median(kept of the compared days) ≤ max_volume_ratio.

    The compared days are, of the `earlier` days that have actions,
    - those of the same weekday in the last `trailing_weeks` weeks, if there are `min_trailing_days` of them;
    - otherwise all of the last `trailing_days` days, if there are `min_trailing_days` of them;
    - otherwise none: then the day passes if it has actions, or if min is 0.
    Days without actions are not compared with, so the median is never 0.

    min is `min_volume_ratio`, or 0 for a weekday that is usually empty: of the same weekdays in the last
    `trailing_weeks` weeks at least two are known, and more than half had no actions. So a closed day passes, and so
    does a closed day with a few actions. min is also 0 for a day without a file, which only a site with
    `missing_days: allow` has, while fewer than two of the same weekdays are known. Any other day without actions fails,
    unless `min_volume_ratio` is 0.

    A day with actions of which none is positive passes, but the reason says so.
    """
    ds, kept = manifest["ds"], manifest["counts"]["kept"]
    day = parse_ds(ds)
    age_of = [((day - parse_ds(other["ds"])).days, other["counts"]["kept"]) for other in earlier]
    weekdays = [num for age, num in age_of if age % 7 == 0 and 7 <= age <= 7 * quality.trailing_weeks]
    num_empty = weekdays.count(0)
    is_weekday_known = len(weekdays) >= MIN_WEEKS_TO_BE_CLOSED
    is_usually_empty = is_weekday_known and 2 * num_empty > len(weekdays)
    may_be_closed = not is_weekday_known and not manifest["inputs"]
    least = 0.0 if is_usually_empty or may_be_closed else quality.min_volume_ratio
    weekday_name = calendar.day_name[day.weekday()]

    if kept == 0:
        if is_usually_empty:
            return CheckResult(ds, True, f"no actions, as on {num_empty} of the last {len(weekdays)} {weekday_name}s")
        if may_be_closed:
            known = f"only {len(weekdays)} earlier {weekday_name}s to compare with"
            return CheckResult(ds, True, f"no file, which `missing_days: allow` permits; {known}")
        return CheckResult(ds, least == 0, _why_empty(manifest))
    compared, name = [num for num in weekdays if num], f"{weekday_name}s"
    if len(compared) < quality.min_trailing_days:
        compared, name = [num for age, num in age_of if num and 1 <= age <= quality.trailing_days], "days"
    positive = "" if manifest["counts"]["positive"] else "; none of them is positive: check source.positive"
    if len(compared) < quality.min_trailing_days:
        return CheckResult(ds, True, f"{kept:,} actions; only {len(compared)} earlier days to compare with{positive}")
    ratio = kept / statistics.median(compared)
    return CheckResult(
        ds,
        least <= ratio <= quality.max_volume_ratio,
        f"{kept:,} actions, {ratio:.2f} times the median of the last {len(compared)} {name} with actions; "
        f"normal is {least:g} to {quality.max_volume_ratio:g}{positive}",
    )


def _why_empty(manifest: RawManifest) -> str:
    """Return where the rows of a day without actions are."""
    counts = manifest["counts"]
    if manifest["outside_site_days"]:
        return (
            f"no actions at all, and {manifest['outside_site_days']:,} rows of the log are outside the site's days: "
            "check start_ds, end_ds and the unit of ts in the site file"
        )
    if counts["read"]:
        others = ", ".join(rows_not_kept(counts))
        return f"no actions at all: of {counts['read']:,} rows read, {others}; check the mapping in the site file"
    return "no actions at all; if the site was silent, min_volume_ratio: 0 lets the day pass"


def is_newest_day(site: Site, ds: str) -> bool:
    """Return whether no later day of the site has a partition or, from the second day after `ds` on, a log.

    The log of the day after `ds` may be in the making while `ds` is ingested. Logs are searched for a week.
    """
    if any(day > ds for day in ingested_days(site)):
        return False
    source = site.source.actions
    if not source.is_dated:
        return True
    days = ds_range(shift_ds(ds, 2), shift_ds(ds, DAYS_SEARCHED_FOR_LOGS))
    in_site = [day for day in days if site.end_ds is None or day <= site.end_ds]
    return not any(find_files(source, site.log_root, day) for day in in_site)


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
        f"{sum(num_rows for _, num_rows in waiting):,} rows belong to {days_text(days)}, ingested before they arrived; "
        f"ingest them with: pf repair --since {ds} --until {ds}"
    )
    return CheckResult(ds, False, reason)


def trailing_manifests(site: Site, ds: str) -> list[RawManifest]:
    """Return the manifests that judge_volume compares with, newest first.

    These are the `trailing_days` days before `ds` and its weekday in the `trailing_weeks` weeks before, as far as they
    have a partition.
    """
    quality = site.quality
    ages = {*range(1, quality.trailing_days + 1), *range(7, 7 * quality.trailing_weeks + 1, 7)}
    days = [shift_ds(ds, -age) for age in sorted(ages)]
    return [manifest for day in days if (manifest := read_manifest(site, day)) is not None]
