"""Routing: which day and user bucket a log row belongs to, or the reason why it is rejected.

A row of a dated log may arrive some days after it happened, or before; it goes to the day on which it happened. So a
day's rows are in the files of several days, and the rows of one file go to several days. The result for a file does
not depend on the files that are read with it: one task may read them all, or many tasks a few each.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from pf_core.config.files import DAY
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of, combined
from pf_core.logs.mapping import ActionMapper, read_columns, rejected_rows
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.raw_batch import RawBatch
from pf_core.logs.readers import find_files, join_batches, read_file
from pf_core.logs.rejects import Forgotten
from pf_core.logs.remedies import AFTER_ITS_FILE, OUTSIDE_SITE_DAYS, TOO_LATE, remedy_of
from pf_core.logs.settings import IngestSettings
from pf_core.printable import printable
from pf_core.progress import Throttle, report
from pf_core.storage.files import path_of, stamp_of

DAY_US = 86_400_000_000

MAX_UNTIMED_ROWS = 1 << 20
"""Rejected rows that an undated file may begin with before its first valid time, which decides their day."""

MAX_UNTIMED_CHARS = 256 << 20
"""Largest length of the contents of these rows; they are held in memory."""

RoutedRows = tuple[pa.Table, np.ndarray]
"""Actions, and the group of each: (day, bucket) as one number."""


class InputFile(TypedDict):
    """A log file as it was when it was read."""

    path: str
    num_bytes: int
    changed: int | str
    """Modification time in nanoseconds, or an object's ETag."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The files of a dated log that arrived on one day, or all files of an undated log; in reading order."""

    ds: str | None
    """Day of arrival; None for an undated log."""
    files: list[InputFile]


@dataclass(kw_only=True)
class Tally:
    """Row counts and rejected rows of one day."""

    ds: str
    quarantine: Quarantine
    counts: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[str] = field(default_factory=Counter)
    """Number of rows sent to each other day."""


def find_arrivals(settings: IngestSettings, days: Sequence[str]) -> Iterator[Arrival]:
    """Yield all files that may hold rows of consecutive days, in the order of arrival."""
    source, log_root = settings.actions, settings.log_root
    if not source.is_dated:
        files = find_files(source, log_root)
        if not files:
            raise PipelineError(
                f"no file matches {log_root / source.path}", "fix `root` or `actions.path` in the site file"
            )
        yield Arrival(ds=None, files=[_describe(file) for file in files])
        return
    for ds in ds_range(shift_ds(days[0], -source.early_days), shift_ds(days[-1], source.late_days)):
        files = find_files(source, log_root, ds)
        if not files and ds in days and source.missing_days == "refuse":
            raise PipelineError(
                f"no file for {ds}: nothing matches {log_root / source.path.replace(DAY, ds)}",
                "if the site was silent that day, put a log without rows there, or declare such days in the site file "
                "with `source.actions.missing_days: allow`",
            )
        yield Arrival(ds=ds, files=[_describe(file) for file in files])


def num_days_complete(days: Sequence[str], arrival: Arrival, *, late_days: int) -> int:
    """Return how many of the days have all their rows once `arrival` was read."""
    if arrival.ds is None:
        return len(days)
    last = day_number(arrival.ds) - late_days
    return min(len(days), max(0, last - day_number(days[0]) + 1))


@dataclass(frozen=True, kw_only=True)
class DayRule:
    """Which days the rows of a file may have."""

    first: int
    """Number of the site's first day."""
    last: int
    """Number of the site's last day; without `end_ds`, beyond every row."""
    late_days: int
    early_days: int

    @classmethod
    def of(cls, settings: IngestSettings) -> "DayRule":
        return cls(
            first=day_number(settings.start_ds),
            last=day_number(settings.end_ds or "9999-12-31"),
            late_days=settings.actions.late_days,
            early_days=settings.actions.early_days,
        )

    def in_site(self, row_day: np.ndarray) -> np.ndarray:
        """Return which days are days of the site."""
        return (row_day >= self.first) & (row_day <= self.last)

    def accepts(self, row_day: np.ndarray, file_day: int) -> np.ndarray:
        """Return which rows of a file of a dated log are accepted; the others are quarantined."""
        lateness = file_day - row_day
        return (lateness <= self.late_days) & (lateness >= -self.early_days) & self.in_site(row_day)

    def reason(self, row_day: int, file_day: int) -> str:
        """Return the reason for rejecting a row because of its day."""
        if not self.first <= row_day <= self.last:
            return OUTSIDE_SITE_DAYS
        if row_day > file_day:
            return f"{AFTER_ITS_FILE} (early_days: {self.early_days})"
        return f"{TOO_LATE} (late_days: {self.late_days})"


class Router:
    """Reads log files and assigns each row of the wanted days to its group; updates the tallies of these days."""

    def __init__(self, settings: IngestSettings, tallies: Sequence[Tally], forgotten: pa.Array) -> None:
        """`tallies` has one entry for each wanted day; the days are consecutive."""
        self._source, self._forgotten, self._tallies = settings.actions, Forgotten(forgotten), tallies
        self._num_buckets = settings.num_buckets
        self._mapper = ActionMapper(self._source, settings.answers)
        self._columns = read_columns(self._source, settings.answers)
        self._first_day = day_number(tallies[0].ds)
        self._rule = DayRule.of(settings)
        self._report = Throttle(report)
        self.num_outside_site_days = 0
        self.num_other_days = 0
        """Rows of an undated log that belong to days of the site which are not wanted."""

    def route(self, arrival: Arrival) -> Iterator[RoutedRows]:
        """Read the files; yield the rows that belong to the wanted days."""
        files = [path_of(file["path"]) for file in arrival.files]
        if arrival.ds is not None:
            yield from self._route_dated(files, day_number(arrival.ds))
        else:
            for file in files:
                yield from self._route_undated(file)

    def _route_dated(self, files: Sequence[Path], file_day: int) -> Iterator[RoutedRows]:
        """Route rows that arrived on `file_day`; its tally, if it is a wanted day, gets the rejects."""
        own = self._tally_of(file_day)
        for batches in join_batches(self._read(file) for file in files):
            raw = pa.concat_tables([batch.rows for batch in batches])
            mapped = self._mapper.map(raw)
            row_day = mapped.ts_us[mapped.kept] // DAY_US
            accepted = self._rule.accepts(row_day, file_day)
            if own is not None:
                own.counts["read"] += sum(len(batch.row_number) + len(batch.malformed) for batch in batches)
                own.counts["skipped"] += len(mapped.skipped)
                sent = row_day[accepted & (row_day != file_day)]
                own.counts["sent"] += len(sent)
                own.sent_to.update(ds_of(day) for day in sent)
                positions = np.concatenate([mapped.rejected, mapped.kept[~accepted]])
                reasons = mapped.reasons + [self._rule.reason(day, file_day) for day in row_day[~accepted]]
                users = pa.concat_arrays([mapped.rejected_users, _users(mapped.actions.filter(pa.array(~accepted)))])
                stay = ~self._forgotten.are_listed(users)
                own.counts["forgotten"] += int((~stay).sum())
                reasons = [reason for reason, stays in zip(reasons, stay, strict=True) if stays]
                for reject in self._rejects(batches, raw, positions[stay], reasons, users.filter(pa.array(stay))):
                    own.quarantine.add(*reject)
            self._count_days("received", row_day[accepted & (row_day != file_day)])
            self._report(f"raw_actions: reading the files of {ds_of(file_day)}")
            yield self._group(mapped.actions, row_day, accepted)

    def _rejects(
        self, batches: list[RawBatch], raw: pa.Table, positions: np.ndarray, reasons: list[str], users: pa.Array
    ) -> Iterator[tuple[Path, int, str, str]]:
        """Yield the malformed rows and the rows at `positions`, without what a forgotten user may have left there."""
        return rejected_rows(
            batches,
            raw,
            positions,
            reasons,
            is_redacted=self._forgotten.may_be(users),
            redact_malformed=len(self._forgotten) > 0,
        )

    def _route_undated(self, file: Path) -> Iterator[RoutedRows]:
        """Route rows to the days on which they happened.

        A rejected or skipped row without a valid time goes to the day of the timed row before it; at the start of the
        file, of the first timed row. A row of a day outside the site's days is counted as that and as nothing else. So:
        rows of the file = sum of the wanted days' `read` + rows outside the site's days + rows of its other days.
        """
        last_day, num_chars, scope = -1, 0, ""
        waiting: list[list[Any]] = []  # rejects before the first row with a valid time
        skipped = np.empty(0, np.int64)  # numbers of skipped rows whose day is not known yet
        forgotten: set[int] = set()  # row numbers of users on the deletion list: not quarantined either
        for batch in self._read(file):
            mapped = self._mapper.map(batch.rows)
            row_day = mapped.ts_us // DAY_US
            timed = mapped.ts_us >= 0
            numbers = np.concatenate([[0], batch.row_number[timed]])
            if timed.any():
                days = np.concatenate([[last_day if last_day >= 0 else row_day[timed][0]], row_day[timed]])
                last_day = int(days[-1])
            else:
                days = np.array([last_day])
            listed = mapped.rejected[self._forgotten.are_listed(mapped.rejected_users)]
            forgotten.update(batch.row_number[listed].tolist())
            num_waiting = len(waiting)
            rejects = self._rejects([batch], batch.rows, mapped.rejected, mapped.reasons, mapped.rejected_users)
            waiting += [reject for _, *reject in rejects]
            skipped = np.concatenate([skipped, batch.row_number[mapped.skipped]])
            if last_day < 0:
                num_chars += sum(len(text) for _, _, text in waiting[num_waiting:])
                if len(waiting) > MAX_UNTIMED_ROWS or num_chars > MAX_UNTIMED_CHARS:
                    scope = f" among the first {len(waiting):,}"
                    break
            else:
                for number, reason, text in waiting:
                    day = int(days[np.searchsorted(numbers, number, side="right") - 1])
                    own = self._tally_of(day)
                    if not self._rule.first <= day <= self._rule.last:
                        self.num_outside_site_days += 1
                    elif own is None:
                        self.num_other_days += 1
                    else:
                        own.counts["read"] += 1
                        if number in forgotten:
                            own.counts["forgotten"] += 1
                        else:
                            own.quarantine.add(file, number, reason, text)
                skipped_day = days[np.searchsorted(numbers, skipped, side="right") - 1]
                skipped_in_site = self._rule.in_site(skipped_day)
                self.num_outside_site_days += int((~skipped_in_site).sum())
                self._count_days("skipped", skipped_day[skipped_in_site])
                self.num_other_days += self._count_days("read", skipped_day[skipped_in_site])
                waiting, skipped, forgotten = [], skipped[:0], set()
            in_site = self._rule.in_site(row_day[mapped.kept])
            self.num_outside_site_days += int((~in_site).sum())
            self.num_other_days += self._count_days("read", row_day[mapped.kept][in_site])
            self._report(f"raw_actions: reading {printable(str(file))}")
            yield self._group(mapped.actions, row_day[mapped.kept], in_site)
        if waiting:
            number, reason, _ = waiting[0]
            raise PipelineError(f"{file}: no row has a valid time{scope}; row {number}: {reason}", remedy_of(reason))
        self.num_outside_site_days += len(skipped)  # a file of skipped rows without a time

    def _read(self, file: Path) -> Iterator[RawBatch]:
        return read_file(file, self._source, self._columns, self._source.categories)

    def _group(self, actions: pa.Table, row_day: np.ndarray, accepted: np.ndarray) -> RoutedRows:
        """Select the accepted rows of the wanted days, without those of forgotten users; number their groups."""
        num_days = len(self._tallies)
        wanted = accepted & (row_day >= self._first_day) & (row_day < self._first_day + num_days)
        if len(self._forgotten):
            listed = self._forgotten.are_listed(actions["user_id"])
            self._count_days("forgotten", row_day[wanted & listed])
            wanted &= ~listed
        if not wanted.all():
            actions, row_day = actions.filter(pa.array(wanted)), row_day[wanted]
        group = (row_day - self._first_day) * self._num_buckets + bucket_of(actions["user_id"], self._num_buckets)
        return actions, group.astype(np.uint16 if num_days * self._num_buckets <= 65_536 else np.uint32)

    def _tally_of(self, number: int) -> Tally | None:
        """Return the tally of a day, or None if it is not a wanted day."""
        index = number - self._first_day
        return self._tallies[index] if 0 <= index < len(self._tallies) else None

    def _count_days(self, name: str, row_day: np.ndarray) -> int:
        """Add the number of rows of each wanted day to its count `name`; return the number of rows of other days."""
        num_other = 0
        for number, num_rows in zip(*np.unique(row_day, return_counts=True), strict=True):
            own = self._tally_of(int(number))
            if own is None:
                num_other += int(num_rows)
            else:
                own.counts[name] += int(num_rows)
        return num_other


def _users(actions: pa.Table) -> pa.Array:
    return combined(actions["user_id"])


def _describe(file: Path) -> InputFile:
    path, num_bytes, changed = stamp_of(file)
    return {"path": path, "num_bytes": num_bytes, "changed": changed}


def day_number(ds: str) -> int:
    """Return the number of days since 1970-01-01."""
    return ds_start_us(ds) // DAY_US


def ds_of(number: int) -> str:
    """Return the ISO date of a day number."""
    return str(np.datetime64(int(number), "D"))
