"""Configuration of a world. Equal configurations give the same bytes, and have the same `fingerprint`.

The constants of human behaviour (what a match is worth, how long a click lasts) are in `behaviour.py`: they are
the engagement model.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, timedelta
from typing import Any

GENERATOR_VERSION = 1
"""Part of the fingerprint: raise it with every change that gives other bytes for the same configuration."""


@dataclass(frozen=True, kw_only=True)
class ContentConfig:
    """The expected norm of each part of a pin's content vector, before the whole vector is normalised.

    A real content vector describes far more than what people engage with. `nuisance` is variance of low rank
    (photographic look, text overlay) that no user cares about, `noise` is isotropic; together they outweigh
    the three levels of interest, so that the nearest pins of a pin are not simply those of its sub-topic.
    `traits` is small: PinSage aggregates engagement, so a pin's vector shows a little of its appeal, link
    richness, saveability and gaze.
    """

    dim: int = 64
    category: float = 0.5
    topic: float = 0.6
    subtopic: float = 0.5
    style: float = 0.45
    traits: float = 0.4
    nuisance: float = 1.2
    noise: float = 0.5
    num_styles: int = 6
    num_nuisances: int = 12

    def __post_init__(self) -> None:
        if min(self.num_styles, self.num_nuisances) < 1:
            raise ValueError("a content vector needs at least one style and one nuisance direction")
        if self.dim < self.num_styles + self.num_nuisances + 4:
            raise ValueError(
                f"dim={self.dim} is too small for {self.num_styles} styles, {self.num_nuisances} nuisances and 4 traits"
            )
        for part in ("category", "topic", "subtopic", "style", "traits", "nuisance", "noise"):
            if getattr(self, part) < 0:
                raise ValueError(f"content part {part} must not be negative")


@dataclass(frozen=True, kw_only=True)
class DefectConfig:
    """Rates of the log's defects, as shares of the true rows.

    Defects add rows (duplicates, unknown events, malformed rows), remove a dwell time or delay a whole session
    (a phone that was offline). They never change or lose a true row, so that a perfect reader could undo them.
    """

    duplicate: float = 0.005
    late_one_day: float = 0.004
    late_two_days: float = 0.001
    unknown_event: float = 0.001
    missing_dwell: float = 0.02
    malformed: float = 0.0001

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) <= 0.5:
                raise ValueError(f"defect rate {f.name} must be between 0 and 0.5, not {getattr(self, f.name)}")


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Everything that decides a world; `seed` chooses one of the worlds with these properties."""

    num_users: int
    num_pins: int
    num_days: int
    seed: int = 0
    start_ds: str = "2026-01-01"

    num_categories: int = 24
    num_topics: int = 350
    num_subtopics: int = 700

    initial_pin_share: float = 0.6
    candidate_share: float = 0.85
    num_rotations: int = 12
    fresh_days: int = 7

    initial_user_share: float = 0.65
    sessions_per_day: float = 0.28
    sessions_sigma: float = 1.25
    max_lasting_interests: int = 10
    project_gap_days: float = 18.0
    num_current_interests: int = 10

    users_per_chunk: int = 8192
    content: ContentConfig = field(default_factory=ContentConfig)
    dirt: DefectConfig = field(default_factory=DefectConfig)  # the name is part of the fingerprint and of world.json

    def __post_init__(self) -> None:
        date.fromisoformat(self.start_ds)
        for name in (
            "num_users num_days num_categories num_rotations fresh_days users_per_chunk "
            "max_lasting_interests num_current_interests"
        ).split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("sessions_per_day", "sessions_sigma", "project_gap_days"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("initial_pin_share", "candidate_share", "initial_user_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        if not self.num_categories <= self.num_topics <= self.num_subtopics:
            raise ValueError("every category needs a topic, and every topic a sub-topic")
        if self.num_initial_pins < self.num_subtopics:
            raise ValueError(
                f"{self.num_initial_pins} initial pins leave some of {self.num_subtopics} sub-topics empty"
            )

    @property
    def num_initial_pins(self) -> int:
        return round(self.num_pins * self.initial_pin_share)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_users // self.users_per_chunk)

    @property
    def dates(self) -> list[str]:
        """Every `ds` of the world, ascending."""
        start = date.fromisoformat(self.start_ds)
        return [(start + timedelta(days=day)).isoformat() for day in range(self.num_days)]

    @property
    def start_s(self) -> int:
        """Start of the first day, in epoch seconds."""
        return (date.fromisoformat(self.start_ds) - date(1970, 1, 1)).days * 86_400

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as in world.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "WorldConfig":
        return cls(
            **{
                **values,
                "content": ContentConfig(**values.get("content", {})),
                "dirt": DefectConfig(**values.get("dirt", {})),
            }
        )

    def fingerprint(self) -> str:
        """Return a hash of the configuration and of the generator's version."""
        canonical = json.dumps({"version": GENERATOR_VERSION, **self.to_dict()}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def ending_by(config: WorldConfig, last_ds: str) -> WorldConfig:
    """Return the same world as late as it can be without a day after `last_ds`.

    It is moved by whole weeks, so that weekends stay weekends: no random number changes, and its last day is at most
    six days before `last_ds`.
    """
    days = (date.fromisoformat(last_ds) - date.fromisoformat(config.dates[-1])).days
    start = date.fromisoformat(config.start_ds) + timedelta(weeks=days // 7)
    return replace(config, start_ds=start.isoformat())


def tiny(*, seed: int = 0, num_users: int = 400, num_days: int = 21) -> WorldConfig:
    """A world for tests: a few topics, written in seconds."""
    return WorldConfig(
        seed=seed,
        num_users=num_users,
        num_pins=2_000,
        num_days=num_days,
        num_categories=6,
        num_topics=20,
        num_subtopics=60,
        num_rotations=3,
        users_per_chunk=150,
        content=ContentConfig(dim=32),
    )


def demo(*, seed: int = 0) -> WorldConfig:
    """The demo's world, which fits a laptop: about 3 million actions of 10,000 users in 90 days.

    These are the days of its published figures; `pf demo` moves them to the newest ones.
    """
    return WorldConfig(seed=seed, num_users=10_000, num_pins=50_000, num_days=90, users_per_chunk=5_000)


def experiments(*, seed: int = 11) -> WorldConfig:
    """The demo's world with three times its users and four times its pins, for narrower confidence intervals.

    Nothing was tuned on its seed.
    """
    return WorldConfig(seed=seed, num_users=30_000, num_pins=200_000, num_days=90, users_per_chunk=5_000)


def large(*, num_users: int, num_days: int, num_pins: int = 1_000_000, seed: int = 0) -> WorldConfig:
    """A world of any size. Memory holds the pins (without vectors) and one chunk of users per worker."""
    return WorldConfig(seed=seed, num_users=num_users, num_pins=num_pins, num_days=num_days, num_subtopics=2_800)
