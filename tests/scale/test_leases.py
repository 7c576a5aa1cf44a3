"""Who may write where, in object storage: leases, conditional writes, and copies that follow what is there."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.storage import locks as lease
from pf_core.storage.builds import MANIFEST, publish_build, start_build
from pf_core.storage.cache import fetched
from pf_core.storage.files import (
    copy_tree,
    etag_of,
    list_folder,
    local_dir,
    object_store,
    path_of,
    read_json,
    remove_tree,
    upload,
    write_file,
    write_if_unchanged,
    write_json,
)
from pf_core.storage.locks import exclusive, holding, relying_on, removing
from tests.scale.servers import new_bucket, object_storage

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with object_storage() as settings:
        yield settings


@pytest.fixture
def folder(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return path_of(new_bucket(server, tmp_path, monkeypatch)) / "asset"


def names(folder: Path) -> list[str]:
    """Keys of all objects below the folder."""
    store, root = object_store(folder)
    return [key.removeprefix(f"{root}/") for key in store.find(root)]


def test_one_writer_at_a_time(folder: Path) -> None:
    with exclusive(folder, "asset"):
        with pytest.raises(PipelineError, match=r"another run is writing asset or relying on it in s3://.*/asset;"):
            exclusive(folder, "asset").__enter__()
        with pytest.raises(PipelineError, match="another run is writing asset in"):
            relying_on(folder, "asset").__enter__()
    assert names(folder) == []
    with exclusive(folder, "asset"):
        pass


def test_many_may_rely_on_it_and_then_nobody_writes(folder: Path) -> None:
    with relying_on(folder, "asset"), relying_on(folder, "asset"):
        with pytest.raises(PipelineError, match="another run is writing asset or relying on it"):
            exclusive(folder, "asset").__enter__()
        assert len(names(folder)) == 2  # what was refused left nothing behind
    with exclusive(folder, "asset"):
        pass


def test_nothing_is_removed_while_it_is_held_and_writers_may_write(folder: Path) -> None:
    with holding(folder, "asset"), holding(folder, "asset"), exclusive(folder, "asset"):
        with removing(folder, "asset") as is_free:
            assert not is_free
    assert names(folder) == []
    with removing(folder, "asset") as is_free:
        assert is_free


def test_a_reader_waits_until_a_removal_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOOK_EVERY_S", 0.05)
    is_held = threading.Event()

    def hold() -> None:
        with holding(folder, "asset"):
            is_held.set()

    with removing(folder, "asset") as is_free:
        assert is_free
        reader = threading.Thread(target=hold)
        reader.start()
        assert not is_held.wait(timeout=1)
    assert is_held.wait(timeout=60)
    reader.join()


def test_of_many_who_come_together_at_most_one_writes(folder: Path) -> None:
    together, inside, most = threading.Barrier(6), 0, 0
    guard = threading.Lock()

    def come(_: int) -> bool:
        nonlocal inside, most
        together.wait()
        try:
            with exclusive(folder, "asset"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.3)
                with guard:
                    inside -= 1
            return True
        except PipelineError:
            return False

    with ThreadPoolExecutor(6) as threads:
        came_in = list(threads.map(come, range(6)))
    assert most == 1
    assert any(came_in)


def test_what_a_dead_run_held_expires(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / lease.LOCK).write_text("host-that-died 1")
    (folder / lease.RELYING / "x").write_text("host-that-died 2")
    with pytest.raises(PipelineError, match="another run"):
        exclusive(folder, "asset").__enter__()
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    time.sleep(2.5)  # times of S3 are whole seconds
    with exclusive(folder, "asset"):
        assert "died" not in (folder / lease.LOCK).read_text()


def test_a_clock_that_jumps_takes_nothing_from_anybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with exclusive(folder, "asset"):
        monkeypatch.setattr(time, "time", lambda: 4e9)
        with pytest.raises(PipelineError, match="another run"):
            exclusive(folder, "asset").__enter__()


def test_a_lease_is_renewed_for_as_long_as_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    with exclusive(folder, "asset"):
        time.sleep(5)
        with pytest.raises(PipelineError, match="another run"):
            exclusive(folder, "asset").__enter__()


def test_a_lease_that_somebody_took_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.5)

    def write_while_another_takes_it() -> None:
        with exclusive(folder, "asset"):
            (folder / lease.LOCK).write_text("another host")
            time.sleep(1)

    with pytest.raises(PipelineError, match=r"the lease of .* was lost"):
        write_while_another_takes_it()
    assert (folder / lease.LOCK).read_text() == "another host"  # not ours to remove


def test_a_conditional_write(folder: Path) -> None:
    path = folder / "pointer.json"
    assert write_if_unchanged(path, "1", None)
    assert not write_if_unchanged(path, "2", None)
    first = etag_of(path)
    assert write_if_unchanged(path, "3", first)
    assert not write_if_unchanged(path, "4", first)
    assert path.read_text() == "3"
    assert etag_of(folder / "nothing") is None


def test_builds_have_names_of_their_own(folder: Path) -> None:
    first, second = start_build(folder), start_build(folder)
    assert first.name != second.name
    for build in (first, second):
        write_json(build / "rows.json", [1])
    publish_build(second, {"rows": 1})
    assert read_json(folder / MANIFEST) == {"rows": 1, "build": second.name}
    assert names(folder) == [f"{second.name}/rows.json", MANIFEST]
    third = start_build(folder)
    write_json(third / "rows.json", [2])
    publish_build(third, {"rows": 1})
    assert names(folder) == [f"{third.name}/rows.json", MANIFEST]


def test_a_copy_follows_what_is_there(folder: Path) -> None:
    path = folder / "part" / "rows.txt"
    path.write_text("old")
    assert fetched(path).read_text() == "old"
    assert fetched(path) == fetched(path)
    path.write_text("new")
    assert fetched(path).read_text() == "new"
    assert fetched(folder / "part").is_dir()
    assert (fetched(folder / "part") / "rows.txt").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        fetched(folder / "nothing")


def test_copies_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PF_CACHE_GB", "2.5e-6")
    for number in range(5):
        (folder / f"{number}").write_text("x" * 1000)
        fetched(folder / f"{number}")
        time.sleep(0.01)
    kept = [path.name for path in (local_dir() / "cache").glob("*/*")]
    assert sorted(kept) == ["3", "4"]


def test_folders(folder: Path, tmp_path: Path) -> None:
    local = tmp_path / "made"
    (local / "inner").mkdir(parents=True)
    (local / "inner" / "a.bin").write_bytes(b"a")
    (local / "about.json").write_text("{}")
    upload(local, folder / "made")
    assert names(folder) == ["made/about.json", "made/inner/a.bin"]
    copy_tree(folder / "made", folder / "copy")
    assert [path.name for path in list_folder(folder)] == ["copy", "made"]
    remove_tree(folder / "made")
    remove_tree(folder / "made")
    assert names(folder) == ["copy/about.json", "copy/inner/a.bin"]
    assert list_folder(folder / "made") == []


def test_what_fails_half_way_is_not_there(folder: Path) -> None:
    def write_half() -> None:
        with write_file(folder / "rows.bin") as path:
            path.write_bytes(b"half")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_half()
    assert names(folder) == []
