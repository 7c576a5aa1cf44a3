"""Results of pf_core's data checks, as results of Dagster's asset checks."""

from collections.abc import Sequence
from dataclasses import replace

import dagster as dg

from pf_core.check_result import CheckResult
from pf_core.printable import printable

MAX_SHOWN = 5

MAX_REASON_CHARS = 1_000
"""Longer reasons are cut: a reason may quote log content."""


def asset_check_result(
    context: dg.AssetCheckExecutionContext,
    results: Sequence[CheckResult],
    *,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetCheckResult:
    """Combine the results of several days into one, which passes if every day passed.

    Its description names the days that failed, or some that passed; its metadata has a table of all days.
    """
    results = [replace(each, reason=printable(each.reason, max_chars=MAX_REASON_CHARS)) for each in results]
    failed = [result for result in results if not result.passed]
    log = context.log.error if severity == dg.AssetCheckSeverity.ERROR else context.log.warning
    for result in failed:
        log(f"{result.ds}: {result.reason}")
    rows = [dg.TableRecord({"ds": each.ds, "passed": each.passed, "reason": each.reason}) for each in results]
    described = failed or results
    more = f"; and {len(described) - MAX_SHOWN} more days" if len(described) > MAX_SHOWN else ""
    return dg.AssetCheckResult(
        passed=not failed,
        severity=severity,
        description="; ".join(f"{result.ds}: {result.reason}" for result in described[:MAX_SHOWN]) + more,
        metadata={"days": dg.MetadataValue.table(rows)},
    )
