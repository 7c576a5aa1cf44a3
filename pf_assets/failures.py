"""Why a Dagster run failed, as a sentence: that of a PipelineError or of a failed check, without the traceback."""

import re
from collections.abc import Iterable

import dagster as dg

from pf_core.storage.disk import REMEDIES, problem_in

OURS = re.compile(r"(pf_core(\.\w+)+Error|dagster(\.\w+)+\.Failure): ")
"""How Dagster begins the message of what we raise: a PipelineError, a class of it, or dg.Failure."""


def reason_of(event: dg.DagsterEvent) -> str:
    """Return the message of a failed step: that of its PipelineError, which ends with its remedy, or the first error's.

    A PipelineError names the file or the field; what caused it often does not. Any other error that tells of a full
    or read-only disk gets the remedy that a PipelineError has.
    """
    error = event.step_failure_data.error
    if error is None:
        return "no error was recorded"
    chain = [error]
    while chain[-1].cause is not None:
        chain.append(chain[-1].cause)
    ours = next((each for each in chain if OURS.match(each.message)), None)
    if ours is not None:
        return OURS.sub("", ours.message.strip().removesuffix("."), count=1)
    sentence = chain[-1].message.strip().removesuffix(".")
    problem = next((number for each in chain if (number := problem_in(each.message)) is not None), None)
    return sentence if problem is None else f"{sentence}; {REMEDIES[problem]}, then re-run"


def sentence_of(events: Iterable[dg.DagsterEvent]) -> str | None:
    """Return which step of a run failed and why; None if no step did.

    A failed check that blocks says itself what is wrong; the error of its step only says that it failed.
    """
    checks = {}
    for event in events:
        if event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION and event.step_key is not None:
            checks[event.step_key] = event.asset_check_evaluation_data
        elif event.event_type == dg.DagsterEventType.STEP_FAILURE:
            check = checks.get(event.step_key or "")
            if check is not None and not check.passed:
                return f"{check.asset_key.to_user_string()}: the check {check.check_name} failed: {check.description}"
            return f"{event.step_key} failed: {reason_of(event)}"
    return None


def why_failed(dagster_home: str, run_id: str) -> str | None:
    """Return the sentence about a run that failed; None if the run ended before any step did."""
    kinds = {dg.DagsterEventType.ASSET_CHECK_EVALUATION, dg.DagsterEventType.STEP_FAILURE}
    with dg.DagsterInstance.from_config(dagster_home) as instance:
        records = instance.all_logs(run_id, of_type=kinds)
    return sentence_of(record.get_dagster_event() for record in records)
