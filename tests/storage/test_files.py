"""Writing and reading on disk with the functions that work in object storage too; `tests/scale` runs them there."""

import importlib.util
import pickle
from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.storage.cache import fetched
from pf_core.storage.files import (
    append_text,
    copy_tree,
    path_of,
    read_json,
    read_parquet,
    rename_folder,
    write_file,
    write_folder,
    write_json,
    write_text,
)


def test_a_path_is_a_path(tmp_path: Path) -> None:
    assert path_of(str(tmp_path)) == tmp_path
    assert fetched(tmp_path) == tmp_path


def test_another_object_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"gs://bucket: unknown object store; use s3://…"):
        path_of("gs://bucket")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match=r"s3://bucket needs s3fs; .* pip install 'pinnerformer\[s3\]'"):
        path_of("s3://bucket")


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.bin"

    def write(content: str, *, fails: bool) -> None:
        with write_file(path) as partial:
            assert partial != path
            partial.write_text(content)
            if fails:
                raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write("1", fails=True)
    assert list(path.parent.iterdir()) == []
    write("2", fails=False)
    with pytest.raises(RuntimeError):
        write("3", fails=True)
    assert path.read_text() == "2"
    write("4", fails=False)
    assert path.read_text() == "4"
    assert [path.name for path in path.parent.iterdir()] == ["rows.bin"]


def test_two_writers_of_a_file_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    with write_file(tmp_path / "x") as one, write_file(tmp_path / "x") as other:
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "x").read_text() == "one"  # the outer block ends last
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": [2], "b": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_what_a_killed_writer_of_a_folder_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.tmp").mkdir()
    (tmp_path / ".model.tmp" / "half").touch()
    with write_folder(tmp_path / "model") as folder:
        (folder / "weights").touch()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_attempt_does_not_bring_back_a_removed_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_folder(tmp_path / "removed" / "part", keep_first=True).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with write_folder(target) as folder:
        (folder / "weights").write_text("1")
        assert not target.exists()

    def fail() -> None:
        with write_folder(target) as folder:
            (folder / "weights").write_text("2")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "1"
    with write_folder(target) as folder:
        (folder / "weights").write_text("3")
    assert (target / "weights").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_copy_of_a_folder_shares_its_files(tmp_path: Path) -> None:
    with write_file(tmp_path / "a" / "x.bin") as path:
        path.write_text("x")
    copy_tree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "x.bin").samefile(tmp_path / "a" / "x.bin")
    rename_folder(tmp_path / "b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_text(path, "1\n")
    append_text(path, "2\n")
    assert path.read_text() == "1\n2\n"
    write_text(path, "3\n")
    assert path.read_text() == "3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bucket-00000.parquet"
    with pytest.raises(PipelineError, match=r"bucket-00000\.parquet is missing or damaged"):
        read_parquet(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(PipelineError, match=r"bucket-00000\.parquet is missing or damaged"):
        read_parquet(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1', b"\xff\xfe\x00", b"\x00" * 100, b"[]", b"null", b"7", b"[" * 200_000]
)
def test_a_json_file_that_is_damaged_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"manifest.json is damaged \("):
        read_json(path)


def test_a_key_that_a_json_file_lacks_is_a_damage(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_json(path, {"a": 1})
    found = read_json(path)
    assert found == {"a": 1}
    assert found.get("b") is None
    assert "b" not in found
    with pytest.raises(PipelineError, match=r"manifest.json is damaged \(it has no 'b'\); re-run"):
        found["b"]
    assert pickle.loads(pickle.dumps(found))["a"] == 1
    with pytest.raises(PipelineError, match=r"it has no 'b'"):
        pickle.loads(pickle.dumps(found))["b"]
