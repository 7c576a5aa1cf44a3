"""The failure sensor's advice."""

import dagster as dg

from pf_assets.failures import reason_of
from pf_assets.schedules import advise
from pf_core.errors import PipelineError


def test_the_remedy_of_an_error_is_part_of_the_advice() -> None:
    @dg.asset
    def release() -> None:
        try:
            raise KeyError("gone")
        except KeyError:
            raise PipelineError("the store is full", "free some space: rm -r old") from None

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([release], instance=instance, raise_on_error=False)
        (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert reason_of(failed) == "the store is full; free some space: rm -r old"
    assert advise(asset=failed.step_key, reason=reason_of(failed), tags={"dagster/partition": "2026-01-01"}) == (
        "release failed: the store is full; free some space: rm -r old. The previous release keeps serving. When this "
        "is fixed, re-execute the run (or: pf repair --since 2026-01-01)."
    )
