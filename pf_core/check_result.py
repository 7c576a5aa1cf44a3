"""The result of a data check, free of any orchestrator; pf_assets turns it into the result of an asset check."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """Whether a day passed a check; `reason` is a sentence for the engineer on call."""

    ds: str
    passed: bool
    reason: str
