"""What a site file makes of its logs: rows, users, pins, days and repeats, of a bounded part of the files.

A small log is read whole; of a large one the pieces are spread evenly over the files (`logs/sample.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.files import DAY
from pf_core.config.site import Site
from pf_core.config.source import Positive
from pf_core.days import ds_range, shift_ds
from pf_core.engine.shuffle import rank_ids, sort_actions
from pf_core.errors import PipelineError
from pf_core.hashing import combined
from pf_core.logs.answers import answers_of
from pf_core.logs.mapping import read_columns
from pf_core.logs.positives import positive_mask
from pf_core.logs.preview import LogPreview, Part, Tally, shown
from pf_core.logs.readers import find_files
from pf_core.logs.routing import DAY_US, day_number, ds_of
from pf_core.logs.sample import Piece, Plan, evenly, plan_sample, read_piece
from pf_core.onboarding.questions import percent
from pf_core.schemas import ANSWER
from pf_core.storage.files import is_remote
from pf_core.timelines.arrays import Timelines

SURVEY_BYTES = 128 << 20
"""Bytes of the log that are read; a smaller log is read whole."""

REMOTE_DAYS = 14
"""Days of a dated log in object storage whose files are listed."""

NAMED_DAYS = 5
"""Days without rows that a message names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Actions:
    """The actions that were read, in the order of users and times."""

    user: pa.Array
    """The users' ids."""
    pin: pa.Array
    """The pins' ids."""
    timelines: Timelines

    @property
    def num_actions(self) -> int:
        return len(self.timelines.ts)

    @property
    def num_users(self) -> int:
        return len(self.user)

    @property
    def num_pins(self) -> int:
        return len(self.pin)

    def lengths(self) -> np.ndarray:
        """Number of actions of each user."""
        return np.diff(self.timelines.offsets)

    def repeat_share(self) -> float:
        """Share of the actions on a pin that the user had acted on before."""
        if not self.num_actions:
            return 0.0
        row = np.repeat(np.arange(self.num_users), self.lengths())
        return 1 - len(np.unique(row * self.num_pins + self.timelines.pin)) / self.num_actions

    def rows_by_day(self) -> dict[str, int]:
        """Number of actions of each day that has any."""
        day, count = np.unique(self.timelines.ts // DAY_US, return_counts=True)
        return {ds_of(number): num for number, num in zip(day.tolist(), count.tolist(), strict=True)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """What was read, and what a run would make of it."""

    plan: Plan
    tally: Tally
    actions: Actions
    agreed: pa.Array | None
    """Users who agree to be learned from, ascending, where a column of the log says so."""
    num_duplicates: int
    """Kept rows that are exact copies of others: a run drops them."""
    num_rows: int
    """Rows of the log, estimated unless it was read whole."""

    @property
    def scale(self) -> float:
        """Rows of the log for each row that was read."""
        return self.num_rows / max(1, self.tally.num_read)


def find_logs(site: Site, ds: str | None) -> list[tuple[str, Path]]:
    """Return the files of the log, or of a day of a dated log, each with its day; an undated log has the first."""
    source = site.source.actions
    if not source.is_dated:
        return [(site.start_ds, file) for file in find_files(source, site.log_root)]
    if ds is not None:
        return [(ds, file) for file in find_files(source, site.log_root, ds)]
    yesterday = shift_ds(datetime.now(UTC).date().isoformat(), -1)
    days = ds_range(site.start_ds, site.end_ds or max(site.start_ds, yesterday))
    if is_remote(site.log_root):
        days = evenly(days, REMOTE_DAYS)
    return [(day, file) for day in days for file in find_files(source, site.log_root, day)]


def days_without_file(site: Site) -> list[str]:
    """Return the days between the first and the last file of a dated log on which a run would stop."""
    source = site.source.actions
    if not source.is_dated or source.missing_days == "allow" or is_remote(site.log_root):
        return []
    known = {day for day, _ in find_logs(site, None)}
    return [day for day in ds_range(min(known), max(known)) if day not in known] if known else []


def survey_log(site: Site, ds: str | None = None, *, max_bytes: int | None = None, shown_actions: int = 0) -> Survey:
    """Read a bounded part of the log as a run would, by default SURVEY_BYTES."""
    found = find_logs(site, ds)
    if not found:
        source = site.source.actions
        other_day = ", or check another day with --ds" if source.is_dated else ""
        raise PipelineError(
            f"no file matches {site.log_root / (source.path if ds is None else source.path.replace(DAY, ds))}",
            f"fix `root` or `actions.path` in the site file{other_day}",
        )
    day_of = {file: day_number(day) for day, file in found}
    plan = plan_sample([file for _, file in found], site.source.actions, max_bytes=max_bytes or SURVEY_BYTES)
    tally, tables, num_rows = Tally(), [], 0.0
    for piece, part in _parts(site, plan, day_of):
        tally.add(part, shown_actions)
        tables.append(part.actions)
        num_rows += piece.weight * part.num_read
    rows, num_duplicates = sort_actions(pa.concat_tables(tables).unify_dictionaries())
    return Survey(
        plan=plan,
        tally=tally,
        actions=_actions(rows, site.source.positive),
        agreed=None if site.answers is None else _agreed(rows),
        num_duplicates=num_duplicates,
        num_rows=round(num_rows),
    )


def _parts(site: Site, plan: Plan, day_of: dict[Path, int]) -> Iterator[tuple[Piece, Part]]:
    source, logs = site.source.actions, LogPreview(site)
    columns = read_columns(source, site.answers)
    for piece in plan.pieces:
        for batch in read_piece(piece, source, columns, absent_keys="refuse"):
            start = 0 if source.file_format == "parquet" else piece.start  # row groups have row numbers
            yield piece, logs.map(batch, day_of[piece.file], start=start)


def _agreed(actions: pa.Table) -> pa.Array:
    """Return the users whose newest row agrees, ascending as sorted actions are."""
    answers = answers_of(actions)
    return combined(answers.filter(answers[ANSWER])["user_id"])


def _actions(table: pa.Table, positive: Positive) -> Actions:
    """Return sorted actions as arrays."""
    if not table.num_rows:
        return Actions(user=combined(table["user_id"]), pin=combined(table["pin_id"]), timelines=_NO_TIMELINES)
    user, pins = rank_ids(table["user_id"]), combined(table["pin_id"]).dictionary_encode()
    start = np.flatnonzero(np.diff(user, prepend=-1))
    nothing = np.zeros(table.num_rows, np.int16)
    timelines = Timelines(
        offsets=np.append(start, table.num_rows),
        pin=pins.indices.to_numpy(zero_copy_only=False).astype(np.int64),
        ts=combined(table["ts"].cast(pa.int64())).to_numpy(zero_copy_only=False),
        action_type=nothing,
        surface=nothing,
        duration=nothing.astype(np.float32),
        is_positive=positive_mask(table, positive),
    )
    users = combined(table["user_id"]).take(pa.array(start))
    return Actions(user=users, pin=pins.dictionary, timelines=timelines)


_NO_TIMELINES = Timelines(
    offsets=np.zeros(1, np.int64),
    pin=np.zeros(0, np.int64),
    ts=np.zeros(0, np.int64),
    action_type=np.zeros(0, np.int16),
    surface=np.zeros(0, np.int16),
    duration=np.zeros(0, np.float32),
    is_positive=np.zeros(0, bool),
)


# Answers


def describe_rows(site: Site, survey: Survey) -> list[str]:
    """Return what happens to the rows, with an example of each reason to reject one."""
    tally = survey.tally
    total = "" if survey.plan.is_whole else f" of about {survey.num_rows:,}"
    outside = ""
    if tally.num_outside:
        first, last = ds_of(min(tally.days_outside)), ds_of(max(tally.days_outside))
        outside = f", {tally.num_outside:,} outside the site's days ({first} to {last})"
    lines = [
        f"{tally.num_read:,} read{total}: {tally.num_kept:,} kept, {tally.num_positive:,} of them positive, "
        f"{tally.num_skipped:,} skipped by a rule{outside}, {tally.num_rejected:,} quarantined"
    ]
    if survey.num_duplicates:
        lines.append(f"{survey.num_duplicates:,} of those that are kept are exact copies of others, and dropped")
    for reason, found in sorted(tally.rejects.items(), key=lambda each: -each[1].num):
        lines.append(f"{found.num:,} quarantined: {shown(reason)}; first {found.place()}: {shown(found.content)}")
    return lines


def describe_positive(site: Site, survey: Survey) -> str:
    """Return how many of the actions are positive, and which are."""
    tally, positive = survey.tally, site.source.positive
    types = f"action types {', '.join(positive.action_types)}"
    longer = ", ".join(f"{name} longer than {bound:g} s" for name, bound in positive.longer_than_s.items())
    where = "" if positive.surfaces is None else f" on {', '.join(positive.surfaces)}"
    share = percent(tally.num_positive / tally.num_kept) if tally.num_kept else "none"
    return shown(f"{share} of the actions: {types}{f' ({longer})' if longer else ''}{where}")


def describe_users(survey: Survey) -> str:
    """Return how many users there are, and how many actions they have."""
    lengths = survey.actions.lengths()
    least = "" if survey.plan.is_whole else "at least "
    note = "" if survey.plan.is_whole else "; a sample shows fewer actions of each than the log has"
    return (
        f"{least}{len(lengths):,}, with {lengths.mean():.1f} actions each (median {np.median(lengths):.0f}, at most "
        f"{lengths.max():,}; {percent(float((lengths == 1).mean()))} have one){note}"
    )


def describe_pins(survey: Survey) -> str:
    """Return how many pins the log has, and how often a user comes back to one."""
    actions = survey.actions
    counts = np.sort(np.bincount(actions.timelines.pin, minlength=actions.num_pins))[::-1]
    head = counts[: max(1, len(counts) // 100)].sum() / counts.sum()
    least = "" if survey.plan.is_whole else "at least "
    return (
        f"{least}{actions.num_pins:,} with an action ({percent(float((counts == 1).mean()))} have one; the most used "
        f"1 % have {percent(float(head))} of the actions); {percent(actions.repeat_share())} of the actions are on a "
        "pin that the user had acted on before"
    )


def describe_days(site: Site, survey: Survey) -> str:
    """Return the days with rows, and those without."""
    rows = survey.actions.rows_by_day()
    first, last = min(rows), max(rows)
    days = ds_range(site.start_ds, site.end_ds or last)
    empty = [ds for ds in days if ds not in rows]
    volumes = np.array(list(rows.values())) * survey.scale
    about = "" if survey.plan.is_whole else "about "
    without = "none without rows"
    if empty:
        named = ", ".join(empty[:NAMED_DAYS]) + (", …" if len(empty) > NAMED_DAYS else "")
        seen = "" if survey.plan.is_whole else " in what was read"
        without = f"{len(empty):,} without rows{seen}: {named}"
    return (
        f"{len(rows):,} with rows from {first} to {last}, {about}{np.median(volumes):,.0f} actions on a usual day "
        f"({volumes.min():,.0f} to {volumes.max():,.0f}); {without}"
    )
