"""A preview of the logs: maps rows as a run would, and refuses what a run would fail on.

`pf check` prints it, before hours of ingestion; `pf init` tries its site file with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import yaml

from pf_core.config.files import DAY
from pf_core.config.site import Site
from pf_core.config.source import NpyVectors
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from pf_core.logs.checks import judge_rejects, judge_volume
from pf_core.logs.mapping import ActionMapper
from pf_core.logs.parquet_columns import raw_json
from pf_core.logs.partition import RawManifest
from pf_core.logs.positives import positive_mask
from pf_core.logs.raw_batch import RawBatch
from pf_core.logs.readers import find_files, read_file
from pf_core.logs.remedies import OUTSIDE_SITE_DAYS, remedy_of
from pf_core.logs.routing import DAY_US, DayRule, ds_of
from pf_core.logs.settings import IngestSettings
from pf_core.printable import printable

NAMES_SHOWN = 10
"""Number of action types and surfaces that a message lists."""

MAX_VALUE_CHARS = 200
"""Longer texts of a log are cut."""


class Reject(NamedTuple):
    """A row that a run would quarantine."""

    reason: str
    row: int
    """Its number, counted from the first row that was read."""
    content: str
    """The row as text; empty for all but the first of its reason."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of a file, mapped."""

    file: Path
    start: int
    """Byte of the file at which reading began; row numbers count from there."""
    num_read: int
    actions: pa.Table
    """The rows that a run would keep."""
    is_positive: np.ndarray
    """Which of these are positive."""
    num_skipped: int
    outside: np.ndarray
    """Day numbers of the rows of an undated log outside the site's days."""
    rejects: list[Reject]


class LogPreview:
    """Maps rows as a run would map them."""

    def __init__(self, site: Site) -> None:
        self._source, self._positive = site.source.actions, site.source.positive
        self._mapper = ActionMapper(self._source, site.answers)
        self._rule = DayRule.of(IngestSettings.of(site))

    def map(self, batch: RawBatch, file_day: int, *, start: int = 0) -> Part:
        """Map rows that were read from byte `start` of a file on; `file_day` is the day of a file of a dated log."""
        mapped = self._mapper.map(batch.rows)
        row_day = mapped.ts_us[mapped.kept] // DAY_US
        rejected, reasons = mapped.rejected, mapped.reasons
        if self._source.is_dated:
            accepted = self._rule.accepts(row_day, file_day)
            rejected = np.concatenate([rejected, mapped.kept[~accepted]])
            reasons = [*reasons, *(self._rule.reason(day, file_day) for day in row_day[~accepted])]
            outside = row_day[:0]
        else:
            accepted = self._rule.in_site(row_day)
            outside = row_day[~accepted]
        actions = mapped.actions.filter(pa.array(accepted))
        return Part(
            file=batch.file,
            start=start,
            num_read=len(batch.row_number) + len(batch.malformed),
            actions=actions,
            is_positive=positive_mask(actions, self._positive) if actions.num_rows else np.zeros(0, bool),
            num_skipped=len(mapped.skipped),
            outside=outside,
            rejects=[*_malformed(batch), *_rejects(batch, rejected, reasons)],
        )


def _malformed(batch: RawBatch) -> Iterator[Reject]:
    for row, reason, text in batch.malformed:
        yield Reject(reason, row, text)


def _rejects(batch: RawBatch, rejected: np.ndarray, reasons: list[str]) -> Iterator[Reject]:
    seen: set[str] = set()
    for position, reason in zip(rejected.tolist(), reasons, strict=True):
        content = "" if reason in seen else raw_json(batch.rows, np.array([position]))[0]
        seen.add(reason)
        yield Reject(reason, int(batch.row_number[position]), content)


@dataclass(kw_only=True)
class RejectsOfReason:
    """How many rows were rejected for a reason, and the first of them."""

    file: Path
    start: int
    row: int
    content: str
    num: int = 0

    def place(self) -> str:
        """Return where the first one is."""
        return (
            f"after byte {self.start:,} of {self.file.name}" if self.start else f"in row {self.row} of {self.file.name}"
        )


@dataclass(kw_only=True)
class Tally:
    """What a run would do with the rows that were read."""

    num_read: int = 0
    num_kept: int = 0
    num_positive: int = 0
    num_skipped: int = 0
    num_outside: int = 0
    days_outside: set[int] = field(default_factory=set)
    """First and last day of rows outside the site's days."""
    rejects: dict[str, RejectsOfReason] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=lambda: {"action_type": set(), "surface": set()})
    first_actions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_rejected(self) -> int:
        return sum(found.num for found in self.rejects.values())

    def add(self, part: Part, max_actions: int = 0) -> None:
        self.num_read += part.num_read
        self.num_kept += part.actions.num_rows
        self.num_positive += int(part.is_positive.sum())
        self.num_skipped += part.num_skipped
        self.num_outside += len(part.outside)
        if len(part.outside):
            days = self.days_outside | {int(part.outside.min()), int(part.outside.max())}
            self.days_outside = {min(days), max(days)}
        for reject in part.rejects:
            first = RejectsOfReason(file=part.file, start=part.start, row=reject.row, content=reject.content)
            self.rejects.setdefault(reject.reason, first).num += 1
        for name, values in self.names.items():
            values.update(part.actions[name].unique().to_pylist())
        self.first_actions += part.actions.slice(0, max(0, max_actions - len(self.first_actions))).to_pylist()


def names_without_rows(site: Site, tally: Tally) -> Iterator[str]:
    """Yield a sentence for each key of `positive` with names that no row has.

    Where the mapping fixes the names, the site file was validated against them.
    """
    positive, actions = site.source.positive, site.source.actions
    for key, name, given, mapping in (
        ("action_types", "action_type", positive.action_types, actions.action_type),
        ("surfaces", "surface", positive.surfaces or (), actions.surface),
    ):
        absent = [value for value in given if value not in tally.names[name]]
        is_given = key in positive.model_fields_set and mapping.vocabulary is None
        if tally.num_kept and absent and is_given:
            yield (
                f"no row that was read has the {name} {shown(', '.join(absent))} of `source.positive.{key}`; "
                f"the rows have {_listed(tally.names[name])}"
            )


def days_without_rows(site: Site, rows_by_day: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence if an undated log ends before the site's last day, and the volume check would stop a run there.

    A day of the week that is usually empty stops none.
    """
    last = site.end_ds
    if last is None or not rows_by_day or (newest := max(rows_by_day)) >= last:
        return
    first = max(site.start_ds, shift_ds(last, -7 * site.quality.trailing_weeks))
    counts = [_counts_of(ds, rows_by_day.get(ds, 0)) for ds in ds_range(first, last)]
    if not judge_volume(counts[-1], counts[:-1], site.quality).passed:
        days = f"the days from {shift_ds(newest, 1)} to {last}" if shift_ds(newest, 1) < last else last
        yield (
            f"the newest rows that were read are of {newest}, and the site file has no `end_ds`: {days} would be built "
            f"without rows, and the volume check would stop the run; set `end_ds: {newest}`, or deliver newer rows"
        )


def _counts_of(ds: str, num_rows: int) -> RawManifest:
    """Return what judge_volume reads of the manifest of a day of an undated log."""
    counts = {"read": num_rows, "kept": num_rows, "positive": num_rows}
    return cast("RawManifest", {"ds": ds, "counts": counts, "inputs": ["the log"], "outside_site_days": 0})


def refuse_rejects(site: Site, day: str, tally: Tally) -> None:
    """Refuse rows of which a run would quarantine more than the site allows."""
    by_reason = {reason: found.num for reason, found in tally.rejects.items()}
    verdict = judge_rejects(day, tally.num_read - tally.num_outside, by_reason, site.quality)
    if not verdict.passed:
        remedy = remedy_of(max(by_reason, key=by_reason.__getitem__))
        raise PipelineError(verdict.reason, f"{remedy}, or raise `quality.max_quarantined_share`")


def refuse_without_positive(site: Site, tally: Tally) -> None:
    """Refuse rows of which none is positive, unless all of them are rejected."""
    if tally.num_positive or tally.num_rejected == tally.num_read:  # refused by refuse_rejects
        return
    if tally.num_kept:
        seen = "; ".join(f"{name}: {_listed(values)}" for name, values in tally.names.items())
        positive = yaml.safe_dump(
            site.source.positive.model_dump(mode="json"), default_flow_style=True, sort_keys=False, width=10_000
        ).strip()
        raise PipelineError(
            f"none of the {tally.num_kept:,} actions that were read is positive: source.positive is {positive}, "
            f"the actions have {seen}",
            "fix source.positive in the site file",
        )
    if tally.num_outside:
        first, last = (ds_of(number) for number in (min(tally.days_outside), max(tally.days_outside)))
        raise PipelineError(
            f"no row that was read is within the site's days, {site.start_ds} to {site.end_ds or 'yesterday'}: "
            f"{tally.num_outside:,} rows are from {first} to {last}",
            remedy_of(OUTSIDE_SITE_DAYS),
        )
    if tally.num_skipped == tally.num_read:
        raise PipelineError(
            f"all {tally.num_read:,} rows that were read are skipped by a rule",
            "fix the rules with `skip` in the site file",
        )


def refuse_pins(site: Site, day: str) -> None:
    """Refuse files of pins that are missing or lack a column."""
    pins, vectors = site.source.pins, site.source.pins.vectors
    if isinstance(vectors, NpyVectors):
        for key, name in (("npy", vectors.npy), ("ids", vectors.ids)):
            if not (site.log_root / name).is_file():
                raise PipelineError(
                    f"no file at {site.log_root / name}", f"fix `source.pins.vectors.{key}` in the site file"
                )
    if pins.catalogue is not None:
        catalogue_files = find_files(pins.catalogue, site.log_root, day if pins.catalogue.is_dated else None)
        if not catalogue_files:
            raise PipelineError(
                f"no pin catalogue matches {site.log_root / pins.catalogue.path.replace(DAY, day)}",
                "fix `source.pins.catalogue.path` in the site file",
            )
        for _ in read_file(catalogue_files[0], pins.catalogue, pins.mapped_columns):
            if pins.catalogue.file_format != "jsonl":  # there only the whole file shows that a key is missing
                break


def _listed(values: set[str]) -> str:
    """Return the first names in alphabetical order, and how many more there are."""
    names = sorted(values)
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return shown(", ".join(names[:NAMES_SHOWN])) + more


def shown(text: str) -> str:
    """Return text of a log as a message shows it."""
    return printable(text, max_chars=MAX_VALUE_CHARS)
