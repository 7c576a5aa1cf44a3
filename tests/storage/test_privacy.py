"""What is stored is for its owner alone, or for the group of a shared folder, whoever writes it."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.serving.export import export_embeddings
from pf_core.storage.builds import start_build
from pf_core.storage.files import append_text, scratch_dir, write_folder, write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.storage.privacy import private
from tests.support.releases import make_site, publish_day
from tests.support.stages import BUILT, DAILY, make_staged_site, run_stage, run_stages, silent

OTHERS, GROUP = 0o007, 0o077


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """The one that most machines have: everybody may read."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022, "the process has its own umask again"


def modes(folder: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def open_to(folder: Path, whom: int) -> list[str]:
    """The files and folders that these may read, write or enter."""
    return [f"{mode:o} {path}" for path, mode in modes(folder).items() if mode & whom]


def test_every_stage_writes_for_the_owner_alone(tmp_path: Path) -> None:
    """Also the files of Lance, LMDB, hnswlib, safetensors and Parquet, and those that workers write."""
    site = make_staged_site(tmp_path)
    for name in ("raw_actions", "pin_features"):
        run_stage(site, name)
    run_stage(site, "user_timelines", num_workers=2)
    run_stages(site, ("training_set", "pinnerformer_model", *DAILY[3:]))
    export_embeddings(site, "users", tmp_path / "exported", ds=None, progress=silent)
    assert (site.directory / "release" / "current.json").exists()
    assert open_to(Path(site.data_dir), GROUP) == []
    assert open_to(tmp_path / "exported", GROUP) == []
    assert open_to(Path(site.source.root) / "logs", GROUP), "what is not ours keeps its modes"


def test_a_shared_folder_is_for_its_group_and_nobody_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o2770)
    site = make_site(tmp_path)
    publish_day(site, BUILT[0], range(20), version=0)
    assert open_to(data, OTHERS) == []
    files = {path: mode for path, mode in modes(site.directory).items() if path.is_file()}
    assert set(files.values()) <= {0o660, 0o600}, "safetensors decides about its own"
    folders = {mode for path, mode in modes(site.directory).items() if path.is_dir()}
    assert folders == {0o2770}
    names = {path.name for path, mode in files.items() if mode == 0o660}
    assert {"data.mdb", "lock.mdb", "release.json", "current.json"} <= names


def test_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "cache"))
    write_json(tmp_path / "a" / "b" / "manifest.json", {})
    append_text(tmp_path / "a" / "history.jsonl", "{}\n")
    with write_folder(tmp_path / "a" / "folder") as folder:
        (folder / "file").touch()
    start_build(tmp_path / "builds")
    with exclusive(tmp_path / "locked", "x"), relying_on(tmp_path / "relied", "y"):
        (tmp_path / "locked" / "file").touch()
    with scratch_dir("x") as scratch:
        (scratch / "file").touch()
        assert open_to(tmp_path / "cache" / "tmp", GROUP) in ([], [f"644 {scratch / 'file'}"])
    for name in ("a", "builds", "locked", "relied", "cache"):
        assert open_to(tmp_path / name, GROUP) == [], name


def test_blocks_in_threads_share_the_narrowest_umask(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with private(tmp_path):
            entered.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    with private(shared):
        (shared / "before").touch()
        thread.start()
        entered.wait()
        (shared / "meanwhile").touch()
        go_on.set()
        thread.join()
        (shared / "after").touch()
    (shared / "outside").touch()
    found = {path.name: mode for path, mode in modes(shared).items()}
    assert [found[name] for name in ("before", "meanwhile", "after", "outside")] == [0o660, 0o600, 0o660, 0o644]


OTHER_USER = """
import os, sys
from pf_core.config.site import Site
from pf_core.serving.client import Serving
os.setgid(65534), os.setuid(65534)
try:
    Serving(Site.model_validate_json(sys.argv[1])).release()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_so(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    publish_day(site, BUILT[0], range(20), version=0)
    command = [sys.executable, "-c", OTHER_USER, site.model_dump_json()]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert printed.stdout.startswith("PipelineError this user may not read "), printed.stderr
    assert "or share the folder with its group: chmod g+s" in printed.stdout


def test_a_release_of_an_earlier_version_does_not_open_the_next_one(tmp_path: Path) -> None:
    """Its folders are readable by everybody: what is written there now is not."""
    site: Site = make_site(tmp_path)
    publish_day(site, BUILT[0], range(20), version=0)
    for path in (site.directory, *site.directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = set(site.directory.rglob("*"))
    publish_day(site, BUILT[1], range(20), version=1)
    made = [path for path in site.directory.rglob("*") if path not in before]
    assert made
    assert [path for path in made if stat.S_IMODE(path.lstat().st_mode) & GROUP] == []
    assert snapshot_state(site).days() == BUILT[:2]
