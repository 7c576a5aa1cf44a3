"""A file system of a few megabytes, which tests fill and make read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A mounted tmpfs."""

    path: Path

    def leave_free(self, num_bytes: int) -> None:
        """Fill it until so many bytes are free, or remove what filled it if more are."""
        filler = self.path / "filler"
        filler.unlink(missing_ok=True)
        filler.write_bytes(bytes(max(0, shutil.disk_usage(self.path).free - num_bytes)))

    def empty(self) -> None:
        """Remove what filled it."""
        (self.path / "filler").unlink(missing_ok=True)

    def set_writable(self, is_writable: bool) -> None:
        subprocess.run(["mount", "-o", f"remount,{'rw' if is_writable else 'ro'}", str(self.path)], check=True)


@contextmanager
def small_disk(path: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    """Mount an empty disk of this size; the test is skipped where that is not possible."""
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    options = f"size={megabytes}m"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mount does not work here: {mount.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
