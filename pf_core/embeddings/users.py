"""user_embeddings: the day's delta (paper, section 3.6), new vectors of the users who were active on the day.

Everybody with a timeline is embedded instead on the first day, whenever the model changes (vectors of two models
cannot be compared), and when a run asks for it. A partition is a function of user_timelines[ds], pin_features[ds],
the model, who is embedded, and the deletion list. Running a day again embeds only the users whose input changed: the
others' vectors are taken over from the run before, and are the ones that would come out. Nothing is published before
every row is sound and enough of the active users have an embedding.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import parse_ds
from pf_core.embeddings.day_plan import DayPlan, plan_day, refuse_if_too_many, refuse_stale_days_before
from pf_core.embeddings.inference import ServedModel, UserSequences, cut_sequences, embed, hash_inputs, open_model
from pf_core.embeddings.tables import embedding_state
from pf_core.embeddings.vectors import column_of, find_fault, matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import Manifest, create_bucket, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.logs.partition import bucket_files, raw_digest
from pf_core.model.checkpoint import ModelDescription
from pf_core.model.device import choose_device
from pf_core.pins.features import content_name, pin_state
from pf_core.pins.packed import PackedPins, open_pins, pack_pins
from pf_core.progress import report
from pf_core.schemas import INPUT_HASH, TIMESTAMP, id_arrow_type, user_embeddings_schema
from pf_core.storage.files import read_json, read_parquet
from pf_core.timelines.build import content_digest, read_bucket, timeline_state

SAY_EVERY_S = 10.0


def embed_days(
    site: Site,
    days: Sequence[str],
    *,
    model_for: Callable[[str], ServedModel],
    everyone: bool,
    engine: Engine,
    forgotten: pa.Array,
    progress: Callable[[str], None],
) -> Iterator[Manifest]:
    """Embed the users of ascending days; yields each published manifest.

    `model_for` names a day's model. With `everyone`, all users are embedded on the first of the days.
    """
    state = embedding_state(site)
    refuse_if_too_many(site, state, days)
    with state.writing():
        for ds in days:
            if ds == days[0]:
                refuse_stale_days_before(site, state, ds)
            plan = plan_day(state, ds, model_for(ds), is_asked_for=everyone and ds == days[0])
            if plan.mode == "everyone":
                progress(f"user_embeddings {ds}: everybody is embedded, because {plan.reason}")
            yield _embed_day(site, plan, engine, forgotten, progress)
        state.retain(site.serving.retention_days, engine, progress)


def _embed_day(
    site: Site, plan: DayPlan, engine: Engine, forgotten: pa.Array, progress: Callable[[str], None]
) -> Manifest:
    started = time.perf_counter()
    ds, model_version, state = plan.ds, plan.served.model_version, embedding_state(site)
    timelines, pins = timeline_state(site).require(ds), pin_state(site).require(ds)
    _refuse_if_stale(site, timelines)
    embedding_dim = _embedding_dim(plan.served, pins)
    inputs = {
        "timelines": content_digest(timelines),
        "pin_features_version": content_name(pins),
        "model_version": model_version,
        "mode": plan.mode,
        "forgotten": digest_of({"users": sorted(forgotten.to_pylist())}),
    }
    tasks = _tasks(site, plan, pack_pins(site, pins, progress), forgotten, num_workers=engine.num_workers)
    results = sorted(_run(tasks, engine, progress), key=lambda result: int(result["bucket"]))
    counts: dict[str, int] = {name: sum(result["counts"][name] for result in results) for name in results[0]["counts"]}
    _refuse_if_few(site, plan, counts)
    if timeline_state(site).require(ds) != timelines:
        raise PipelineError(
            f"user_timelines {ds} was built anew meanwhile; re-run: {materialize_command('user_embeddings', ds)}"
        )
    total = np.sum([result["sum"] for result in results], axis=0)
    manifest = state.publish(
        ds,
        [result["version"] for result in results],
        {
            "model_version": model_version,
            "embedding_dim": embedding_dim,
            "mode": plan.mode,
            "reason": plan.reason,
            "inputs": inputs,
            "digest": digest_of(inputs),
            "counts": counts,
            "mean_vector": (total / counts["users"]).tolist() if counts["users"] else None,
            "seconds": time.perf_counter() - started,
        },
    )
    progress(
        f"user_embeddings {ds}: {counts['embedded']:,} users embedded in {manifest['seconds']:.1f} s, "
        f"{counts['reused']:,} unchanged, {counts['without_actions']:,} without an action that model {model_version} "
        "can read"
    )
    return manifest


def _tasks(site: Site, plan: DayPlan, pins: Path, forgotten: pa.Array, *, num_workers: int) -> list["_BucketTask"]:
    state, files = embedding_state(site), bucket_files(site, plan.ds)
    before = state.manifest(plan.ds)
    if before is not None and (
        before["model_version"] != plan.served.model_version or before["num_buckets"] != state.num_buckets
    ):
        before = None  # nothing of it can be taken over
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    num_threads = max(1, (os.cpu_count() or 1) // min(num_workers, state.num_buckets))
    return [
        _BucketTask(
            bucket=bucket,
            path=state.bucket_path(bucket),
            version_before=None if before is None else before["versions"][bucket],
            actions=files.get(bucket),
            pins=pins,
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
            num_threads=num_threads,
            plan=plan,
            site=site,
        )
        for bucket in range(state.num_buckets)
    ]


def _refuse_if_stale(site: Site, timelines: Manifest) -> None:
    ds = timelines["ds"]
    if timelines["raw_digests"].get(ds) != raw_digest(site, ds):
        newest_ds = timeline_state(site).days()[-1]
        raise PipelineError(
            f"raw_actions {ds} changed after user_timelines {ds} was built. Build it and what follows from it anew: "
            f"dagster asset materialize --select user_timelines --partition-range {ds}...{newest_ds} "
            "-m pf_assets.definitions"
        )


def _embedding_dim(served: ServedModel, pins: Manifest) -> int:
    """The model's; refuses one that reads other features than there are."""
    if not (served.path / "model.json").is_file():
        raise PipelineError(f"no model {served.model_version} in {served.path}: materialize pinnerformer_model first")
    description = read_json(served.path / "model.json")
    if description["feature_dim"] != pins["dim"]:
        raise PipelineError(
            f"model {served.model_version} reads pin features of {description['feature_dim']} numbers, pin_features "
            f"{pins['ds']} has {pins['dim']}: train and promote a model on these features, or change them back"
        )
    return int(description["model"]["embedding_dim"])


def _refuse_if_few(site: Site, plan: DayPlan, counts: dict[str, int]) -> None:
    """Of the active users and, when everybody is embedded, of everybody."""
    num_users, num_covered = counts["active_users"], counts["active_users_with_embedding"]
    least = site.serving.quality.min_active_coverage
    if plan.mode == "everyone" and num_covered >= least * num_users:
        num_users, num_covered = counts["users"] + counts["without_actions"], counts["users"]
    if num_covered < least * num_users:
        raise PipelineError(
            f"only {num_covered:,} of the {num_users:,} users who were to be embedded on {plan.ds} have an action that "
            f"model {plan.served.model_version} can read; serving.quality.min_active_coverage asks for "
            f"{site.serving.quality.min_active_coverage:.0%}. Of the actions, {counts['no_feature']:,} are on pins "
            f"without a feature and {counts['unknown_word']:,} have an action type or a surface that the model does "
            "not know: mend pin_features or the source's mapping, or promote a model that knows them. Nothing was "
            "published"
        )


def _run(tasks: Sequence["_BucketTask"], engine: Engine, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    said = time.monotonic()
    num_users = 0
    for num_done, result in enumerate(engine.map_buckets(_embed_bucket, tasks, progress), 1):
        num_users += result["counts"]["users"]
        if time.monotonic() - said > SAY_EVERY_S and num_done < len(tasks):
            said = time.monotonic()
            progress(f"user_embeddings {tasks[0].plan.ds}: {num_done} of {len(tasks)} buckets, {num_users:,} users")
        yield result


# Buckets


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    bucket: int
    path: Path
    version_before: int | None
    """Of an earlier run of this day with this model."""
    actions: Path | None
    """The day's log."""
    pins: Path
    forgotten: pa.Array
    num_threads: int
    plan: DayPlan
    site: Site


def _embed_bucket(task: _BucketTask) -> dict[str, Any]:
    site, plan = task.site, task.plan
    active = _active_users(task)
    model, description = open_model(plan.served, choose_device(site.serving.device))
    pins = open_pins(task.pins)
    sequences = _read_sequences(task, active, pins, description)
    input_hash = hash_inputs(sequences, pins)
    vectors, is_reused = _vectors_before(task, sequences, input_hash, model.config.embedding_dim)
    changed = np.flatnonzero(~is_reused)
    vectors[changed], num_padded = embed(
        model, sequences, changed, pins, num_threads=task.num_threads, progress=_Reporter(task, len(changed))
    )
    rows = _rows(task, sequences, vectors, input_hash)
    fault = find_fault(rows, key="user_id", model_version=plan.served.model_version)
    if fault is not None:
        raise PipelineError(f"user_embeddings {plan.ds}, bucket {task.bucket}: {fault}; nothing was published")
    has_embedding = pc.is_in(active, rows["user_id"].combine_chunks())
    return {
        "bucket": task.bucket,
        "version": create_bucket(task.path, rows).version,
        "sum": matrix_of(rows["embedding"]).sum(axis=0, dtype=np.float64),
        "counts": {
            "users": rows.num_rows,
            "active_users": len(active),
            "active_users_with_embedding": pc.sum(has_embedding).as_py() or 0,
            "embedded": len(changed),
            "reused": rows.num_rows - len(changed),
            "without_actions": sequences.num_without_actions,
            "actions": int(sequences.lengths[changed].sum()),
            "padded_actions": num_padded,
            "no_feature": sequences.num_no_feature,
            "unknown_word": sequences.num_unknown_word,
        },
    }


def _read_sequences(
    task: _BucketTask, active: pa.Array, pins: PackedPins, description: ModelDescription
) -> UserSequences:
    """Of each user the newest actions, as many as the model reads; of those with unusable ones among them, all."""
    user_ids, length = active if task.plan.mode == "active" else None, description["model"]["sequence_length"]
    timelines = read_bucket(task.site, task.plan.ds, task.bucket, user_ids=user_ids, newest=length)
    timelines = timelines.filter(pc.invert(pc.is_in(timelines["user_id"], task.forgotten)))
    sequences = cut_sequences(timelines, pins, description)
    may_have_more = pc.equal(pc.list_value_length(timelines["ts"]), length)
    is_full = pc.is_in(timelines["user_id"], sequences.user_ids.filter(pa.array(sequences.lengths == length)))
    has_older = pc.and_not(may_have_more, is_full)
    if not pc.any(has_older).as_py():
        return sequences
    older_ids = timelines["user_id"].filter(has_older).combine_chunks()
    whole = read_bucket(task.site, task.plan.ds, task.bucket, user_ids=older_ids)
    together = pa.concat_tables([timelines.filter(pc.invert(has_older)), whole])
    return cut_sequences(together, pins, description)


def _active_users(task: _BucketTask) -> pa.Array:
    if task.actions is None:
        return pa.array([], id_arrow_type(task.site.source.actions.user_id.type))
    user_ids = read_parquet(task.actions, columns=["user_id"])["user_id"].unique()
    return user_ids.filter(pc.invert(pc.is_in(user_ids, task.forgotten)))


def _vectors_before(
    task: _BucketTask, sequences: UserSequences, input_hash: np.ndarray, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Room for everybody's vector, with those filled in that an earlier run made of the same input; and which."""
    vectors, is_reused = np.zeros((len(input_hash), dim), np.float16), np.zeros(len(input_hash), bool)
    if task.version_before is not None:
        columns = ["user_id", INPUT_HASH.name, "embedding"]
        before = open_dataset(task.path, version=task.version_before).to_table(columns=columns)
        position = pc.index_in(sequences.user_ids, before["user_id"].combine_chunks()).fill_null(-1).to_numpy()
        rows = np.flatnonzero(position >= 0)
        rows = rows[before[INPUT_HASH.name].to_numpy()[position[rows]] == input_hash[rows]]
        is_reused[rows] = True
        vectors[rows] = matrix_of(before["embedding"])[position[rows]]
    return vectors, is_reused


def _rows(task: _BucketTask, sequences: UserSequences, vectors: np.ndarray, input_hash: np.ndarray) -> pa.Table:
    num_users = len(input_hash)
    schema = user_embeddings_schema(task.site.source.actions.user_id.type, vectors.shape[1]).append(INPUT_HASH)
    columns = {
        "user_id": sequences.user_ids,
        "embedding": column_of(vectors),
        "model_version": pa.repeat(task.plan.served.model_version, num_users),
        "computed_ds": pa.repeat(pa.scalar(parse_ds(task.plan.ds), pa.date32()), num_users),
        "last_action_ts": pa.array(sequences.last_action_us).cast(TIMESTAMP),
        "num_actions": pa.array(sequences.lengths.astype(np.int32)),
        INPUT_HASH.name: pa.array(input_hash),
    }
    return pa.table(columns, schema=schema).sort_by("user_id")


class _Reporter:
    """Says every few seconds how far a bucket has come."""

    def __init__(self, task: _BucketTask, num_users: int) -> None:
        self._said = time.monotonic()
        self._of = f"of {num_users:,} users embedded"
        self._where = f"user_embeddings {task.plan.ds}, bucket {task.bucket}"

    def __call__(self, num_done: int) -> None:
        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            report(f"{self._where}: {num_done:,} {self._of}")
