"""Who may read what is stored: its owner alone, or the owner and the group of a shared folder.

Files get mode 0600 and folders 0700, also those that libraries write (Lance, LMDB, hnswlib, SQLite): the umask of the
process is narrowed meanwhile, and processes that are started then have it, too. A folder with the setgid bit
(`chmod g+s`) is shared with its group, which new files inherit: below it the modes are 0660 and 0770.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

OWNER_ONLY, WITH_GROUP = 0o077, 0o007


def umask_for(folder: Path) -> int:
    """Return the umask of what is written in a folder, which may not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return WITH_GROUP if existing.stat().st_mode & stat.S_ISGID else OWNER_ONLY


class _Umask:
    """The umask of the process while blocks ask for narrower ones: with all bits that any of them asks for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[int] = []
        self._before = 0

    def narrow(self, mask: int) -> None:
        with self._lock:
            before = os.umask(mask)
            if not self._asked:
                self._before = before
            self._asked.append(mask)
            self._set()

    def widen(self, mask: int) -> None:
        with self._lock:
            self._asked.remove(mask)
            self._set()

    def _set(self) -> None:
        together = 0
        for mask in self._asked:
            together |= mask
        os.umask(together if self._asked else self._before)


_umask = _Umask()


@contextlib.contextmanager
def private(folder: Path) -> Iterator[None]:
    """Files and folders that are made in this block, in `folder` or elsewhere, are not for everybody."""
    if not isinstance(folder, Path):  # in object storage, where buckets have rules of their own
        yield
        return
    mask = umask_for(folder)
    _umask.narrow(mask)
    try:
        yield
    finally:
        _umask.widen(mask)
