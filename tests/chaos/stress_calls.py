"""What runs at once in the stress test, and what its readers see: each thing with what it says that it is made of."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.embeddings.checks import judge_embeddings, judge_one_model, judge_pin_embeddings, judge_users_kept
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.engine.daily_state import StateDay
from pf_core.engine.local import LocalEngine
from pf_core.logs.log_day import open_log_day
from pf_core.operations.inspect import newest_actions
from pf_core.operations.repair import plan_repair
from pf_core.operations.status import asset_statuses
from pf_core.pins.features import pin_state
from pf_core.serving.client import Release, Serving
from pf_core.serving.export import export_embeddings
from pf_core.serving.index import PinIndex
from pf_core.storage.files import remove_tree
from pf_core.timelines.build import build_timelines, content_digest, stored_timelines, timeline_state
from pf_core.timelines.checks import audit_day
from tests.chaos.chaos_site import AGAIN, DAYS, assert_one_model, digest_of, open_site, sorted_rows
from tests.support.daily import NUM_USERS

Seen = dict[str, list[Any]]
"""By what was read, its digest followed by what it says that it is made of."""


def observe(root: Path) -> Seen:
    """Read the day AGAIN of every asset, and the current release, as they are now."""
    site = open_site(root)
    readers: dict[str, Callable[[Site], list[Any]]] = {
        "raw_actions": _raw_actions,
        "pin_features": _pin_features,
        "user_timelines": _timelines,
        "user_embeddings": _user_embeddings,
        "user_embedding_snapshot": _snapshot,
        "pin_embeddings": _pin_embeddings,
        "release": lambda site: seen_of_release(Serving(site).release()),
    }
    return {name: reader(site) for name, reader in readers.items()}


def _raw_actions(site: Site) -> list[Any]:
    """A partition that is published again removes the files of the one before: readers may have to look again."""
    for _ in range(20):
        day = open_log_day(site, AGAIN)
        try:
            return [
                digest_of([pq.read_table(day.files[bucket]).to_pylist() for bucket in sorted(day.files)]),
                day.digest,
            ]
        except FileNotFoundError:
            time.sleep(0.01)
    raise AssertionError("raw_actions was replaced 20 times while it was read")


def _pin_features(site: Site) -> list[Any]:
    with pin_state(site).held(AGAIN) as day:
        return [digest_of(sorted_rows(day.open_bucket(0).to_table(), "pin_id")), day.manifest["raw_digests"][AGAIN]]


def _timelines(site: Site) -> list[Any]:
    with timeline_state(site).held(AGAIN) as day:
        buckets = [stored_timelines(day, bucket).read().to_pylist() for bucket in range(day.state.num_buckets)]
        return [digest_of(buckets), day.manifest["raw_digests"][AGAIN], content_digest(day.manifest)]


def _user_embeddings(site: Site) -> list[Any]:
    with embedding_state(site).held(AGAIN) as day:
        return [_rows(day, "user_id"), day.manifest["model_version"], day.manifest["inputs"]["timelines"]]


def _snapshot(site: Site) -> list[Any]:
    with snapshot_state(site).held(AGAIN) as day:
        return [_rows(day, "user_id"), day.manifest["model_version"]]


def _pin_embeddings(site: Site) -> list[Any]:
    with pin_embedding_state(site).held(AGAIN) as day:
        return [_rows(day, "pin_id"), day.manifest["model_version"]]


def _rows(day: "StateDay[Any]", key: str) -> str:
    tables = [sorted_rows(dataset.to_table(), key) for dataset in day.buckets()]
    assert_one_model(tables, day.manifest["model_version"], day.state.asset)
    return digest_of(tables)


def seen_of_release(release: Release) -> list[Any]:
    """The users with their vectors and memory, and the pins, of one release, with its day and its model."""
    found, index = release.look_up(list(range(NUM_USERS))), release.index
    assert isinstance(index, PinIndex)
    assert int(found.found_N.sum()) == release.manifest["counts"]["users"]
    users = digest_of([None if value is None else bytes(value) for value in found.values])
    pins = digest_of([index.pin_ids.to_pylist(), index.vectors(np.arange(len(index))).tobytes()])
    assert release.recommend(int(np.flatnonzero(found.found_N)[0]), k=5)
    return [users, pins, digest_of(release.popular(k=100)), release.manifest["ds"], release.manifest["model_version"]]


def serve(root: Path, seconds: float) -> list[list[Any]]:
    """Read as a service does, with one client, for some seconds; return everything that was seen, and how often."""
    serving, until = Serving(open_site(root)), time.monotonic() + seconds
    seen: dict[str, list[Any]] = {}
    while time.monotonic() < until:
        found = seen_of_release(serving.release())
        seen.setdefault(repr(found), [found, 0])[1] += 1
        time.sleep(0.01)
    return list(seen.values())


# Commands


def command(root: Path, name: str) -> None:
    """Do what a command or a check does, on the day AGAIN."""
    COMMANDS[name](open_site(root))


def _export(site: Site) -> None:
    out = Path(site.data_dir).parent / "aside" / f"out-{uuid.uuid4().hex}"
    out.parent.mkdir(exist_ok=True)
    export_embeddings(site, "users", out, ds=AGAIN, progress=lambda _: None)
    assert len(set(pq.read_table(out)["model_version"].to_pylist())) == 1
    remove_tree(out)


def _rebuild(site: Site) -> None:
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        for _ in build_timelines(site, [AGAIN], engine=engine, rebuild=True, progress=lambda _: None):
            pass


def _checks(site: Site) -> None:
    """Whether they pass depends on what ran before; here they have to read what is there."""
    for judge in (judge_embeddings, judge_one_model, judge_users_kept, judge_pin_embeddings):
        judge(site, AGAIN)
    audit_day(site, AGAIN)


COMMANDS: dict[str, Callable[[Site], Any]] = {
    "export": _export,
    "rebuild": _rebuild,
    "checks": _checks,
    "status": asset_statuses,
    "plan a repair": lambda site: plan_repair(site, since=DAYS[2]),
    "newest actions": lambda site: newest_actions(site, AGAIN, 5, 10),
}

CALLS: dict[str, Callable[..., Any]] = {"observe": observe, "serve": serve, "command": command}
