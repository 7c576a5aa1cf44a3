"""Merge one bucket of one day into user_embedding_snapshot: the pure per-bucket function of `snapshot.py`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.embeddings.tables import SnapshotCount
from pf_core.embeddings.vectors import matrix_of, norms_of, record_fault
from pf_core.engine.daily_state import (
    ROW_ADDRESS,
    create_bucket,
    is_one_of,
    open_dataset,
    replace_rows,
    stream_batches,
)
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of
from pf_core.schemas import INPUT_HASH

SAMPLING_HASHES = 65_521

MAX_DEAD_SHARE = 0.1
"""Compact a bucket when it has more deleted rows than this share of its remaining ones: 10 % of deleted rows, spread
evenly, double the scan time."""

ID_COLUMNS = ["user_id", "computed_ds"]


@dataclass(frozen=True, kw_only=True)
class MergeTask:
    """What merging a bucket needs."""

    ds: str
    bucket: int
    path: Path
    """Lance dataset of the bucket of the snapshot."""
    base_version: int | None
    """Lance version of the day before, if there is one."""
    delta_path: Path
    """Lance dataset of the bucket of user_embeddings."""
    delta_version: int
    model_version: str
    is_whole: bool
    """Whether everyone was embedded on the day."""
    forgotten: pa.Array
    sample_size: int
    """Number of refreshed users whose old and new vectors are compared."""
    compact_after: int


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """Version and statistics of a merged bucket."""

    bucket: int
    version: int
    counts: dict[SnapshotCount, int]
    by_computed_ds: Counter[str]
    norm: np.ndarray
    """Smallest norm, sum of the norms and largest norm of the new embeddings."""
    distance: np.ndarray
    """Distance between the old and the new vector of each sampled user."""
    cosine: np.ndarray
    """Cosine between the old and the new vector of each sampled user."""


@dataclass(kw_only=True)
class _Delta:
    """A stream of the day's rows of a bucket: checked, without forgotten users; keeps their ids and norms.

    A fault ends the stream. It is raised afterwards, because Lance would turn an error within a stream into its own.
    """

    task: MergeTask
    fault: str | None = None
    ids: list[pa.Table] = field(default_factory=list)
    norms: list[np.ndarray] = field(default_factory=list)

    def stream(self) -> pa.RecordBatchReader:
        dataset = open_dataset(self.task.delta_path, version=self.task.delta_version)
        schema = dataset.schema.remove(dataset.schema.get_field_index(INPUT_HASH.name))
        return pa.RecordBatchReader.from_batches(schema, self._checked(stream_batches(dataset, schema.names)))

    def _checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.table(batch)
            if len(self.task.forgotten):
                rows = rows.filter(pa.array(~_is_in(rows["user_id"], self.task.forgotten)))
            norm = norms_of(rows["embedding"])
            self.fault = record_fault(rows, model_version=self.task.model_version, norms=norm)
            if self.fault is not None:
                return
            # A copy: a column that came from Lance keeps its whole batch in memory.
            self.ids.append(rows.select(ID_COLUMNS).take(pa.array(np.arange(rows.num_rows))))
            self.norms.append(norm)
            yield from rows.to_batches()


def merge_bucket(task: MergeTask) -> MergeResult:
    delta = _Delta(task=task)
    reader = delta.stream()
    base = None if task.base_version is None else open_dataset(task.path, version=task.base_version)
    nobody = reader.schema.empty_table().select(ID_COLUMNS)
    known = nobody if base is None else base.to_table(columns=ID_COLUMNS, with_row_address=True)
    taken_in = create_bucket(task.path, reader) if task.is_whole else reader.read_all()
    _refuse_if(task, delta.fault)
    new = pa.concat_tables([nobody, *delta.ids])
    _refuse_if(task, "a user_id has two rows" if len(new["user_id"].unique()) != new.num_rows else None)
    is_forgotten = _is_in(known["user_id"], task.forgotten)
    is_refreshed = _is_in(known["user_id"], new["user_id"])
    is_left = ~is_refreshed & ~is_forgotten
    dataset = (
        taken_in
        if task.is_whole
        else replace_rows(
            base,
            gone=known[ROW_ADDRESS].filter(pa.array(~is_left)),
            rows=taken_in,
            compact_after=task.compact_after,
            max_dead_share=0 if is_forgotten.any() else MAX_DEAD_SHARE,  # forgotten users leave the files, too
        )
    )
    num_refreshed, num_left = int(is_refreshed.sum()), int(is_left.sum())
    counts: dict[SnapshotCount, int] = {
        "users": dataset.count_rows(),
        "new": new.num_rows - num_refreshed,
        "refreshed": num_refreshed,
        "carried_over": 0 if task.is_whole else num_left,
        "forgotten": int(is_forgotten.sum()),
        "expired": num_left if task.is_whole else 0,
        "previous_users": known.num_rows,
        "fragments": len(dataset.get_fragments()),
    }
    expected = counts["previous_users"] + counts["new"] - counts["forgotten"] - counts["expired"]
    is_complete = counts["users"] == expected
    _refuse_if(task, None if is_complete else f"{counts['users']:,} users were stored instead of {expected:,}")
    norm = np.concatenate([np.empty(0), *delta.norms])
    distance, cosine = _moves(task, known["user_id"].filter(pa.array(is_refreshed)), base, dataset)
    carried_over = known["computed_ds"].filter(pa.array(is_left & (not task.is_whole)))
    return MergeResult(
        bucket=task.bucket,
        version=dataset.version,
        counts=counts,
        by_computed_ds=_count_days(new["computed_ds"]) + _count_days(carried_over),
        norm=np.array([norm.min(initial=np.inf), norm.sum(), norm.max(initial=-np.inf)]),
        distance=distance,
        cosine=cosine,
    )


def _refuse_if(task: MergeTask, fault: str | None) -> None:
    if fault is not None:
        raise PipelineError(
            f"user_embedding_snapshot {task.ds}, bucket {task.bucket}: {fault}; nothing was published",
            f"embed the day again: {materialize_command('user_embeddings,user_embedding_snapshot', task.ds)}",
        )


def _is_in(ids: pa.ChunkedArray, others: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return pc.is_in(ids, others).to_numpy() if len(others) else np.zeros(len(ids), bool)


def _count_days(computed_ds: pa.ChunkedArray) -> Counter[str]:
    return Counter({entry["values"].isoformat(): entry["counts"] for entry in computed_ds.value_counts().to_pylist()})


def _moves(
    task: MergeTask, refreshed: pa.ChunkedArray, before: lance.LanceDataset, after: lance.LanceDataset
) -> tuple[np.ndarray, np.ndarray]:
    """Return distance and cosine between the old and the new vectors of the refreshed users with the lowest hashes."""
    if task.sample_size == 0 or len(refreshed) == 0:
        return np.empty(0), np.empty(0)
    hashed = pa.table({"hash": bucket_of(refreshed, SAMPLING_HASHES), "user_id": refreshed})
    order = pc.sort_indices(hashed, sort_keys=[("hash", "ascending"), ("user_id", "ascending")])
    user_ids = refreshed.take(order[: task.sample_size]).combine_chunks()
    old_ND, new_ND = _vectors(before, user_ids), _vectors(after, user_ids)
    product = np.linalg.norm(old_ND, axis=1) * np.linalg.norm(new_ND, axis=1)
    return np.linalg.norm(new_ND - old_ND, axis=1), (old_ND * new_ND).sum(1) / product


def _vectors(dataset: lance.LanceDataset, user_ids: pa.Array) -> np.ndarray:
    """Read the embeddings of these users, in this order."""
    rows = dataset.to_table(columns=["user_id", "embedding"], filter=is_one_of("user_id", user_ids))
    return matrix_of(rows["embedding"].take(pc.index_in(user_ids, rows["user_id"]))).astype(np.float32)
