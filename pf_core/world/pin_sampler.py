"""Sampling of the pins that a surface shows: by popularity, among the pins of a sub-topic that exist on the day.

Pins are sorted by (sub-topic, rotation, day of first visibility), with one cumulative sum of popularity: the pins
that exist on a day are a prefix of each group, fresh pins are the end of that prefix, and a draw is one search.

Rotations replace the filter of pins already seen. A real Homefeed does not show a pin to the same person repeatedly,
but remembering who saw what would be state. Instead, every pin belongs to one of `num_rotations` sets, and a user is
shown the next set about once per session: the set advances with the user's expected number of sessions, from an
offset of the user's own. An empty set is replaced by the next one of the sub-topic.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pf_core.world.column_tables import Bools, Doubles, Ints
from pf_core.world.pins import Pins

DAYS_IN_MEMORY = 8
"""Enough for the days that are written together, and the days of their late sessions."""


class PinSampler:
    """Draws pins and sub-topics for the sessions of any day."""

    def __init__(
        self,
        pins: Pins,
        *,
        mask: Bools,
        num_subtopics: int,
        num_rotations: int,
        num_days: int,
        fresh_days: int,
    ) -> None:
        """Sample from the pins that `mask` selects. With `num_rotations=1`, the pins' rotation is ignored."""
        members = np.flatnonzero(mask)
        self._num_rotations = num_rotations
        self._num_groups = num_subtopics * num_rotations
        self._num_keys = num_days + 1
        self._fresh_days = fresh_days
        group = pins.subtopic[members] * num_rotations + pins.rotation[members] % num_rotations
        key = group * self._num_keys + np.minimum(pins.visible_day[members], num_days)
        order = np.argsort(key, kind="stable")
        self._keys = key[order]
        self._pins = members[order]
        self._cumulative = np.concatenate(([0.0], np.cumsum(pins.popularity[self._pins], dtype=np.float64)))
        self._guide, self._buckets_per_mass = _build_guide(self._cumulative)
        self._bounds_of_day: dict[int, tuple[Ints, Ints, Ints, Doubles]] = {}

    def pick(
        self, day: Ints, rotation: Ints, session: Ints, subtopic: Ints, uniform: Doubles, is_fresh: NDArray[Any]
    ) -> Ints:
        """Return one pin for each draw, on the day and in the rotation of its session.

        Where `is_fresh`, the pin is one of the last `fresh_days`, if the group has any.
        """
        first_day, bounds = self._bounds_between(day)
        starts, fresh_starts, stops = (np.concatenate([of_day[i] for of_day in bounds]) for i in range(3))
        first_group = (day - first_day) * self._num_groups + rotation % self._num_rotations
        group = first_group[session] + subtopic * self._num_rotations
        first, stop = starts[group], stops[group]
        wants_fresh = np.flatnonzero(is_fresh)
        fresh_first = fresh_starts[group[wants_fresh]]
        has_fresh = fresh_first < stop[wants_fresh]
        first[wants_fresh[has_fresh]] = fresh_first[has_fresh]
        low, high = self._cumulative[first], self._cumulative[stop]
        found = self._search(low + uniform * (high - low))
        return self._pins[np.clip(found, first, stop - 1)]

    def pick_popular_subtopic(self, day: Ints, rotation: Ints, session: Ints, uniform: Doubles) -> Ints:
        """Return a sub-topic for each draw, by the popularity of all its pins on that day, in that rotation."""
        first_day, bounds = self._bounds_between(day)
        num_subtopics = bounds[0][3].shape[1]
        mass = np.concatenate([of_day[3].ravel() + i * self._num_rotations for i, of_day in enumerate(bounds)])
        row = ((day - first_day) * self._num_rotations + rotation % self._num_rotations)[session]
        found = np.searchsorted(mass, row + uniform, side="right")
        return np.clip(found - row * num_subtopics, 0, num_subtopics - 1)

    def _search(self, target: Doubles) -> Ints:
        """Return searchsorted(cumulative, target, side="right") - 1, by guide table, which is several times faster."""
        found = self._guide[(target * self._buckets_per_mass).astype(np.int64)]
        behind = np.flatnonzero(self._cumulative[found + 1] <= target)
        while len(behind):
            found[behind] += 1
            behind = behind[self._cumulative[found[behind] + 1] <= target[behind]]
        return found

    def _bounds_between(self, day: Ints) -> tuple[int, list[tuple[Ints, Ints, Ints, Doubles]]]:
        """Return the first day that occurs, and the bounds of all days from it: late sessions are of earlier days."""
        first, last = (int(day.min()), int(day.max())) if len(day) else (0, 0)
        return first, [self._bounds(one_day) for one_day in range(first, last + 1)]

    def _bounds(self, day: int) -> tuple[Ints, Ints, Ints, Doubles]:
        """Return start, fresh start and stop of every group on a day, and the cumulative mass [rotation, sub-topic]."""
        if day not in self._bounds_of_day:
            base = np.arange(self._num_groups, dtype=np.int64) * self._num_keys
            starts = np.searchsorted(self._keys, base)
            fresh = np.searchsorted(self._keys, base + max(1, day - self._fresh_days + 1))
            stops = np.searchsorted(self._keys, base + day, side="right")
            stand_in = self._next_occupied(stops > starts)
            starts, fresh, stops = starts[stand_in], fresh[stand_in], stops[stand_in]
            mass = (self._cumulative[stops] - self._cumulative[starts]).reshape(-1, self._num_rotations).T
            cumulative = np.cumsum(mass, axis=1)
            cumulative = cumulative / cumulative[:, -1:] + np.arange(self._num_rotations)[:, None]
            while len(self._bounds_of_day) >= DAYS_IN_MEMORY:
                self._bounds_of_day.pop(next(iter(self._bounds_of_day)))
            self._bounds_of_day[day] = (starts, fresh, stops, cumulative)
        return self._bounds_of_day[day]

    def _next_occupied(self, occupied: Bools) -> Ints:
        """Return for each group itself, or if it is empty the next group of the same sub-topic that has pins."""
        table = occupied.reshape(-1, self._num_rotations)
        rotation = np.tile(np.arange(self._num_rotations), (len(table), 1))
        for _ in range(self._num_rotations - 1):
            is_empty = ~np.take_along_axis(table, rotation, axis=1)
            rotation = np.where(is_empty, (rotation + 1) % self._num_rotations, rotation)
        return (np.arange(len(table))[:, None] * self._num_rotations + rotation).ravel()


def _build_guide(cumulative: Doubles) -> tuple[Ints, float]:
    """Return the entry to start a search from (never past the target), for 2n equal slices of the total mass."""
    num_buckets = 2 * len(cumulative)
    buckets_per_mass = (num_buckets - 1) / cumulative[-1]
    edges = (np.arange(num_buckets) - 1e-3) / buckets_per_mass
    guide = np.searchsorted(cumulative, edges, side="right") - 1
    return np.clip(guide, 0, len(cumulative) - 2), buckets_per_mass
