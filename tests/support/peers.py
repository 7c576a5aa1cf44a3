"""Peers without their libraries, for tests: one answers, one has no lists, the others break."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pf_core.benchmark import run
from pf_core.benchmark.baselines import popularity
from pf_core.benchmark.log import BenchmarkLog
from pf_core.benchmark.ours import OurResult, our_lists
from pf_core.benchmark.peers.run import PeerResult

TUNED_ON: list[BenchmarkLog] = []
"""The logs on which peers were asked to choose their settings."""


def replace_peers(patch: pytest.MonkeyPatch) -> None:
    """Replace the peers and preset `paper`, whose steps take seconds, by answers that cost nothing."""
    TUNED_ON.clear()
    patch.setattr(run, "ensure_environment", lambda requirements, **options: Path("/nowhere/python"))
    patch.setattr(run, "run_peer", _run_peer)
    patch.setattr(run, "our_lists", _our_lists)


def _run_peer(name: str, log: BenchmarkLog, tuning_log: BenchmarkLog, **options: Any) -> PeerResult:
    TUNED_ON.append(tuning_log)
    if name == "ials":
        lists = popularity(log, last_days=3)
        return PeerResult(name=name, lists=lists, note="1 of 3 settings finished", settings={"factors": 8}, seconds=1.5)
    if name == "ease":
        return PeerResult(name=name, lists=None, note="ran out of its budget of 40 s (final)", seconds=40.0)
    raise ValueError(f"{name} broke")


def _our_lists(*arguments: Any, **options: Any) -> OurResult:
    if options["preset"] == "paper":
        raise MemoryError("too large")
    result = our_lists(*arguments, **options)
    return dataclasses.replace(result, note=f"{result.note} (tested)")
