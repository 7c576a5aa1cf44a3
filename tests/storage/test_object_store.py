"""The same functions on an object store: fsspec's, in memory. `tests/scale` has real servers, conditions and leases."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from upath import UPath

from pf_core.storage import cache, files
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.files import (
    append_text,
    copy_tree,
    is_remote,
    list_folder,
    object_store,
    read_json,
    remove_tree,
    rename_folder,
    write_file,
    write_folder,
    write_json,
    write_text,
)
from pf_core.storage.retention import keep_newest


@contextlib.contextmanager
def reaching_memory(path: Path) -> Iterator[None]:
    """Stands for `reaching`, which needs botocore: nothing in memory can be unreachable."""
    yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "local"))
    for module in (files, cache):
        monkeypatch.setattr(module, "reaching", reaching_memory)
    return cast("Path", UPath(f"memory://bucket/{uuid.uuid4().hex}"))


def names(folder: Path) -> list[str]:
    """Names of all objects under a folder."""
    store, root = object_store(folder)
    return sorted(key.removeprefix(f"{root}/") for key in store.find(root))


def write_half(path: Path) -> None:
    with write_file(path) as local:
        local.write_bytes(b"half")
        raise RuntimeError("the disk is full")


def build_and_fail(partition: Path, *, publishes: bool) -> None:
    with building(partition) as build:
        write_text(build / "rows", "3")
        if publishes:
            publish_build(build, {"rows": 3})
        raise RuntimeError("the disk is full")


def test_a_file_appears_when_it_is_whole(folder: Path, tmp_path: Path) -> None:
    assert is_remote(folder)
    with write_file(folder / "part" / "rows.bin") as path:
        path.write_bytes(b"rows")
        assert names(folder) == []
    assert names(folder) == ["part/rows.bin"]
    with pytest.raises(RuntimeError):
        write_half(folder / "part" / "rows.bin")
    assert (folder / "part" / "rows.bin").read_bytes() == b"rows"
    assert list((tmp_path / "local" / "tmp").iterdir()) == []


def test_texts(folder: Path) -> None:
    write_text(folder / "lines", "1\n")
    append_text(folder / "lines", "2\n")
    assert (folder / "lines").read_text() == "1\n2\n"
    write_json(folder / "a.json", {"b": [1]})
    assert read_json(folder / "a.json") == {"b": [1]}


def test_a_folder_replaces_an_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with write_folder(folder / "model") as local:
        (local / "old").touch()
        (local / "model.json").touch()
    order: list[str] = []
    store, _ = object_store(folder)
    put = store.put_file

    def put_in_order(self: object, source: str, key: str) -> None:
        order.append(Path(key).name)
        put(source, key)

    monkeypatch.setattr(type(store), "put_file", put_in_order)
    with write_folder(folder / "model") as local:
        for name in ("a.json", "b.bin", "c.json", "d.bin"):
            (local / name).touch()
        assert names(folder) == ["model/model.json", "model/old"]
    assert names(folder / "model") == ["a.json", "b.bin", "c.json", "d.bin"]
    assert sorted(order[:2]) == ["b.bin", "d.bin"]  # JSON files, which describe the others, come last


def test_attempts_at_a_folder_give_one(folder: Path) -> None:
    with write_folder(folder / "part", keep_first=True) as second:
        with write_folder(folder / "part", keep_first=True) as first:
            (first / "rows").write_text("rows")
        (second / "rows").write_text("rows")
    assert names(folder) == ["part/rows"]
    assert (folder / "part" / "rows").read_text() == "rows"


def test_copies_renames_and_removes(folder: Path) -> None:
    with write_folder(folder / "a") as local:
        (local / "x").touch()
    copy_tree(folder / "a", folder / "b")
    rename_folder(folder / "b", folder / "c")
    assert names(folder) == ["a/x", "c/x"]
    assert [path.name for path in list_folder(folder)] == ["a", "c"]
    remove_tree(folder / "a")
    remove_tree(folder / "a")
    assert names(folder) == ["c/x"]
    assert list_folder(folder / "a") == []


def test_a_build_is_published_or_removed(folder: Path) -> None:
    with building(folder) as build:
        write_text(build / "rows", "1")
        publish_build(build, {"rows": 1})
    with pytest.raises(RuntimeError):
        build_and_fail(folder, publishes=False)
    assert names(folder) == [f"{build.name}/rows", MANIFEST]
    assert read_json(folder / MANIFEST) == {"rows": 1, "build": build.name}
    with pytest.raises(RuntimeError):
        build_and_fail(folder, publishes=True)
    newer = read_json(folder / MANIFEST)["build"]
    assert newer != build.name
    assert names(folder) == [f"{newer}/rows", MANIFEST]


def test_the_newest_folders_are_kept(folder: Path) -> None:
    for name in "abc":
        write_json(folder / name / "about.json", {})
        write_text(folder / name / "rows", name)
    keep_newest([folder / name for name in "abc"], 1, description="about.json")
    assert names(folder) == ["c/about.json", "c/rows"]


def test_a_copy_in_the_cache_follows_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "plain_etag", lambda info: str(info["created"]))  # memory has no ETags
    path = folder / "part" / "rows.txt"
    write_text(path, "old")
    first = cache.fetched(path)
    assert first.read_text() == "old"
    assert cache.fetched(path) == first
    write_text(path, "new")
    assert cache.fetched(path).read_text() == "new"
    assert (cache.fetched(folder / "part") / "rows.txt").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        cache.fetched(folder / "nothing")


def test_the_copy_that_was_just_made_is_kept_when_the_clock_was_set_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "plain_etag", lambda info: str(info["created"]))  # memory has no ETags
    monkeypatch.setenv("PF_CACHE_GB", "2.5e-6")  # two copies
    tomorrow = time.time() + 86_400
    for number in range(4):
        write_text(folder / f"{number}", "x" * 1000)
        copy = cache.fetched(folder / f"{number}")
        assert copy.exists()
        if number < 2:
            os.utime(copy.parent, (tomorrow + number, tomorrow + number))
    kept = [path.name for path in copy.parent.parent.glob("*/*")]
    assert sorted(kept) == ["2", "3"]
