"""pin_embeddings: the pin tower's output for every candidate with a content vector, as of each day; rows are sorted by
pin_id.

Memory holds the ids of all pins, to sort them, and one chunk of their features. A pin's vector is a function of its
feature and the model alone, bit for bit: the tower computes blocks of one shape, the last one filled up, each in one
thread (how several threads divide a product depends on its size, and rounding depends on that). A day whose features
and model are those of another day shares its version.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pf_core.config.site import Site
from pf_core.embeddings.inference import ServedModel, open_served_model
from pf_core.embeddings.parts_pins import counts_digest, open_parts_pins
from pf_core.embeddings.parts_records import open_parts_model
from pf_core.embeddings.records import vector_dim, vector_slices
from pf_core.embeddings.tables import (
    PinEmbeddingContent,
    PinEmbeddingInputs,
    PinEmbeddingManifest,
    PinEmbeddingState,
    SnapshotManifest,
    embedding_state,
    pin_embedding_state,
)
from pf_core.embeddings.vectors import column_of, embedding_fault, matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay, create_bucket, take_rows
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.model.checkpoint import read_description, reads_vectors_of
from pf_core.model.device import choose_device, single_threaded
from pf_core.model.towers import PinnerFormer
from pf_core.pins.counts import counts_as_of
from pf_core.pins.features import PinManifest, content_name, pin_state
from pf_core.pins.packed import finite_features, pins_by_id
from pf_core.progress import Progress, Throttle
from pf_core.schemas import pin_embeddings_schema

CHUNK_ROWS = 8192

BLOCK_ROWS = 1024

USERS_AT_ONCE = 1024
"""Number of users whose scores for a chunk of pins an exact search holds in memory."""

SECOND_HASH = 65_521
"""A prime, so that hashing to this many values orders a bucket's users independently of the hash to buckets."""


def embed_pin_days(
    site: Site,
    days: Sequence[str],
    *,
    model_for: Callable[[str], ServedModel],
    engine: Engine,
    progress: Progress,
) -> Iterator[PinEmbeddingManifest]:
    """Embed the candidates of ascending days; yield each published manifest."""
    state = pin_embedding_state(site)
    state.refuse_if_dropped(days, site.serving.retention_days)
    with state.writing():
        for ds in days:
            with pin_state(site).held(ds) as pins:
                manifest = _embed_day(site, state, pins, model_for(ds), progress)
            yield manifest
        state.retain(site.serving.retention_days, engine, progress)


@contextlib.contextmanager
def pin_tower(model: PinnerFormer, *, num_threads: int) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Yield a function from features to float16 unit vectors; a pin's vector does not depend on the other pins."""

    @torch.inference_mode()
    def embed_block(feature_NF: np.ndarray) -> np.ndarray:
        filled = np.zeros((BLOCK_ROWS, model.feature_dim), np.float32)
        filled[: len(feature_NF)] = feature_NF
        embedding_BD = model.embed_pins(torch.from_numpy(filled).to(model.project.weight.device))
        return np.asarray(embedding_BD[: len(feature_NF)].half().cpu().numpy())

    def embed(feature_NF: np.ndarray) -> np.ndarray:
        blocks = (feature_NF[start : start + BLOCK_ROWS] for start in range(0, len(feature_NF), BLOCK_ROWS))
        return np.concatenate(list(pool.map(embed_block, blocks)))

    with single_threaded(), ThreadPoolExecutor(num_threads) as pool:
        yield embed


@contextlib.contextmanager
def tower_of_rows(
    served: ServedModel, device: torch.device, ds: str, *, num_threads: int
) -> Iterator[Callable[[pa.Table], np.ndarray]]:
    """Yield a function from rows of pin_features to the pin tower's vectors."""
    model, _ = open_served_model(served, device)
    with pin_tower(model, num_threads=num_threads) as embed:
        yield lambda chunk: embed(finite_features(chunk, ds))


def read_vectors(pins: StateDay[PinEmbeddingManifest]) -> Iterator[np.ndarray]:
    """Yield a day's embeddings in the order of their rows, as float32, a chunk at a time."""
    for batch in pins.open_bucket(0).to_batches(columns=["embedding"], batch_size=CHUNK_ROWS):
        yield matrix_of(batch["embedding"]).astype(np.float32)


def sample_users(snapshot: StateDay[SnapshotManifest], num_users: int) -> np.ndarray:
    """Return the embeddings (float32) of a sample of the snapshot's users.

    The sample is taken by hash of the id, so that it has the same users every day. Buckets are made by hash too: the
    first few that have enough users are as good as all of them.
    """
    parts, num_found = [], 0
    for dataset in snapshot.buckets():
        ids = dataset.to_table(columns=["user_id"])
        keyed = ids.append_column("hash", pa.array(bucket_of(ids["user_id"], SECOND_HASH)))
        order = pc.sort_indices(keyed, sort_keys=[("hash", "ascending"), ("user_id", "ascending")])
        rows = np.sort(order.to_numpy()[: num_users - num_found])
        parts.append(matrix_of(take_rows(dataset, rows, ["embedding"])["embedding"]).astype(np.float32))
        num_found += len(rows)
        if num_found == num_users:
            break
    if num_found == 0:
        ds = snapshot.manifest["ds"]
        raise PipelineError(f"user_embedding_snapshot {ds} has no users to measure the recall of the index with")
    return np.concatenate(parts)


def nearest_scores(pins: StateDay[PinEmbeddingManifest], users_UD: np.ndarray, k: int) -> np.ndarray:
    """Return the k largest scores of each user by exact search over a day's pins, best first."""
    users = torch.from_numpy(users_UD).split(USERS_AT_ONCE)
    best = [torch.empty(len(rows_RD), 0) for rows_RD in users]
    for vectors in read_vectors(pins):
        pin_DC = torch.from_numpy(vectors).T
        for number, rows_RD in enumerate(users):
            score = torch.cat([best[number], rows_RD @ pin_DC], dim=1)
            best[number] = score.topk(min(k, score.shape[1]), dim=1).values
    return torch.cat(best).numpy()


def _embed_day(
    site: Site, state: PinEmbeddingState, opened: StateDay[PinManifest], served: ServedModel, progress: Progress
) -> PinEmbeddingManifest:
    pins, ds = opened.manifest, opened.manifest["ds"]
    _refuse_another_model(site, ds, served)
    description = read_description(served.path)
    inputs: PinEmbeddingInputs = {
        "pin_features_version": content_name(pins),
        "model_version": served.model_version,
    }
    is_parts = description.get("family", "towers") == "parts"
    counts = counts_as_of(site, ds) if is_parts else None
    if counts is not None:
        inputs["pin_counts"] = counts_digest(counts, ds)
    for known_ds in reversed(state.days()):
        known = state.manifest(known_ds)
        if known is not None and state.is_readable(known) and known["inputs"] == inputs:
            progress(f"pin_embeddings {ds}: unchanged, {known['counts']['pins']:,} pins as of {known_ds}")
            return state.publish(ds, known["versions"], {**known, "slices": vector_slices(description)})
    if pins["counts"]["candidates"] == 0:
        raise PipelineError(
            f"none of the {pins['counts']['pins']:,} pins of pin_features {ds} is a candidate",
            f"fix source.pins.is_candidate in the site file, then: {materialize_command('pin_features', ds)}",
        )
    if not reads_vectors_of(description, pins["dim"]):
        raise PipelineError(
            f"model {served.model_version} reads features of {description['feature_dim']} numbers, those of "
            f"pin_features {ds} have {pins['dim']}",
            "train a model on them, or go back to the vectors that it was trained on",
        )
    started = time.monotonic()
    features = opened.open_bucket(0)
    device, num_threads = choose_device(site.serving.device), site.engine.num_workers
    num_candidates = features.count_rows("is_candidate" if is_parts else "is_candidate AND has_feature")
    if num_candidates == 0:
        raise PipelineError(
            f"none of the {pins['counts']['candidates']:,} candidates of pin_features {ds} has a content vector",
            f"fix source.pins.vectors in the site file, then: {materialize_command('pin_features', ds)}",
        )
    parts = None
    if counts is not None:
        model, table, _ = open_parts_model(served, device)
        first_us, num_pins = description["time_origin_us"], pins["counts"]["pins"]
        parts = open_parts_pins(ds, model, table, counts, first_us=first_us, num_pins=num_pins)
    schema = pin_embeddings_schema(site.source.pins.pin_id.type, vector_dim(description))
    with (
        parts.embedding(num_threads=num_threads)
        if parts is not None
        else tower_of_rows(served, device, ds, num_threads=num_threads)
    ) as embed:
        day = _Pass(
            ds=ds,
            features=features,
            num_candidates=num_candidates,
            embed=embed,
            model_version=served.model_version,
            only_with_feature=not is_parts,
            throttled=Throttle(progress),
        )
        dataset = day.write(state.bucket_path(0), schema)
    if day.num_pins != num_candidates:
        raise PipelineError(
            f"pin_embeddings {ds}: {day.num_pins:,} rows for {num_candidates:,} candidates; nothing was published"
        )
    content: PinEmbeddingContent = {
        "model_version": served.model_version,
        "embedding_dim": vector_dim(description),
        "slices": vector_slices(description),
        "inputs": inputs,
        "digest": digest_of(inputs),
        "counts": {"pins": day.num_pins, "clipped": 0 if parts is None else parts.num_clipped},
        "norm": {"min": day.min_norm, "mean": day.sum_norm / day.num_pins, "max": day.max_norm},
        "seconds": time.monotonic() - started,
    }
    manifest = state.publish(ds, [dataset.version], content)
    progress(f"pin_embeddings {ds}: {day.num_pins:,} pins embedded in {manifest['seconds']:.1f} s")
    return manifest


def _refuse_another_model(site: Site, ds: str, served: ServedModel) -> None:
    """Refuse a model other than the one that embedded the day's users."""
    users = embedding_state(site).manifest(ds)
    if users is not None and users["model_version"] != served.model_version:
        raise PipelineError(
            f"user_embeddings {ds} is of model {users['model_version']}, the pins were to be embedded by model "
            f"{served.model_version}: a day has one model",
            f"embed its users first: {materialize_command('user_embeddings', ds)}",
        )


@dataclass(kw_only=True)
class _Pass:
    """One pass over a day's candidates, from their features into the dataset, with statistics of the embeddings."""

    ds: str
    features: lance.LanceDataset
    num_candidates: int
    embed: Callable[[pa.Table], np.ndarray]
    """Function from rows of pin_features to float16 unit vectors."""
    model_version: str
    only_with_feature: bool
    throttled: Throttle
    num_pins: int = 0
    min_norm: float = float("inf")
    max_norm: float = 0.0
    sum_norm: float = 0.0

    def write(self, path: Path, schema: pa.Schema) -> lance.LanceDataset:
        """Write a new version of the dataset; if a row fails, there is none. Only a manifest makes it visible."""
        raised: list[Exception] = []
        embedded = self._embedded()

        def rows() -> Iterator[pa.RecordBatch]:
            """Compute in one thread of our own: Lance reads from many, and each would keep the memory of a chunk."""
            try:
                while (batch := worker.submit(next, embedded, None).result()) is not None:
                    yield batch
            except Exception as error:
                raised.append(error)
                raise

        with ThreadPoolExecutor(1) as worker:
            try:
                return create_bucket(path, pa.RecordBatchReader.from_batches(schema, rows()))
            except OSError as error:  # Lance turns every error of `rows` into this one
                raise raised[0] if raised else error from None

    def _embedded(self) -> Iterator[pa.RecordBatch]:
        last_id = None
        columns = ["pin_id", "feature", "interest"]
        for chunk in pins_by_id(self.features, columns, only_candidates=True, only_with_feature=self.only_with_feature):
            rows = pa.table(
                {
                    "pin_id": chunk["pin_id"],
                    "embedding": column_of(self.embed(chunk)),
                    "model_version": pa.repeat(self.model_version, len(chunk)),
                    "interest": chunk["interest"],
                }
            )
            fault = embedding_fault(rows, key="pin_id", model_version=self.model_version)
            if fault is None and rows["pin_id"][0] == last_id:
                fault = "a pin_id has two rows"
            if fault is not None:
                raise PipelineError(f"pin_embeddings {self.ds}: {fault}; nothing was published")
            self._count(matrix_of(rows["embedding"]))
            last_id = rows["pin_id"][-1]
            self.throttled(f"pin_embeddings {self.ds}: {self.num_pins:,} of {self.num_candidates:,} pins embedded")
            yield from rows.combine_chunks().to_batches()

    def _count(self, vector_ND: np.ndarray) -> None:
        norm_N = np.linalg.norm(vector_ND.astype(np.float32), axis=1)
        self.num_pins += len(norm_N)
        self.min_norm, self.max_norm = min(self.min_norm, float(norm_N.min())), max(self.max_norm, float(norm_N.max()))
        self.sum_norm += float(norm_N.sum(dtype=np.float64))
