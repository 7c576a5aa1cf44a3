"""Compute the records of one bucket of one day: the pure per-bucket function of `users.py`.

A record is the vector and the memory beside it, which a model computes (`records.py`), and the pins that the user has
seen (`histories.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.days import parse_ds
from pf_core.embeddings.day_plan import DayPlan
from pf_core.embeddings.histories import BucketOfTimelines, SeenPins, combined_hash, find_seen
from pf_core.embeddings.inference import EmbeddedRecords, UserSequences
from pf_core.embeddings.records import UserInputs, num_actions_read, read_inputs
from pf_core.embeddings.tables import UserCount
from pf_core.embeddings.vectors import column_of, matrix_of, record_fault
from pf_core.engine.daily_state import create_bucket, open_dataset
from pf_core.errors import PipelineError
from pf_core.hashing import combined
from pf_core.model.checkpoint import read_description
from pf_core.model.device import choose_device
from pf_core.pins.packed import open_pins
from pf_core.progress import Throttle, report
from pf_core.schemas import INPUT_HASH, TIMESTAMP, IdType, id_arrow_type, user_embeddings_schema
from pf_core.storage.files import read_parquet
from pf_core.timelines.build import StoredTimelines

REPORT_EVERY_S = 10.0

COMPUTED_COLUMNS = ("embedding", "memory_pin_id", "memory_increment")
"""What a model computes; the other columns of a record are read from the timeline."""


@dataclass(frozen=True, kw_only=True)
class EmbedTask:
    """What embedding a bucket needs; it carries no Site, so that no secret of the site file reaches a Spark task."""

    bucket: int
    path: Path
    """Lance dataset of the bucket."""
    version_before: int | None
    """Lance version of an earlier run of this day with this model."""
    actions: Path | None
    """File of the day's raw_actions; None if the bucket has none."""
    timelines: StoredTimelines
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
class EmbedResult:
    """Version and statistics of an embedded bucket."""

    bucket: int
    version: int
    vector_sum: np.ndarray
    """Sum of the bucket's embeddings."""
    counts: dict[UserCount, int]


def embed_bucket(task: EmbedTask) -> EmbedResult:
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
    return EmbedResult(
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


def _read_bucket(task: EmbedTask, active: pa.Array) -> tuple[UserInputs, SeenPins]:
    """Read the timelines of the users of the day; return the model's input, and the seen pins of the same users."""
    plan = task.plan
    source = BucketOfTimelines(
        stored=task.timelines,
        user_ids=active if plan.mode == "active" else None,
        forgotten=task.forgotten,
    )
    num_read = num_actions_read(read_description(plan.served.path))
    histories = source.read_newest(None if num_read is None else max(num_read, task.seen_size + 1))
    inputs = read_inputs(plan.served, choose_device(task.device), histories, open_pins(task.pins), task.pin_id_type)
    row = pc.index_in(inputs.sequences.user_ids, combined(histories.timelines["user_id"])).to_numpy()
    return inputs, find_seen(histories, task.seen_size).take(row)


def _active_users(task: EmbedTask) -> pa.Array:
    if task.actions is None:
        return pa.array([], id_arrow_type(task.user_id_type))
    user_ids = read_parquet(task.actions, columns=["user_id"])["user_id"].unique()
    return user_ids.filter(pc.invert(pc.is_in(user_ids, task.forgotten)))


def _records_before(
    task: EmbedTask, sequences: UserSequences, input_hash: np.ndarray
) -> tuple[pa.Table | None, np.ndarray]:
    """Return the records of an earlier run of the day, and for each user the row with the same input, -1 for none."""
    if task.version_before is None:
        return None, np.full(len(input_hash), -1)
    columns = ["user_id", INPUT_HASH.name, *COMPUTED_COLUMNS]
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
    task: EmbedTask,
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


def _reporter(task: EmbedTask, num_users: int) -> Callable[[int], None]:
    """Return a function that reports every few seconds how many users of the bucket are done."""
    throttled = Throttle(report, every_s=REPORT_EVERY_S)

    def report_progress(num_done: int) -> None:
        throttled(f"user_embeddings {task.plan.ds}, bucket {task.bucket}: {num_done:,} of {num_users:,} users embedded")

    return report_progress
