"""Statistics of pins as of a day, from counts: on how many user-days they were used in the days before.

A user-day is a user with a positive action on the pin on that day; only users whom training may see are counted.
`centered` brings the statistics of every day to the same level: minus the mean of that day's known pins. The model
divides them by a constant of its own, `scale_of`, which training sets as it sets weights.
"""

from typing import NamedTuple

import numpy as np

from pf_core.days import COUNT_WINDOWS_DAYS

WINDOWS_DAYS = COUNT_WINDOWS_DAYS

STATISTICS = (
    "log rate, 1 day",
    "log rate, 7 days",
    "log rate, 28 days",
    "log rate, 91 days",
    "log user-days",
    "log age",
    "log user-days per user",
)
"""The columns of statistics_NF. The last one is known where factors are: as of the end of a fit, 0 for newer pins."""

LOG_RATE_7, LOG_USER_DAYS, REPEAT = 1, 4, 6

MAX_AGE_DAYS = 28

MIN_SCALE = 0.1


class DayCounts(NamedTuple):
    """Counts of N pins in the windows that end before a day."""

    user_days_NW: np.ndarray
    """User-days in each of WINDOWS_DAYS."""
    age_N: np.ndarray
    """Days since the first user-day in the longest window, at least 1; 0 for a pin without any."""
    num_days: int
    """Days from the first day of the log: a window is no longer than that."""

    def is_known(self) -> np.ndarray:
        """Return whether each pin was used in the longest window."""
        return self.user_days_NW[:, -1] > 0

    def rates(self) -> np.ndarray:
        """Return user-days per day in each window, rates_NW, float32."""
        days_W = np.minimum(WINDOWS_DAYS, max(1, self.num_days))
        return (self.user_days_NW / days_W).astype(np.float32)


def raw_statistics(counts: DayCounts, log_repeat_N: np.ndarray) -> np.ndarray:
    """Return STATISTICS of each pin before they are centered, float32."""
    rates_NW = counts.rates()
    columns = [np.log(rates_NW[:, place] + 0.5 / window) for place, window in enumerate(WINDOWS_DAYS[:4])]
    columns.append(np.log(counts.user_days_NW[:, -1] + 0.5))
    columns.append(np.log(np.clip(counts.age_N, 1, MAX_AGE_DAYS)))
    columns.append(log_repeat_N)
    return np.stack(columns, axis=1).astype(np.float32)


def scale_of(raw_NF: np.ndarray, is_known_N: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each statistic over the known pins: the constant of the model."""
    if not is_known_N.any():
        return np.ones(raw_NF.shape[1], np.float32)
    return np.maximum(raw_NF[is_known_N].std(axis=0), MIN_SCALE).astype(np.float32)


def centered(raw_NF: np.ndarray, is_known_N: np.ndarray) -> np.ndarray:
    """Return the statistics minus the mean of the known pins, float32."""
    if not is_known_N.any():
        return raw_NF
    return raw_NF - raw_NF[is_known_N].mean(axis=0)
