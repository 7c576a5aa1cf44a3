"""The world as one object: its users and pins, the actions of a day, and the probability of any other action.

Everything is recomputed from the configuration: nothing here is written to disk. The ground truth ("would this
user engage with this pin?") comes from the same tables as the simulation.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from pf_core.world import behaviour
from pf_core.world.behaviour import ACTION_TYPES, CLICK, CLOSEUP, REPIN, SURFACES, Surface
from pf_core.world.column_tables import Doubles, Floats, Ints, concat, take
from pf_core.world.config import WorldConfig
from pf_core.world.ids import PIN_BITS, USER_BITS, Scramble, parse_pins, spell_pins
from pf_core.world.pin_sampler import PinSampler
from pf_core.world.pins import TRAITS, build_content_space, build_pins, content_vectors
from pf_core.world.sessions import Sessions, draw_sessions
from pf_core.world.simulate import Actions, Impressions, Site, collect_actions, simulate_impressions
from pf_core.world.streams import Stream, open_stream
from pf_core.world.taxonomy import build_taxonomy
from pf_core.world.users import Users, build_users, current_interests

CHUNKS_IN_MEMORY = 4

MAX_DELAY_DAYS = 2


@dataclass(frozen=True, kw_only=True)
class Engagement:
    """Probabilities for each (user, pin, time), given that the pin is shown in a session that starts at that time."""

    none: Doubles
    actions: Doubles  # [row, ACTION_TYPES]; with `none` they sum to 1
    long_closeup: Doubles  # P(longer than 10 s | closeup)
    long_click: Doubles  # P(longer than 10 s | click)

    @property
    def positive(self) -> Doubles:
        """P(repin, closeup > 10 s or click > 10 s), the paper's positive engagement (section 3)."""
        long = self.actions[:, CLOSEUP] * self.long_closeup + self.actions[:, CLICK] * self.long_click
        return np.asarray(self.actions[:, REPIN] + long)


class World:
    """A site with its users and pins; users are built in chunks, of which a few stay in memory."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.taxonomy = build_taxonomy(config)
        self.pins = build_pins(config, self.taxonomy)
        self._content = build_content_space(config)
        self._user_ids = Scramble(seed=config.seed, bits=USER_BITS)
        self._pin_ids = Scramble(seed=config.seed, bits=PIN_BITS)
        self._site = Site(
            taxonomy=self.taxonomy,
            pins=self.pins,
            pin_utility=behaviour.pin_utilities(self.pins.traits),
            appeal=self.pins.traits[:, TRAITS.index("appeal")].copy(),
            homefeed=self._sampler(self.pins.is_candidate, num_rotations=config.num_rotations),
            everything=self._sampler(np.ones(len(self.pins), dtype=np.bool_), num_rotations=1),
        )
        self._users = lru_cache(maxsize=CHUNKS_IN_MEMORY)(lambda chunk: build_users(config, self.taxonomy, chunk))

    def _sampler(self, mask: NDArray[np.bool_], *, num_rotations: int) -> PinSampler:
        return PinSampler(
            self.pins,
            mask=mask,
            num_subtopics=self.config.num_subtopics,
            num_rotations=num_rotations,
            num_days=self.config.num_days,
            fresh_days=self.config.fresh_days,
        )

    # Users and pins

    def users(self, chunk: int) -> Users:
        if not 0 <= chunk < self.config.num_chunks:
            raise ValueError(f"there is no user chunk {chunk}: this world has {self.config.num_chunks}")
        return self._users(chunk)

    def users_at(self, user_index: ArrayLike) -> Users:
        """Return one row for each index; indices may repeat and be of any chunk."""
        index = np.asarray(user_index, dtype=np.int64)
        if index.size and not 0 <= index.min() <= index.max() < self.config.num_users:
            raise ValueError(f"user indices must be in [0, {self.config.num_users})")
        chunk_of = index // self.config.users_per_chunk
        if not index.size:
            return take(self.users(0), index)
        chunks = np.unique(chunk_of)
        parts = [take(self.users(int(c)), index[chunk_of == c] - c * self.config.users_per_chunk) for c in chunks]
        arrived = np.argsort(np.argsort(chunk_of, kind="stable"), kind="stable")
        return take(concat(parts), arrived)

    def user_id(self, user_index: ArrayLike) -> Ints:
        """Return the users' ids in the logs: integers below 2^53, neither dense nor ordered."""
        return self._user_ids.encode(np.asarray(user_index))

    def user_index(self, user_id: ArrayLike) -> Ints:
        return self._user_ids.decode(np.asarray(user_id))

    def pin_id(self, pin_index: ArrayLike) -> pa.StringArray:
        """Return the pins' ids in the logs: strings such as 'p0k3x9a1z'."""
        return spell_pins(self._pin_ids.encode(np.asarray(pin_index)))

    def pin_index(self, pin_id: pa.Array | pa.ChunkedArray | list[str]) -> Ints:
        return self._pin_ids.decode(parse_pins(pin_id))

    def pin_topics(self, pin_index: NDArray[Any]) -> list[str]:
        topics = self.taxonomy.topic_of[self.pins.subtopic[pin_index]]
        return [self.taxonomy.topic_names[topic] for topic in topics]

    def vectors(self, start: int = 0, stop: int | None = None) -> Floats:
        """Return the content vectors (unit norm) of the pins with index in [start, stop)."""
        stop = len(self.pins) if stop is None else stop
        blocks = list(content_vectors(self.config, self.taxonomy, self.pins, self._content, start, stop))
        return np.concatenate(blocks) if blocks else np.empty((0, self.config.content.dim), dtype=np.float32)

    def created_on(self, day: int) -> tuple[int, int]:
        """Return the index range of the pins created on a day; day 0 includes the pins that exist at the start."""
        first = 0 if day == 0 else int(np.searchsorted(self.pins.visible_day, day, side="right"))
        return first, int(np.searchsorted(self.pins.visible_day, day + 1, side="right"))

    # The simulation

    def sessions(self, day: int, chunk: int) -> Sessions:
        """Return the sessions whose actions arrive on a day: sessions of that day, and late ones of the days before."""
        users = self.users(chunk)
        parts = [
            draw_sessions(self.config, self.taxonomy, users, chunk=chunk, day=day - delay, delay_days=delay)
            for delay in range(min(day, MAX_DELAY_DAYS) + 1)
        ]
        return concat(parts)

    def impressions(self, day: int, chunk: int) -> tuple[Sessions, Impressions]:
        """Return the sessions whose actions arrive on a day, and every pin that was shown in them."""
        sessions, impressions, _ = self._play(day, chunk)
        return sessions, impressions

    def actions(self, day: int, chunk: int) -> Actions:
        """Return the true actions that arrive on a day: late ones are included, other defects are not."""
        sessions, impressions, rng = self._play(day, chunk)
        return collect_actions(
            self._site, self.users(chunk), sessions, impressions, start_s=self.config.start_s, rng=rng
        )

    def _play(self, day: int, chunk: int) -> tuple[Sessions, Impressions, np.random.Generator]:
        sessions = self.sessions(day, chunk)
        rng = open_stream(self.config.seed, Stream.ACTIONS, day, chunk)
        return sessions, simulate_impressions(self._site, self.users(chunk), sessions, rng), rng

    # The ground truth

    def interests(self, user_index: ArrayLike, ts_s: ArrayLike) -> tuple[Ints, Floats]:
        """Return the sub-topics [row, k] that interest the users at these times, and their probability as intent."""
        users = self.users_at(np.atleast_1d(user_index))
        times = np.broadcast_to(np.asarray(ts_s, dtype=np.float64), (len(users),))
        return current_interests(self.config, self.taxonomy, users, times)

    def engagement(
        self,
        user_index: ArrayLike,
        pin_index: ArrayLike,
        ts_s: ArrayLike,
        surface: Surface = "homefeed",
        *,
        intent: ArrayLike | None = None,
    ) -> Engagement:
        """Return the probabilities of what a user does with a pin that is shown, row by row (arguments are broadcast).

        Without `intent` (sub-topics), they are averaged over the intents that the user may have at that time. Times
        are epoch seconds. The probability that the surface shows the pin is not included.
        """
        user_index, pin, times = np.broadcast_arrays(
            np.atleast_1d(user_index), np.asarray(pin_index), np.asarray(ts_s, dtype=np.float64)
        )
        users = self.users_at(user_index)
        interest, share = current_interests(self.config, self.taxonomy, users, times)
        if intent is None:
            intents, weights = interest, share.astype(np.float64)
        else:
            intents = np.broadcast_to(np.asarray(intent), pin.shape)[:, None]
            weights = np.ones(intents.shape)

        subtopic, traits = self.pins.subtopic[pin], self.pins.traits[pin]
        lineage = self.taxonomy.lineage
        liked = behaviour.affinity(lineage[subtopic], lineage[interest], share)
        taste = behaviour.dot_rows(users.taste, self.pins.style[pin])
        of_pin = self._site.pin_utility[pin]
        on_surface = np.full(len(pin), SURFACES.index(surface))
        actions = np.zeros((len(pin), len(ACTION_TYPES)))
        long = {CLOSEUP: np.zeros(len(pin)), CLICK: np.zeros(len(pin))}
        for slot in range(intents.shape[1]):
            matched = behaviour.match(lineage[subtopic], lineage[intents[:, slot]])
            odds = behaviour.odds(of_pin, users.propensity, on_surface, matched, liked, taste).astype(np.float64)
            probability = weights[:, slot, None] * odds / (1 + odds.sum(axis=1, keepdims=True))
            actions += probability
            for action in long:
                codes = np.full(len(pin), action)
                mean_log = behaviour.log_duration(codes, traits, matched, taste)
                long[action] += probability[:, action] * behaviour.long_probability(action, mean_log)
        return Engagement(
            none=1 - actions.sum(axis=1),
            actions=actions,
            long_closeup=long[CLOSEUP] / actions[:, CLOSEUP],
            long_click=long[CLICK] / actions[:, CLICK],
        )
