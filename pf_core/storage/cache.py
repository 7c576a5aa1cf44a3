"""Copies on this machine of what lies in object storage, for those who need a file on disk: to map, or to load whole.

A copy is known by what it holds (names and ETags), so that it is never out of date, and one who asks again has it.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from pathlib import Path

from pf_core.storage.files import is_remote, local_dir, object_store, plain_etag, reaching, scratch_dir

CACHE_GB = 100.0
"""Of all copies; those that were not asked for the longest are removed first. PF_CACHE_GB changes it."""


def fetched(path: Path) -> Path:
    """A file or folder on this machine's disk: itself, or a copy that has what the object store has now."""
    if not is_remote(path):
        return path
    store, name = object_store(path)
    with reaching(path):
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
                with contextlib.suppress(OSError):  # another process was faster
                    partial.rename(entry)
            _evict(entry.parent, but=entry)
    os.utime(entry)
    return entry / path.name


def _evict(cache: Path, *, but: Path) -> None:
    """What is removed stays readable for those who have it open."""
    sizes = {
        entry: sum(file.stat().st_size for file in entry.rglob("*") if file.is_file()) for entry in cache.glob("[!.]*")
    }
    excess = sum(sizes.values()) - float(os.environ.get("PF_CACHE_GB") or CACHE_GB) * 1e9
    for entry in sorted(sizes, key=lambda entry: entry.stat().st_mtime_ns):
        if excess > 0 and entry != but:
            gone = entry.rename(entry.with_name(f".{uuid.uuid4().hex}"))
            shutil.rmtree(gone, ignore_errors=True)
            excess -= sizes[entry]
