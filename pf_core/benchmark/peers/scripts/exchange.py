"""Files that a peer's script reads and writes, and the matrices that peers learn from.

FOLDER has train.parquet and past.parquet (user, pin, day, is_positive; in the order of user and time; `day` counts from
the cut, -1 is the last day before it) and meta.json (num_pins, num_train_users, num_test_users, list_length). Training
users and test users are numbered apart, each from 0.

A script writes (user, pin, score), best first within a user, and a JSON file with the same name beside it.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

OUT_OF_MEMORY = 3
"""Exit code of a script that needs more memory than it may have."""

OWN_DECAY_DAYS = 120


@dataclass(frozen=True)
class Actions:
    user: np.ndarray
    pin: np.ndarray
    day: np.ndarray
    is_positive: np.ndarray

    def chosen(self, actions: str) -> "Actions":
        """Positive actions only (`positive`), or all of them (`all`)."""
        if actions == "all":
            return self
        if actions != "positive":
            raise ValueError(f"actions is 'positive' or 'all', not {actions!r}")
        mask = self.is_positive
        return Actions(self.user[mask], self.pin[mask], self.day[mask], self.is_positive[mask])


@dataclass(frozen=True)
class Log:
    num_pins: int
    num_train_users: int
    num_test_users: int
    list_length: int
    train: Actions
    past: Actions

    def list_lengths(self) -> np.ndarray:
        """Pins that each test user's list needs: list_length more than the user has seen."""
        pairs = np.unique(self.past.user.astype(np.int64) * self.num_pins + self.past.pin)
        return self.list_length + np.bincount(pairs // self.num_pins, minlength=self.num_test_users)


def read_log(folder: Path) -> Log:
    def actions(name: str) -> Actions:
        table = pq.read_table(folder / name)
        return Actions(*(table[column].to_numpy() for column in ("user", "pin", "day", "is_positive")))

    meta = json.loads((folder / "meta.json").read_text())
    return Log(
        num_pins=meta["num_pins"],
        num_train_users=meta["num_train_users"],
        num_test_users=meta["num_test_users"],
        list_length=meta["list_length"],
        train=actions("train.parquet"),
        past=actions("past.parquet"),
    )


def weight_matrix(actions: Actions, num_users: int, num_pins: int, weights: str) -> sparse.csr_array:
    """Users x pins: for a pin with n actions of the user 1 (`binary`), log(1 + n) (`log_count`) or n (`count`)."""
    shape = (num_users, num_pins)
    matrix = sparse.coo_array((np.ones(len(actions.pin)), (actions.user, actions.pin)), shape=shape).tocsr()
    matrix.sum_duplicates()
    if weights == "binary":
        matrix.data[:] = 1.0
    elif weights == "log_count":
        matrix.data = np.log1p(matrix.data)
    elif weights != "count":
        raise ValueError(f"weights is 'binary', 'log_count' or 'count', not {weights!r}")
    return matrix


def own_frequency(past: Actions, num_users: int, num_pins: int) -> sparse.csr_array:
    """Users x pins: sum over the user's own actions of exp(-age / 120 days)."""
    shape = (num_users, num_pins)
    decayed = np.exp(past.day / OWN_DECAY_DAYS)
    matrix = sparse.coo_array((decayed, (past.user, past.pin)), shape=shape).tocsr()
    matrix.sum_duplicates()
    return matrix


def user_batches(num_users: int, num_pins: int, *, max_scores: int = 20_000_000) -> Iterator[slice]:
    """Slices of users whose scores for all pins are at most `max_scores` numbers."""
    step = max(1, max_scores // max(1, num_pins))
    for start in range(0, num_users, step):
        yield slice(start, min(start + step, num_users))


@dataclass
class Lists:
    """Ranked lists, user by user in ascending order."""

    users: list[np.ndarray] = field(default_factory=list)
    pins: list[np.ndarray] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)

    def add(self, user: int, pin: np.ndarray, score: np.ndarray, length: int) -> None:
        """Add the `length` best pins of a user; equal scores in the order of pins."""
        if len(pin) > length:
            # Everything that ties with the last one is kept until the sort decides.
            best = score >= np.partition(score, len(score) - length)[len(score) - length]
            pin, score = pin[best], score[best]
        order = np.lexsort((pin, -score))[:length]
        self.users.append(np.full(len(order), user, np.int32))
        self.pins.append(pin[order].astype(np.int32))
        self.scores.append(score[order].astype(np.float64))

    def table(self) -> pa.Table:
        empty = [np.empty(0)]
        return pa.table(
            {
                "user": np.concatenate(self.users or empty).astype(np.int32),
                "pin": np.concatenate(self.pins or empty).astype(np.int32),
                "score": np.concatenate(self.scores or empty).astype(np.float64),
            }
        )


@dataclass(frozen=True)
class Task:
    """What a script is asked to do."""

    log: Log
    settings: dict[str, Any]
    budget_s: float
    started_at: float
    """time.time() at the start of the process: importing a library may take many seconds."""
    out: Path
    keep_factors: bool

    def seconds_left(self) -> float:
        return self.budget_s - (time.time() - self.started_at)


Rank = Callable[[Task], tuple[Lists, str]]
"""A peer: lists for the test users, and a sentence on what was limited (or an empty string)."""


def main(rank: Rank, libraries: tuple[str, ...] = ()) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--started-at", type=float, default=time.time(), help="Unix time from which the budget counts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--keep-factors", action="store_true", help="write factors.npz beside the lists")
    arguments = parser.parse_args()
    limit = int(arguments.memory_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # on Linux: private memory that can be written
    try:
        log = read_log(arguments.folder)
        task = Task(
            log=log,
            settings=arguments.settings,
            budget_s=arguments.budget_s,
            started_at=arguments.started_at,
            out=arguments.out,
            keep_factors=arguments.keep_factors,
        )
        lists, note = rank(task)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):  # what torch raises
            raise
        print(f"needs more than {arguments.memory_gb:g} GB of memory: {error}", file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)
    pq.write_table(lists.table(), arguments.out)
    report = {
        "note": note,
        "seconds": time.time() - arguments.started_at,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "versions": {name: version(name) for name in ("numpy", "scipy", *libraries)},
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(report))
