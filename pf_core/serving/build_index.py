"""How a day's pin_index is made: pins are linked, and the index is judged before it is published.

How far a search looks, `ef`, is not chosen but found: the smallest of a ladder at which users of the day's snapshot get
what exact search gives them, up to the target. What is judged is what lies on disk. Graph files do not keep ef,
`index.json` does. A graph depends on the pins and on how it is linked: days that share both share its files by hard
links, and are only judged anew. In memory are as many shards as the engine has workers; one, while they are judged.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hnswlib
import lance
import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.embeddings.pins import nearest_scores, sample_users
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import Manifest
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of, digest_of
from pf_core.metrics.exact_search import ROUNDING
from pf_core.progress import report
from pf_core.serving.index import (
    DESCRIPTION,
    PINS,
    SPACE,
    Hits,
    index_dir,
    index_manifest,
    load_shard,
    merge_hits,
    search_shard,
    shard_path,
    used,
)
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.files import link_or_copy, make_durable, read_json, remove_tree, write_file, write_json
from pf_core.storage.locks import exclusive
from pf_core.storage.retention import keep_newest, refuse_expired

JUDGED_AT = 10

CHUNK_ROWS = 16_384

REPORT_EVERY_S = 10.0


def build_index_days(
    site: Site, days: Sequence[str], *, engine: Engine, progress: Callable[[str], None]
) -> Iterator[Manifest]:
    """Build, judge and publish the indexes of ascending days; yields each manifest."""
    root, num_kept = index_dir(site, days[0]).parent, site.serving.index.retention_days
    setting = "serving.index.retention_days"
    refuse_expired("pin_index", days, existing=_published(root), num_days=num_kept, setting=setting)
    with exclusive(root, "pin_index"):
        for ds in days:
            manifest = _build_day(site, ds, engine, progress)
            _retain(root, num_kept)
            yield manifest


def _build_day(site: Site, ds: str, engine: Engine, progress: Callable[[str], None]) -> Manifest:
    config = site.serving.index
    pins, snapshot = pin_embedding_state(site).require(ds), snapshot_state(site).require(ds)
    if pins["model_version"] != snapshot["model_version"]:
        raise PipelineError(
            f"pin_embeddings {ds} is of model {pins['model_version']}, user_embedding_snapshot {ds} of model "
            f"{snapshot['model_version']}: their vectors cannot be compared. Embed the pins by the users' model: "
            f"{materialize_command('pin_embeddings', ds)}"
        )
    inputs = {
        "pin_embeddings": pins["digest"],
        "snapshot": snapshot["digest"],  # its users judge
        "parameters": config.model_dump(exclude={"retention_days"}),
    }
    known = index_manifest(site, ds)
    if known is not None and known["inputs"] == inputs:
        progress(f"pin_index {ds}: unchanged, {known['counts']['pins']:,} pins")
        return known
    linking = {"links": config.links, "ef_construction": config.ef_construction, "num_shards": config.num_shards}
    graph = digest_of({"pin_embeddings": pins["digest"], **linking})
    started = time.monotonic()
    with building(index_dir(site, ds)) as build:
        pins_of_shard = _share_graph(build, graph, progress) or _write_graph(site, ds, build, engine, progress)
        manifest: Manifest = {
            "ds": ds,
            "build": build.name,
            "model_version": pins["model_version"],
            "embedding_dim": pins["embedding_dim"],
            "digest": digest_of(inputs),
            "inputs": inputs,
            "graph": graph,
            "space": SPACE,
            **linking,
            "pins_of_shard": pins_of_shard,
            "counts": {"pins": sum(pins_of_shard)},
        }
        manifest |= _find_ef(site, ds, build, manifest, progress)
        manifest["seconds"] = time.monotonic() - started
        write_json(build / DESCRIPTION, manifest)
        make_durable(build)
    publish_build(build, manifest)
    progress(
        f"pin_index {ds}: {manifest['counts']['pins']:,} pins, recall@{JUDGED_AT} {manifest['recall_at_10']:.4f} "
        f"at ef {manifest['ef']}, in {manifest['seconds']:.1f} s"
    )
    return manifest


def _published(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob(f"????-??-??/{MANIFEST}"))


def _retain(root: Path, num_days: int) -> None:
    """Remove all but the newest days, and what builds that never were published left behind."""
    keep_newest([root / ds for ds in _published(root)], num_days, description=MANIFEST)
    for partition in root.glob("????-??-??"):
        if not (partition / MANIFEST).exists():
            remove_tree(partition)


# Graphs


def _share_graph(build: Path, graph: str, progress: Callable[[str], None]) -> list[int] | None:
    """Take over the files of a published day with the same graph; its pins by shard, or None if there is none."""
    root = build.parent.parent
    for ds in reversed(_published(root)):
        known = read_json(root / ds / MANIFEST)
        if known["graph"] == graph:
            for name in (PINS, *(shard_path(build, number).name for number in used(known))):
                link_or_copy(root / ds / known["build"] / name, build / name)
            progress(f"pin_index {build.parent.name}: the pins are those of {ds}, and so is the graph")
            return list(known["pins_of_shard"])
    return None


@dataclass(frozen=True)
class _ShardTask:
    site: Site
    ds: str
    number: int
    num_pins: int
    path: Path
    num_threads: int


def _write_graph(site: Site, ds: str, build: Path, engine: Engine, progress: Callable[[str], None]) -> list[int]:
    """Link the pins of every shard, as many shards at a time as the engine has workers; returns how many each has."""
    config, dataset = site.serving.index, pin_embedding_state(site).open_bucket(ds, 0)
    shard_N = _write_pins(dataset, build / PINS, config.num_shards)
    pins_of_shard = np.bincount(shard_N, minlength=config.num_shards).tolist()
    shards = used({"pins_of_shard": pins_of_shard})
    num_threads = max(1, (os.cpu_count() or 1) // min(engine.num_workers, len(shards)))
    tasks = [
        _ShardTask(site, ds, number, pins_of_shard[number], shard_path(build, number), num_threads) for number in shards
    ]
    for done, _ in enumerate(engine.map_buckets(_link_shard, tasks, progress), start=1):
        if len(tasks) > 1:
            progress(f"pin_index {ds}: {done} of {len(tasks)} shards are linked")
    return pins_of_shard


def _link_shard(task: _ShardTask) -> None:
    """One graph, of the pins whose ids hash to it."""
    config, dataset = task.site.serving.index, pin_embedding_state(task.site).open_bucket(task.ds, 0)
    graph = hnswlib.Index(space=SPACE, dim=dataset.schema.field("embedding").type.list_size)
    graph.init_index(task.num_pins, M=config.links, ef_construction=config.ef_construction)
    graph.set_num_threads(task.num_threads)
    first, started = 0, time.monotonic()
    told = started
    for batch in dataset.to_batches(columns=["pin_id", "embedding"], batch_size=CHUNK_ROWS):
        mine = np.flatnonzero(bucket_of(batch["pin_id"], config.num_shards) == task.number)
        vector_CD = matrix_of(batch["embedding"].take(pa.array(mine))).astype(np.float32)
        graph.add_items(vector_CD, first + mine)
        first += batch.num_rows
        if time.monotonic() - told > REPORT_EVERY_S:
            told, num_linked = time.monotonic(), graph.get_current_count()
            report(
                f"pin_index {task.ds}, shard {task.number}: {num_linked:,} of {task.num_pins:,} pins linked, "
                f"{num_linked / (told - started):,.0f} a second"
            )
    with write_file(task.path) as path:
        graph.save_index(str(path))


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


def _find_ef(site: Site, ds: str, build: Path, manifest: Manifest, progress: Callable[[str], None]) -> dict[str, Any]:
    """The smallest ef that reaches the target, and what was found on the way."""
    config = site.serving.index
    users_UD = sample_users(site, ds, config.sample_users)
    k = min(JUDGED_AT, sum(manifest["pins_of_shard"]))
    least_U1 = nearest_scores(site, ds, users_UD, k)[:, -1:]
    tried: list[dict[str, float]] = []
    for ef in _ladder(config.max_ef):
        timed = [_search_from_disk(build, manifest, number, ef, users_UD, k) for number in used(manifest)]
        score_UK = merge_hits([hits for hits, _ in timed], k)[1]
        recall = float((score_UK >= least_U1 - ROUNDING).mean())  # by score: which of several equal pins is no matter
        queries_per_s = len(users_UD) / sum(seconds for _, seconds in timed)
        tried.append({"ef": ef, "recall_at_10": recall, "queries_per_s": queries_per_s})
        progress(f"pin_index {ds}: ef {ef} finds {recall:.4f} of what exact search finds for {len(users_UD):,} users")
        if recall >= config.target_recall:
            return {"ef": ef, "recall_at_10": recall, "judged_users": len(users_UD), "ef_tried": tried}
    raise PipelineError(
        f"pin_index {ds}: even ef {config.max_ef} finds {recall:.4f} of what exact search finds, less than "
        f"target_recall {config.target_recall}; nothing was published. Raise max_ef, or for a better graph links (now "
        f"{config.links}) and ef_construction (now {config.ef_construction}), under serving.index in the site file"
    )


def _search_from_disk(
    build: Path, manifest: Manifest, number: int, ef: int, users_UD: np.ndarray, k: int
) -> tuple[Hits, float]:
    """What one shard finds, and how long it searched; the shard leaves memory."""
    graph = load_shard(build, manifest, number, ef=ef)
    started = time.perf_counter()
    return search_shard(graph, users_UD, k), time.perf_counter() - started


def _ladder(max_ef: int) -> list[int]:
    """10, 16, 24, 32, 48, 64, 96, … and max_ef."""
    steps = [step for power in range(4, max_ef.bit_length()) for step in (2**power, 3 * 2 ** (power - 1))]
    return [step for step in (JUDGED_AT, *steps) if step < max_ef] + [max_ef]
