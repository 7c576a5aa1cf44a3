"""The log of a Dagster run, line by line: which asset is at work, what it says, and how far it is.

A message with `3 of 8 buckets` says how far a stage is, and so does one that names a day of the run's range. This is
all that assets need to do for a bar: the messages are those that everybody reads in the UI, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LINE = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4} - dagster - (?P<level>[A-Z]+) - \S+ - (?P<run>[0-9a-f-]{36}) - "
    r"(?:\d+ - )?(?P<rest>.*)$"
)
"""A line of Dagster's console logger: time, logger, level, job, run, for events the process, then step and message."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

EVENT = re.compile(r"^(?P<event>[A-Z]+(?:_[A-Z]+)+) - ")

AMOUNT = re.compile(r"(?<![\w.,-])(\d[\d,]*) of (?:the )?(\d[\d,]*) ([a-z]+)")

STEP_NUMBER = re.compile(r"\bstep (\d[\d,]*)(?: of |/)(\d[\d,]*)")

DAY = re.compile(r"\b\d{4}-\d\d-\d\d\b")


NOISE = re.compile(
    r"^(nanobind: |See https://nanobind| - (leaked (instance|type|function|keep_alive)\b|\.\.\. skipped remainder)"
    r"|.*\b(Supersession|Preview)Warning: |  return callback\(\*args, \*\*kwargs\)$"
    r"|  self\._expected_writers = message_reader\.expected_writer_count$)"
)
"""Warnings of libraries at the beginning and end of a run, about themselves: Dagster prefers another command, and
nanobind counts what DuckDB did not free at exit. Nobody who runs a site can act on them."""


@dataclass(frozen=True)
class Amount:
    """How far a stage is."""

    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class Said:
    """One line of a run's log."""

    kind: Literal["started", "succeeded", "failed", "message", "other"]
    run_id: str = ""
    step: str = ""
    text: str = ""
    level: str = ""


def read_line(line: str) -> Said:
    """Read a line of the run's output. What is no line of Dagster's logger, as in a traceback, is `other`."""
    found = LINE.match(COLOUR.sub("", line))
    if found is None:
        return Said("other", text=line)
    run_id, level = found["run"], found["level"]
    step, _, text = found["rest"].partition(" - ")
    if not text or EVENT.match(found["rest"]):
        return Said("other", run_id=run_id, text=found["rest"], level=level)
    event = EVENT.match(text)
    if event is None:
        return Said("message", run_id=run_id, step=step, text=text, level=level)
    match event["event"]:
        case "STEP_START":
            return Said("started", run_id=run_id, step=step)
        case "STEP_SUCCESS":
            return Said("succeeded", run_id=run_id, step=step)
        case "STEP_FAILURE":
            return Said("failed", run_id=run_id, step=step, text=text, level=level)
    return Said("other", run_id=run_id, step=step, text=text, level=level)


def is_noise(line: str) -> bool:
    """Whether a line is only in the log file."""
    return NOISE.match(COLOUR.sub("", line)) is not None


def amount_of(text: str, days: Sequence[str]) -> Amount | None:
    """Return how far a stage is by one of its messages: `step 120 of 200`, `3 of 8 buckets`, or a day of `days`."""
    if step := STEP_NUMBER.search(text):
        return _amount(step[1], step[2], "steps")
    if len(days) > 1:
        named = [day for day in DAY.findall(text) if day in days]
        return Amount(days.index(named[0]) + 1, len(days), "days") if len(named) == 1 else None
    found = AMOUNT.search(text)
    return None if found is None else _amount(*found.groups())


def _amount(done: str, total: str, unit: str) -> Amount | None:
    amount = Amount(int(done.replace(",", "")), int(total.replace(",", "")), unit)
    return amount if 0 <= amount.done <= amount.total > 1 else None
