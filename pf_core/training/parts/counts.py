"""Counts of pins before any day, from the training users' positive actions.

`UseLog` holds each user-day once: (day, pin) of a user with a positive action on the pin that day, sorted by day, in
memory-mapped files of the training set. The counts before day c read nothing of day c or later. User-days are those of
pins/counts.py, which serving counts: of all actions of a day, also those that a timeline has no room for.

Suffixes: E user-days, N pins, W windows.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pf_core.model.parts.statistics import WINDOWS_DAYS, DayCounts
from pf_core.storage.arrays import NpyFile


@dataclass(frozen=True, kw_only=True, eq=False)
class UseLog:
    """User-days of the training users, by day."""

    origin_day: int
    """Day of the first action, in days since 1970: windows are no longer than the days from there."""
    first_day: int
    """First day that was counted."""
    offsets: np.ndarray
    """First user-day of each day from `first_day` on, and the end of the last day's."""
    pin_E: np.ndarray
    num_pins: int
    first_use_N: np.ndarray
    """Day of the first user-day of each pin; a day after all others for a pin without any."""

    @classmethod
    def open(cls, folder: Path, *, num_pins: int, origin_day: int) -> "UseLog":
        offsets = np.load(folder / "offsets.npy")
        return cls(
            origin_day=origin_day,
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
        return DayCounts(np.stack(counts, axis=1), self._ages(day, total > 0), max(1, day - self.origin_day))

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


def write_use_log(
    days: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path, *, num_pins: int, first_day: int
) -> None:
    """Write the files of a `UseLog`, from the pins of each day from `first_day` on and their user-days."""
    folder.mkdir(parents=True)
    offsets, first_use_N = [0], np.full(num_pins, -1, np.int32)
    with closing(NpyFile(folder / "pin.npy", np.int32)) as file:
        for day, (pin, user_days) in enumerate(days, first_day):
            file.append(np.repeat(pin, user_days))
            offsets.append(len(file))
            first_use_N[pin[first_use_N[pin] < 0]] = day
    first_use_N[first_use_N < 0] = first_day + len(offsets) - 1
    np.save(folder / "first_use.npy", first_use_N)
    np.save(folder / "offsets.npy", np.array([first_day, *offsets]))
