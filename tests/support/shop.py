"""A small shop: two crowds with pins of their own, in one CSV file, and a matrix of content vectors."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pf_core.config.site import Site
from pf_core.days import ds_range

DAYS = ds_range("2026-01-01", "2026-01-12")

CUT_DS = "2026-01-09"
"""A quarter of the twelve days comes after it."""

NUM_USERS, NUM_PINS, HELD_OUT_SHARE = 80, 40, 0.2

DIM = 4

Row = tuple[int, str, str, int]
"""User, pin, day, second of the day."""


def shop_actions() -> list[Row]:
    rng = np.random.default_rng(3)
    rows: list[Row] = []
    for user in range(NUM_USERS):
        for ds in DAYS:
            if rng.random() < 0.6:
                pins = rng.integers(NUM_PINS // 2, size=3) * 2 + user % 2
                rows += [(user, f"p{pin:02d}", ds, 3600 * hour) for hour, pin in enumerate(pins.tolist())]
    return rows


def write_shop(root: Path, rows: Sequence[Row] | None = None, **changes: Any) -> Site:
    """Write the log, and return the site that describes it; `changes` are keys of the site file."""
    root.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{user},{pin},{ds}T{second // 3600:02d}:{second // 60 % 60:02d}:00Z\n"
        for user, pin, ds, second in (shop_actions() if rows is None else rows)
    ]
    (root / "actions.csv").write_text("user,pin,at\n" + "".join(lines))
    write_vectors(root, {pin for _, pin, _, _ in (shop_actions() if rows is None else rows)})
    return Site.model_validate(shop_file(root) | changes)


def write_vectors(root: Path, pins: set[str]) -> None:
    """Write vectors of the pins that are numbered, such as p07: near for pins of one crowd; others have none."""
    numbered = sorted(pin for pin in pins if re.fullmatch(r"[a-z]\d+", pin))
    numbers = [int(pin[1:]) for pin in numbered]
    noise = [np.random.default_rng([ord(pin[0]), int(pin[1:])]).normal(size=DIM) for pin in numbered]
    vectors = np.eye(2, DIM)[np.array(numbers, int) % 2] + 0.3 * np.reshape(noise, (-1, DIM))
    np.save(root / "vectors.npy", vectors.astype(np.float32))
    np.save(root / "ids.npy", np.array(numbered, "U8"))


def shop_file(root: Path) -> dict[str, Any]:
    """Return the content of the site file."""
    return {
        "name": "shop",
        "start_ds": DAYS[0],
        "end_ds": DAYS[-1],
        "data_dir": str(root / "data"),
        "source": {
            "root": str(root),
            "actions": {
                "path": "actions.csv",
                "user_id": "user",
                "pin_id": {"column": "pin", "type": "string"},
                "ts": {"column": "at", "unit": "iso"},
                "action_type": {"constant": "buy"},
            },
            "pins": {"vectors": {"npy": "vectors.npy", "ids": "ids.npy"}},
        },
        "timelines": {"num_buckets": 2},
        "engine": {"num_workers": 1, "memory_mb": 64},
        "training": {"preset": "tiny", "held_out_share": HELD_OUT_SHARE, "launch": {"num_workers": 0}},
    }
