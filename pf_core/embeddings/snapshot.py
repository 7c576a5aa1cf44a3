"""user_embedding_snapshot: the newest embedding of every user, as of each day (paper, section 3.6).

A day is the day before with the rows of user_embeddings[ds] on top: the newest row wins, no user is lost, and the cost
is that of the changed rows. On a day on which everyone was embedded (a new model, or a new start) it is those rows
alone; users of the day before who are not among them have no timeline any more and expire. Forgotten users are removed
in either case.

A day's digest covers what it was merged from, including the day before: no day is built on one that is out of date.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.embeddings.snapshot_bucket import MergeResult, MergeTask, merge_bucket
from pf_core.embeddings.tables import (
    Change,
    Norm,
    SnapshotContent,
    SnapshotInputs,
    SnapshotManifest,
    SnapshotState,
    SnapshotSummary,
    UserEmbeddingManifest,
    UserEmbeddingState,
    embedding_state,
    snapshot_state,
)
from pf_core.engine.base import Engine
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.progress import Progress, Throttle
from pf_core.storage.locks import relying_on

SAMPLED_USERS = 2048
"""Number of refreshed users sampled to measure how far embeddings moved."""


def read_snapshot(site: Site, ds: str, bucket: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a bucket's users as of ds; the order of the rows is not fixed."""
    return snapshot_state(site).open_bucket(ds, bucket).to_table(columns=None if columns is None else list(columns))


def merge_days(site: Site, days: Sequence[str], *, engine: Engine, progress: Progress) -> Iterator[SnapshotManifest]:
    """Merge the user_embeddings of ascending days, each into the day before; yield each published manifest."""
    state, deltas = snapshot_state(site), embedding_state(site)
    state.refuse_if_dropped(days, site.serving.retention_days)
    with state.writing(), relying_on(deltas.root, deltas.asset):
        forgotten = read_deletion_list(site)
        for ds in days:
            manifest = _merge_day(site, ds, engine, forgotten, progress, is_first=ds == days[0])
            counts = manifest["counts"]
            progress(
                f"user_embedding_snapshot {ds}: {counts['users']:,} users, {counts['refreshed']:,} refreshed, "
                f"{counts['new']:,} new, {counts['carried_over']:,} carried over, {counts['forgotten']:,} forgotten, "
                f"{counts['expired']:,} expired; {manifest['seconds']:.1f} s"
            )
            yield manifest
        state.retain(site.serving.retention_days, engine, progress)


def _merge_day(
    site: Site, ds: str, engine: Engine, forgotten: pa.Array, progress: Progress, *, is_first: bool
) -> SnapshotManifest:
    started = time.perf_counter()
    state, deltas = snapshot_state(site), embedding_state(site)
    delta = deltas.require(ds)
    is_whole = delta["mode"] == "everyone"
    base = _comparable(state, ds) if is_whole else _base(state, deltas, delta, is_first=is_first)
    tasks = _tasks(site, delta, base, forgotten)
    results, throttled = [], Throttle(progress)
    for result in engine.map_buckets(merge_bucket, tasks):
        results.append(result)
        throttled(f"user_embedding_snapshot {ds}: {len(results)} of {len(tasks)} buckets merged")
    results.sort(key=lambda result: result.bucket)
    inputs: SnapshotInputs = {
        "user_embeddings": delta["digest"],
        "previous": None if is_whole or base is None else base["digest"],
        "forgotten": digest_of({"user_ids": sorted(forgotten.to_pylist())}),
    }
    content: SnapshotContent = {
        "model_version": delta["model_version"],
        "embedding_dim": delta["embedding_dim"],
        "slices": delta["slices"],
        "built_from": "everyone" if is_whole else "previous day",
        "inputs": inputs,
        "digest": digest_of(inputs),
        **_summary(results),
        "seconds": time.perf_counter() - started,
    }
    return state.publish(ds, [result.version for result in results], content)


# What a day builds on


def _comparable(state: SnapshotState, ds: str) -> SnapshotManifest | None:
    """Return the manifest of the day before, if there is one to count new and expired users against."""
    previous = state.manifest(shift_ds(ds, -1))
    return previous if previous is not None and previous["num_buckets"] == state.num_buckets else None


def _base(
    state: SnapshotState, deltas: UserEmbeddingState, delta: UserEmbeddingManifest, *, is_first: bool
) -> SnapshotManifest:
    """Return the manifest of the day before; refuse if it is missing, out of date, or of another model."""
    ds, previous_ds = delta["ds"], shift_ds(delta["ds"], -1)
    both = f"{deltas.asset},{state.asset}"
    if state.manifest(previous_ds) is None:
        before = [day for day in deltas.days() if day < ds]
        whole = [day for day in before if (known := deltas.manifest(day)) is not None and known["mode"] == "everyone"]
        starts = [*whole, *(shift_ds(day, 1) for day in state.days() if day < ds)]
        command = materialize_command(both, ds, config={"everyone": True})
        if starts:
            command = materialize_command(state.asset, max(starts), until=ds)
        raise PipelineError(
            f"{state.asset} {ds} builds on {previous_ds}, which is missing", f"build the gap with: {command}"
        )
    base = state.require(previous_ds)
    stale_ds = _first_stale_day(state, deltas, previous_ds) if is_first else None  # this run merged the others
    if stale_ds is not None:
        raise PipelineError(
            f"{state.asset} {stale_ds}, on which {ds} builds, was merged from embeddings that have changed since",
            f"merge again from there with: {materialize_command(state.asset, stale_ds, until=ds)}",
        )
    if base["model_version"] != delta["model_version"]:
        raise PipelineError(
            f"{deltas.asset} {ds} has the day's active users by model {delta['model_version']}, but {state.asset} "
            f"{previous_ds} has model {base['model_version']}: vectors of two models are not comparable",
            f"embed {ds} again: {materialize_command(both, ds)}",
        )
    return base


def _first_stale_day(state: SnapshotState, deltas: UserEmbeddingState, last_ds: str) -> str | None:
    """Return the first day that `last_ds` builds on and that was not merged from the present partitions."""
    stale_ds, ds = None, last_ds
    while (merged := state.manifest(ds)) is not None:
        delta, previous, inputs = deltas.manifest(ds), state.manifest(shift_ds(ds, -1)), merged["inputs"]
        has_new_delta = delta is not None and delta["digest"] != inputs["user_embeddings"]
        has_new_base = previous is not None and inputs["previous"] not in (None, previous["digest"])
        if has_new_delta or has_new_base:
            stale_ds = ds
        if inputs["previous"] is None:
            break
        ds = shift_ds(ds, -1)
    return stale_ds


# Buckets


def _tasks(
    site: Site, delta: UserEmbeddingManifest, base: SnapshotManifest | None, forgotten: pa.Array
) -> list[MergeTask]:
    state, deltas = snapshot_state(site), embedding_state(site)
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    # A bucket is a hash of the user's id: a few whole buckets are as good a sample as a few users of each.
    num_sampled = min(
        state.num_buckets, math.ceil(SAMPLED_USERS * state.num_buckets / max(delta["counts"]["users"], 1))
    )
    has_same_model = base is not None and base["model_version"] == delta["model_version"]
    return [
        MergeTask(
            ds=delta["ds"],
            bucket=bucket,
            path=state.bucket_path(bucket),
            base_version=None if base is None else base["versions"][bucket],
            delta_path=deltas.bucket_path(bucket),
            delta_version=delta["versions"][bucket],
            model_version=delta["model_version"],
            is_whole=delta["mode"] == "everyone",
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
            sample_size=SAMPLED_USERS // num_sampled if has_same_model and bucket < num_sampled else 0,
            compact_after=site.serving.compact_after_fragments,
        )
        for bucket in range(state.num_buckets)
    ]


def _summary(results: Sequence[MergeResult]) -> SnapshotSummary:
    counts = {name: sum(result.counts[name] for result in results) for name in results[0].counts}
    num_rows = counts["new"] + counts["refreshed"]
    smallest, total, largest = np.array([result.norm for result in results]).T
    distance, cosine = (np.concatenate(parts) for parts in zip(*((r.distance, r.cosine) for r in results), strict=True))
    norm: Norm = {
        "min": float(smallest.min()),
        "mean": float(total.sum() / max(num_rows, 1)),
        "max": float(largest.max()),
    }
    change: Change | None = None
    if len(distance):
        quantiles = {f"p{share:02d}": float(np.percentile(cosine, share)) for share in (5, 50, 95)}
        change = {"sampled": len(distance), "mean_distance": float(distance.mean()), "cosine": quantiles}
    return {
        "counts": counts,
        "by_computed_ds": dict(sorted(sum((result.by_computed_ds for result in results), Counter[str]()).items())),
        "norm": norm if num_rows else None,
        "change": change,
        "buckets": [
            {"bucket": result.bucket, "version": result.version, **{str(name): n for name, n in result.counts.items()}}
            for result in results
        ],
    }
