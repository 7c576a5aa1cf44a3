"""Judgements of pf_core as the results of asset checks."""

import dagster as dg

from pf_core.check_result import CheckResult


def verdict_result(
    context: dg.AssetCheckExecutionContext,
    verdicts: list[CheckResult],
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetCheckResult:
    failed = [verdict for verdict in verdicts if not verdict.passed]
    shown = failed or verdicts
    log = context.log.error if severity == dg.AssetCheckSeverity.ERROR else context.log.warning
    for verdict in failed:
        log(f"{verdict.ds}: {verdict.reason}")
    rows = [dg.TableRecord({"ds": v.ds, "passed": v.passed, "reason": v.reason}) for v in verdicts]
    return dg.AssetCheckResult(
        passed=not failed,
        severity=severity,
        description="; ".join(f"{verdict.ds}: {verdict.reason}" for verdict in shown[:5]),
        metadata={"days": dg.MetadataValue.table(rows)},
    )
