"""Ingestion: foreign log files to raw_actions partitions.

Every row that is read is accounted for in a manifest: kept, duplicate, skipped by a rule, sent to its own day,
forgotten, or quarantined with a reason. A day is published whole or not at all.
"""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.atomic import exclusive, publish_build, start_build
from pf_core.contracts import (
    PipelineError,
    ds_range,
    ds_start_us,
    shift_ds,
)
from pf_core.engine import Engine, LocalEngine, Shuffle, bucket_of, report
from pf_core.mapping import ActionMapper, rejected_rows
from pf_core.quarantine import Quarantine
from pf_core.raw_actions import Manifest, partition_dir, positive_mask, write_bucket
from pf_core.reading import RawBatch, find_files, join_batches, read_file
from pf_core.site import Site
from pf_core.source import DAY

DAY_US = 86_400_000_000
TELL_EVERY_S = 5.0
COUNTS = ("read", "kept", "users", "positive", "duplicates", "skipped", "sent", "received", "forgotten", "quarantined")

RoutedRows = tuple[pa.Table, np.ndarray]


def ingest_days(
    site: Site,
    days: Sequence[str],
    *,
    engine: Engine,
    forgotten: pa.Array,
    progress: Callable[[str], None],
) -> Iterator[Manifest]:
    """Write the partitions of consecutive days; yields each manifest once it is published.

    The days of a dated log are shared out among the workers; an undated log is read once, for all days.
    """
    if list(days) != ds_range(days[0], days[-1]):
        raise PipelineError(f"the days to ingest must be consecutive; {days[0]} … {days[-1]} has gaps")
    is_dated = site.source.actions.is_dated
    step = -(-len(days) // engine.num_workers) if is_dated else len(days)
    passes = [list(days[start : start + step]) for start in range(0, len(days), step)]
    memory_mb = site.engine.memory_mb // min(engine.num_workers, len(passes))
    tasks = [_Pass(site=site, days=chunk, forgotten=forgotten, memory_mb=memory_mb) for chunk in passes]
    for manifests in engine.map_buckets(_run_pass, tasks, progress):
        yield from manifests


@dataclass(frozen=True, kw_only=True)
class _Pass:
    site: Site
    days: list[str]
    forgotten: pa.Array
    memory_mb: int


def _run_pass(task: _Pass) -> list[Manifest]:
    is_dated = task.site.source.actions.is_dated
    with contextlib.ExitStack() as locks:
        for ds in task.days if is_dated else ["."]:  # an undated log may have more days than a process may lock
            locks.enter_context(exclusive(partition_dir(task.site, ds), f"raw_actions {ds}"))
        run = _PassRun(task)
        locks.callback(run.clean_up)
        return run.ingest()


@dataclass
class _Day:
    """What one partition of the pass collects."""

    ds: str
    build: Path
    quarantine: Quarantine
    counts: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[str] = field(default_factory=Counter)
    by_type: Counter[str] = field(default_factory=Counter)
    by_surface: Counter[str] = field(default_factory=Counter)
    files: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    neighbours: list[dict[str, Any]] = field(default_factory=list)  # other days' files that were looked through
    is_published: bool = False


class _PassRun:
    """Reads every file that may hold rows of the pass's days once, and routes each row to its day and bucket.

    Files are read in the order of their days, and a day is written and published as soon as no later file can
    hold rows of it: memory holds a few days, not the pass.
    """

    def __init__(self, task: _Pass) -> None:
        self.site, self.forgotten, self.memory_mb = task.site, task.forgotten, task.memory_mb
        self.source = task.site.source.actions
        self.mapper = ActionMapper(self.source)
        self.first_day = _day_number(task.days[0])
        self.site_days = (_day_number(self.site.start_ds), _day_number(self.site.end_ds or "9999-12-31"))
        self.days: list[_Day] = []
        for ds in task.days:
            build = start_build(partition_dir(self.site, ds))
            self.days.append(_Day(ds=ds, build=build, quarantine=Quarantine(build / "quarantine.parquet")))
        self.num_outside_site_days = 0
        self.started = self.told = time.monotonic()

    def ingest(self) -> list[Manifest]:
        spill_dir = self.site.directory / "tmp" / f"raw_actions-{self.days[0].ds}"
        shutil.rmtree(spill_dir, ignore_errors=True)  # of a pass that was killed: we hold its lock
        engine = LocalEngine(num_workers=1, memory_mb=self.memory_mb, temp_dir=spill_dir)
        num_buckets = self.site.timelines.num_buckets
        manifests: list[Manifest] = []
        with engine.shuffle() as shuffle:
            for num_complete in self._read_dated(shuffle) if self.source.is_dated else self._read_undated(shuffle):
                for group, actions, num_duplicates in shuffle.finish(below=num_complete * num_buckets):
                    self._write_bucket(group, actions, num_duplicates)
                manifests += [self._publish(day) for day in self.days[len(manifests) : num_complete]]
        return manifests

    def clean_up(self) -> None:
        for day in self.days:
            if not day.is_published:
                shutil.rmtree(day.build, ignore_errors=True)

    # Routing: which day does a row belong to?

    def _read_dated(self, shuffle: Shuffle) -> Iterator[int]:
        """Reads a day's files after the other; yields how many of our days are complete."""
        wanted = [day.ds for day in self.days]
        first, last = shift_ds(wanted[0], -self.source.early_days), shift_ds(wanted[-1], self.source.late_days)
        for ds in ds_range(first, last):
            files = find_files(self.source, self.site.log_root, ds)
            if not files and ds in wanted:
                raise PipelineError(
                    f"no file for {ds}: nothing matches {self.site.log_root / self.source.path.replace(DAY, ds)}. "
                    "If the site was silent that day, put a log without rows there"
                )
            for day in self.days:
                reach = _day_number(ds) - _day_number(day.ds)
                if reach and -self.source.early_days <= reach <= self.source.late_days:
                    day.neighbours += [_describe(file) for file in files]
            for rows, group in self._route_dated(files, _day_number(ds)):
                shuffle.add(rows, group)
            yield max(0, _day_number(ds) - self.source.late_days - self.first_day + 1)

    def _route_dated(self, files: list[Path], file_day: int) -> Iterator[RoutedRows]:
        """Rows that arrived on `file_day`; the rejects among them are ours only if that is one of our days."""
        own = self._own(file_day)
        if own is not None:
            own.inputs += [_describe(file) for file in files]
        for batches in join_batches(self._read(file) for file in files):
            raw = pa.concat_tables([batch.rows for batch in batches])
            mapped = self.mapper.map(raw)
            row_day = mapped.ts_us[mapped.kept] // DAY_US
            lateness = file_day - row_day
            accepted = (lateness <= self.source.late_days) & (lateness >= -self.source.early_days)
            accepted &= self._in_site_days(row_day)
            if own is not None:
                own.counts["read"] += sum(len(batch.row_number) + len(batch.malformed) for batch in batches)
                own.counts["skipped"] += len(mapped.skipped)
                sent = row_day[accepted & (row_day != file_day)]
                own.counts["sent"] += len(sent)
                own.sent_to.update(_ds_of(day) for day in sent)
                positions = np.concatenate([mapped.rejected, mapped.kept[~accepted]])
                reasons = mapped.reasons + [self._wrong_day(day, file_day) for day in row_day[~accepted]]
                positions, reasons = self._without_forgotten(own, raw, positions, reasons)
                for reject in rejected_rows(batches, raw, positions, reasons):
                    own.quarantine.add(*reject)
            self._count_days("received", row_day[accepted & (row_day != file_day)])
            self._tell(f"raw_actions: reading the files of {_ds_of(file_day)}")
            yield self._group(mapped.actions, row_day, accepted)

    def _without_forgotten(
        self, own: _Day, raw: pa.Table, positions: np.ndarray, reasons: list[str]
    ) -> tuple[np.ndarray, list[str]]:
        """Who asked to be forgotten is not remembered in the quarantine either."""
        if not len(self.forgotten) or not len(positions):
            return positions, reasons
        users = raw[self.source.user_id.column].take(pa.array(positions)).cast(pa.string())
        stay = ~pc.is_in(users, self.forgotten.cast(pa.string())).to_numpy(zero_copy_only=False)
        own.counts["forgotten"] += int((~stay).sum())
        return positions[stay], [reason for reason, stays in zip(reasons, stay, strict=True) if stays]

    def _read(self, file: Path) -> Iterator[RawBatch]:
        return read_file(file, self.source, self.source.columns, self.source.categories)

    def _read_undated(self, shuffle: Shuffle) -> Iterator[int]:
        files = find_files(self.source, self.site.log_root)
        if not files:
            raise PipelineError(f"no file matches {self.site.log_root / self.source.path}")
        for file in files:
            for rows, group in self._route_undated(file):
                shuffle.add(rows, group)
        yield len(self.days)

    def _route_undated(self, file: Path) -> Iterator[RoutedRows]:
        """Every row goes to its own day; a reject without a valid time goes with the nearest row before it."""
        for day in self.days:
            day.inputs.append(_describe(file))
        last_day = -1
        waiting: list[list[Any]] = []  # rejects before the first row with a valid time
        for batch in self._read(file):
            mapped = self.mapper.map(batch.rows)
            row_day = mapped.ts_us // DAY_US
            timed = mapped.ts_us >= 0
            numbers = np.concatenate([[0], batch.row_number[timed]])
            if timed.any():
                days = np.concatenate([[last_day if last_day >= 0 else row_day[timed][0]], row_day[timed]])
                last_day = int(days[-1])
            else:
                days = np.array([last_day])
            waiting += [reject for _, *reject in rejected_rows([batch], batch.rows, mapped.rejected, mapped.reasons)]
            if last_day >= 0:
                for number, reason, text in waiting:
                    own = self._own(int(days[np.searchsorted(numbers, number, side="right") - 1]))
                    if own is not None:
                        own.counts["read"] += 1
                        own.quarantine.add(file, number, reason, text)
                waiting = []
            self._count_days("skipped", row_day[mapped.skipped])
            self._count_days("read", row_day[mapped.skipped])
            self._count_days("read", row_day[mapped.kept])
            in_site = self._in_site_days(row_day[mapped.kept])
            self.num_outside_site_days += int((~in_site).sum())
            self._tell(f"raw_actions: reading {file}")
            yield self._group(mapped.actions, row_day[mapped.kept], in_site)
        if waiting:
            number, reason, _ = waiting[0]
            raise PipelineError(f"{file}: no row has a valid time; row {number}: {reason}. Mend the mapping")

    def _group(self, actions: pa.Table, row_day: np.ndarray, accepted: np.ndarray) -> RoutedRows:
        ours = accepted & (row_day >= self.first_day) & (row_day < self.first_day + len(self.days))
        if len(self.forgotten):
            asked = pc.is_in(actions["user_id"], self.forgotten).to_numpy()
            self._count_days("forgotten", row_day[ours & asked])
            ours &= ~asked
        if not ours.all():
            actions, row_day = actions.filter(pa.array(ours)), row_day[ours]
        num_buckets = self.site.timelines.num_buckets
        group = (row_day - self.first_day) * num_buckets + bucket_of(actions["user_id"], num_buckets)
        return actions, group.astype(np.uint16 if len(self.days) * num_buckets <= 65_536 else np.uint32)

    # Writing

    def _write_bucket(self, group: int, actions: pa.Table, num_duplicates: int) -> None:
        day_index, bucket = divmod(group, self.site.timelines.num_buckets)
        day = self.days[day_index]
        day.files.append({"bucket": bucket, **write_bucket(day.build, bucket, actions, self.site)})
        ids = actions["user_id"].combine_chunks()
        num_users = 1 + int(np.count_nonzero(pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)))
        is_positive = positive_mask(actions, self.site.source.positive)
        day.counts.update(
            kept=actions.num_rows, users=num_users, duplicates=num_duplicates, positive=int(is_positive.sum())
        )
        for column, counter in (("action_type", day.by_type), ("surface", day.by_surface)):
            counter.update({row["values"]: row["counts"] for row in actions[column].value_counts().to_pylist()})

    def _publish(self, day: _Day) -> Manifest:
        quarantine_file = day.quarantine.close()
        day.counts["quarantined"] = day.quarantine.by_reason.total()
        if day.counts["quarantined"] and day.counts["quarantined"] == day.counts["read"]:
            first = pq.read_table(day.quarantine.path).slice(0, 1).to_pylist()[0]
            raise PipelineError(
                f"{day.ds}: not one of the {day.counts['read']:,} rows could be used. {first['source_file']}, "
                f"row {first['row_number']}: {first['reason']}. Mend the mapping in the site file"
            )
        manifest: Manifest = {
            "ds": day.ds,
            "site": self.site.fingerprint(),
            "seconds": round(time.monotonic() - self.started, 2),
            "num_buckets": self.site.timelines.num_buckets,
            "counts": {name: day.counts[name] for name in COUNTS},
            "sent_to": dict(day.sent_to),
            "outside_site_days": self.num_outside_site_days,
            "by_type": dict(day.by_type),
            "by_surface": dict(day.by_surface),
            "quarantined_by_reason": dict(day.quarantine.by_reason),
            "quarantine_file": quarantine_file,
            "files": sorted(day.files, key=lambda entry: int(entry["bucket"])),
            "inputs": day.inputs,
            "neighbours": day.neighbours,
        }
        self.started = time.monotonic()
        publish_build(day.build, manifest)
        day.is_published = True
        report(
            f"raw_actions {day.ds}: {day.counts['kept']:,} actions of {day.counts['users']:,} users, "
            f"{day.counts['duplicates']:,} duplicates, {day.counts['quarantined']:,} quarantined"
        )
        return manifest | {"build": day.build.name}

    def _tell(self, message: str) -> None:
        """Progress within a day, every few seconds."""
        if time.monotonic() - self.told > TELL_EVERY_S:
            self.told = time.monotonic()
            report(message)

    # Days

    def _own(self, day_number: int) -> _Day | None:
        index = day_number - self.first_day
        return self.days[index] if 0 <= index < len(self.days) else None

    def _count_days(self, name: str, row_day: np.ndarray) -> None:
        for day_number, number in zip(*np.unique(row_day, return_counts=True), strict=True):
            own = self._own(int(day_number))
            if own is not None:
                own.counts[name] += int(number)

    def _in_site_days(self, row_day: np.ndarray) -> np.ndarray:
        return (row_day >= self.site_days[0]) & (row_day <= self.site_days[1])

    def _wrong_day(self, row_day: int, file_day: int) -> str:
        if not self.site_days[0] <= row_day <= self.site_days[1]:
            return "ts: outside the site's days"
        if row_day > file_day:
            return f"ts: after its file's day (early_days: {self.source.early_days})"
        return f"ts: too late for its day (late_days: {self.source.late_days})"


def _describe(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"path": str(file), "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _day_number(ds: str) -> int:
    return ds_start_us(ds) // DAY_US


def _ds_of(day_number: int) -> str:
    return str(np.datetime64(int(day_number), "D"))
