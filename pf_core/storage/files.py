"""Paths on this machine's disk, and in object storage (s3://bucket/folder), under the same verbs.

A path that `path_of` gives is a pathlib.Path, or universal_pathlib's stand-in for one, which reads, writes, lists and
removes alike. What an object store cannot do is here: nothing can be renamed, appended to, mapped or locked there. So
files are written aside and uploaded whole; folders are uploaded, their JSON files last, because these describe the
others; and who needs a file in memory or on disk has a copy of it in this machine's cache, known by what it holds.
Credentials, region and endpoint come from AWS' own chain (environment, profile, instance).
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

SCHEME = "s3://"


def path_of(text: str) -> Path:
    """What a site file names."""
    if "://" not in text:
        return Path(text)
    if not text.startswith(SCHEME):
        raise PipelineError(f"{text}: of object stores, {SCHEME}… is known (S3, and what speaks its protocol)")
    if importlib.util.find_spec("s3fs") is None:
        raise PipelineError(f"{text} needs s3fs: pip install 'pinnerformer[s3]'")
    return cast("Path", UPath(text, use_listings_cache=False))  # other machines write there, too


def is_remote(path: Path) -> bool:
    return not isinstance(path, Path)


def object_store(path: Path) -> tuple[Any, str]:
    """The file system of a remote path, and the path's name there."""
    remote = cast("UPath", path)
    return remote.fs, remote.path


def local_dir() -> Path:
    """Where this machine works and keeps copies, if what it works on is in object storage."""
    chosen = os.environ.get("PF_LOCAL_DIR")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pinnerformer"


@contextlib.contextmanager
def reaching(path: Path) -> Iterator[None]:
    """What an object store answers instead, in a sentence; never with the credentials that it did not like."""
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
            f"{path} may not be reached: the credentials in AWS' chain (AWS_ACCESS_KEY_ID, AWS_PROFILE, the "
            "instance's role) are wrong, or do not allow it"
        ) from error
    except (BotoCoreError, ClientError, ConnectionError, TimeoutError) as error:
        raise PipelineError(
            f"{path} cannot be reached ({type(error).__name__}): see AWS_ENDPOINT_URL, AWS_REGION, the credentials "
            "and the network; then re-run"
        ) from error


# Files


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place on this machine to write a file to, which is at `path` afterwards, if all went well."""
    if not is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with scratch_dir("upload") as folder:
        yield folder / path.name
        upload(folder / path.name, path)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The same, where somebody may read what is there until then."""
    if is_remote(path):
        with written(path) as local:
            yield local
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    yield temporary
    os.replace(temporary, path)


def upload(source: Path, target: Path) -> None:
    """A file, or all files of a folder, those that describe the others (JSON) last."""
    store, name = object_store(target)
    if source.is_file():
        files = {source: name}
    else:
        found = sorted((file for file in source.rglob("*") if file.is_file()), key=lambda file: file.suffix == ".json")
        files = {file: f"{name}/{file.relative_to(source).as_posix()}" for file in found}
    with reaching(target):
        for file, key in files.items():
            store.put_file(str(file), key)


@contextlib.contextmanager
def placed(target: Path) -> Iterator[Path]:
    """A new folder of this machine, which is at `target` afterwards, if all went well."""
    if is_remote(target):
        with scratch_dir("folder") as folder:
            yield folder
            remove_tree(target)
            upload(folder, target)
        return
    partial = target.with_name(f".{target.name}.tmp")
    remove_tree(partial)
    partial.mkdir(parents=True)
    yield partial
    place(partial, target)


@contextlib.contextmanager
def placed_once(target: Path) -> Iterator[Path]:
    """The same for one of several attempts at a folder, which all make the same: the first to be whole stays."""
    if is_remote(target):
        with scratch_dir("folder") as folder:
            yield folder
            upload(folder, target)
        return
    attempt = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    attempt.mkdir()
    yield attempt
    try:
        attempt.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove_tree(attempt)


def place(folder: Path, target: Path) -> None:
    """A folder of this machine becomes `target`, instead of what was there."""
    if is_remote(target):
        remove_tree(target)
        upload(folder, target)
        remove_tree(folder)
    else:
        remove_tree(target)
        os.replace(folder, target)


def copy_tree(source: Path, target: Path) -> None:
    """By hard links where the disk has them, by the object store itself if both are there (JSON files last)."""
    if not is_remote(source):
        shutil.copytree(source, target, copy_function=_link_or_copy)
        return
    store, name = object_store(source)
    with reaching(source):
        for key in sorted(store.find(name), key=lambda key: key.endswith(".json")):
            store.copy(key, f"{object_store(target)[1]}{key.removeprefix(name)}")


def rename_folder(source: Path, target: Path) -> None:
    """At once on disk; in an object store, what is there afterwards is whole when its JSON files are there."""
    if is_remote(source):
        copy_tree(source, target)
        remove_tree(source)
    else:
        source.rename(target)


def write_if_unchanged(path: Path, text: str, stamp: str | None) -> bool:
    """Write an object if it is still the one that had this stamp (None: if there is none); whether it was."""
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
    """By an object store: a condition did not hold, or another conditional write was under way."""
    return isinstance(error, FileExistsError) or "pre-condition" in str(error) or "conditional request" in str(error)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file system has no hard links."""
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
    """With all that is in it, if it is there."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    store, name = object_store(folder)
    with reaching(folder), contextlib.suppress(FileNotFoundError):
        store.rm(name, recursive=True)


def list_folder(folder: Path) -> list[Path]:
    """What is in it, by name; nothing, if it is not there."""
    with reaching(folder):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def make_durable(folder: Path) -> None:
    """All files of a folder of this machine, and their names; an object store answers when what it has is durable."""
    if is_remote(folder):
        return
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_dir(what: str) -> Iterator[Path]:
    """A folder on this machine, gone afterwards."""
    root = local_dir() / "tmp"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{what}-", dir=root) as folder:
        yield Path(folder)


def read_parquet(path: Path, **arguments: Any) -> pa.Table:
    try:
        if not is_remote(path):
            return pq.read_table(path, **arguments)
        with reaching(path), path.open("rb") as file:
            return pq.read_table(file, **arguments)
    except (pa.ArrowInvalid, OSError) as error:
        raise PipelineError(f"{path} is missing or damaged ({error}): make its partition anew") from error


@contextlib.contextmanager
def open_arrow(path: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """An Arrow IPC file, of which only what is asked for is read."""
    with contextlib.ExitStack() as stack:
        source = pa.PythonFile(stack.enter_context(path.open("rb")), "r") if is_remote(path) else path
        yield stack.enter_context(pa.ipc.open_file(source))


def stamp_of(path: Path) -> list[Any]:
    """What shows that a file has changed, without reading it."""
    status = path.stat()
    changed = plain_etag(status.as_info()) if is_remote(path) else status.st_mtime_ns  # type: ignore[attr-defined]
    return [str(path), status.st_size, changed]


def etag_of(path: Path) -> str | None:
    """Of an object; None if there is none."""
    store, name = object_store(path)
    with reaching(path):
        try:
            return str(store.info(name)["ETag"])
        except FileNotFoundError:
            return None


def plain_etag(info: dict[str, Any]) -> str:
    return str(info["ETag"]).strip('"')


def append_text(path: Path, text: str) -> None:
    """To a small file, whose writer is alone; an object is written anew."""
    if is_remote(path):
        with reaching(path):
            path.write_text((path.read_text() if path.exists() else "") + text)
    else:
        with path.open("a") as file:
            file.write(text)


def replace_text(path: Path, text: str) -> None:
    """At once: who reads meanwhile sees what was there before, or this."""
    if is_remote(path):
        with reaching(path):
            path.write_text(text)
    else:
        with replaced(path) as temporary:
            temporary.write_text(text)


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
