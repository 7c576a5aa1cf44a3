"""Is a day of pin_features fit to build on?"""

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.pins.features import feature_coverage


def judge_coverage(site: Site, ds: str) -> CheckResult:
    """The share of the day's actions whose pin has a feature is at least min_feature_coverage; no actions pass."""
    share = feature_coverage(site, ds)
    reason = (
        f"{share:.2%} of the day's actions have a pin feature, expected are {site.quality.min_feature_coverage:.0%}"
    )
    return CheckResult(ds, not share < site.quality.min_feature_coverage, reason)
