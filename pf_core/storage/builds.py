"""Publish a partition so that readers see the old one or the new one, never a mixture.

A partition is a folder with numbered builds and one `manifest.json`. A build is filled under its own number;
the manifest that names it is written last, under a temporary name, and renamed over the old one: that rename
is the publication. A crash leaves at worst a build that no manifest names, which the next publication removes.
In object storage, where a write is atomic by itself, builds get names that are never used twice, and leases replace
locks.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pf_core.storage.files import is_remote, read_json, remove_tree, write_json
from pf_core.storage.privacy import private

MANIFEST = "manifest.json"


@contextlib.contextmanager
def building(partition: Path) -> Iterator[Path]:
    """Yield a new build folder; remove it if the block fails before `publish_build` has published it."""
    build = start_build(partition)
    try:
        yield build
    except BaseException:
        if not _is_published(build):
            remove_tree(build)
        raise


def start_build(partition: Path) -> Path:
    """Return a new, empty build folder; two writers never get the same one."""
    number = max((_number(path) for path in partition.glob("build-*")), default=0)
    if is_remote(partition):  # where folders are only names
        return partition / f"build-{number + 1:06d}-{secrets.token_hex(4)}"
    with private(partition):
        partition.mkdir(parents=True, exist_ok=True)
        while True:
            number += 1
            build = partition / f"build-{number:06d}"
            try:
                build.mkdir()
            except FileExistsError:
                continue
            return build


def _number(build: Path) -> int:
    return int(build.name.split("-")[1])


def _is_published(build: Path) -> bool:
    manifest = build.parent / MANIFEST
    return manifest.exists() and read_json(manifest)["build"] == build.name


def publish_build(build: Path, manifest: Mapping[str, Any]) -> None:
    """Name `build` in its partition's manifest, then remove the builds before it."""
    partition = build.parent
    write_json(partition / MANIFEST, {**manifest, "build": build.name})
    for other in partition.glob("build-*"):
        if other.name != build.name and _number(other) <= _number(build):
            remove_tree(other)
    for leftover in partition.glob(f".{MANIFEST}.*.tmp"):
        leftover.unlink(missing_ok=True)
