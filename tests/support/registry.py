"""A champion for tests that do not evaluate a model: registering one does not make it champion."""

from pf_assets.tracking.tracking import Tracking


def promote_first(tracking: Tracking) -> None:
    """Make the candidate the champion if there is none, as `offline_evaluation` does with the first model."""
    candidate = tracking.candidate()
    assert candidate is not None
    if tracking.champion() is None:
        tracking.promote(candidate.version, because="first model")
