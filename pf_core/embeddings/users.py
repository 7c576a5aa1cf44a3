"""user_embeddings: the day's delta (paper, section 3.6), new records of the users who were active on the day.

A record is the vector, the memory beside it (`records.py`) and the pins that the user has seen (`histories.py`). On
some days everyone is embedded instead; `day_plan.py` decides. A partition is a function of user_timelines[ds],
pin_features[ds], the model, who is embedded, seen_size, and the deletion list. Running a day again embeds only the
users whose input changed and reuses the other vectors of the run before, which are equal to what the model would
compute. Nothing is published before every row is sound and enough of the active users have an embedding.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import parse_ds
from pf_core.embeddings.day_plan import DayPlan, plan_day, refuse_if_too_many, refuse_stale_days_before
from pf_core.embeddings.histories import BucketOfTimelines, SeenPins, combined_hash, find_seen
from pf_core.embeddings.inference import EmbeddedRecords, ServedModel, UserSequences
from pf_core.embeddings.records import UserInputs, num_actions_read, read_inputs, vector_dim, vector_slices
from pf_core.embeddings.tables import (
    UserCount,
    UserEmbeddingContent,
    UserEmbeddingInputs,
    UserEmbeddingManifest,
    embedding_state,
)
from pf_core.embeddings.vectors import column_of, matrix_of, record_fault
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import create_bucket, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, combined, digest_of
from pf_core.logs.partition import bucket_files, raw_digest
from pf_core.model.checkpoint import ModelDescription, read_description
from pf_core.model.device import choose_device
from pf_core.pins.features import PinManifest, content_name, pin_state
from pf_core.pins.packed import open_pins, pack_pins
from pf_core.progress import Progress, Throttle, report
from pf_core.schemas import INPUT_HASH, TIMESTAMP, IdType, id_arrow_type, user_embeddings_schema
from pf_core.storage.files import read_parquet
from pf_core.timelines.build import TimelineManifest, TimelineState, content_digest, timeline_state

REPORT_EVERY_S = 10.0


def embed_days(
    site: Site,
    days: Sequence[str],
    *,
    model_for: Callable[[str], ServedModel],
    everyone: bool,
    engine: Engine,
    forgotten: pa.Array,
    progress: Progress,
) -> Iterator[UserEmbeddingManifest]:
    """Embed the users of ascending days; yield each published manifest.

    `model_for` returns a day's model. With `everyone`, all users are embedded on the first of the days.
    """
    state = embedding_state(site)
    refuse_if_too_many(state, days, retention_days=site.serving.retention_days)
    with state.writing():
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


def _embed_day(
    site: Site, plan: DayPlan, engine: Engine, forgotten: pa.Array, progress: Progress
) -> UserEmbeddingManifest:
    started = time.perf_counter()
    ds, model_version, state = plan.ds, plan.served.model_version, embedding_state(site)
    timelines, pins = timeline_state(site).require(ds), pin_state(site).require(ds)
    _refuse_if_stale(site, timelines)
    description = _description(plan.served, pins)
    inputs: UserEmbeddingInputs = {
        "timelines": content_digest(timelines),
        "pin_features_version": content_name(pins),
        "model_version": model_version,
        "mode": plan.mode,
        "seen_size": site.serving.seen_size,
        "forgotten": digest_of({"users": sorted(forgotten.to_pylist())}),
    }
    tasks = _tasks(site, plan, pack_pins(site, pins, progress), forgotten, num_workers=engine.num_workers)
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


def _tasks(site: Site, plan: DayPlan, pins: Path, forgotten: pa.Array, *, num_workers: int) -> list["_BucketTask"]:
    state, files = embedding_state(site), bucket_files(site, plan.ds)
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
        _BucketTask(
            bucket=bucket,
            path=state.bucket_path(bucket),
            version_before=None if before is None else before["versions"][bucket],
            actions=files.get(bucket),
            timelines=timeline_state(site),
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


def _refuse_if_stale(site: Site, timelines: TimelineManifest) -> None:
    """Refuse timelines that were not built from the day's current raw_actions."""
    ds = timelines["ds"]
    if timelines["raw_digests"].get(ds) != raw_digest(site, ds):
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
    if description["feature_dim"] != pins["dim"]:
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


def _run(tasks: Sequence["_BucketTask"], engine: Engine, progress: Progress) -> Iterator["_BucketResult"]:
    throttled = Throttle(progress, every_s=REPORT_EVERY_S)
    num_users = 0
    for num_done, result in enumerate(engine.map_buckets(_embed_bucket, tasks, progress), 1):
        num_users += result.counts["users"]
        if num_done < len(tasks):
            throttled(f"user_embeddings {tasks[0].plan.ds}: {num_done} of {len(tasks)} buckets, {num_users:,} users")
        yield result


# Buckets


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    """What embedding a bucket needs; it carries no Site, so that no secret of the site file reaches a Spark task."""

    bucket: int
    path: Path
    """Lance dataset of the bucket."""
    version_before: int | None
    """Lance version of an earlier run of this day with this model."""
    actions: Path | None
    """File of the day's raw_actions; None if the bucket has none."""
    timelines: TimelineState
    pins: Path
    """Folder of the packed pins."""
    forgotten: pa.Array
    user_id_type: IdType
    pin_id_type: IdType
    seen_size: int
    device: Literal["auto", "cpu", "cuda"]
    num_threads: int
    plan: DayPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class _BucketResult:
    bucket: int
    version: int
    vector_sum: np.ndarray
    """Sum of the bucket's embeddings."""
    counts: dict[UserCount, int]


def _embed_bucket(task: _BucketTask) -> _BucketResult:
    plan = task.plan
    active = _active_users(task)
    inputs, seen = _read_bucket(task, active)
    sequences = inputs.sequences
    input_hash = combined_hash(inputs.hashes(), seen.hashes())
    before, position = _records_before(task, sequences, input_hash)
    changed = np.flatnonzero(position < 0)
    embedded = inputs.embed(changed, num_threads=task.num_threads, progress=_reporter(task, len(changed)))
    rows = _rows(task, sequences, _merged(embedded, changed, before, position), seen, input_hash)
    fault = record_fault(rows, model_version=plan.served.model_version)
    if fault is not None:
        raise PipelineError(f"user_embeddings {plan.ds}, bucket {task.bucket}: {fault}; nothing was published")
    has_embedding = pc.is_in(active, rows["user_id"].combine_chunks())
    return _BucketResult(
        bucket=task.bucket,
        version=create_bucket(task.path, rows).version,
        vector_sum=matrix_of(rows["embedding"]).sum(axis=0, dtype=np.float64),
        counts={
            "users": rows.num_rows,
            "active_users": len(active),
            "active_users_with_embedding": pc.sum(has_embedding).as_py() or 0,
            "embedded": len(changed),
            "reused": rows.num_rows - len(changed),
            "without_actions": sequences.num_without_actions,
            "actions": int(sequences.lengths[changed].sum()),
            "padded_actions": embedded.num_padded,
            "no_feature": sequences.num_no_feature,
            "unknown_word": sequences.num_unknown_word,
        },
    )


def _read_bucket(task: _BucketTask, active: pa.Array) -> tuple[UserInputs, SeenPins]:
    """Read the timelines of the users of the day; return the model's input, and the seen pins of the same users."""
    plan = task.plan
    source = BucketOfTimelines(
        state=task.timelines,
        ds=plan.ds,
        bucket=task.bucket,
        user_ids=active if plan.mode == "active" else None,
        forgotten=task.forgotten,
    )
    num_read = num_actions_read(read_description(plan.served.path))
    histories = source.read_newest(None if num_read is None else max(num_read, task.seen_size + 1))
    inputs = read_inputs(plan.served, choose_device(task.device), histories, open_pins(task.pins), task.pin_id_type)
    row = pc.index_in(inputs.sequences.user_ids, combined(histories.timelines["user_id"])).to_numpy()
    return inputs, find_seen(histories, task.seen_size).take(row)


def _active_users(task: _BucketTask) -> pa.Array:
    if task.actions is None:
        return pa.array([], id_arrow_type(task.user_id_type))
    user_ids = read_parquet(task.actions, columns=["user_id"])["user_id"].unique()
    return user_ids.filter(pc.invert(pc.is_in(user_ids, task.forgotten)))


RECORD_COLUMNS = ("embedding", "memory_pin_id", "memory_increment")
"""What a model computes; the other columns of a record are read from the timeline."""


def _records_before(
    task: _BucketTask, sequences: UserSequences, input_hash: np.ndarray
) -> tuple[pa.Table | None, np.ndarray]:
    """Return the records of an earlier run of the day, and for each user the row with the same input, -1 for none."""
    if task.version_before is None:
        return None, np.full(len(input_hash), -1)
    columns = ["user_id", INPUT_HASH.name, *RECORD_COLUMNS]
    before = open_dataset(task.path, version=task.version_before).to_table(columns=columns)
    position = pc.index_in(sequences.user_ids, combined(before["user_id"])).fill_null(-1).to_numpy().copy()
    rows = np.flatnonzero(position >= 0)
    is_same = before[INPUT_HASH.name].to_numpy()[position[rows]] == input_hash[rows]
    position[rows[~is_same]] = -1
    return before, position


def _merged(
    embedded: EmbeddedRecords, changed: np.ndarray, before: pa.Table | None, position: np.ndarray
) -> dict[str, pa.Array]:
    """Return the columns of all users: from `embedded` for the changed rows, from `before` for the others."""
    new = {
        "embedding": column_of(embedded.vectors_ND),
        "memory_pin_id": embedded.memory_pin_id,
        "memory_increment": embedded.memory_increment,
    }
    if before is None:
        return new
    row = len(changed) + position
    row[changed] = np.arange(len(changed))
    return {
        name: pa.concat_arrays([column, combined(before[name]).cast(column.type)]).take(pa.array(row))
        for name, column in new.items()
    }


def _rows(
    task: _BucketTask,
    sequences: UserSequences,
    computed: dict[str, pa.Array],
    seen: SeenPins,
    input_hash: np.ndarray,
) -> pa.Table:
    num_users, dim = len(input_hash), computed["embedding"].type.list_size
    schema = user_embeddings_schema(task.user_id_type, task.pin_id_type, dim).append(INPUT_HASH)
    columns = {
        "user_id": sequences.user_ids,
        **computed,
        "model_version": pa.repeat(task.plan.served.model_version, num_users),
        "computed_ds": pa.repeat(pa.scalar(parse_ds(task.plan.ds), pa.date32()), num_users),
        "last_action_ts": pa.array(sequences.last_action_us).cast(TIMESTAMP),
        "num_actions": pa.array(sequences.lengths.astype(np.int32)),
        "seen_pin_id": seen.pin_ids,
        "seen_is_complete": pa.array(seen.is_complete),
        INPUT_HASH.name: pa.array(input_hash),
    }
    return pa.table(columns, schema=schema).sort_by("user_id")


def _reporter(task: _BucketTask, num_users: int) -> Callable[[int], None]:
    """Return a function that reports every few seconds how many users of the bucket are done."""
    throttled = Throttle(report, every_s=REPORT_EVERY_S)

    def report_progress(num_done: int) -> None:
        throttled(f"user_embeddings {task.plan.ds}, bucket {task.bucket}: {num_done:,} of {num_users:,} users embedded")

    return report_progress
