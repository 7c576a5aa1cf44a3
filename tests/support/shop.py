"""A small shop: two crowds with pins of their own, in one CSV file, and a matrix of content vectors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pf_core.config.site import Site
from pf_core.days import ds_range

DAYS = ds_range("2026-01-01", "2026-01-12")

CUT_DS = "2026-01-09"
"""A quarter of the twelve days comes after it."""

NUM_USERS, NUM_PINS, HELD_OUT_SHARE, VECTOR_DIM = 80, 40, 0.2, 4

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
    """Write the log, and return the site that describes it; `changes` are keys of the site file.

    Every pin has a content vector, which shows its crowd, but pins whose name begins with "new" or "rare".
    """
    root.mkdir(parents=True, exist_ok=True)
    rows = shop_actions() if rows is None else rows
    lines = [f"{user},{pin},{ds}T{second // 3600:02d}:{second // 60 % 60:02d}:00Z\n" for user, pin, ds, second in rows]
    (root / "actions.csv").write_text("user,pin,at\n" + "".join(lines))
    pins = sorted({row[1] for row in rows if not row[1].startswith(("new", "rare"))} or {"p00"})
    crowd = np.array([1.0 if int(pin[1:]) % 2 else -1.0 for pin in pins])
    vectors = np.random.default_rng(4).normal(size=(len(pins), VECTOR_DIM)) * 0.3
    vectors[:, 0] += crowd
    np.save(root / "vectors.npy", vectors.astype(np.float32))
    np.save(root / "vector_ids.npy", np.array(pins))
    return Site.model_validate(shop_file(root) | changes)


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
            "pins": {"vectors": {"npy": "vectors.npy", "ids": "vector_ids.npy"}},
        },
        "timelines": {"num_buckets": 2},
        "engine": {"num_workers": 1, "memory_mb": 64},
        "training": {"preset": "tiny", "held_out_share": HELD_OUT_SHARE, "launch": {"num_workers": 0}},
    }


def without_vectors(root: Path, **training: Any) -> dict[str, Any]:
    """Return changes of the site file: no content vectors, and preset auto, with few steps."""
    file = shop_file(root)
    chosen = {"preset": "auto", "changes": {"optimizer": {"num_steps": 20}, "batch_users": 64, "evaluate_every": 5}}
    return {
        "source": {key: value for key, value in file["source"].items() if key != "pins"},
        "training": {**file["training"], **chosen, **training},
    }
