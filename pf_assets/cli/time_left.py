"""About how long the stages that are left will take: a guess from the size of the site, corrected by the stages so far.

The seconds are a formula for each asset, fitted to runs of the demo, Globo, MovieTweetings and KuaiRand on 2 cores. The
first stages show how fast this machine is in comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pf_assets.cli.stage import Stage
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.logs.partition import read_manifest
from pf_core.logs.readers import find_files
from pf_core.onboarding.forecast import ACTION_S, FIXED_S, PIN_S
from pf_core.pins.features import pin_state

BYTES_OF_ACTION = 40
"""Bytes of a row of a log, roughly, while nothing was read yet."""

ACTIONS_OF_PIN = 20

SLOWEST, FASTEST = 10.0, 0.2
"""Bounds of how much slower or faster than the formula this machine may be."""


@dataclass(frozen=True)
class Size:
    """What decides how long a site takes."""

    num_days: int
    num_actions: int
    num_pins: int


def size_of(site: Site, ds: str) -> Size:
    """Return the size of a site by what is stored of it, or else by its files."""
    days = ds_range(site.start_ds, ds)
    stored = [manifest["counts"]["kept"] for day in days if (manifest := read_manifest(site, day)) is not None]
    if stored:
        num_actions = round(sum(stored) * len(days) / len(stored))
    else:
        source = site.source.actions
        shown = days[-1] if source.is_dated else None
        num_bytes = sum(path.stat().st_size for path in find_files(source, site.log_root, shown))
        num_actions = num_bytes * (len(days) if source.is_dated else 1) // BYTES_OF_ACTION
    pins = pin_state(site).manifest(ds)
    num_pins = num_actions // ACTIONS_OF_PIN if pins is None else pins["counts"]["pins"]
    return Size(len(days), num_actions, num_pins)


def expected_seconds(size: Size) -> dict[str, float]:
    """Return how long each stage takes, roughly."""
    days, actions, pins = size.num_days, size.num_actions, size.num_pins
    training = FIXED_S + PIN_S * pins + ACTION_S * actions
    return {
        "raw_actions": 8 + 0.05 * days + 8e-6 * actions,
        "pin_features": 3 + 0.1 * days + 2e-5 * pins,
        "user_timelines": 3 + 0.15 * days + 4e-6 * actions,
        "training_set": 8 + 3e-6 * actions,
        "pinnerformer_model": training,
        "offline_evaluation": 15 + 2e-4 * pins,
        "refitted_model": training,
        "user_embeddings": 10 + 2e-6 * actions,
        "user_embedding_snapshot": 3,
        "pin_embeddings": 3 + 5e-5 * pins,
        "pin_index": 3 + 3e-4 * pins,
        "release": 5,
    }


def seconds_left(stages: Sequence[Stage], expected: Mapping[str, float]) -> float | None:
    """Return about how many seconds the stages that wait or run will take; None if none is left.

    A stage at work takes as long as its own amount says, or else what the formula says is left of it.
    """
    took = sum(stage.seconds for stage in stages if stage.state == "done")
    guessed = sum(expected.get(stage.name, 0.0) for stage in stages if stage.state == "done" and stage.seconds)
    factor = min(max(took / guessed, FASTEST), SLOWEST) if guessed else 1.0
    left, is_any = 0.0, False
    for stage in stages:
        guess = factor * expected.get(stage.name, 0.0)
        if stage.state == "waiting":
            left, is_any = left + guess, True
        elif stage.state == "running":
            by_rate = stage.units_left_s()
            left, is_any = left + (max(guess - stage.elapsed(), 1.0) if by_rate is None else by_rate), True
    return left if is_any else None
