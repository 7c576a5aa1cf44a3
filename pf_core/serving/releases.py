"""Releases that are published: current.json, the manifests of releases, their stores, and the locks of their readers.

`current.json` alone decides: a folder that it does not name was never published. It names the current release, the ones
before it (a rollback returns to them at once), and those that a rollback withdrew. Withdrawn releases stay until the
next publication, so that a rollback can be undone; their ids are never used again.

A reader of a release holds a lock on it, and a release is not removed while it is read; a lock ends with its process.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pf_core.config.serving import StoreKind
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import layout_fault, marked, refuse_other_layout
from pf_core.schemas import IdType, Slices
from pf_core.serving.index import PinIndex
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.store import UserStore
from pf_core.storage.files import etag_of, is_remote, list_folder, read_json, sync, write_if_unchanged, write_json

CURRENT = "current.json"

DESCRIPTION = "release.json"

READERS = ".readers"
"""Name of the file in a release's folder that its readers lock."""

BUILDING = ".building-"
"""Prefix of the folder of a release while it is built."""

POPULAR = "popular.arrow"
"""Name of the file with the popular pins: pin_id, interest, user_days; the most popular first."""

_PUBLISH = materialize_command("release", "DAY")

RELEASE_ID = re.compile(r"\d{4}-\d{2}-\d{2}\.\d+")


# Manifests


class ReleaseInputs(TypedDict):
    """Digests of what a release is made of."""

    snapshot: str
    pin_index: str
    popular: str
    forgotten: str


class StoreDescription(TypedDict):
    kind: StoreKind
    key_prefix: NotRequired[str]
    """First part of the keys in Redis."""


class ReleaseDraft(TypedDict):
    """What is known of a release before it is built."""

    release: str
    """Id, `{ds}.{n}`."""
    layout: NotRequired[int]
    """Absent in the first layout."""
    ds: str
    model_version: str
    embedding_dim: int
    slices: Slices
    inputs: ReleaseInputs
    store: StoreDescription
    num_buckets: int
    user_id: IdType


class ReleaseCounts(TypedDict):
    users: int
    pins: int


class StoreChecks(TypedDict):
    """What was checked after the users were loaded."""

    users_in_snapshot: int
    users_in_store: int
    forgotten_left_out: int
    users_read_back_equal: int


class ReleaseChecks(StoreChecks):
    pins_in_index: int
    model_versions: int


class ReleaseManifest(ReleaseDraft):
    """Content of `release.json`."""

    created_at: str
    counts: ReleaseCounts
    checks: ReleaseChecks
    store_seconds: float
    seconds: float
    forgotten_since: NotRequired[int]
    """Number of users deleted from the store since the release was built."""


class ListedRelease(ReleaseManifest):
    """An element of `list_releases`."""

    is_current: bool
    is_withdrawn: bool
    can_roll_back_to: bool


def release_root(site: Site) -> Path:
    return site.directory / "release"


def read_release(folder: Path) -> ReleaseManifest:
    """Read the manifest of the release in `folder`, whatever its layout."""
    manifest: ReleaseManifest = read_json(folder / DESCRIPTION)
    return manifest


def current_manifest(site: Site) -> ReleaseManifest | None:
    """Return the manifest of the current release; None if there is no release, or if its files are gone."""
    folder = release_root(site) / (read_published(site).current or "none")
    return read_release(folder) if (folder / DESCRIPTION).exists() else None


def release_folders(site: Site) -> list[Path]:
    """Folders of complete releases, whether current.json names them or not."""
    return [path for path in list_folder(release_root(site)) if RELEASE_ID.fullmatch(path.name)]


def day_and_number(release: str) -> tuple[str, int]:
    """Parse a release id. The result orders releases: by day, and within a day by publication."""
    if not RELEASE_ID.fullmatch(release):
        raise PipelineError(f"{release!r} is not a release such as 2026-01-31.1")
    ds, number = release.split(".")
    return ds, int(number)


# current.json


@dataclass(frozen=True, kw_only=True)
class PublishedReleases:
    """Content of current.json: ids of releases."""

    current: str | None = None
    previous: tuple[str, ...] = ()
    """Releases before the current one, oldest first."""
    withdrawn: tuple[str, ...] = ()
    """Releases that a rollback withdrew."""
    revision: int = 0
    """Number of times that the file was replaced, so that a writer notices the replacement by another."""

    def names(self) -> tuple[str, ...]:
        """All releases that the file names."""
        return (*self.in_order(), *self.withdrawn)

    def in_order(self) -> tuple[str, ...]:
        """Releases that are not withdrawn, oldest first; the last is the current one."""
        return (*self.previous, *([] if self.current is None else [self.current]))


def current_file(site: Site) -> Path:
    return release_root(site) / CURRENT


def read_published(site: Site) -> PublishedReleases:
    """Read current.json; returns an empty PublishedReleases if nothing was ever published."""
    path = current_file(site)
    if not path.exists():
        return PublishedReleases()
    try:
        content = read_json(path)
        previous, withdrawn = tuple(content["previous"]), tuple(content["withdrawn"])
        for name in (content["current"], *previous, *withdrawn):
            day_and_number(name)
    except (PipelineError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} is damaged ({error}), but the releases in its folder are not",
            f"remove the file, and publish again with: {_PUBLISH}",
        ) from error
    refuse_other_layout("current_release", content, what=str(path), command=_PUBLISH)
    return PublishedReleases(
        current=content["current"], previous=previous, withdrawn=withdrawn, revision=content.get("revision", 0)
    )


def write_published(site: Site, published: PublishedReleases) -> None:
    """Replace current.json, which publishes its current release; then record that release in Redis.

    If Redis fails, the next publication records it.
    """
    assert published.current is not None
    path = current_file(site)
    content = {**asdict(replace(published, revision=published.revision + 1)), **marked("current_release")}
    if is_remote(path):
        _replace_object(path, content, revision=published.revision)
    else:
        write_json(path, content)
        sync(release_root(site))
    with opened_store(site, release_root(site) / published.current) as store:
        store.announce()


def _replace_object(path: Path, content: dict[str, Any], *, revision: int) -> None:
    """Replace current.json if it still has the revision that was read: this process may have lost its lease since."""
    stamp = etag_of(path)
    is_ours = (read_json(path).get("revision", 0) if stamp is not None else 0) == revision
    if not (is_ours and write_if_unchanged(path, json.dumps(content, indent=1, sort_keys=True), stamp)):
        raise PipelineError(f"{path} was replaced by another run meanwhile, nothing was published", "re-run")


def list_releases(site: Site) -> list[ListedRelease]:
    """Return the manifests of the releases that can be read, newest first."""
    published, root = read_published(site), release_root(site)
    present = [name for name in published.names() if (root / name / DESCRIPTION).exists()]
    return [
        {
            **read_release(root / name),
            "is_current": name == published.current,
            "is_withdrawn": name in published.withdrawn,
            "can_roll_back_to": name != published.current,
        }
        for name in sorted(present, key=day_and_number, reverse=True)
    ]


# Users


def store_of(site: Site, folder: Path, release: ReleaseDraft) -> UserStore:
    """Return the store of the release in `folder`, as its manifest describes it; does not open it yet."""
    config, num_buckets, embedding_dim = site.serving.store, release["num_buckets"], release["embedding_dim"]
    if release["store"]["kind"] == "lmdb":
        return LmdbStore(folder / "users", num_buckets=num_buckets, embedding_dim=embedding_dim)
    if config.kind != "redis" or config.url is None:
        raise PipelineError(
            f"the users of release {release['release']} are in Redis, but serving.store in the site file is "
            f"{config.kind}",
            "set serving.store in the site file to that Redis",
        )
    from pf_core.serving.redis_store import RedisLocation, RedisStore  # only services that use Redis import it

    return RedisStore(
        RedisLocation(
            url=config.url,
            is_cluster=config.cluster,
            prefix=f"{release['store']['key_prefix']}:{site.name}",
            release=release["release"],
            num_buckets=num_buckets,
            embedding_dim=embedding_dim,
        )
    )


@contextlib.contextmanager
def opened_store(site: Site, folder: Path) -> Iterator[UserStore]:
    """The store of the release in `folder`, closed at the end."""
    store = store_of(site, folder, read_json(folder / DESCRIPTION))
    try:
        yield store
    finally:
        store.close()


def fault_of(site: Site, release: str) -> str | None:
    """Return why a release cannot be served, in a sentence, or None if it is complete."""
    folder = release_root(site) / release
    if not (folder / DESCRIPTION).exists():
        return f"release {release} does not exist any more"
    manifest = read_release(folder)
    layout_problem = layout_fault("release", manifest)
    if layout_problem is not None:
        return f"release {release} {layout_problem}"
    counts = manifest["counts"]
    if not (folder / POPULAR).exists():
        return f"release {release} is incomplete: it has no {POPULAR}"
    try:
        with opened_store(site, folder) as store:
            num_users, num_pins = store.count(), len(PinIndex.open(folder / "index"))
    except (FileNotFoundError, PipelineError) as error:
        return f"release {release} is incomplete: {error}"
    if (num_users, num_pins) != (counts["users"], counts["pins"]):
        return (
            f"release {release} is incomplete: it has {num_users:,} of {counts['users']:,} users, "
            f"{num_pins:,} of {counts['pins']:,} pins"
        )
    return None


def lock_for_reading(folder: Path) -> int | None:
    """Return a descriptor: until it is closed, the release in the folder is not removed.

    Raises FileNotFoundError if the release has been removed. Returns None for a release in object storage: its reader
    has a local copy of the files that it uses.
    """
    if is_remote(folder):
        if not (folder / DESCRIPTION).exists():
            raise FileNotFoundError(f"no release in {folder}")
        return None
    descriptor = os.open(folder / READERS, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not (folder / READERS).exists():  # it was removed while this process waited for the lock
        os.close(descriptor)
        raise FileNotFoundError(f"no release in {folder}")
    return descriptor
