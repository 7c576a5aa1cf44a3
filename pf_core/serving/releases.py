"""What is published: the pointer, the releases that it names, those who read them, and what is swept away.

The pointer, `current.json`, is the only truth: a folder that it does not name was never published. It names the
current release, those before it (a rollback goes back to them at once), and those that a rollback withdrew: they stay
until the next publication, so that a rollback can be undone, and their ids are never given again.

Whoever reads a release holds a lock on it, and nothing is removed under a reader; a lock dies with its process.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.serving.index import PinIndex
from pf_core.serving.lmdb_store import LmdbStore
from pf_core.serving.redis_store import RedisStore
from pf_core.serving.store import UserStore
from pf_core.storage.files import (
    etag_of,
    is_remote,
    list_folder,
    read_json,
    remove_tree,
    sync,
    write_if_unchanged,
    write_json,
)

POINTER = "current.json"

DESCRIPTION = "release.json"

READERS = ".readers"
"""The file in a release's folder that its readers lock."""

BUILDING, DROPPING = ".building-", ".dropping-"

RELEASE_ID = re.compile(r"\d{4}-\d{2}-\d{2}\.\d+")


@dataclass(frozen=True, kw_only=True)
class Pointer:
    current: str | None = None
    previous: tuple[str, ...] = ()
    """Those before it, oldest first."""
    withdrawn: tuple[str, ...] = ()
    revision: int = 0
    """Grows with every replacement, so that whoever looks sees that there was one."""

    def names(self) -> tuple[str, ...]:
        return (*self.published(), *self.withdrawn)

    def published(self) -> tuple[str, ...]:
        """Oldest first; the last is the current one."""
        return (*self.previous, *([] if self.current is None else [self.current]))


def pointer_path(site: Site) -> Path:
    return release_root(site) / POINTER


def read_pointer(site: Site) -> Pointer:
    """An empty one if nothing was ever published."""
    path = pointer_path(site)
    if not path.exists():
        return Pointer()
    try:
        content = read_json(path)
        previous, withdrawn = tuple(content["previous"]), tuple(content["withdrawn"])
        for name in (content["current"], *previous, *withdrawn):
            day_and_number(name)
    except (PipelineError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} is damaged ({error}). The releases beside it are whole: remove the file, and publish again with: "
            f"{materialize_command('release', 'DAY')}"
        ) from error
    return Pointer(
        current=content["current"], previous=previous, withdrawn=withdrawn, revision=content.get("revision", 0)
    )


def replace_pointer(site: Site, pointer: Pointer) -> None:
    """The publication itself. Redis follows; should that fail, the next run mends it."""
    assert pointer.current is not None
    path, content = pointer_path(site), asdict(replace(pointer, revision=pointer.revision + 1))
    if is_remote(path):
        _replace_object(path, content, revision=pointer.revision)
    else:
        write_json(path, content)
        sync(release_root(site))
    with opened_store(site, release_root(site) / pointer.current) as store:
        store.announce()


def _replace_object(path: Path, content: dict[str, Any], *, revision: int) -> None:
    """On the condition that it is still what we read: a lease may have been lost without our knowing."""
    stamp = etag_of(path)
    is_ours = (read_json(path).get("revision", 0) if stamp is not None else 0) == revision
    if not (is_ours and write_if_unchanged(path, json.dumps(content, indent=1, sort_keys=True), stamp)):
        raise PipelineError(f"{path} was replaced by another run meanwhile. Nothing was published: re-run")


def day_and_number(release: str) -> tuple[str, int]:
    """Releases in order: of a later day, or of the same day and published later."""
    if not RELEASE_ID.fullmatch(release):
        raise PipelineError(f"{release!r} is not a release such as 2026-01-31.1")
    ds, number = release.split(".")
    return ds, int(number)


def release_folders(site: Site) -> list[Path]:
    """Of complete releases, whether the pointer names them or not."""
    return [path for path in list_folder(release_root(site)) if RELEASE_ID.fullmatch(path.name)]


def next_id(site: Site, pointer: Pointer, ds: str) -> str:
    """`{ds}.{n}`; n is larger than that of any release of the day that was published, withdrawn or left unpublished.

    What was left unfinished counts as long as it could not be swept away: its store may not be reachable.
    """
    present = [path.name.removeprefix(BUILDING) for path in list_folder(release_root(site))]
    names = (*pointer.names(), *filter(RELEASE_ID.fullmatch, present))
    numbers = [number for day, number in map(day_and_number, names) if day == ds]
    return f"{ds}.{max(numbers, default=0) + 1}"


def store_of(site: Site, folder: Path, release: Mapping[str, Any]) -> UserStore:
    """The users of the release in `folder`, by its description; nothing is opened yet."""
    config, num_buckets, embedding_dim = site.serving.store, release["num_buckets"], release["embedding_dim"]
    if release["store"]["kind"] == "lmdb":
        return LmdbStore(folder / "users", num_buckets=num_buckets, embedding_dim=embedding_dim)
    if config.kind != "redis" or config.url is None:
        raise PipelineError(
            f"the users of release {release['release']} are in Redis, but serving.store in the site file is "
            f"{config.kind}: name the Redis there to reach them"
        )
    prefix = f"{release['store']['key_prefix']}:{site.name}"
    return RedisStore(
        config.url,
        is_cluster=config.cluster,
        prefix=prefix,
        release=release["release"],
        num_buckets=num_buckets,
        embedding_dim=embedding_dim,
    )


@contextlib.contextmanager
def opened_store(site: Site, folder: Path) -> Iterator[UserStore]:
    store = store_of(site, folder, read_json(folder / DESCRIPTION))
    try:
        yield store
    finally:
        store.close()


def fault_of(site: Site, release: str) -> str | None:
    """Why a release could not be served, in a sentence; None if it is whole."""
    folder = release_root(site) / release
    if not (folder / DESCRIPTION).exists():
        return f"release {release} is not there any more"
    counts = read_json(folder / DESCRIPTION)["counts"]
    try:
        with opened_store(site, folder) as store:
            num_users, num_pins = store.count(), len(PinIndex.open(folder / "index"))
    except (FileNotFoundError, PipelineError) as error:
        return f"release {release} is not whole: {error}"
    if (num_users, num_pins) != (counts["users"], counts["pins"]):
        return (
            f"release {release} is not whole: it has {num_users:,} of {counts['users']:,} users, "
            f"{num_pins:,} of {counts['pins']:,} pins"
        )
    return None


def hold(folder: Path) -> int | None:
    """A descriptor: until it is closed, the release in the folder is not removed. FileNotFoundError if it has been.

    None of a release in object storage: who reads it has a copy of what he read, and the pointer's other releases stay.
    """
    if is_remote(folder):
        if not (folder / DESCRIPTION).exists():
            raise FileNotFoundError(f"no release in {folder}")
        return None
    descriptor = os.open(folder / READERS, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not (folder / READERS).exists():  # it was being removed
        os.close(descriptor)
        raise FileNotFoundError(f"no release in {folder}")
    return descriptor


def sweep(site: Site, kept: set[str] | None, progress: Callable[[str], None]) -> None:
    """Remove what crashes left behind and, if `kept` is given, every release but those kept and those being read."""
    for temporary in release_root(site).glob(f".{POINTER}.*.tmp"):
        temporary.unlink()
    for folder in (path for path in list_folder(release_root(site)) if path.is_dir()):
        is_unfinished = folder.name.startswith((BUILDING, DROPPING))
        is_old = kept is not None and folder.name not in kept and RELEASE_ID.fullmatch(folder.name)
        if not (is_unfinished or is_old):
            continue
        try:
            removed = folder if is_unfinished else _withdraw_from_readers(folder)
            if removed is None:
                progress(f"release {folder.name} is still being read; it is removed after a later publication")
            else:
                remove(site, removed)
        except PipelineError as error:  # what was published is not less published for that
            progress(f"{folder.name} could not be removed yet: {error}")


def _withdraw_from_readers(folder: Path) -> Path | None:
    """Rename a release so that nobody can open it any more; None if somebody has."""
    if is_remote(folder):
        return folder
    with (folder / READERS).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return folder.rename(folder.with_name(f"{DROPPING}{folder.name}"))


def remove(site: Site, folder: Path) -> None:
    """The users first, wherever they are: their place is known as long as the folder is there."""
    if (folder / DESCRIPTION).exists():
        with opened_store(site, folder) as store:
            store.drop()
        (folder / DESCRIPTION).unlink()  # first: without it, nobody takes the rest for a release
    remove_tree(folder)


def release_root(site: Site) -> Path:
    return site.directory / "release"
