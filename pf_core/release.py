"""release: a day's users and pins, of one model, become what services read, by the replacement of one file.

A release is a folder that needs nothing else: `users/` (unless they are in Redis), `index/` (hard links of the day's
pin_index) and `release.json`. It is built under a hidden name, verified against the snapshot, and renamed; then the
pointer is replaced (see `pointer.py`). A crash at any moment leaves the old release current, and something that the
next publication sweeps away. Memory: two buckets of the snapshot, or a shard of the index.

Users on the deletion list are left out even if the snapshot still has them, and a rollback does not bring them back.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.atomic import exclusive, read_json, relying_on, write_json
from pf_core.contracts import PipelineError
from pf_core.embeddings import digest_of, index_dir, matrix_of, release_root, snapshot_state
from pf_core.packing import command
from pf_core.pin_index import PinIndex, require_index
from pf_core.pointer import (
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
    remove,
    replace_pointer,
    store_of,
    sweep,
)
from pf_core.raw_actions import read_deletion_list
from pf_core.shuffle import bucket_of
from pf_core.site import Site
from pf_core.state import Manifest, open_dataset
from pf_core.storage import copy_tree, is_remote, make_durable, rename_folder, sync
from pf_core.store import UserStore

STORED_COLUMNS = ("user_id", "embedding", "model_version", "computed_ds")
READ_BACK_USERS = 1000
"""At least so many are read back and compared with the snapshot bit for bit: the last rows of every bucket."""
REPORT_EVERY_S = 5.0


def publish_release(site: Site, ds: str, *, progress: Callable[[str], None]) -> Manifest:
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
        draft = _draft(site, ds, next_id(site, pointer, ds))
        manifest = _if_unchanged(site, pointer, draft)
        if manifest is not None:
            progress(f"release {ds}: unchanged, {manifest['release']} stays the current one")
            return manifest
        sweep(site, None, progress)
        manifest = _build(site, draft, progress)
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
            f"{command('pin_embeddings,pin_index', ds)}"
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


def _build(site: Site, draft: Manifest, progress: Callable[[str], None]) -> Manifest:
    """Fill the release's folder under a hidden name, verify it, make it durable, and give it its name."""
    root, started = release_root(site), time.monotonic()
    building = root / f"{BUILDING}{draft['release']}"
    try:
        if not is_remote(building):
            building.mkdir()
            (building / READERS).touch()
        write_json(building / DESCRIPTION, draft)  # from here on, a sweep knows where the users are
        _, index_build = require_index(site, draft["ds"])
        copy_tree(index_build, building / "index")
        stream = _Stream(site, draft, progress)
        with contextlib.closing(store_of(site, building, draft)) as store:
            store_started = time.monotonic()
            store.build(stream.buckets(), num_users=stream.num_users)
            checks = _verify_users(draft, store, stream)
            store_seconds = time.monotonic() - store_started
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


class _Stream:
    """The snapshot's buckets on their way into the store: judged, without forgotten users, and sampled."""

    def __init__(self, site: Site, draft: Manifest, progress: Callable[[str], None]) -> None:
        self._state = snapshot_state(site)
        self._snapshot = self._state.require(draft["ds"])
        self._forgotten = read_deletion_list(site)
        self._draft, self._progress = draft, progress
        self.num_users = self._snapshot["counts"]["users"]
        self.num_read = self.num_left_out = 0
        self.sampled: list[pa.Table] = []

    def buckets(self) -> Iterator[tuple[int, pa.Table]]:
        bucket_of_forgotten = bucket_of(self._forgotten, self._state.num_buckets)
        told = time.monotonic()
        for bucket, rows in enumerate(self._read_ahead()):
            self._judge(bucket, rows)
            self.num_read += rows.num_rows
            forgotten = self._forgotten.filter(pa.array(bucket_of_forgotten == bucket))
            if len(forgotten):
                kept = rows.filter(pc.invert(pc.is_in(rows["user_id"], forgotten)))
                self.num_left_out += rows.num_rows - kept.num_rows
                rows = kept
            num_sampled = min(rows.num_rows, math.ceil(READ_BACK_USERS * rows.num_rows / max(1, self.num_users)))
            self.sampled.append(_copied(rows.slice(rows.num_rows - num_sampled)))
            yield bucket, rows
            if time.monotonic() - told > REPORT_EVERY_S:
                told = time.monotonic()
                self._progress(
                    f"release {self._draft['release']}: {self.num_read:,} of {self.num_users:,} users are in the store"
                )

    def _read_ahead(self) -> Iterator[pa.Table]:
        """Read a bucket while the one before it is written."""
        with ThreadPoolExecutor(1) as reader:
            pending = reader.submit(self._read, 0)
            for bucket in range(1, self._state.num_buckets):
                rows, pending = pending.result(), reader.submit(self._read, bucket)
                yield rows
            yield pending.result()

    def _read(self, bucket: int) -> pa.Table:
        dataset = open_dataset(self._state.bucket_path(bucket), version=self._snapshot["versions"][bucket])
        return dataset.to_table(columns=list(STORED_COLUMNS))

    def _judge(self, bucket: int, rows: pa.Table) -> None:
        for name in STORED_COLUMNS:
            if rows[name].null_count:
                raise PipelineError(f"user_embedding_snapshot: {name} is missing in rows of bucket {bucket}")
        versions = set(rows["model_version"].unique().to_pylist())
        if not versions <= {self._draft["model_version"]}:
            raise PipelineError(
                f"user_embedding_snapshot {self._draft['ds']} is of model {self._draft['model_version']}, but bucket "
                f"{bucket} has rows of {', '.join(sorted(versions))}: build the day anew"
            )


def _copied(rows: pa.Table) -> pa.Table:
    """Rows with buffers of their own: a slice would keep the whole alive."""
    return rows.take(pa.array(np.arange(rows.num_rows)))


def _verify_users(draft: Manifest, store: UserStore, stream: _Stream) -> dict[str, int]:
    """What was written is what should have been; what was checked, for the manifest."""
    num_stored, release = store.count(), draft["release"]
    if not num_stored + stream.num_left_out == stream.num_read == stream.num_users:
        raise PipelineError(
            f"release {release}: the snapshot has {stream.num_users:,} users, {stream.num_read:,} were read and "
            f"{stream.num_left_out:,} of them are forgotten, but {num_stored:,} are in the store. Nothing was published"
        )
    sampled = pa.concat_tables(stream.sampled)
    stored = store.get(sampled["user_id"].combine_chunks())
    days = sampled["computed_ds"].cast(pa.int32()).to_numpy()
    vectors = matrix_of(sampled["embedding"]).astype(np.float32)
    is_equal = stored.found_N & (stored.days_N == days) & (stored.vectors_ND == vectors).all(axis=1)
    if not is_equal.all():
        raise PipelineError(
            f"release {release}: {int((~is_equal).sum()):,} of {len(is_equal):,} users who were read back from the "
            f"store differ from the snapshot, such as {sampled['user_id'][int(np.argmin(is_equal))].as_py()!r}. "
            "Nothing was published"
        )
    return {
        "users_in_snapshot": stream.num_users,
        "users_in_store": num_stored,
        "forgotten_left_out": stream.num_left_out,
        "users_read_back_equal": len(is_equal),
    }


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
