"""Data check of pin_features: do the day's actions have pins with a feature?

The model cannot see an action whose pin has none. A low share mostly means that the catalogue is late or incomplete.
"""

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.pins.features import feature_coverage


def judge_coverage(site: Site, ds: str) -> CheckResult:
    """Share of the day's actions whose pin has a feature ≥ min_feature_coverage; a day without actions passes."""
    share = feature_coverage(site, ds)
    reason = (
        f"{share:.2%} of the day's actions have a pin feature, expected are {site.quality.min_feature_coverage:.0%}"
    )
    return CheckResult(ds, not share < site.quality.min_feature_coverage, reason)
