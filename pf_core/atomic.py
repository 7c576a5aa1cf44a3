"""Publishing a partition so that a reader sees the old one or the new one, never half.

A partition is a folder with numbered builds and one `manifest.json`. A build is filled under its own number;
the manifest that names it is written last, under a temporary name, and renamed over the old one: that rename
is the publication. A crash leaves at worst an unnamed build, which the next publication sweeps away.
The same scheme carries over to object storage, where a conditional write takes the place of the rename.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pf_core.contracts import PipelineError

MANIFEST = "manifest.json"


def write_json(path: Path, value: Any) -> None:
    """Write under a temporary name, make it durable, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PipelineError(f"{path} is damaged ({error}); re-run the partition that writes it") from error


def exclusive(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """One writer of a folder at a time, and nobody who relies on it; the lock dies with its process."""
    return _locked(folder, fcntl.LOCK_EX, f"another run is writing {what} or relying on it")


def relying_on(folder: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """While this lasts, nobody replaces what is in the folder."""
    return _locked(folder, fcntl.LOCK_SH, f"another run is writing {what}")


@contextlib.contextmanager
def _locked(folder: Path, kind: int, otherwise: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"{otherwise} in {folder}; wait until it has ended, then re-run") from None
        yield


def rename_once(attempt: Path, target: Path) -> None:
    """Give a folder that is whole its name; if another attempt at the same was faster, that one stays."""
    try:
        attempt.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(attempt, ignore_errors=True)


def start_build(partition: Path) -> Path:
    """A new, empty build folder; two writers never get the same one."""
    partition.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name.removeprefix("build-")) for path in partition.glob("build-*")), default=0)
    while True:
        number += 1
        build = partition / f"build-{number:06d}"
        try:
            build.mkdir()
        except FileExistsError:
            continue
        return build


def publish_build(build: Path, manifest: dict[str, Any]) -> None:
    """Name `build` in its partition's manifest, then remove the builds that came before it."""
    partition = build.parent
    write_json(partition / MANIFEST, {**manifest, "build": build.name})
    for other in partition.glob("build-*"):
        if other.name < build.name:
            shutil.rmtree(other, ignore_errors=True)
    for leftover in partition.glob(f".{MANIFEST}.*.tmp"):
        leftover.unlink(missing_ok=True)
