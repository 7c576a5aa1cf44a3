"""Publishing a partition so that a reader sees the old one or the new one, never half.

A partition is a folder with numbered builds and one `manifest.json`. A build is filled under its own number;
the manifest that names it is written last, under a temporary name, and renamed over the old one: that rename
is the publication. A crash leaves at worst an unnamed build, which the next publication sweeps away.
In object storage, where a write is atomic by itself, builds have names that are never given twice, and leases stand for
locks.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pf_core.contracts import PipelineError
from pf_core.lease import exclusive_lease, shared_lease
from pf_core.storage import is_remote, reaching, remove_tree

MANIFEST = "manifest.json"


def write_json(path: Path, value: Any) -> None:
    """Write under a temporary name, make it durable, rename."""
    if is_remote(path):
        with reaching(path):
            path.write_text(json.dumps(value, indent=1, sort_keys=True))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        with reaching(path):
            return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PipelineError(f"{path} is damaged ({error}); re-run the partition that writes it") from error


def exclusive(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """One writer of a folder at a time, and nobody who relies on it; the lock dies with its process."""
    otherwise = f"another run is writing {what} or relying on it"
    return exclusive_lease(folder, otherwise) if is_remote(folder) else _locked(folder, fcntl.LOCK_EX, otherwise)


def relying_on(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """While this lasts, nobody replaces what is in the folder."""
    otherwise = f"another run is writing {what}"
    return shared_lease(folder, otherwise) if is_remote(folder) else _locked(folder, fcntl.LOCK_SH, otherwise)


@contextlib.contextmanager
def _locked(folder: Path, kind: int, otherwise: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"{otherwise} in {folder}; wait until it has ended, then re-run") from None
        yield


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


def publish_build(build: Path, manifest: dict[str, Any]) -> None:
    """Name `build` in its partition's manifest, then remove the builds that came before it."""
    partition = build.parent
    write_json(partition / MANIFEST, {**manifest, "build": build.name})
    for other in partition.glob("build-*"):
        if other.name != build.name and _number(other) <= _number(build):
            remove_tree(other)
    for leftover in partition.glob(f".{MANIFEST}.*.tmp"):
        leftover.unlink(missing_ok=True)
