"""Counts of pins before any day, from the training users' positive actions.

`UseLog` holds each user-day once: (day, pin) of a user with a positive action on the pin that day, sorted by day, in
memory-mapped files. The counts before day c read nothing of day c or later.

Suffixes: E user-days, N pins, W windows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pf_core.days import DAY_US
from pf_core.model.parts.statistics import WINDOWS_DAYS, DayCounts
from pf_core.storage.arrays import NpyFile
from pf_core.storage.files import write_folder
from pf_core.timelines.arrays import Timelines

ACTIONS_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class UseLog:
    """User-days of the training users, by day."""

    first_day: int
    """First day of the log, in days since 1970."""
    offsets: np.ndarray
    """First user-day of each day from `first_day` on, and the end of the last day's."""
    pin_E: np.ndarray
    num_pins: int
    first_use_N: np.ndarray
    """Day of the first user-day of each pin; a day after all others for a pin without any."""

    @classmethod
    def open(cls, folder: Path, *, num_pins: int) -> "UseLog":
        offsets = np.load(folder / "offsets.npy")
        return cls(
            first_day=int(offsets[0]),
            offsets=offsets[1:],
            pin_E=np.load(folder / "pin.npy", mmap_mode="r"),
            num_pins=num_pins,
            first_use_N=np.load(folder / "first_use.npy", mmap_mode="r"),
        )

    def pins_of(self, first_day: int, end_day: int) -> np.ndarray:
        """Return the pins of the user-days from `first_day` to the day before `end_day`."""
        first, end = (int(np.clip(day - self.first_day, 0, len(self.offsets) - 1)) for day in (first_day, end_day))
        return np.asarray(self.pin_E[self.offsets[first] : self.offsets[max(first, end)]])

    def before(self, day: int) -> DayCounts:
        """Return the counts of the days before `day`."""
        counts, total, until = [], np.zeros(self.num_pins, np.int64), day
        for window in WINDOWS_DAYS:  # each window adds the days before those of the shorter one
            total = total + np.bincount(self.pins_of(day - window, until), minlength=self.num_pins)
            counts.append(total)
            until = day - window
        return DayCounts(np.stack(counts, axis=1), self._ages(day, total > 0), max(1, day - self.first_day))

    def _ages(self, day: int, is_known_N: np.ndarray) -> np.ndarray:
        """Return the days since the first user-day in the longest window, 0 for a pin without any."""
        first_N, start = np.asarray(self.first_use_N), day - WINDOWS_DAYS[-1]
        if (is_known_N & (first_N < start)).any():  # used before the window and in it
            pin_E = self.pins_of(start, day)
            first, end = (int(np.clip(each - self.first_day, 0, len(self.offsets) - 1)) for each in (start, day))
            day_E = np.repeat(np.arange(first, end), np.diff(self.offsets[first : end + 1])) + self.first_day
            first_N = first_N.copy()
            first_N[pin_E[::-1]] = day_E[::-1]  # the last assignment is that of the first day
        return np.where(is_known_N, day - first_N, 0)


def count_before(timelines: Timelines, day: int, *, num_pins: int, first_day: int) -> DayCounts:
    """Return what `UseLog.before` returns, in one pass over the timelines and without files."""
    user_days_NW = np.zeros((num_pins, len(WINDOWS_DAYS)), np.int64)
    first_use_N = np.full(num_pins, day, np.int64)
    for day_E, pin_E in _user_days(timelines):
        for place, window in enumerate(WINDOWS_DAYS):
            is_inside = (day_E >= day - window) & (day_E < day)
            user_days_NW[:, place] += np.bincount(pin_E[is_inside], minlength=num_pins)
        np.minimum.at(first_use_N, pin_E[is_inside], day_E[is_inside])
    return DayCounts(user_days_NW, day - first_use_N, max(1, day - first_day))


def write_use_log(timelines: Timelines, folder: Path, *, num_pins: int, first_day: int, end_day: int) -> None:
    """Write the files of a `UseLog` of the days from `first_day` to the day before `end_day`, in bounded memory."""
    num_days = end_day - first_day
    num_on_day = np.zeros(num_days, np.int64)
    with write_folder(folder) as partial:
        unsorted = {name: NpyFile(partial / f"unsorted_{name}.npy", np.int32) for name in ("day", "pin")}
        for day_E, pin_E in _user_days(timelines):
            unsorted["day"].append(day_E - first_day)
            unsorted["pin"].append(pin_E)
            num_on_day += np.bincount(day_E - first_day, minlength=num_days)
        for file in unsorted.values():
            file.close()
        offsets = np.concatenate([[0], np.cumsum(num_on_day)])
        _sort_by_day(partial, offsets, num_pins=num_pins, first_day=first_day, end_day=end_day)
        np.save(partial / "offsets.npy", np.concatenate([[first_day], offsets]))


def _user_days(timelines: Timelines) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (day, pin) of every user-day, a chunk of users at a time."""
    start, offsets = 0, timelines.offsets
    while start < timelines.num_users:
        end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + ACTIONS_AT_ONCE, side="right")) - 1)
        rows = slice(int(offsets[start]), int(offsets[end]))
        is_positive = np.asarray(timelines.is_positive[rows])
        user = np.repeat(np.arange(end - start), np.diff(offsets[start : end + 1]))[is_positive]
        day, pin = timelines.ts[rows][is_positive] // DAY_US, timelines.pin[rows][is_positive].astype(np.int64)
        order = np.lexsort((day, pin, user))
        user, pin, day = user[order], pin[order], day[order]
        is_new = np.ones(len(user), bool)
        is_new[1:] = (user[1:] != user[:-1]) | (pin[1:] != pin[:-1]) | (day[1:] != day[:-1])
        yield day[is_new], pin[is_new]
        start = end


def _sort_by_day(folder: Path, offsets: np.ndarray, *, num_pins: int, first_day: int, end_day: int) -> None:
    """Write pin.npy, sorted by day, and first_use.npy."""
    day_E, pin_E = (np.load(folder / f"unsorted_{name}.npy", mmap_mode="r") for name in ("day", "pin"))
    result = np.lib.format.open_memmap(folder / "pin.npy", mode="w+", dtype=np.int32, shape=(int(offsets[-1]),))
    first_use_N, next_of_day = np.full(num_pins, end_day, np.int32), offsets[:-1].copy()
    for start in range(0, len(day_E), ACTIONS_AT_ONCE):
        day, pin = (np.asarray(values[start : start + ACTIONS_AT_ONCE]) for values in (day_E, pin_E))
        order = np.argsort(day, kind="stable")
        day, pin = day[order], pin[order]
        count = np.bincount(day, minlength=len(next_of_day))
        place = np.arange(len(day)) - np.repeat(np.cumsum(count) - count, count)
        result[next_of_day[day] + place] = pin
        next_of_day += count
        np.minimum.at(first_use_N, pin, day + first_day)
    result.flush()
    np.save(folder / "first_use.npy", first_use_N)
    del day_E, pin_E, result
    for name in ("day", "pin"):
        (folder / f"unsorted_{name}.npy").unlink()
