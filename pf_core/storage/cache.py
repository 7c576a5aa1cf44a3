"""The local cache: copies of files in object storage, for code that needs them on disk to memory-map or load them.

The name of a copy is a hash of the names and ETags of what it holds, so that a copy is never out of date and is
downloaded once.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from pathlib import Path

from pf_core.storage.files import is_remote, local_dir, object_store, plain_etag, reaching, scratch_dir
from pf_core.storage.privacy import private
from pf_core.storage.retention import mark_used, time_of

CACHE_GB = 100.0
"""Size of the cache in GB; beyond it, the least recently used copies are evicted. PF_CACHE_GB changes it."""


def fetched(path: Path) -> Path:
    """Return a path on this machine's disk: the path itself, or a copy of what the object store has now."""
    if not is_remote(path):
        return path
    store, name = object_store(path)
    with reaching(path), private(local_dir()):
        found = store.find(name, detail=True)
        if not found:
            raise FileNotFoundError(f"nothing at {path}")
        content = "".join((name, *(f"\n{key} {plain_etag(info)}" for key, info in sorted(found.items()))))
        entry = local_dir() / "cache" / hashlib.sha256(content.encode()).hexdigest()[:24]
        if not entry.exists():
            entry.parent.mkdir(parents=True, exist_ok=True)
            with scratch_dir("download") as folder:
                partial = folder / entry.name
                for key in found:
                    target = partial / path.name / key.removeprefix(name).lstrip("/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    store.get_file(key, str(target))
                mark_used(partial, _entries(entry.parent))  # before another process can see it, and evict it
                with contextlib.suppress(OSError):  # another process was faster
                    partial.rename(entry)
            _evict(entry.parent, keep=entry)
    mark_used(entry, _entries(entry.parent))
    return entry / path.name


def _entries(cache: Path) -> list[Path]:
    return list(cache.glob("[!.]*"))


def _evict(cache: Path, *, keep: Path) -> None:
    """Remove the least recently used copies. Processes that have a removed file open can go on reading it."""
    sizes = {entry: _size_of(entry) for entry in _entries(cache)}
    excess = sum(sizes.values()) - float(os.environ.get("PF_CACHE_GB") or CACHE_GB) * 1e9
    for entry in sorted(sizes, key=time_of):
        if excess > 0 and entry != keep:
            with contextlib.suppress(FileNotFoundError):  # another process has evicted it
                evicted = entry.rename(entry.with_name(f".{uuid.uuid4().hex}"))
                shutil.rmtree(evicted, ignore_errors=True)
            excess -= sizes[entry]


def _size_of(entry: Path) -> int:
    """Number of bytes of a copy; 0 if another process evicts it."""
    try:
        return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
    except FileNotFoundError:
        return 0
