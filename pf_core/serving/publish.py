"""release: a day's users and pins, of one model, become what services read, by the replacement of one file.

A release is a folder that needs nothing else: `users/` (unless they are in Redis), `index/` (hard links of the day's
pin_index) and `release.json`. It is built under a hidden name, verified against the snapshot, and renamed; then the
pointer is replaced (see `pointer.py`). A crash at any moment leaves the old release current, and something that the
next publication sweeps away. `loading.py` copies the users.

Users on the deletion list are left out even if the snapshot still has them, and a rollback does not bring them back.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import Manifest
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import digest_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.serving.index import PinIndex, index_dir, require_index
from pf_core.serving.load_store import load_users
from pf_core.serving.releases import (
    BUILDING,
    DESCRIPTION,
    READERS,
    Pointer,
    day_and_number,
    fault_of,
    next_id,
    opened_store,
    read_pointer,
    release_folders,
    release_root,
    remove,
    replace_pointer,
    sweep,
)
from pf_core.storage.files import copy_tree, is_remote, make_durable, read_json, rename_folder, sync, write_json
from pf_core.storage.locks import exclusive, relying_on


def publish_release(site: Site, ds: str, *, engine: Engine, progress: Callable[[str], None]) -> Manifest:
    """Publish a day's snapshot and pin_index together. If just that is current already, it stays as it is."""
    root, snapshots = release_root(site), snapshot_state(site)
    with (
        exclusive(root, "release"),
        relying_on(snapshots.root, snapshots.asset),
        relying_on(index_dir(site, ds).parent, "pin_index"),
    ):
        pointer = read_pointer(site)
        if pointer.current is not None and ds < day_and_number(pointer.current)[0]:
            raise PipelineError(
                f"release {ds} would be older than the current one, {pointer.current}. "
                "To let services go back to an earlier release: pf rollback"
            )
        sweep(site, None, progress)
        draft = _draft(site, ds, next_id(site, pointer, ds))
        manifest = _if_unchanged(site, pointer, draft)
        if manifest is not None:
            progress(f"release {ds}: unchanged, {manifest['release']} stays the current one")
            return manifest
        manifest = _build(site, draft, engine, progress)
        pointer = Pointer(
            current=manifest["release"],
            previous=pointer.published()[1 - site.serving.keep_releases :],
            withdrawn=pointer.withdrawn,
            revision=pointer.revision,
        )
        replace_pointer(site, pointer)
        progress(
            f"release {manifest['release']} is current: {manifest['counts']['users']:,} users, "
            f"{manifest['counts']['pins']:,} pins, model {manifest['model_version']}, in {manifest['seconds']:.1f} s"
        )
        sweep(site, set(pointer.published()), progress)
        return manifest


def _draft(site: Site, ds: str, release: str) -> Manifest:
    """What is known of a release before it is built."""
    snapshot, (index, _) = snapshot_state(site).require(ds), require_index(site, ds)
    if snapshot["model_version"] != index["model_version"]:
        raise PipelineError(
            f"user_embedding_snapshot {ds} is of model {snapshot['model_version']}, pin_index {ds} of model "
            f"{index['model_version']}: a release has one model. Make the pins' day anew: "
            f"{materialize_command('pin_embeddings,pin_index', ds)}"
        )
    config = site.serving.store
    return {
        "release": release,
        "ds": ds,
        "model_version": snapshot["model_version"],
        "embedding_dim": snapshot["embedding_dim"],
        "inputs": {
            "snapshot": snapshot["digest"],
            "pin_index": index["digest"],
            "forgotten": digest_of({"user_ids": sorted(read_deletion_list(site).to_pylist())}),
        },
        "store": {"kind": config.kind, **({"key_prefix": config.key_prefix} if config.kind == "redis" else {})},
        "num_buckets": snapshot["num_buckets"],
        "user_id": site.source.actions.user_id.type,
    }


def _if_unchanged(site: Site, pointer: Pointer, draft: Manifest) -> Manifest | None:
    """The current release, if it is whole and made of the same."""
    folder = release_root(site) / (pointer.current or "none")
    if not (folder / DESCRIPTION).exists():
        return None
    manifest: Manifest = read_json(folder / DESCRIPTION)
    is_same = all(manifest.get(name) == value for name, value in draft.items() if name != "release")
    if not is_same or fault_of(site, manifest["release"]) is not None:
        return None
    with opened_store(site, folder) as store:
        store.announce()
    return manifest


def _build(site: Site, draft: Manifest, engine: Engine, progress: Callable[[str], None]) -> Manifest:
    """Fill the release's folder under a hidden name, verify it, make it durable, and give it its name."""
    root, started = release_root(site), time.monotonic()
    building = root / f"{BUILDING}{draft['release']}"
    try:
        if not is_remote(building):
            building.mkdir()
            (building / READERS).touch()
        write_json(building / DESCRIPTION, draft)  # from here on, a sweep knows where the users are
        store_started = time.monotonic()
        checks = load_users(site, draft, building, engine=engine, progress=progress)
        store_seconds = time.monotonic() - store_started
        _, index_build = require_index(site, draft["ds"])
        copy_tree(index_build, building / "index")
        checks |= {"pins_in_index": _verify_index(building, draft), "model_versions": 1}
        manifest = draft | {
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "counts": {"users": checks["users_in_store"], "pins": checks["pins_in_index"]},
            "checks": checks,
            "store_seconds": round(store_seconds, 3),
            "seconds": round(time.monotonic() - started, 3),
        }
        write_json(building / DESCRIPTION, manifest)
        make_durable(building)
        rename_folder(building, root / draft["release"])
        sync(root)
    except BaseException as error:
        with contextlib.suppress(PipelineError):  # then the next publication sweeps it away
            remove(site, building)
        if isinstance(error, OSError):
            raise PipelineError(
                f"release {draft['release']} could not be written: {error}. What was published stays as it is; "
                "see that the disk is not full, then re-run"
            ) from error
        raise
    return manifest


def _verify_index(building: Path, draft: Manifest) -> int:
    """It is of the users' model, and a graph can be loaded; how many pins it has."""
    index = PinIndex.open(building / "index")
    described = {name: index.description[name] for name in ("model_version", "embedding_dim")}
    index.vectors(np.arange(min(1, len(index))))
    if described != {name: draft[name] for name in described}:
        raise PipelineError(
            f"release {draft['release']}: the index is of {described}, the users are not. Nothing was published"
        )
    return len(index)


# Afterwards


def list_releases(site: Site) -> list[Manifest]:
    """Those that are there, newest first; each with is_current, is_withdrawn and can_roll_back_to."""
    pointer, root = read_pointer(site), release_root(site)
    present = [name for name in pointer.names() if (root / name / DESCRIPTION).exists()]
    return [
        read_json(root / name / DESCRIPTION)
        | {
            "is_current": name == pointer.current,
            "is_withdrawn": name in pointer.withdrawn,
            "can_roll_back_to": name != pointer.current,
        }
        for name in sorted(present, key=day_and_number, reverse=True)
    ]


def rollback(site: Site, *, to: str | None = None) -> Manifest:
    """Make the release before the current one current, or the one named; nothing is removed.

    Every release after the one gone back to is withdrawn. Naming a withdrawn one goes forward to it again.
    """
    with exclusive(release_root(site), "release"):
        pointer = read_pointer(site)
        target = to or (pointer.previous[-1] if pointer.previous else None)
        if pointer.current is None or target is None:
            raise PipelineError("there is no earlier release to go back to; see: pf releases")
        if target == pointer.current:
            raise PipelineError(f"release {target} is the current one already")
        if target not in pointer.names():
            raise PipelineError(f"there is no release {target}; those that are there: pf releases")
        fault = fault_of(site, target)
        if fault is not None:
            raise PipelineError(fault)
        _forget(site, release_root(site) / target, read_deletion_list(site))
        published = pointer.published()
        if target in published:
            position = published.index(target)
            withdrawn = (*pointer.withdrawn, *published[position + 1 :])
            previous = published[:position]
        else:
            withdrawn = tuple(name for name in pointer.withdrawn if name != target)
            previous = published
        replace_pointer(
            site, Pointer(current=target, previous=previous, withdrawn=withdrawn, revision=pointer.revision)
        )
        manifest: Manifest = read_json(release_root(site) / target / DESCRIPTION)
        return manifest


def forget_users(site: Site, ids: pa.Array) -> dict[str, int]:
    """Delete users from the store of every release that is there; how many each one had."""
    with exclusive(release_root(site), "release"):
        deleted = {folder.name: _forget(site, folder, ids) for folder in release_folders(site)}
        pointer = read_pointer(site)
        if pointer.current is not None and is_remote(release_root(site)):
            replace_pointer(site, pointer)  # services have copies, and look for new ones when it changes
        return deleted


def _forget(site: Site, folder: Path, ids: pa.Array) -> int:
    """The description follows the store, so that a later look at it finds the release whole."""
    with opened_store(site, folder) as store:
        num_deleted, num_left = store.delete(ids), store.count()
    manifest = read_json(folder / DESCRIPTION)
    if num_left != manifest["counts"]["users"]:
        manifest["counts"]["users"] = num_left
        manifest["forgotten_since"] = manifest.get("forgotten_since", 0) + num_deleted
        write_json(folder / DESCRIPTION, manifest)
    return num_deleted
