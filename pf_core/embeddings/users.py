"""user_embeddings: the day's delta (paper, section 3.6), new records of the users who were active on the day.

`users_bucket.py` computes the records of a bucket. On some days everyone is embedded instead; `day_plan.py` decides. A
partition is a function of user_timelines[ds], pin_features[ds], the model, who is embedded, seen_size, and the deletion
list. Running a day again embeds only the users whose input changed and reuses the other vectors of the run before,
which are equal to what the model would compute. Nothing is published before every row is sound and enough of the active
users have an embedding.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.embeddings.day_plan import DayPlan, plan_day, refuse_if_too_many, refuse_stale_days_before
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.records import vector_dim, vector_slices
from pf_core.embeddings.tables import (
    UserCount,
    UserEmbeddingContent,
    UserEmbeddingInputs,
    UserEmbeddingManifest,
    embedding_state,
)
from pf_core.embeddings.users_bucket import REPORT_EVERY_S, EmbedResult, EmbedTask, embed_bucket
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.log_day import LogDay, relying_on_log_day
from pf_core.model.checkpoint import ModelDescription, read_description, reads_vectors_of
from pf_core.pins.features import PinManifest, content_name, pin_state
from pf_core.pins.packed import pack_pins
from pf_core.progress import Progress, Throttle
from pf_core.timelines.build import TimelineManifest, content_digest, stored_timelines, timeline_state


def embed_days(
    site: Site,
    days: Sequence[str],
    *,
    model_for: Callable[[str], ServedModel],
    everyone: bool,
    engine: Engine,
    progress: Progress,
) -> Iterator[UserEmbeddingManifest]:
    """Embed the users of ascending days; yield each published manifest.

    `model_for` returns a day's model. With `everyone`, all users are embedded on the first of the days.
    """
    state = embedding_state(site)
    refuse_if_too_many(state, days, retention_days=site.serving.retention_days)
    with state.writing():
        forgotten = read_deletion_list(site)
        for ds in days:
            if ds == days[0]:
                refuse_stale_days_before(site, state, ds)
            plan = plan_day(
                state,
                ds,
                model_for(ds),
                everyone=everyone and ds == days[0],
                seen_size=site.serving.seen_size,
            )
            if plan.mode == "everyone":
                progress(f"user_embeddings {ds}: everyone is embedded, because {plan.reason}")
            yield _embed_day(site, plan, engine, forgotten, progress)
        state.retain(site.serving.retention_days, engine, progress)


@dataclass(frozen=True, kw_only=True)
class _DayInputs:
    """What a day is embedded from, opened once."""

    timelines: StateDay[TimelineManifest]
    pins: StateDay[PinManifest]
    log_day: LogDay
    forgotten: pa.Array


def _embed_day(
    site: Site, plan: DayPlan, engine: Engine, forgotten: pa.Array, progress: Progress
) -> UserEmbeddingManifest:
    with (
        timeline_state(site).held(plan.ds) as timelines,
        pin_state(site).held(plan.ds) as pins,
        relying_on_log_day(site, plan.ds) as log_day,
    ):
        given = _DayInputs(timelines=timelines, pins=pins, log_day=log_day, forgotten=forgotten)
        return _embed_and_publish(site, plan, given, engine, progress)


def _embed_and_publish(
    site: Site, plan: DayPlan, given: _DayInputs, engine: Engine, progress: Progress
) -> UserEmbeddingManifest:
    started = time.perf_counter()
    ds, model_version, state = plan.ds, plan.served.model_version, embedding_state(site)
    timelines, pins = given.timelines.manifest, given.pins.manifest
    _refuse_if_stale(site, timelines, given.log_day)
    description = _description(plan.served, pins)
    inputs: UserEmbeddingInputs = {
        "timelines": content_digest(timelines),
        "pin_features_version": content_name(pins),
        "model_version": model_version,
        "mode": plan.mode,
        "seen_size": site.serving.seen_size,
        "forgotten": digest_of({"users": sorted(given.forgotten.to_pylist())}),
    }
    tasks = _tasks(site, plan, given, pack_pins(site, pins, progress), num_workers=engine.num_workers)
    results = sorted(_run(tasks, engine, progress), key=lambda result: result.bucket)
    counts = {name: sum(result.counts[name] for result in results) for name in results[0].counts}
    _refuse_if_few(plan, counts, min_coverage=site.serving.quality.min_active_coverage)
    if timeline_state(site).require(ds) != timelines:
        raise PipelineError(
            f"user_timelines {ds} was rebuilt while its users were embedded",
            f"re-run: {materialize_command('user_embeddings', ds)}",
        )
    total = np.sum([result.vector_sum for result in results], axis=0)
    content: UserEmbeddingContent = {
        "model_version": model_version,
        "embedding_dim": vector_dim(description),
        "slices": vector_slices(description),
        "mode": plan.mode,
        "reason": plan.reason,
        "inputs": inputs,
        "digest": digest_of(inputs),
        "counts": counts,
        "mean_vector": (total / counts["users"]).tolist() if counts["users"] else None,
        "seconds": time.perf_counter() - started,
    }
    manifest = state.publish(ds, [result.version for result in results], content)
    progress(
        f"user_embeddings {ds}: {counts['embedded']:,} users embedded in {manifest['seconds']:.1f} s, "
        f"{counts['reused']:,} unchanged, {counts['without_actions']:,} without an action that model {model_version} "
        "can read"
    )
    return manifest


def _tasks(site: Site, plan: DayPlan, given: _DayInputs, pins: Path, *, num_workers: int) -> list[EmbedTask]:
    state, files, forgotten = embedding_state(site), given.log_day.files, given.forgotten
    before = state.manifest(plan.ds)
    if before is not None and not (
        before["model_version"] == plan.served.model_version
        and before["num_buckets"] == state.num_buckets
        and state.is_readable(before)
    ):
        before = None  # nothing of it can be reused
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    num_threads = max(1, (os.cpu_count() or 1) // min(num_workers, state.num_buckets))
    return [
        EmbedTask(
            bucket=bucket,
            path=state.bucket_path(bucket),
            version_before=None if before is None else before["versions"][bucket],
            actions=files.get(bucket),
            timelines=stored_timelines(given.timelines, bucket),
            pins=pins,
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
            user_id_type=site.source.actions.user_id.type,
            pin_id_type=site.source.pins.pin_id.type,
            seen_size=site.serving.seen_size,
            device=site.serving.device,
            num_threads=num_threads,
            plan=plan,
        )
        for bucket in range(state.num_buckets)
    ]


def _refuse_if_stale(site: Site, timelines: TimelineManifest, log_day: LogDay) -> None:
    """Refuse timelines that were not built from the day's current raw_actions."""
    ds = timelines["ds"]
    if timelines["raw_digests"].get(ds) != log_day.digest:
        newest_ds = timeline_state(site).days()[-1]
        raise PipelineError(
            f"raw_actions {ds} changed after user_timelines {ds} was built",
            f"rebuild the days from there with: {materialize_command('user_timelines', ds, until=newest_ds)}",
        )


def _description(served: ServedModel, pins: PinManifest) -> ModelDescription:
    """Return the model's description; refuse a model that reads features of another dimension."""
    if not (served.path / "model.json").is_file():
        raise PipelineError(
            f"no model {served.model_version} in {served.path}",
            f"train one with: {materialize_command('pinnerformer_model')}",
        )
    description = read_description(served.path)
    if not reads_vectors_of(description, pins["dim"]):
        raise PipelineError(
            f"model {served.model_version} reads pin features of {description['feature_dim']} numbers, pin_features "
            f"{pins['ds']} has {pins['dim']}",
            "train and promote a model on these features, or change them back",
        )
    return description


def _refuse_if_few(plan: DayPlan, counts: dict[UserCount, int], *, min_coverage: float) -> None:
    """Refuse a day on which too few of the active users, or of everyone if all are embedded, have an embedding."""
    num_users, num_covered = counts["active_users"], counts["active_users_with_embedding"]
    if plan.mode == "everyone" and num_covered >= min_coverage * num_users:
        num_users, num_covered = counts["users"] + counts["without_actions"], counts["users"]
    if num_covered < min_coverage * num_users:
        raise PipelineError(
            f"only {num_covered:,} of the {num_users:,} users who were to be embedded on {plan.ds} have an action that "
            f"model {plan.served.model_version} can read; serving.quality.min_active_coverage requires "
            f"{min_coverage:.0%}. {counts['no_feature']:,} actions are on pins without a feature, and "
            f"{counts['unknown_word']:,} have an action type or a surface that the model does not know. Nothing was "
            "published",
            "fix pin_features or the source's mapping, or promote a model that knows these words",
        )


def _run(tasks: Sequence[EmbedTask], engine: Engine, progress: Progress) -> Iterator[EmbedResult]:
    throttled = Throttle(progress, every_s=REPORT_EVERY_S)
    num_users = 0
    for num_done, result in enumerate(engine.map_buckets(embed_bucket, tasks, progress), 1):
        num_users += result.counts["users"]
        if num_done < len(tasks):
            throttled(f"user_embeddings {tasks[0].plan.ds}: {num_done} of {len(tasks)} buckets, {num_users:,} users")
        yield result
