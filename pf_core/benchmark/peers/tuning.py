"""The peers, the settings that each may try, and the equal budget within which it chooses one of them.

Every peer has a fixed list of settings, most promising first, of which a budget tries the same number. The better of
two settings has the higher recall@10 (all positives) on a log of training users before an earlier cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pf_core.errors import PipelineError

Level = Literal["quick", "default", "full"]

Settings = dict[str, Any]
"""JSON values that a script reads."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every peer may use on a log. Installing libraries is not counted: it happens once."""

    num_settings: int
    """Number of settings that are tried at most."""
    seconds: float
    """Time for trying settings and for the final run together."""
    memory_gb: float = 8.0
    num_threads: int = 2
    max_order: int = 20_000
    """Largest order of a dense matrix that EASE inverts in the final run; the time grows with its cube."""

    @property
    def tuning_s(self) -> float:
        """Time for trying settings: the final run has at least as much."""
        return self.seconds / 2


BUDGETS: Mapping[Level, Budget] = {
    "quick": Budget(num_settings=3, seconds=40, max_order=8_000),
    "default": Budget(num_settings=8, seconds=180),
    "full": Budget(num_settings=12, seconds=400),
}

TUNING_MAX_ORDER = 4_000
"""Largest order of EASE's dense matrix while settings are tried."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    label: str
    script: str
    family: str
    """Name of the requirements file of its environment."""
    settings: tuple[Settings, ...]
    """Most promising first."""
    levels: tuple[Level, ...] = ("quick", "default", "full")
    is_single_vector: bool = False
    """Whether its score is an inner product of a vector of the user and one of the pin."""
    tuning_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that make trying cheaper; the final run takes the budget's instead."""


def _knn() -> tuple[Settings, ...]:
    rows = [
        ("positive", "bm25", "log_count", 100, 10.0, True),
        ("positive", "bm25", "count", 100, 10.0, True),
        ("positive", "none", "binary", 100, 10.0, True),
        ("positive", "none", "count", 100, 100.0, True),
        ("positive", "bm25", "log_count", 20, 10.0, True),
        ("positive", "bm25", "binary", 500, 100.0, True),
        ("all", "bm25", "log_count", 100, 10.0, True),
        ("positive", "none", "binary", 100, 10.0, False),
        ("positive", "bm25", "log_count", 500, 0.0, True),
        ("positive", "none", "binary", 20, 0.0, True),
        ("positive", "bm25", "binary", 100, 10.0, False),
        ("positive", "none", "log_count", 500, 100.0, True),
    ]
    names = ("actions", "weighting", "weights", "num_neighbours", "shrinkage", "keep_self")
    return tuple(dict(zip(names, row, strict=True)) for row in rows)


def _ease() -> tuple[Settings, ...]:
    rows = [
        ("positive", "log_count", 300.0),
        ("positive", "binary", 300.0),
        ("positive", "log_count", 1000.0),
        ("positive", "binary", 100.0),
        ("positive", "log_count", 100.0),
        ("positive", "binary", 1000.0),
        ("all", "log_count", 300.0),
        ("positive", "log_count", 3000.0),
        ("positive", "binary", 3000.0),
        ("positive", "binary", 30.0),
        ("all", "binary", 300.0),
        ("positive", "log_count", 30.0),
    ]
    return tuple(dict(zip(("actions", "weights", "ridge"), row, strict=True)) for row in rows)


def _ease_own() -> tuple[Settings, ...]:
    rows = [
        ("log_count", 300.0, 1.0),
        ("binary", 300.0, 0.3),
        ("log_count", 300.0, 3.0),
        ("binary", 300.0, 1.0),
        ("binary", 1000.0, 0.1),
        ("log_count", 1000.0, 1.0),
        ("binary", 100.0, 0.3),
        ("log_count", 100.0, 1.0),
        ("log_count", 1000.0, 0.3),
        ("binary", 1000.0, 1.0),
        ("binary", 300.0, 0.03),
        ("log_count", 300.0, 10.0),
    ]
    names = ("weights", "ridge", "own_weight")
    return tuple({"actions": "positive", **dict(zip(names, row, strict=True))} for row in rows)


def _ials() -> tuple[Settings, ...]:
    rows = [
        ("count", 128, 0.3, 3.0),
        ("log_count", 128, 1.0, 3.0),
        ("log_count", 64, 10.0, 10.0),
        ("count", 256, 0.3, 3.0),
        ("binary", 64, 1.0, 1.0),
        ("binary", 128, 10.0, 10.0),
        ("log_count", 256, 0.3, 1.0),
        ("count", 64, 0.3, 3.0),
        ("log_count", 128, 10.0, 100.0),
        ("binary", 32, 10.0, 1.0),
        ("count", 128, 1.0, 10.0),
        ("log_count", 256, 3.0, 30.0),
    ]
    names = ("weights", "factors", "alpha", "regularization")
    return tuple({"actions": "positive", "iterations": 15, **dict(zip(names, row, strict=True))} for row in rows)


def _sasrec() -> tuple[Settings, ...]:
    common = {
        "actions": "positive",
        "n_blocks": 2,
        "n_heads": 2,
        "dropout": 0.2,
        "n_negatives": 128,
        "batch_size": 64,
        "epochs": 100,
    }
    rows = [
        (64, 50, 1e-3),
        (128, 50, 1e-3),
        (64, 50, 3e-3),
        (64, 100, 1e-3),
        (128, 100, 1e-3),
        (32, 50, 3e-3),
        (128, 50, 3e-4),
        (64, 20, 1e-3),
        (128, 20, 3e-3),
        (32, 100, 1e-3),
        (256, 50, 1e-3),
        (64, 200, 1e-3),
    ]
    names = ("n_factors", "session_max_len", "lr")
    return tuple({**common, **dict(zip(names, row, strict=True))} for row in rows)


PEERS: Mapping[str, Peer] = {
    "item_knn": Peer(label="item-kNN", script="item_knn.py", family="implicit", settings=_knn()),
    "ease": Peer(
        label="EASE",
        script="ease.py",
        family="implicit",
        settings=_ease(),
        tuning_overrides={"max_order": TUNING_MAX_ORDER},
    ),
    "ease_own": Peer(
        label="EASE + own frequency",
        script="ease.py",
        family="implicit",
        settings=_ease_own(),
        tuning_overrides={"max_order": TUNING_MAX_ORDER},
    ),
    "ials": Peer(label="iALS (implicit)", script="ials.py", family="implicit", settings=_ials(), is_single_vector=True),
    "sasrec": Peer(
        label="SASRec (RecTools)",
        script="rectools_sasrec.py",
        family="rectools",
        settings=_sasrec(),
        levels=("full",),
        is_single_vector=True,
    ),
    "flat_sasrec": Peer(
        label="FlatSASRec (RecTools)",
        script="flat_sasrec.py",
        family="rectools",
        settings=_sasrec(),
        levels=("full",),
        is_single_vector=True,
    ),
}


def peers_of(level: Level, only: Sequence[str] = ()) -> list[str]:
    """Names of the peers that a benchmark of this level runs; with `only` exactly these, whatever the level."""
    unknown = [name for name in only if name not in PEERS]
    if unknown:
        raise PipelineError(f"no peer {unknown[0]!r}", f"choose among {', '.join(PEERS)}")
    return [name for name, peer in PEERS.items() if (name in only if only else level in peer.levels)]
