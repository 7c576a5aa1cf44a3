"""Builds a day's pin_index: links the pins, and judges the index before it is published.

The search width `ef` is measured, not configured: it is the smallest of a ladder at which users of the day's snapshot
get what exact search gives them, up to the target. A graph of many pins with nearly the same vectors may not reach it:
then every search scores all pins, which is as fast for some ten thousands of them. The files on disk are judged, not
what is in memory. Graph files do not store ef; `index.json` does. A graph depends on the pins and on the linking
parameters: days that share both share its files by hard links, and only the judgement is repeated. Memory holds as many
shards as the engine has workers, and one shard while the index is judged.

The pins and the users are opened once, by version, and held: another run may publish the day again meanwhile. The
manifest says which models the linked rows themselves are of (`vectors_of`), which the release verifies.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hnswlib
import lance
import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.embeddings.pins import nearest_scores, sample_users
from pf_core.embeddings.tables import PinEmbeddingManifest, SnapshotManifest, pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.layouts import LAYOUTS, is_current
from pf_core.metrics.exact_search import ROUNDING
from pf_core.progress import Progress, Throttle, report
from pf_core.serving.index import (
    DESCRIPTION,
    PINS,
    SPACE,
    GraphManifest,
    Hits,
    IndexInputs,
    IndexManifest,
    IndexQuality,
    TriedEf,
    index_days,
    index_dir,
    index_manifest,
    index_root,
    load_shard,
    merge_hits,
    shard_path,
    used_shards,
)
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.files import link_or_copy, make_durable, remove_tree, write_file, write_json
from pf_core.storage.locks import exclusive
from pf_core.storage.retention import keep_newest, refuse_expired

JUDGED_AT = 10
"""Number of nearest pins by which the index is judged."""

CHUNK_ROWS = 16_384

REPORT_EVERY_S = 10.0


def build_index_days(site: Site, days: Sequence[str], *, engine: Engine, progress: Progress) -> Iterator[IndexManifest]:
    """Build, judge and publish the indexes of ascending days; yields each manifest."""
    num_kept = site.serving.index.retention_days
    setting = "serving.index.retention_days"
    refuse_expired("pin_index", days, existing=index_days(site), num_days=num_kept, setting=setting)
    with exclusive(index_root(site), "pin_index"):
        for ds in days:
            with pin_embedding_state(site).held(ds) as pins, snapshot_state(site).held(ds) as snapshot:
                manifest = _build_day(site, pins, snapshot, engine, progress)
            _retain(site, num_kept)
            yield manifest


def _build_day(
    site: Site,
    opened_pins: StateDay[PinEmbeddingManifest],
    opened_snapshot: StateDay[SnapshotManifest],
    engine: Engine,
    progress: Progress,
) -> IndexManifest:
    """Build the index of a day's pins, which the users of the same day's snapshot judge; both were opened once."""
    config, pins, snapshot = site.serving.index, opened_pins.manifest, opened_snapshot.manifest
    ds = pins["ds"]
    if pins["model_version"] != snapshot["model_version"]:
        raise PipelineError(
            f"pin_embeddings {ds} is of model {pins['model_version']}, user_embedding_snapshot {ds} of model "
            f"{snapshot['model_version']}: their vectors cannot be compared",
            f"embed the pins with the users' model: {materialize_command('pin_embeddings', ds)}",
        )
    inputs: IndexInputs = {
        "pin_embeddings": pins["digest"],
        "snapshot": snapshot["digest"],
        "parameters": config.model_dump(exclude={"retention_days"}),
    }
    known = index_manifest(site, ds)
    if known is not None and is_current("pin_index", known) and known["inputs"] == inputs and "vectors_of" in known:
        progress(f"pin_index {ds}: unchanged, {known['counts']['pins']:,} pins")
        return known
    linking = {"links": config.links, "ef_construction": config.ef_construction, "num_shards": config.num_shards}
    graph = digest_of({"pin_embeddings": pins["digest"], **linking})
    started = time.monotonic()
    with building(index_dir(site, ds)) as build:
        files = _share_graph(site, build, graph, progress) or _write_graph(site, opened_pins, build, engine, progress)
        _refuse_other_vectors(pins, files)
        linked: GraphManifest = {
            "layout": LAYOUTS["pin_index"],
            "ds": ds,
            "build": build.name,
            "model_version": pins["model_version"],
            "vectors_of": files.vectors_of,
            "embedding_dim": pins["embedding_dim"],
            "digest": digest_of(inputs),
            "inputs": inputs,
            "graph": graph,
            "space": SPACE,
            "links": config.links,
            "ef_construction": config.ef_construction,
            "num_shards": config.num_shards,
            "pins_of_shard": files.pins_of_shard,
            "counts": {"pins": sum(files.pins_of_shard)},
        }
        judgement = _find_ef(site, opened_pins, opened_snapshot, build, linked, progress)
        manifest: IndexManifest = {**linked, **judgement, "seconds": time.monotonic() - started}
        write_json(build / DESCRIPTION, manifest)
        make_durable(build)
    publish_build(build, manifest)
    progress(
        f"pin_index {ds}: {manifest['counts']['pins']:,} pins, recall@{JUDGED_AT} {manifest['recall_at_10']:.4f} "
        f"at ef {manifest['ef']}, in {manifest['seconds']:.1f} s"
    )
    return manifest


def _retain(site: Site, num_days: int) -> None:
    """Remove all but the newest days, and builds that were never published."""
    keep_newest([index_dir(site, ds) for ds in index_days(site)], num_days, description=MANIFEST)
    for partition in index_root(site).glob("????-??-??"):
        if not (partition / MANIFEST).exists():
            remove_tree(partition)


# Graphs


@dataclass(frozen=True)
class _GraphFiles:
    """What was found while the files of a graph were written."""

    pins_of_shard: list[int]
    vectors_of: list[str]
    """Distinct values of `model_version` in the rows whose vectors are linked."""


def _share_graph(site: Site, build: Path, graph: str, progress: Progress) -> _GraphFiles | None:
    """Link the files of a published day with the same graph; returns what they hold, or None."""
    for ds in reversed(index_days(site)):
        known = index_manifest(site, ds)
        if known is None or not is_current("pin_index", known):
            continue
        if known["graph"] == graph and "vectors_of" in known:
            folder = index_dir(site, ds) / known["build"]
            for name in (PINS, *(shard_path(build, number).name for number in used_shards(known["pins_of_shard"]))):
                link_or_copy(folder / name, build / name)
            progress(f"pin_index {build.parent.name}: the pins are those of {ds}, so its graph is used")
            return _GraphFiles(known["pins_of_shard"], known["vectors_of"])
    return None


def _refuse_other_vectors(pins: PinEmbeddingManifest, files: _GraphFiles) -> None:
    """Refuse vectors of which the rows themselves say that another model made them."""
    if files.vectors_of != [pins["model_version"]]:
        raise PipelineError(
            f"pin_embeddings {pins['ds']} is of model {pins['model_version']}, but has vectors of "
            f"{', '.join(files.vectors_of)}; no index was published",
            f"embed the pins again: {materialize_command('pin_embeddings', pins['ds'])}",
        )


@dataclass(frozen=True)
class _ShardTask:
    ds: str
    dataset: Path
    """Lance dataset of pin_embeddings, which holds the pins of all shards."""
    version: int
    """Lance version of the dataset as of the day."""
    number: int
    num_shards: int
    num_pins: int
    links: int
    ef_construction: int
    path: Path
    """File that the graph is written to."""
    num_threads: int


def _write_graph(
    site: Site, pins: StateDay[PinEmbeddingManifest], build: Path, engine: Engine, progress: Progress
) -> _GraphFiles:
    """Link the pins of every shard, as many shards at a time as the engine has workers."""
    config, ds = site.serving.index, pins.manifest["ds"]
    source, version = pins.state.bucket_path(0), pins.manifest["versions"][0]
    shard_N = _write_pins(open_dataset(source, version=version), build / PINS, config.num_shards)
    pins_of_shard = np.bincount(shard_N, minlength=config.num_shards).tolist()
    shards = used_shards(pins_of_shard)
    tasks = [
        _ShardTask(
            ds=ds,
            dataset=source,
            version=version,
            number=number,
            num_shards=config.num_shards,
            num_pins=pins_of_shard[number],
            links=config.links,
            ef_construction=config.ef_construction,
            path=shard_path(build, number),
            num_threads=max(1, (os.cpu_count() or 1) // min(engine.num_workers, len(shards))),
        )
        for number in shards
    ]
    vectors_of: set[str] = set()
    for done, found in enumerate(engine.map_buckets(_link_shard, tasks, progress), start=1):
        vectors_of |= found
        if len(tasks) > 1:
            progress(f"pin_index {ds}: {done} of {len(tasks)} shards are linked")
    return _GraphFiles(pins_of_shard, sorted(vectors_of))


def _link_shard(task: _ShardTask) -> set[str]:
    """Write the graph of the pins whose ids hash to one shard; returns which models its rows say they are of."""
    dataset = open_dataset(task.dataset, version=task.version)
    graph = hnswlib.Index(space=SPACE, dim=dataset.schema.field("embedding").type.list_size)
    graph.init_index(task.num_pins, M=task.links, ef_construction=task.ef_construction)
    graph.set_num_threads(task.num_threads)
    started = time.monotonic()

    def rate() -> str:
        num_linked = graph.get_current_count()
        return (
            f"pin_index {task.ds}, shard {task.number}: {num_linked:,} of {task.num_pins:,} pins linked, "
            f"{num_linked / (time.monotonic() - started):,.0f} a second"
        )

    first, throttle, vectors_of = 0, Throttle(report, every_s=REPORT_EVERY_S), set()
    for batch in dataset.to_batches(columns=["pin_id", "embedding", "model_version"], batch_size=CHUNK_ROWS):
        mine = np.flatnonzero(bucket_of(batch["pin_id"], task.num_shards) == task.number)
        vector_CD = matrix_of(batch["embedding"].take(pa.array(mine))).astype(np.float32)
        graph.add_items(vector_CD, first + mine)
        vectors_of |= set(batch["model_version"].take(pa.array(mine)).unique().to_pylist())
        first += batch.num_rows
        throttle(rate)
    with write_file(task.path) as path:
        graph.save_index(str(path))
    return vectors_of


def _write_pins(dataset: lance.LanceDataset, path: Path, num_shards: int) -> np.ndarray:
    """Write ids and interests; returns the shard of each pin."""
    schema = pa.schema([dataset.schema.field(name) for name in ("pin_id", "interest")])
    shards = []
    with write_file(path) as local, pa.ipc.new_file(local, schema) as writer:
        for batch in dataset.to_batches(columns=schema.names, batch_size=CHUNK_ROWS):
            writer.write_batch(batch)
            shards.append(bucket_of(batch["pin_id"], num_shards))
    return np.concatenate(shards)


# Judging


def _find_ef(
    site: Site,
    pins: StateDay[PinEmbeddingManifest],
    snapshot: StateDay[SnapshotManifest],
    build: Path,
    linked: GraphManifest,
    progress: Progress,
) -> IndexQuality:
    """Find the smallest ef that reaches the target; returns it with what was measured on the way."""
    config, ds, shards = site.serving.index, linked["ds"], used_shards(linked["pins_of_shard"])
    users_UD = sample_users(snapshot, config.sample_users)
    k = min(JUDGED_AT, linked["counts"]["pins"])
    least_U1 = nearest_scores(pins, users_UD, k)[:, -1:]
    tried: list[TriedEf] = []
    for ef in _ladder(config.max_ef, linked["counts"]["pins"], config.max_exact_pins):
        timed = [_search_from_disk(build, linked, number, ef, users_UD, k) for number in shards]
        score_UK = merge_hits([hits for hits, _ in timed], k)[1]
        recall = float((score_UK >= least_U1 - ROUNDING).mean())  # by score, so that equal pins are interchangeable
        queries_per_s = len(users_UD) / sum(seconds for _, seconds in timed)
        tried.append({"ef": ef, "recall_at_10": recall, "queries_per_s": queries_per_s})
        how = "scoring all pins" if ef > config.max_ef else f"ef {ef}"
        progress(f"pin_index {ds}: {how} finds {recall:.4f} of what exact search finds for {len(users_UD):,} users")
        if recall >= config.target_recall:
            return {"ef": ef, "recall_at_10": recall, "judged_users": len(users_UD), "ef_tried": tried}
    raise PipelineError(
        f"pin_index {ds}: even ef {config.max_ef} finds {recall:.4f} of what exact search finds, less than "
        f"target_recall {config.target_recall}; nothing was published",
        f"raise max_exact_pins to {linked['counts']['pins']}, which scores all pins in every search, or max_ef, or for "
        f"a better graph links (now {config.links}) and ef_construction (now {config.ef_construction}), under "
        "serving.index in the site file",
    )


def _search_from_disk(
    build: Path, linked: GraphManifest, number: int, ef: int, users_UD: np.ndarray, k: int
) -> tuple[Hits, float]:
    """Search one shard, which is loaded for it; returns the hits and the seconds of the search alone."""
    shard = load_shard(build, linked, number, ef=ef)
    started = time.perf_counter()
    return shard.search(users_UD, k), time.perf_counter() - started


def _ladder(max_ef: int, num_pins: int, max_exact_pins: int) -> list[int]:
    """Return 10, 16, 24, 32, 48, 64, 96, …, max_ef, and the number of all pins if they may all be scored."""
    steps = [step for power in range(4, max_ef.bit_length()) for step in (2**power, 3 * 2 ** (power - 1))]
    everything = [num_pins] if max_ef < num_pins <= max_exact_pins else []
    return [step for step in (JUDGED_AT, *steps) if step < max_ef] + [max_ef, *everything]
