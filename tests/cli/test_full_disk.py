"""`pf run` on a disk that is full, or read-only: a sentence with the place, and after that the run goes on."""

import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cli.test_run import is_released, newest_log, pf_run, start
from tests.support.shop import shop_file, write_shop
from tests.support.small_disk import small_disk

FREE_BYTES = (0, 60_000, 400_000, 1_000_000, 2_000_000)
"""From not even the log of pf to the middle of the training; the whole site takes 7 MB."""


def make_home(folder: Path, data: Path) -> Path:
    write_shop(folder)
    steps = {"optimizer": {"num_steps": 24}, "log_every": 4, "evaluate_every": 12, "checkpoint_every": 12}
    content = shop_file(folder) | {"data_dir": str(data)}
    content["training"] |= {"changes": steps}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\nnux: {enabled: false}\n")
    return folder


def refused(home: Path, disk: Path) -> None:
    """The run ends with exit code 1, and the last lines are the sentence and maybe the command."""
    code, _, errors = pf_run(home)
    assert code == 1
    lines = [line for line in errors.splitlines() if not line.startswith("to run it again:")]
    assert lines[-1].startswith("error: "), errors
    assert str(disk) in lines[-1], errors
    assert "then re-run" in lines[-1], errors


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "home"])
def test_a_run_on_a_full_disk_is_a_sentence_and_completes_when_there_is_room(tmp_path: Path, what: str) -> None:
    with small_disk(tmp_path / "small", megabytes=64) as disk:
        site = disk.path / "site" if what == "home" else tmp_path / "site"
        home = make_home(site, tmp_path / "data" if what == "home" else disk.path)
        for free in FREE_BYTES[: 3 if what == "home" else None]:
            disk.leave_free(free)
            refused(home, disk.path)
        disk.empty()
        disk.set_writable(False)
        refused(home, disk.path)
        disk.set_writable(True)
        code, _, errors = pf_run(home)
        assert code == 0, errors
        assert is_released(home)


@pytest.mark.slow
def test_a_run_whose_dagster_is_killed_says_so(tmp_path: Path) -> None:
    home = make_home(tmp_path / "site", tmp_path / "data")
    process = start(home)
    while "user_timelines - STEP_START" not in newest_log(home, process.pid):
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if "materialize" in child.cmdline()).send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the run was killed, as the kernel does when memory is short; its log is " in errors
    assert psutil.wait_procs(children, timeout=30)[1] == []
