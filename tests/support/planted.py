"""A training set in which the right answer is known: every user has one interest and engages with its pins alone.

An interest's pins share a direction of the content space. Pin popularity is equal, so that popularity retrieves by
chance, and a model that reads its users' pins retrieves their interest.
"""

import json
from pathlib import Path

import numpy as np

from pf_core.layouts import marked

NUM_INTERESTS = 8
PINS_PER_INTEREST = 25
FEATURE_DIM = 16
START_US = 1_767_225_600_000_000
DAY_US = 86_400_000_000
NUM_DAYS = 60


def write_planted_set(path: Path, *, num_users: int = 240, num_held_out: int = 60, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    num_pins = NUM_INTERESTS * PINS_PER_INTEREST
    interest_of_pin = np.arange(num_pins) % NUM_INTERESTS
    direction = np.linalg.qr(rng.normal(size=(FEATURE_DIM, FEATURE_DIM)))[0][:NUM_INTERESTS]
    feature = direction[interest_of_pin] + 0.15 * rng.normal(size=(num_pins, FEATURE_DIM))
    _save(
        path / "pins",
        feature=feature.astype(np.float32),
        has_feature=np.ones(num_pins, bool),
        candidates=np.arange(num_pins),
        interest=interest_of_pin.astype(np.int32),
    )
    for split, num in (("train", num_users), ("held_out", num_held_out)):
        length = rng.integers(20, 40, num)
        offsets = np.concatenate([[0], np.cumsum(length)])
        interest = np.repeat(rng.integers(NUM_INTERESTS, size=num), length)
        ts = [START_US + np.sort(rng.integers(NUM_DAYS * DAY_US, size=size)) for size in length]
        _save(
            path / split,
            offsets=offsets,
            pin=(interest + NUM_INTERESTS * rng.integers(PINS_PER_INTEREST, size=offsets[-1])).astype(np.int32),
            ts=np.concatenate(ts),
            action_type=rng.integers(3, size=offsets[-1]).astype(np.int16),
            surface=np.zeros(offsets[-1], np.int16),
            duration=rng.exponential(20, offsets[-1]).astype(np.float32),
            is_positive=rng.random(offsets[-1]) < 0.5,
        )
    manifest = {
        "cut_ds": "2026-03-01",
        "cut_us": START_US + NUM_DAYS * DAY_US,
        "time_origin_us": START_US,
        "vocabularies": {"action_type": ["click", "closeup", "repin"], "surface": ["homefeed"]},
        "fingerprint": f"planted-{seed}",
        **marked("training_set"),
    }
    (path / "training_set.json").write_text(json.dumps(manifest))
    return path


def _save(folder: Path, **arrays: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
