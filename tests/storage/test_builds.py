"""Builds of a partition: published whole, or removed; and the retention of folders."""

from pathlib import Path

import pytest

from pf_core.errors import PipelineError
from pf_core.storage import builds
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.files import read_json
from pf_core.storage.retention import keep_newest, refuse_expired


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(partition: Path, content: str, *, fails_in: str | None = None) -> None:
    with building(partition) as build:
        (build / "rows").write_text(content)
        if fails_in == "filling":
            raise RuntimeError(fails_in)
        publish_build(build, {"content": content})
        if fails_in == "reporting":
            raise RuntimeError(fails_in)


def test_a_build_that_fails_is_removed_and_the_old_one_stays(tmp_path: Path) -> None:
    fill(tmp_path, "old")
    with pytest.raises(RuntimeError, match="filling"):
        fill(tmp_path, "new", fails_in="filling")
    assert names(tmp_path) == ["build-000001", MANIFEST]
    assert read_json(tmp_path / MANIFEST) == {"build": "build-000001", "content": "old"}


def test_a_published_build_stays_even_if_what_follows_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "old")
    with pytest.raises(RuntimeError, match="reporting"):
        fill(tmp_path, "new", fails_in="reporting")
    assert names(tmp_path) == ["build-000002", MANIFEST]
    assert (tmp_path / "build-000002" / "rows").read_text() == "new"

    def refuse(folder: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(builds, "remove_tree", refuse)  # called for the old build, after the publication
    with pytest.raises(OSError, match="the disk is gone"):
        fill(tmp_path, "newest")
    assert read_json(tmp_path / MANIFEST)["content"] == "newest"
    assert (tmp_path / "build-000003" / "rows").read_text() == "newest"


def test_a_build_whose_publication_fails_is_removed(tmp_path: Path) -> None:
    with pytest.raises(TypeError), building(tmp_path) as build:
        publish_build(build, {"content": object()})
    assert names(tmp_path) == []


@pytest.mark.parametrize(("num_kept", "kept"), [(1, ["c"]), (2, ["b", "c"]), (5, ["a", "b", "c"])])
def test_the_newest_folders_are_kept(num_kept: int, kept: list[str], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").touch()
    keep_newest([tmp_path / name for name in "abc"], num_kept, description="about.json")
    assert names(tmp_path) == kept


def test_an_interrupted_removal_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pf_core.storage.retention.remove_tree", lambda folder: None)  # killed before it
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for file in ("about.json", "rows"):
            (tmp_path / name / file).touch()
    keep_newest([tmp_path / "old", tmp_path / "new"], 1, description="about.json")
    assert names(tmp_path / "old") == ["rows"]
    assert names(tmp_path / "new") == ["about.json", "rows"]


def test_a_day_that_would_expire_at_once_is_refused() -> None:
    existing = ["2026-01-02", "2026-01-03"]
    refuse_expired("timelines", ["2026-01-01"], existing=existing, num_days=3)
    refuse_expired("timelines", ["2026-01-01", "2026-01-04"], existing=existing, num_days=2)
    with pytest.raises(PipelineError, match=r"timelines 2026-01-01 is older than the 2 days that are kept \(from"):
        refuse_expired("timelines", ["2026-01-01"], existing=existing, num_days=2)
