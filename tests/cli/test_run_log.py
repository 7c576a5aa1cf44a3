"""What is read of the lines of a Dagster run. The lines are those of real runs."""

import pytest

from pf_assets.cli.run_log import Amount, Said, amount_of, is_noise, read_line

RUN = "4f892d1a-32c4-4f82-acff-e06592772b2c"
HEAD = "2026-11-19 05:54:11 +0000 - dagster - {level} - __ASSET_JOB - " + RUN


def debug(rest: str) -> str:
    return f"{HEAD.format(level='DEBUG')} - 9279 - {rest}"


def info(rest: str) -> str:
    return f"{HEAD.format(level='INFO')} - {rest}"


def test_the_beginning_and_the_end_of_a_step() -> None:
    started = read_line(debug('raw_actions - STEP_START - Started execution of step "raw_actions".'))
    assert started == Said("started", run_id=RUN, step="raw_actions")
    done = read_line(debug('raw_actions - STEP_SUCCESS - Finished execution of step "raw_actions" in 2.56s.'))
    assert done == Said("succeeded", run_id=RUN, step="raw_actions")
    failed = read_line(debug('raw_actions - STEP_FAILURE - Execution of step "raw_actions" failed.'))
    assert (failed.kind, failed.step) == ("failed", "raw_actions")


def test_a_message_of_a_step() -> None:
    said = read_line(info("raw_actions - raw_actions 2026-03-14: 493 rows read: 492 actions of 37 users"))
    assert (said.kind, said.step, said.level) == ("message", "raw_actions", "INFO")
    assert said.text == "raw_actions 2026-03-14: 493 rows read: 492 actions of 37 users"


def test_colours_are_not_read() -> None:
    said = read_line(f"\x1b[34m{info('raw_actions - read')}\x1b[0m")
    assert (said.kind, said.text) == ("message", "read")


def test_a_line_of_the_run_as_a_whole_has_no_step() -> None:
    said = read_line(debug('RUN_START - Started execution of run for "__ASSET_JOB".'))
    assert (said.kind, said.step, said.run_id) == ("other", "", RUN)
    assert read_line("Traceback (most recent call last):") == Said("other", text="Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("text", "days", "amount"),
    [
        ("step 120 of 200: loss 3.1", (), Amount(120, 200, "steps")),
        ("step 1,200/2,000", (), Amount(1200, 2000, "steps")),
        ("user_timelines: 3 of 8 buckets", (), Amount(3, 8, "buckets")),
        ("3 of the 8 buckets", (), Amount(3, 8, "buckets")),
        ("raw_actions 2026-03-02: 5 rows", ("2026-03-01", "2026-03-02", "2026-03-03"), Amount(2, 3, "days")),
        ("from 2026-03-01 to 2026-03-02", ("2026-03-01", "2026-03-02"), None),  # names two days, and so no progress
        ("9 of 8 buckets", (), None),
        ("1 of 1 buckets", (), None),
        ("0.5 of 8 users", (), None),
        ("nothing", (), None),
    ],
)
def test_how_far_a_message_says_that_a_stage_is(text: str, days: tuple[str, ...], amount: Amount | None) -> None:
    assert amount_of(text, days) == amount


@pytest.mark.parametrize(
    "line",
    [
        "/x/click/core.py:911: SupersessionWarning: Function `asset_materialize_command` is superseded and its usage",
        "  return callback(*args, **kwargs)",
        "/x/pipes/context.py:104: PreviewWarning: Function `PipesMessageReader.expected_writer_count` is currently in",
        "nanobind: leaked 27 instances!",
        ' - leaked instance 0x5641370e14e0 of type "_duckdb._sqltypes.DuckDBPyType"',
        ' - leaked function "fetch_df_chunk"',
        " - ... skipped remainder",
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
    ],
)
def test_what_libraries_say_about_themselves_is_noise(line: str) -> None:
    assert is_noise(line)


def test_what_the_run_says_is_no_noise() -> None:
    assert not is_noise(info("raw_actions - UserWarning: 5 rows leaked to the next day"))
    assert not is_noise("RuntimeError: out of memory")
