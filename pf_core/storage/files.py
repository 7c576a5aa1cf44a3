"""Read and write files on this machine's disk and in object storage (s3://bucket/folder) with the same functions.

`path_of` returns a pathlib.Path, or universal_pathlib's equivalent of one, which reads, writes, lists and removes the
same way. An object store cannot rename, append, memory-map or lock, so the functions here do what it needs instead:
files are written aside and uploaded whole; folders are uploaded with their JSON files last, because these describe the
others; and a file that must be on disk is copied into this machine's cache (`cache.py`). Credentials, region and
endpoint come from AWS' own chain (environment, profile, instance).
"""

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from pf_core.errors import PipelineError
from pf_core.storage.privacy import private

SCHEME = "s3://"


def path_of(text: str) -> Path:
    """Return the path that a site file names: a local one, or one in object storage."""
    if "://" not in text:
        return Path(text)
    if not text.startswith(SCHEME):
        raise PipelineError(
            f"{text}: unknown object store", f"use {SCHEME}…, the only kind known (S3, and servers with its protocol)"
        )
    if importlib.util.find_spec("s3fs") is None:
        raise PipelineError(f"{text} needs s3fs", "install it with: pip install 'pinnerformer[s3]'")
    return cast("Path", UPath(text, use_listings_cache=False))  # other machines write there too


def is_remote(path: Path) -> bool:
    """Whether a path is in object storage."""
    return not isinstance(path, Path)


def object_store(path: Path) -> tuple[Any, str]:
    """Return the file system of a remote path, and the path's name in it."""
    remote = cast("UPath", path)
    return remote.fs, remote.path


def local_dir() -> Path:
    """Folder of temporary files and of the cache, for sites in object storage; PF_LOCAL_DIR changes it."""
    chosen = os.environ.get("PF_LOCAL_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pinnerformer"


@contextlib.contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Turn errors of the object store into PipelineErrors, whose text never contains the credentials."""
    if not is_remote(path):
        yield
        return
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except FileNotFoundError as error:
        if "bucket does not exist" in str(error):
            raise PipelineError(f"{path}: there is no such bucket") from error
        raise
    except PermissionError as error:
        raise PipelineError(
            f"{path}: access denied by the credentials in AWS' chain (AWS_ACCESS_KEY_ID, AWS_PROFILE, the instance's "
            "role)"
        ) from error
    except (BotoCoreError, ClientError, ConnectionError, TimeoutError) as error:
        raise PipelineError(
            f"{path} cannot be reached ({type(error).__name__})",
            "check AWS_ENDPOINT_URL, AWS_REGION, the credentials and the network, then re-run",
        ) from error


# Writing


@contextlib.contextmanager
def write_file(path: Path) -> Iterator[Path]:
    """Yield a path on this machine to write to; the file appears at `path` when the block ends without an error.

    Readers see the old file until then. On disk the new file is written under a temporary name and renamed, in object
    storage it is uploaded. It is private.
    """
    if is_remote(path):
        with scratch_dir("upload") as folder:
            yield folder / path.name
            upload(folder / path.name, path)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with private(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old text or the new one. The new one is durable before it appears."""
    if is_remote(path):
        with reaching(path):
            path.write_text(text)
        return
    with write_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)


def write_new_text(path: Path, text: str) -> None:
    """Write a file on disk that does not exist yet, at once; a file that exists is a PipelineError, and stays."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.link(temporary, path)  # unlike a rename it fails if the file exists
    except FileExistsError as error:
        raise PipelineError(f"{path} exists, and is not overwritten", "delete it, or name another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def append_text(path: Path, text: str) -> None:
    """Append to a small file that has one writer; in object storage the whole object is rewritten."""
    if is_remote(path):
        with reaching(path):
            path.write_text((path.read_text() if path.exists() else "") + text)
    else:
        with private(path.parent), path.open("a") as file:
            file.write(text)


@contextlib.contextmanager
def write_folder(target: Path, *, keep_first: bool = False) -> Iterator[Path]:
    """Yield a new folder on this machine to fill; it becomes `target` when the block ends without an error.

    It replaces an older folder. With `keep_first`, several attempts may write the same folder at once: the first one
    that is complete stays, and later ones are dropped.
    """
    if is_remote(target):
        with scratch_dir("folder") as folder:
            yield folder
            if not keep_first:
                remove_tree(target)
            upload(folder, target)
        return
    # One writer reuses its name, so that what a killed run left is removed here; attempts at once need one each.
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp" if keep_first else f".{target.name}.tmp")
    remove_tree(partial)
    # An attempt whose run has ended must not bring back the folder that the run has removed.
    with private(target.parent):
        partial.mkdir(parents=not keep_first)
        try:
            yield partial
            if keep_first:
                _rename_unless_present(partial, target)
            else:
                remove_tree(target)
                os.replace(partial, target)
        finally:
            remove_tree(partial)


def _rename_unless_present(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def write_if_unchanged(path: Path, text: str, stamp: str | None) -> bool:
    """Write an object if its ETag is still `stamp` (None: if there is no object); return whether it was written."""
    store, name = object_store(path)
    bucket, _, key = name.partition("/")
    condition = {"IfNoneMatch": "*"} if stamp is None else {"IfMatch": stamp}
    with reaching(path):
        try:
            store.call_s3("put_object", Bucket=bucket, Key=key, Body=text.encode(), **condition)
        except OSError as error:
            if not is_refused(error):
                raise
            return False
    return True


def is_refused(error: Exception) -> bool:
    """Whether an object store refused a conditional write: the condition failed, or another write was under way."""
    return isinstance(error, FileExistsError) or "pre-condition" in str(error) or "conditional request" in str(error)


# Copying, moving and removing


def upload(source: Path, target: Path) -> None:
    """Upload a file, or all files of a folder; JSON files last, because they describe the others."""
    store, name = object_store(target)
    if source.is_file():
        files = {source: name}
    else:
        found = sorted((file for file in source.rglob("*") if file.is_file()), key=lambda file: file.suffix == ".json")
        files = {file: f"{name}/{file.relative_to(source).as_posix()}" for file in found}
    with reaching(target):
        for file, key in files.items():
            store.put_file(str(file), key)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder: on disk by hard links where possible, in object storage by the store itself (JSON files last)."""
    if not is_remote(source):
        shutil.copytree(source, target, copy_function=_link_or_copy)
        return
    store, name = object_store(source)
    with reaching(source):
        for key in sorted(store.find(name), key=lambda key: key.endswith(".json")):
            store.copy(key, f"{object_store(target)[1]}{key.removeprefix(name)}")


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder: at once on disk; in object storage `target` is complete when its JSON files are there."""
    if is_remote(source):
        copy_tree(source, target)
        remove_tree(source)
    else:
        source.rename(target)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name by a hard link; copy it where the file system has no hard links."""
    if is_remote(source):
        store, name = object_store(source)
        with reaching(source):
            store.copy(name, object_store(target)[1])
        return
    _link_or_copy(str(source), str(target))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def remove_tree(folder: Path) -> None:
    """Remove a folder and everything in it; do nothing if there is no such folder."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    store, name = object_store(folder)
    with reaching(folder), contextlib.suppress(FileNotFoundError):
        store.rm(name, recursive=True)


def list_folder(folder: Path) -> list[Path]:
    """Paths of the entries of a folder, sorted by name; empty if there is no such folder."""
    with reaching(folder):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def make_durable(folder: Path) -> None:
    """Make all files of a local folder durable, and their names; in object storage every write already is."""
    if is_remote(folder):
        return
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Flush a file to disk, or the names of the entries of a folder; do nothing in object storage."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_dir(what: str) -> Iterator[Path]:
    """Yield a new folder on this machine, which is removed at the end."""
    root = local_dir() / "tmp"
    with private(root):
        root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{what}-", dir=root) as folder:
        yield Path(folder)


# Reading


def read_parquet(path: Path, **arguments: Any) -> pa.Table:
    """Read a Parquet file; a missing or damaged one is a PipelineError."""
    try:
        if not is_remote(path):
            return pq.read_table(path, **arguments)
        with reaching(path), path.open("rb") as file:
            return pq.read_table(file, **arguments)
    except (pa.ArrowInvalid, OSError) as error:
        raise PipelineError(
            f"{path} is missing or damaged ({error})",
            "re-run, because another run may have replaced it meanwhile; if that does not help, rebuild its partition",
        ) from error


@contextlib.contextmanager
def open_arrow(path: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """Open an Arrow IPC file; only the record batches that are used are read."""
    with contextlib.ExitStack() as stack:
        source = pa.PythonFile(stack.enter_context(path.open("rb")), "r") if is_remote(path) else path
        yield stack.enter_context(pa.ipc.open_file(source))


def stamp_of(path: Path) -> list[Any]:
    """Path, size and time (or ETag) of a file: they change when the file does."""
    status = path.stat()
    changed = plain_etag(status.as_info()) if is_remote(path) else status.st_mtime_ns  # type: ignore[attr-defined]
    return [str(path), status.st_size, changed]


def etag_of(path: Path) -> str | None:
    """ETag of an object; None if there is no such object."""
    store, name = object_store(path)
    with reaching(path):
        try:
            return str(store.info(name)["ETag"])
        except FileNotFoundError:
            return None


def plain_etag(info: dict[str, Any]) -> str:
    """ETag in an object's information, without its quotes."""
    return str(info["ETag"]).strip('"')


class _Described(dict[str, Any]):
    """Content of a JSON file: a key that it should have and has not is a damage of the file, not of the code."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise _damaged(self.path, f"it has no {key!r}")


def _damaged(path: Path, fault: object) -> PipelineError:
    return PipelineError(f"{path} is damaged ({fault})", "re-run the partition that writes it")


def read_json(path: Path) -> Any:
    """Read a JSON file, which holds an object; a damaged one is a PipelineError, also when a missing key is read."""
    try:
        with reaching(path):
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no JSON object")
    described = _Described(content)
    described.path = path
    return described


def find_json(path: Path) -> Any | None:
    """Read a JSON file; None if there is no such file, also if another run removes it at this moment."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
