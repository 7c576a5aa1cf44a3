"""A preview of the logs: reads their first rows as a run would, and refuses what a run would fail on.

`pf check` prints it, before hours of ingestion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from pf_core.config.site import Site
from pf_core.config.source import DAY, NpyVectors
from pf_core.errors import PipelineError
from pf_core.logs.checks import judge_rejects
from pf_core.logs.mapping import ActionMapper
from pf_core.logs.positives import positive_mask
from pf_core.logs.readers import RawBatch, find_files, read_file
from pf_core.logs.remedies import OUTSIDE_SITE_DAYS, remedy_of
from pf_core.logs.routing import DAY_US, DayRule, day_number, ds_of
from pf_core.logs.settings import IngestSettings
from pf_core.printable import printable

NAMES_SHOWN = 10
"""Number of action types and surfaces that a message lists."""

MAX_VALUE_CHARS = 200
"""Longer texts of a log are cut."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of a file, mapped."""

    num_read: int
    actions: pa.Table
    """The rows that a run would keep."""
    num_positive: int
    num_skipped: int
    outside: np.ndarray
    """Day numbers of the rows of an undated log outside the site's days."""
    rejects: list[tuple[int, str]]
    """Row number and reason of each row that a run would quarantine."""


class LogPreview:
    """Reads files as a run would read those of one day."""

    def __init__(self, site: Site, day: str) -> None:
        self._source, self._positive = site.source.actions, site.source.positive
        self._mapper = ActionMapper(self._source)
        self._rule = DayRule.of(IngestSettings.of(site))
        self._file_day = day_number(day)

    def read(self, file: Path, max_rows: int | None = None) -> Iterator[Part]:
        """Yield the rows of a file, or the first `max_rows`."""
        num_left = max_rows
        for batch in read_file(file, self._source, self._source.mapped_columns):
            if num_left is not None:
                batch = _first_rows(batch, num_left)
                num_left -= len(batch.row_number) + len(batch.malformed)
            yield self._map(batch)
            if num_left == 0:
                return

    def _map(self, batch: RawBatch) -> Part:
        mapped = self._mapper.map(batch.rows)
        row_day = mapped.ts_us[mapped.kept] // DAY_US
        rejects = [(number, reason) for number, reason, _ in batch.malformed]
        rejects += zip(batch.row_number[mapped.rejected].tolist(), mapped.reasons, strict=True)
        if self._source.is_dated:
            accepted = self._rule.accepts(row_day, self._file_day)
            numbers = batch.row_number[mapped.kept[~accepted]].tolist()
            reasons = [self._rule.reason(day, self._file_day) for day in row_day[~accepted]]
            rejects += zip(numbers, reasons, strict=True)
            outside = row_day[:0]
        else:
            accepted = self._rule.in_site(row_day)
            outside = row_day[~accepted]
        actions = mapped.actions.filter(pa.array(accepted))
        return Part(
            num_read=len(batch.row_number) + len(batch.malformed),
            actions=actions,
            num_positive=int(positive_mask(actions, self._positive).sum()) if actions.num_rows else 0,
            num_skipped=len(mapped.skipped),
            outside=outside,
            rejects=rejects,
        )


def _first_rows(batch: RawBatch, max_rows: int) -> RawBatch:
    """Return the first rows of a batch, malformed ones included."""
    numbers = np.sort(np.concatenate([batch.row_number, [number for number, _, _ in batch.malformed]]))
    if len(numbers) <= max_rows:
        return batch
    end = numbers[max_rows]
    num_rows = int(np.searchsorted(batch.row_number, end))
    return replace(
        batch,
        rows=batch.rows.slice(0, num_rows),
        row_number=batch.row_number[:num_rows],
        malformed=[row for row in batch.malformed if row[0] < end],
    )


@dataclass(kw_only=True)
class Sample:
    """What a run would do with the rows that were read."""

    num_read: int = 0
    num_kept: int = 0
    num_positive: int = 0
    num_skipped: int = 0
    num_outside: int = 0
    days_outside: set[int] = field(default_factory=set)
    """First and last day of rows outside the site's days."""
    rejects: dict[str, list[int]] = field(default_factory=dict)
    """Row numbers by reason."""
    names: dict[str, set[str]] = field(default_factory=lambda: {"action_type": set(), "surface": set()})
    first_actions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: Part, max_actions: int) -> None:
        self.num_read += part.num_read
        self.num_kept += part.actions.num_rows
        self.num_positive += part.num_positive
        self.num_skipped += part.num_skipped
        self.num_outside += len(part.outside)
        if len(part.outside):
            days = self.days_outside | {int(part.outside.min()), int(part.outside.max())}
            self.days_outside = {min(days), max(days)}
        for number, reason in part.rejects:
            self.rejects.setdefault(reason, []).append(number)
        for name, values in self.names.items():
            values.update(part.actions[name].unique().to_pylist())
        self.first_actions += part.actions.slice(0, max(0, max_actions - len(self.first_actions))).to_pylist()


def names_without_rows(site: Site, sample: Sample) -> Iterator[str]:
    """Yield a sentence for each key of `positive` with names that no row has.

    Where the mapping fixes the names, the site file was validated against them.
    """
    positive, actions = site.source.positive, site.source.actions
    for key, name, given, mapping in (
        ("action_types", "action_type", positive.action_types, actions.action_type),
        ("surfaces", "surface", positive.surfaces or (), actions.surface),
    ):
        absent = [value for value in given if value not in sample.names[name]]
        is_given = key in positive.model_fields_set and mapping.vocabulary is None
        if sample.num_kept and absent and is_given:
            yield (
                f"no row that was read has the {name} {shown(', '.join(absent))} of `source.positive.{key}`; "
                f"the rows have {_listed(sample.names[name])}"
            )


def refuse_rejects(site: Site, day: str, sample: Sample) -> None:
    """Refuse rows of which a run would quarantine more than the site allows."""
    by_reason = {reason: len(numbers) for reason, numbers in sample.rejects.items()}
    verdict = judge_rejects(day, sample.num_read - sample.num_outside, by_reason, site.quality)
    if not verdict.passed:
        remedy = remedy_of(max(by_reason, key=by_reason.__getitem__))
        raise PipelineError(verdict.reason, f"{remedy}, or raise `quality.max_quarantined_share`")


def refuse_without_positive(site: Site, files: Sequence[Path], logs: LogPreview, sample: Sample) -> None:
    """Read the files up to their first positive action; refuse them if they have actions but none of these."""
    num_rejected = sum(map(len, sample.rejects.values()))
    if sample.num_positive or (sample.num_read and num_rejected == sample.num_read):  # refused by refuse_rejects
        return
    found = Sample()
    for part in (part for file in files for part in logs.read(file)):
        if part.num_positive:
            return
        found.add(replace(part, rejects=[]), 0)
    if found.num_kept:
        seen = "; ".join(f"{name}: {_listed(values)}" for name, values in found.names.items())
        positive = yaml.safe_dump(
            site.source.positive.model_dump(mode="json"), default_flow_style=True, sort_keys=False, width=10_000
        ).strip()
        raise PipelineError(
            f"none of the {found.num_kept:,} actions of {len(files)} files is positive: source.positive is {positive}, "
            f"the actions have {seen}",
            "fix source.positive in the site file, or check another day with --ds",
        )
    if found.num_outside:
        first, last = (ds_of(number) for number in (min(found.days_outside), max(found.days_outside)))
        raise PipelineError(
            f"no row of {len(files)} files is within the site's days, {site.start_ds} to {site.end_ds or 'today'}: "
            f"{found.num_outside:,} rows are from {first} to {last}",
            remedy_of(OUTSIDE_SITE_DAYS),
        )
    if found.num_read and found.num_skipped == found.num_read:
        raise PipelineError(
            f"all {found.num_read:,} rows of {len(files)} files are skipped by a rule",
            "fix the rules with `skip` in the site file, or check another day with --ds",
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
