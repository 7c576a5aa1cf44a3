"""Data check of pin_features: do the pins of the day's actions have a content vector?

Models that read content see nothing of the other pins. A low share mostly means that the catalogue is late or
incomplete.
"""

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.pins.features import feature_coverage


def judge_coverage(site: Site, ds: str) -> CheckResult:
    """Share of the day's actions whose pin has a content vector ≥ min_feature_coverage.

    A day without actions passes, and so does a site without vectors.
    """
    if site.source.pins.vectors is None:
        return CheckResult(ds, True, "the site has no content vectors")
    share = feature_coverage(site, ds)
    reason = (
        f"{share:.2%} of the day's actions have a pin with a content vector, expected are "
        f"{site.quality.min_feature_coverage:.0%}"
    )
    return CheckResult(ds, not share < site.quality.min_feature_coverage, reason)
