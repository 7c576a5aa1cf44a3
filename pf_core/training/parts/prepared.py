"""What training reads of pins before each day: the training set's use log, and the factors of a few points in time.

The first rank writes the factors to the run's folder once; all ranks and their sampling processes map the files. They
are removed when the model is saved. The last fit, at the end of training, serves. A later point in time never decides
an earlier one.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pf_core.config.parts import PartsConfig
from pf_core.days import DAY_US
from pf_core.model.parts.statistics import DayCounts, centered, raw_statistics, scale_of
from pf_core.progress import Progress
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_json, remove_tree, write_folder, write_json
from pf_core.training.parts.counts import UseLog
from pf_core.training.parts.factors import Factors, fit_factors
from pf_core.training.training_set import TrainingSet

DESCRIPTION = "prepared.json"

CACHE_BYTES = 256 << 20
"""Statistics of days that are kept in memory."""


class TrainingDays(NamedTuple):
    """The days on which rows may stand, in days since 1970, and how likely each is."""

    day: np.ndarray
    share: np.ndarray
    end_day: int
    """The day after the cut."""

    def points_in_time(self, num_points: int) -> list[int]:
        """Return the days at which factors are fitted: quantiles, so that each fit serves as many rows."""
        quantiles = np.arange(num_points) / num_points
        return np.unique(self.day[np.searchsorted(np.cumsum(self.share), quantiles)]).tolist()


def training_days(data: TrainingSet, config: PartsConfig) -> TrainingDays:
    """Return the days of rows: some days of history before the first, some days of targets after the last."""
    first_day, end_day = data.manifest["time_origin_us"] // DAY_US, data.cut_us // DAY_US
    num_days = end_day - first_day
    history = max(1, int(num_days * 0.15), min(14, num_days // 4))
    last_day = max(end_day - config.min_window_days, first_day + 1)
    day = np.arange(min(first_day + history, last_day), last_day + 1)
    weight = np.exp(-(end_day - day) / config.day_decay_days)
    return TrainingDays(day, weight / weight.sum(), int(end_day))


class PinsOfDay(NamedTuple):
    """Statistics of all pins as of a day."""

    statistics_NF: np.ndarray
    rates_NW: np.ndarray
    is_known_N: np.ndarray
    mean_rate_W: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PointInTime:
    """A fit of the factors, and the statistics of its day, which the user side reads."""

    day: int
    factors: Factors
    statistics_NF: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    uses: UseLog
    points: list[PointInTime]
    """Ascending; the last one ends with the training period."""
    scale_F: np.ndarray
    """Scale of the statistics, a constant of the model; no input of a row is divided by it."""

    def point_before(self, day: int) -> PointInTime:
        """Return the newest fit that reads nothing of `day` or later."""
        return [point for point in self.points if point.day <= day][-1]

    def unknown_statistics(self) -> np.ndarray:
        """Return the centered statistics, as of the end of training, of a pin without any user-day."""
        counts, factors = self.uses.before(self.points[-1].day), self.points[-1].factors
        nothing = DayCounts(
            np.zeros((1, counts.user_days_NW.shape[1]), np.int64), np.zeros(1, np.int64), counts.num_days
        )
        raw_NF = np.concatenate([raw_statistics(counts, factors.log_repeat_N), raw_statistics(nothing, np.zeros(1))])
        return centered(raw_NF, np.append(counts.is_known(), False))[-1]

    def pins_of_day(self, day: int, log_repeat_N: np.ndarray) -> PinsOfDay:
        """Return the statistics of the pins as of `day`."""
        return pins_of_day(self.uses.before(day), log_repeat_N)


def pins_of_day(counts: DayCounts, log_repeat_N: np.ndarray) -> PinsOfDay:
    is_known_N, rates_NW = counts.is_known(), counts.rates()
    raw_NF = raw_statistics(counts, log_repeat_N)
    return PinsOfDay(
        statistics_NF=centered(raw_NF, is_known_N),
        rates_NW=rates_NW,
        is_known_N=is_known_N,
        mean_rate_W=rates_NW.mean(axis=0, dtype=np.float64).astype(np.float32),
    )


def prepare(data: TrainingSet, config: PartsConfig, folder: Path, progress: Progress) -> None:
    """Write the factors of all points in time, unless they are there."""
    if (folder / DESCRIPTION).exists():
        return
    days, num_pins = training_days(data, config), data.num_pins
    onto: np.ndarray | None = None
    points = [*days.points_in_time(config.points_in_time), days.end_day]
    for number, day in enumerate(points):
        progress(f"factors of {num_pins:,} pins: fit {number + 1} of {len(points)}")
        factors = fit_factors(
            data.train,
            day,
            num_pins=num_pins,
            dim=max(1, config.factor_dim),
            max_pairs=config.max_factor_pairs,
            onto=onto,
        )
        onto = factors.factor_ND
        with write_folder(folder / f"factors-{number:02d}") as partial:
            for name, values in factors._asdict().items():
                np.save(partial / f"{name}.npy", values)
    scale_day = max(days.end_day - config.window_days, int(days.day[0]))
    counts = data.uses.before(scale_day)
    last = _open_factors(folder, len(points) - 1)
    scale_F = scale_of(raw_statistics(counts, last.log_repeat_N), counts.is_known())
    write_json(folder / DESCRIPTION, {"points": [int(day) for day in points], "scale": scale_F.tolist()})


def remove_prepared(folder: Path) -> None:
    """Remove what `prepare` wrote. What is left after an interruption counts as nothing."""
    (folder / DESCRIPTION).unlink(missing_ok=True)
    remove_tree(folder)


def open_prepared(data: TrainingSet, folder: Path) -> Prepared:
    """Open what `prepare` wrote."""
    folder = fetched(folder)
    description = read_json(folder / DESCRIPTION)
    scale_F = np.array(description["scale"], np.float32)
    points = []
    for number, day in enumerate(description["points"]):
        factors = _open_factors(folder, number)
        statistics_NF = pins_of_day(data.uses.before(day), factors.log_repeat_N).statistics_NF
        points.append(PointInTime(day=day, factors=factors, statistics_NF=statistics_NF))
    return Prepared(uses=data.uses, points=points, scale_F=scale_F)


def _open_factors(folder: Path, number: int) -> Factors:
    fit = fetched(folder / f"factors-{number:02d}")
    return Factors(*(np.load(fit / f"{name}.npy", mmap_mode="r") for name in Factors._fields))


def cached_by_day(function, num_bytes: int):  # type: ignore[no-untyped-def]  # lru_cache keeps the signature
    """Cache a function of a day whose results take `num_bytes`, within CACHE_BYTES."""
    return functools.lru_cache(maxsize=max(2, CACHE_BYTES // max(1, num_bytes)))(function)
