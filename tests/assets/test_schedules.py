"""The failure sensor's advice."""

import errno

import dagster as dg
import pytest

from pf_assets.failures import reason_of, sentence_of
from pf_assets.schedules import advise
from pf_core.errors import PipelineError
from pf_core.storage.locks import LockedError


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


def test_a_failure_is_told_without_the_name_of_its_class() -> None:
    @dg.asset
    def pinnerformer_model() -> None:
        raise dg.Failure("not a single pair; add days", allow_retries=False)

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([pinnerformer_model], instance=instance, raise_on_error=False)
    assert sentence_of(result.all_events) == "pinnerformer_model failed: not a single pair; add days"


def test_an_error_of_ours_is_told_and_not_what_caused_it() -> None:
    @dg.asset
    def raw_actions() -> None:
        try:
            raise OSError("incorrect header check")
        except OSError as error:
            raise LockedError("actions.csv.gz cannot be read", "restore the file") from error

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([raw_actions], instance=instance, raise_on_error=False)
        (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert reason_of(failed) == "actions.csv.gz cannot be read; restore the file"
    assert sentence_of(result.all_events) == "raw_actions failed: actions.csv.gz cannot be read; restore the file"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "No space left on device: '/data/x'; free some"),
        (RuntimeError("database or disk is full"), "database or disk is full; free some space there, then re-run"),
        (OSError(errno.EROFS, "Read-only file system", "/data"), "'/data'; mount it for writing, then re-run"),
        (RuntimeError("no such shard"), "RuntimeError: no such shard"),
    ],
)
def test_an_error_of_the_disk_has_a_remedy_whoever_raised_it(error: Exception, sentence: str) -> None:
    @dg.asset
    def release() -> None:
        raise error

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([release], instance=instance, raise_on_error=False)
        (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert sentence in reason_of(failed)
    assert ("then re-run" in reason_of(failed)) == (str(error) != "no such shard")


def test_a_check_that_blocks_says_itself_what_is_wrong() -> None:
    @dg.asset_check(asset="raw_actions", blocking=True)
    def volume_is_normal() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description="3 rows instead of 100")

    @dg.asset
    def raw_actions() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([raw_actions, volume_is_normal], instance=instance, raise_on_error=False)
    assert sentence_of(result.all_events) == "raw_actions: the check volume_is_normal failed: 3 rows instead of 100"
