"""Locks on disk: writers, runs that rely on a folder, runs that hold what they read, and removals."""

import multiprocessing
import stat
from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.storage.locks import HOLDING, exclusive, holding, relying_on, removing
from tests.support.small_disk import small_disk


def test_nothing_is_removed_while_it_is_read_and_new_versions_may_come(tmp_path: Path) -> None:
    with holding(tmp_path, "asset"), holding(tmp_path, "asset"):
        with exclusive(tmp_path, "asset"), removing(tmp_path, "asset") as is_free:
            assert not is_free
    with removing(tmp_path, "asset") as is_free:
        assert is_free
        with removing(tmp_path, "asset") as is_free_twice:
            assert not is_free_twice


def test_relying_keeps_writers_out(tmp_path: Path) -> None:
    with relying_on(tmp_path, "asset"), holding(tmp_path, "asset"):
        with pytest.raises(PipelineError, match="another run is writing asset or relying on it"):
            exclusive(tmp_path, "asset").__enter__()


def _hold(folder: Path, is_held: "multiprocessing.synchronize.Event") -> None:
    with holding(folder, "asset"):
        is_held.set()


def test_a_reader_waits_until_a_removal_has_ended(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    with removing(tmp_path, "asset") as is_free:
        assert is_free
        reader = context.Process(target=_hold, args=(tmp_path, is_held))
        reader.start()
        assert not is_held.wait(timeout=2)
    assert is_held.wait(timeout=60)
    reader.join()


def test_nothing_is_made_to_hold_what_is_not_there(tmp_path: Path) -> None:
    with holding(tmp_path / "asset", "asset"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_can_be_held(tmp_path: Path) -> None:
    with holding(tmp_path, "asset"):
        pass
    (tmp_path / HOLDING).chmod(stat.S_IRUSR)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with holding(tmp_path, "asset"):
            pass
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_read_only_disk_can_be_read_and_not_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", megabytes=1) as disk:
        used, new = disk.path / "used", disk.path / "new"
        new.mkdir()
        with relying_on(used, "asset"), holding(used, "asset"):
            pass
        disk.set_writable(False)
        with relying_on(used, "asset"), holding(used, "asset"):
            pass
        for lock in (relying_on(new, "asset"), holding(new, "asset"), exclusive(new, "asset")):
            with pytest.raises(PipelineError, match=r"^asset: Read-only file system: .*; mount it for writing, then"):
                lock.__enter__()
