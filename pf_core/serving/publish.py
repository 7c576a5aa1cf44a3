"""release: publishes a day's users and pins, embedded by one model, to services, by replacing one file.

A release is a folder that needs nothing outside it: `users/` (unless they are in Redis), `index/` (hard links to the
day's pin_index), `popular.arrow` and `release.json`. It is built under a hidden name, verified against the snapshot,
and renamed; then current.json is replaced (see `releases.py`). A crash at any moment leaves the old release current,
and files that the next publication removes. `load_store.py` copies the users, `popular.py` counts the popular pins.

Users on the deletion list are left out even if the snapshot still has them, and a rollback does not bring them back.
"""

import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.embeddings.tables import SnapshotManifest, snapshot_state
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import digest_of
from pf_core.layouts import LAYOUTS
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.log_day import LogDay
from pf_core.progress import Progress
from pf_core.serving.index import IndexManifest, PinIndex, index_root, require_index
from pf_core.serving.load_store import load_users
from pf_core.serving.popular import NUM_POPULAR, open_week, popular_digest, popular_pins
from pf_core.serving.releases import (
    BUILDING,
    DESCRIPTION,
    POPULAR,
    READERS,
    RELEASE_ID,
    PublishedReleases,
    ReleaseDraft,
    ReleaseManifest,
    StoreDescription,
    day_and_number,
    fault_of,
    opened_store,
    read_published,
    read_release,
    release_root,
    write_published,
)
from pf_core.serving.retention import remove_release, sweep
from pf_core.storage.files import (
    copy_tree,
    is_remote,
    list_folder,
    make_durable,
    rename_folder,
    sync,
    write_file,
    write_json,
)
from pf_core.storage.locks import exclusive, relying_on


def publish_release(site: Site, ds: str, *, engine: Engine, progress: Progress) -> ReleaseManifest:
    """Publish a day's snapshot and pin_index together; do nothing if the current release has the same inputs."""
    root, snapshots = release_root(site), snapshot_state(site)
    with (
        exclusive(root, "release"),
        relying_on(snapshots.root, snapshots.asset),
        relying_on(index_root(site), "pin_index"),
    ):
        published = read_published(site)
        if published.current is not None and ds < day_and_number(published.current)[0]:
            raise PipelineError(
                f"release {ds} would be older than the current one, {published.current}",
                "to return services to an earlier release: pf rollback",
            )
        sweep(site, None, progress)
        inputs = _open_inputs(site, ds)
        draft = _draft(site, inputs, _next_id(site, published, ds))
        manifest = _if_unchanged(site, published, draft)
        if manifest is not None:
            progress(f"release {ds}: unchanged, {manifest['release']} stays the current one")
            return manifest
        manifest = _build(site, draft, inputs, engine, progress)
        published = PublishedReleases(
            current=manifest["release"],
            previous=published.in_order()[1 - site.serving.keep_releases :],
            withdrawn=published.withdrawn,
            revision=published.revision,
        )
        write_published(site, published)
        progress(
            f"release {manifest['release']} is current: {manifest['counts']['users']:,} users, "
            f"{manifest['counts']['pins']:,} pins, model {manifest['model_version']}, in {manifest['seconds']:.1f} s"
        )
        sweep(site, set(published.in_order()), progress)
        return manifest


def _next_id(site: Site, published: PublishedReleases, ds: str) -> str:
    """Return `{ds}.{n}`, with n larger than that of any release of the day: published, withdrawn or unpublished.

    An interrupted publication that could not be removed counts too: its users may be in a store that is unreachable.
    """
    present = [path.name.removeprefix(BUILDING) for path in list_folder(release_root(site))]
    names = (*published.names(), *filter(RELEASE_ID.fullmatch, present))
    numbers = [number for day, number in map(day_and_number, names) if day == ds]
    return f"{ds}.{max(numbers, default=0) + 1}"


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What a release is made of, opened once."""

    snapshot: StateDay[SnapshotManifest]
    index: IndexManifest
    index_folder: Path
    week: list[LogDay]
    """Days of the log whose popular pins it has."""


def _open_inputs(site: Site, ds: str) -> _Inputs:
    snapshot, (index, index_folder) = snapshot_state(site).open_day(ds), require_index(site, ds)
    return _Inputs(snapshot=snapshot, index=index, index_folder=index_folder, week=open_week(site, ds))


def _draft(site: Site, inputs: _Inputs, release: str) -> ReleaseDraft:
    snapshot, index = inputs.snapshot.manifest, inputs.index
    ds = snapshot["ds"]
    if snapshot["model_version"] != index["model_version"]:
        raise PipelineError(
            f"user_embedding_snapshot {ds} is of model {snapshot['model_version']}, pin_index {ds} of model "
            f"{index['model_version']}: a release has one model",
            f"rebuild the pins of the day: {materialize_command('pin_embeddings,pin_index', ds)}",
        )
    config = site.serving.store
    store: StoreDescription = {"kind": config.kind}
    if config.kind == "redis":
        store["key_prefix"] = config.key_prefix
    return {
        "release": release,
        "layout": LAYOUTS["release"],
        "ds": ds,
        "model_version": snapshot["model_version"],
        "embedding_dim": snapshot["embedding_dim"],
        "slices": snapshot["slices"],
        "inputs": {
            "snapshot": snapshot["digest"],
            "pin_index": index["digest"],
            "popular": popular_digest(site, inputs.week),
            "forgotten": digest_of({"user_ids": sorted(read_deletion_list(site).to_pylist())}),
        },
        "store": store,
        "num_buckets": snapshot["num_buckets"],
        "user_id": site.source.actions.user_id.type,
    }


def _if_unchanged(site: Site, published: PublishedReleases, draft: ReleaseDraft) -> ReleaseManifest | None:
    """Return the current release if it is complete and made of the same."""
    folder = release_root(site) / (published.current or "none")
    if not (folder / DESCRIPTION).exists():
        return None
    manifest = read_release(folder)
    is_same = all(manifest.get(name) == value for name, value in draft.items() if name != "release")
    if not is_same or fault_of(site, manifest["release"]) is not None:
        return None
    with opened_store(site, folder) as store:
        store.announce()
    return manifest


def _build(site: Site, draft: ReleaseDraft, inputs: _Inputs, engine: Engine, progress: Progress) -> ReleaseManifest:
    """Fill the release's folder under a hidden name, verify it, make it durable, and rename it."""
    root, started = release_root(site), time.monotonic()
    building = root / f"{BUILDING}{draft['release']}"
    try:
        if not is_remote(building):
            building.mkdir()
            (building / READERS).touch()
        write_json(building / DESCRIPTION, draft)  # first: it tells a sweep where the users are
        store_started = time.monotonic()
        checks = load_users(site, draft, inputs.snapshot, building, engine=engine, progress=progress)
        store_seconds = time.monotonic() - store_started
        copy_tree(inputs.index_folder, building / "index")
        num_pins = _verify_index(building, draft)
        _write_popular(building / POPULAR, popular_pins(site, inputs.week, building / "index", NUM_POPULAR))
        manifest: ReleaseManifest = {
            **draft,  # type: ignore[typeddict-item]  # a draft has no forgotten_since
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "counts": {"users": checks["users_in_store"], "pins": num_pins},
            "checks": {**checks, "pins_in_index": num_pins, "model_versions": 1},
            "store_seconds": round(store_seconds, 3),
            "seconds": round(time.monotonic() - started, 3),
        }
        write_json(building / DESCRIPTION, manifest)
        make_durable(building)
        rename_folder(building, root / draft["release"])
        sync(root)
    except BaseException as error:
        with contextlib.suppress(PipelineError):  # then the next publication removes it
            remove_release(site, building)
        if isinstance(error, OSError):
            raise PipelineError(
                f"release {draft['release']} could not be written: {error}; the current release is unchanged",
                "check that the disk is not full, then re-run",
            ) from error
        raise
    return manifest


def _write_popular(path: Path, pins: pa.Table) -> None:
    with write_file(path) as local, pa.ipc.new_file(local, pins.schema) as writer:
        writer.write_table(pins)


def _verify_index(building: Path, draft: ReleaseDraft) -> int:
    """Check that the index, and by their own account its vectors, are of the users' model, and that a graph can be
    loaded; returns the number of pins."""
    index = PinIndex.open(building / "index")
    index.vectors(np.arange(min(1, len(index))))
    description, release, ds = index.description, draft["release"], draft["ds"]
    if "vectors_of" not in description:
        raise PipelineError(
            f"release {release}: pin_index {ds} was built by an older version, which did not record the models of its "
            "vectors; nothing was published",
            f"rebuild it with: {materialize_command('pin_index', ds)}",
        )
    of_index = (*description["vectors_of"], description["model_version"], description["embedding_dim"])
    if of_index != (draft["model_version"], draft["model_version"], draft["embedding_dim"]):
        raise PipelineError(
            f"release {release}: the index has model {description['model_version']} with "
            f"{description['embedding_dim']} dimensions and vectors of {', '.join(description['vectors_of'])}, the "
            f"users model {draft['model_version']} with {draft['embedding_dim']}; nothing was published",
            f"rebuild the pins of the day: {materialize_command('pin_embeddings,pin_index', ds)}",
        )
    return len(index)
