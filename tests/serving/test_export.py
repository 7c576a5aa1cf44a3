"""Exports of users: without those on the deletion list, also when they are forgotten after the export."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.serving.export import export_embeddings, forget_in_exports, recorded_exports
from tests.support.releases import make_site, silent, write_day

DS = "2026-01-01"
USERS = {"int": [-(2**63), *range(40), 2**63 - 1], "string": ["", " alice", "alice", *map(str, range(40))]}


@pytest.fixture(params=["int", "string"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    site = make_site(tmp_path / "site", id_type=request.param)
    write_day(site, DS, USERS[request.param], 0)
    return site


def users(folder: Path) -> set[int | str]:
    return set(pq.read_table(folder)["user_id"].to_pylist())


def known(site: Site) -> list[int | str]:
    return USERS[site.source.actions.user_id.type]


def forget(site: Site, *user_ids: int | str) -> pa.Array:
    return pa.array(user_ids, pa.int64() if site.source.actions.user_id.type == "int" else pa.string())


def test_users_on_the_list_are_left_out(site: Site, tmp_path: Path) -> None:
    assert site.deletion_list is not None
    Path(site.deletion_list).write_text("5\n6\n99\n")
    num_rows = export_embeddings(site, "users", tmp_path / "out", ds=None, progress=silent)
    assert num_rows == len(known(site)) - 2
    assert users(tmp_path / "out") == {user for user in known(site) if str(user) not in ("5", "6")}


def test_users_are_deleted_from_earlier_exports(site: Site, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "gone")]
    for folder in folders:
        export_embeddings(site, "users", folder, ds=DS, progress=silent)
    export_embeddings(site, "pins", tmp_path / "pins", ds=DS, progress=silent)
    shutil.rmtree(folders[2])
    assert [record["path"] for record in recorded_exports(site)].count(str(folders[0])) == 1
    assert len(recorded_exports(site)) == 3  # pins are nobody
    before, times = pq.read_table(folders[0]), {path: path.stat().st_mtime_ns for path in folders[0].iterdir()}
    leaves = known(site)[1]
    expected = {str(folders[0]): 1, str(folders[1]): 1, str(folders[2]): 0}
    assert forget_in_exports(site, forget(site, leaves)) == expected
    assert users(folders[0]) == users(folders[1]) == {*known(site)} - {leaves}
    after = pq.read_table(folders[0])
    stays = before.filter(pa.array([user != leaves for user in before["user_id"].to_pylist()]))
    assert after.sort_by("user_id").equals(stays.sort_by("user_id"))
    assert sum(path.stat().st_mtime_ns != times[path] for path in folders[0].iterdir()) == 1  # one bucket was written
    assert set(forget_in_exports(site, forget(site, leaves)).values()) == {0}


def test_an_export_that_is_interrupted_leaves_no_folder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(message: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(PipelineError, match=r"the export to .*No space left .*; free some space there"):
        export_embeddings(site, "users", tmp_path / "out", ds=DS, progress=fail)
    assert list(tmp_path.glob("*out*")) == []
    assert forget_in_exports(site, forget(site, known(site)[2])) == {str(tmp_path / "out"): 0}
