"""The first and the last day of a site, by how many rows each day has.

A log may hold stray rows years away from the others, a first and a last day that are cut, and rows of today, whose day
is not over. The last day is the newest one with a normal volume: at least a third of the median of the four weeks
before it.
"""

import calendar
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any, cast

import numpy as np

from pf_core.config.site import QualityConfig, TimelineConfig
from pf_core.errors import PipelineError
from pf_core.logs.checks import judge_volume
from pf_core.logs.partition import RawManifest
from pf_core.logs.routing import DAY_US, day_number, ds_of
from pf_core.onboarding.questions import percent

NORMAL_SHARE = 0.3

COMPARED_DAYS = 28

STRAY_SHARE = 0.01
"""A day with less than this share of a typical day's rows is stray."""

GAP_DAYS = 30
"""A few rows that lie so many empty days away from the others are stray, too."""

GAP_SHARE = 0.01

VOLUME_RATIOS = ((0.5, 2.0), (0.3, 3.0), (0.2, 5.0), (0.1, 10.0), (0.02, 50.0))
"""Limits of `quality` that are tried, the default first."""

MARGIN = 1.15
"""Days must keep so much distance from a limit: a sample does not know their volume exactly."""

USUAL_DAYS = 0.95
"""Share of the days that must lie within the limits; the newest ones must all."""


@dataclass(frozen=True, kw_only=True)
class SiteDays:
    """The days of the site."""

    start_ds: str
    end_ds: str
    start_reason: str
    end_reason: str
    quality: dict[str, float] = field(default_factory=dict)
    """Limits of the volume, where the default ones would stop normal days."""
    quality_reason: str = ""
    volumes: dict[str, float] = field(default_factory=dict)
    """Rows by day, estimated, within the site's days."""

    @property
    def num_days(self) -> int:
        return day_number(self.end_ds) - day_number(self.start_ds) + 1


def volumes_of(us: np.ndarray, weight: np.ndarray) -> dict[int, float]:
    """Return the number of rows by day, from the times (-1: none) and weights of a sample."""
    known = us >= 0
    day, place = np.unique(us[known] // DAY_US, return_inverse=True)
    total = np.bincount(place, weight[known], minlength=len(day))
    return dict(zip(day.tolist(), total.tolist(), strict=True))


def choose_days(volumes: Mapping[int, float], *, is_sample: bool) -> SiteDays:
    """Return the first and the last day of the site; refuse a log of a single day."""
    today = day_number(datetime.now(UTC).date().isoformat())
    past = {day: rows for day, rows in sorted(volumes.items()) if day < today}
    if not past:
        raise PipelineError("all rows are of today, whose day is not over", "name a log with earlier days")
    typical = _typical(past)
    kept = _without_islands({day: rows for day, rows in past.items() if rows >= STRAY_SHARE * typical})
    end = next((day for day in reversed(kept) if _is_normal(day, kept, typical)), max(kept))
    start = min(kept)
    end = max(kept) if start == end else end
    if start == end:
        others = [ds_of(day) for day in sorted(volumes) if day != end]
        beside = f"; few are of {len(others)} others, {others[0]} to {others[-1]}" if others else ""
        raise PipelineError(
            f"{'nearly ' if others else ''}all rows are of one day, {ds_of(end)}{beside}",
            "name a log of more days: a model is trained on some and judged on the others",
        )
    window_days = TimelineConfig().window_days
    is_cut = end - start >= window_days
    total = sum(volumes.values())
    after = sum(rows for day, rows in volumes.items() if day > end)
    start = max(start, end - window_days + 1)
    before = sum(rows for day, rows in volumes.items() if day < start)
    about = "about " if is_sample else ""
    chosen = {day: rows for day, rows in past.items() if start <= day <= end}
    quality, quality_reason = _limits(chosen, start, end)
    older = f"from {ds_of(min(volumes))} on"
    start_reason = _edge_reason("first", before, about, older)
    if is_cut:
        start_reason = (
            f"{window_days} days, what timelines keep (timelines.window_days); {about}{percent(before / total)} of the "
            f"rows are older, {older}"
        )
    return SiteDays(
        start_ds=ds_of(start),
        end_ds=ds_of(end),
        start_reason=start_reason,
        end_reason=_edge_reason("last", after, about, f"until {ds_of(max(volumes))}"),
        quality=quality,
        quality_reason=quality_reason,
        volumes={ds_of(day): rows for day, rows in chosen.items()},
    )


def _edge_reason(which: str, outside: float, about: str, where: str) -> str:
    if not outside:
        return f"the {which} day of the log"
    rows = "1 row" if round(outside) == 1 else f"{outside:,.0f} rows"
    return f"the {which} day with a normal volume; {about}{rows} beyond it, {where}, left out"


def _typical(volumes: Mapping[int, float]) -> float:
    """Return the volume of the day on which the middle row lies when days are sorted by volume."""
    rows = np.sort(np.array(list(volumes.values())))
    return float(rows[np.searchsorted(np.cumsum(rows), rows.sum() / 2)])


def _without_islands(volumes: dict[int, float]) -> dict[int, float]:
    """Leave out the first and the last days if they are few rows far away from the others."""
    days, total = list(volumes), sum(volumes.values())
    first, last = 0, len(days)
    for place in range(1, len(days)):
        if days[place] - days[place - 1] > GAP_DAYS:
            if sum(volumes[day] for day in days[:place]) <= GAP_SHARE * total:
                first = place
            elif sum(volumes[day] for day in days[place:]) <= GAP_SHARE * total:
                last = min(last, place)
    return {day: volumes[day] for day in days[first:last]}


def _is_normal(day: int, volumes: Mapping[int, float], typical: float) -> bool:
    before = [volumes[other] for other in range(day - COMPARED_DAYS, day) if other in volumes]
    usual = median(before) if len(before) >= 3 else typical if not before else median([*before, typical])
    return volumes[day] >= NORMAL_SHARE * usual


def _limits(volumes: Mapping[int, float], start: int, end: int) -> tuple[dict[str, float], str]:
    """Return limits for the volume of a day that normal days keep, and why; nothing if the default ones do."""
    manifests = [_manifest(ds_of(day), volumes.get(day, 0.0)) for day in range(start, end + 1)]
    for least, most in VOLUME_RATIOS:
        quality = QualityConfig(min_volume_ratio=least * MARGIN, max_volume_ratio=most / MARGIN)
        passed = [
            judge_volume(manifest, manifests[max(0, place - COMPARED_DAYS) : place][::-1], quality).passed
            for place, manifest in enumerate(manifests)
            if manifest["counts"]["kept"]
        ]
        if sum(passed) >= USUAL_DAYS * len(passed) and all(passed[-3:]):
            break
    if (least, most) == VOLUME_RATIOS[0]:
        return {}, ""
    busiest, quietest = (
        max(volumes, key=lambda day: volumes[day]),
        min(volumes, key=lambda day: volumes[day]),
    )
    reason = (
        f"days have {volumes[quietest]:,.0f} ({_weekday(quietest)}) to {volumes[busiest]:,.0f} rows "
        f"({_weekday(busiest)}); the default, 0.5 to 2 times the usual, would stop normal days"
    )
    return {"min_volume_ratio": least, "max_volume_ratio": most}, reason


def _weekday(day: int) -> str:
    return f"{calendar.day_abbr[(day + 3) % 7]} {ds_of(day)}"


def _manifest(ds: str, rows: float) -> RawManifest:
    """Return what judge_volume reads of a day."""
    counts = {"kept": round(rows), "positive": 1, "read": round(rows)}
    found: dict[str, Any] = {"ds": ds, "counts": counts, "inputs": ["log"], "outside_site_days": 0}
    return cast("RawManifest", found)


def quietest_hour(us: np.ndarray) -> str:
    """Return in which three hours of the day fewest rows lie, which mostly are at night."""
    hours = np.bincount((us[us >= 0] % DAY_US) // (DAY_US // 24), minlength=24)
    three = hours + np.roll(hours, -1) + np.roll(hours, -2)
    first = int(three.argmin())
    return f"fewest rows lie between {first:02d}:00 and {(first + 3) % 24:02d}:00"
