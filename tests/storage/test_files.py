"""Paths on disk under the verbs that object storage has, too; `tests/scale` runs them there."""

import importlib.util
from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.storage.cache import fetched
from pf_core.storage.files import append_text, copy_tree, path_of, place, placed, read_parquet, replace_text, written


def test_a_path_is_a_path(tmp_path: Path) -> None:
    assert path_of(str(tmp_path)) == tmp_path
    assert fetched(tmp_path) == tmp_path


def test_another_object_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"gs://bucket: of object stores, s3://… is known"):
        path_of("gs://bucket")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match=r"s3://bucket needs s3fs: pip install 'pinnerformer\[s3\]'"):
        path_of("s3://bucket")


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with placed(target) as folder:
        (folder / "weights").write_text("1")
        assert not target.exists()

    def fail() -> None:
        with placed(target) as folder:
            (folder / "weights").write_text("2")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert (target / "weights").read_text() == "1"
    with placed(target) as folder:
        (folder / "weights").write_text("3")
    assert (target / "weights").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_copy_of_a_folder_shares_its_files(tmp_path: Path) -> None:
    with written(tmp_path / "a" / "x.bin") as path:
        path.write_text("x")
    copy_tree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "x.bin").samefile(tmp_path / "a" / "x.bin")
    place(tmp_path / "b", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_text(path, "1\n")
    append_text(path, "2\n")
    assert path.read_text() == "1\n2\n"
    replace_text(path, "3\n")
    assert path.read_text() == "3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bucket-00000.parquet"
    with pytest.raises(PipelineError, match=r"bucket-00000\.parquet is missing or damaged"):
        read_parquet(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(PipelineError, match=r"bucket-00000\.parquet is missing or damaged"):
        read_parquet(path)
