"""Publishing a partition so that a reader sees the old one or the new one, never half.

A partition is a folder with numbered builds and one `manifest.json`. A build is filled under its own number;
the manifest that names it is written last, under a temporary name, and renamed over the old one: that rename
is the publication. A crash leaves at worst an unnamed build, which the next publication sweeps away.
In object storage, where a write is atomic by itself, builds have names that are never given twice, and leases stand for
locks.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pf_core.storage.files import is_remote, remove_tree, write_json

MANIFEST = "manifest.json"


def start_build(partition: Path) -> Path:
    """A new, empty build folder; two writers never get the same one."""
    number = max((_number(path) for path in partition.glob("build-*")), default=0)
    if is_remote(partition):  # where folders are only names
        return partition / f"build-{number + 1:06d}-{secrets.token_hex(4)}"
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


def publish_build(build: Path, manifest: Mapping[str, Any]) -> None:
    """Name `build` in its partition's manifest, then remove the builds that came before it."""
    partition = build.parent
    write_json(partition / MANIFEST, {**manifest, "build": build.name})
    for other in partition.glob("build-*"):
        if other.name != build.name and _number(other) <= _number(build):
            remove_tree(other)
    for leftover in partition.glob(f".{MANIFEST}.*.tmp"):
        leftover.unlink(missing_ok=True)
