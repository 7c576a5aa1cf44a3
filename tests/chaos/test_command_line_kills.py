"""`dagster asset materialize` and `pf`, killed at changes of files, or alone while their children work."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.chain import read_link, shared_chain, spread
from tests.chaos.chaos_site import AGAIN, NEXT
from tests.chaos.chaos_stages import DAILY
from tests.chaos.command_line import CommandLine, materialize, open_command_line, pf
from tests.chaos.killing import mixed
from tests.chaos.lanes import Lane
from tests.support.tried import Tried

pytestmark = pytest.mark.chaos

KIND = "kills of commands"

PATIENCE_S = 300.0


def killed(shell: CommandLine, command: tuple[str, ...], change: int) -> bool:
    """Run a command that kills itself at a change of a file; return whether it came to that."""
    code, output = shell.run(*command, kill_at_change=change)
    assert code in (0, -signal.SIGKILL), output
    return code != 0


def completed(shell: CommandLine, command: tuple[str, ...]) -> None:
    code, output = shell.run(*command)
    assert code == 0, output


@pytest.mark.parametrize("asset", [*DAILY, "training_set"])
def test_an_asset_that_is_killed(asset: str, lane: Lane, folder: Path, tmp_path: Path, tried: Tried) -> None:
    """Four times, each time a little later, and then completed."""
    link = read_link(shared_chain(folder / "all", lane), "next", asset)
    shell = open_command_line(folder, link.folder, tmp_path / "site")
    command = materialize(asset, None if asset == "training_set" else NEXT)
    for change in spread(1, link.counts["change"], 4):
        tried.count(KIND, killed(shell, command, change))
        assert list(mixed(link, lane.must("content", shell.root))) == [], change
    completed(shell, command)
    assert lane.must("content", shell.root) == link.after


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("rollback", pf("rollback")),
        ("export", pf("export", "users", "{root}/export-users", "--ds", NEXT)),
    ],
)
def test_a_command_that_is_killed(
    stage: str, command: tuple[str, ...], lane: Lane, folder: Path, tmp_path: Path, tried: Tried
) -> None:
    link = read_link(shared_chain(folder / "all", lane), "next", stage)
    shell = open_command_line(folder, link.folder, tmp_path / "site")
    command = tuple(part.replace("{root}", str(shell.root)) for part in command)
    content, num_exports = link.before, 2 if stage == "export" else 1
    for change in spread(1, link.counts["change"] // num_exports, 3):
        if stage != "rollback" or content == link.before:  # a second rollback would go back further
            tried.count(KIND, killed(shell, command, change))
            content = lane.must("content", shell.root)
            assert list(mixed(link, content)) == [], change
    if content == link.before:
        completed(shell, command)
    wanted = {name: value for name, value in link.after.items() if not name.startswith("export export-pins")}
    assert lane.must("content", shell.root) == wanted


def kill_alone(shell: CommandLine, command: tuple[str, ...], when: Callable[[], bool]) -> None:
    """Kill the process of a command, and no other, at a moment; it leaves nothing running."""
    process = shell.start(*command)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and not when():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.communicate()
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_training_whose_run_is_killed_alone(lane: Lane, folder: Path, tmp_path: Path, tried: Tried) -> None:
    link = read_link(shared_chain(folder / "all", lane), "next", "pinnerformer_model")
    shell = open_command_line(folder, link.folder, tmp_path / "site")
    command, models = materialize("pinnerformer_model"), shell.site.directory / "pinnerformer_model"
    known = set(models.glob("*"))
    for moment in ("job.json", "checkpoints/step-*"):

        def is_there(moment: str = moment) -> bool:
            return any(any(folder.glob(moment)) for folder in set(models.glob("*")) - known if folder.is_dir())

        kill_alone(shell, command, is_there)
        tried.count(KIND, 1)
        assert list(mixed(link, lane.must("content", shell.root))) == []
    completed(shell, command)
    assert lane.must("content", shell.root)["pinnerformer_model"] == link.after["pinnerformer_model"]


def test_a_repair_that_is_killed_alone(lane: Lane, folder: Path, tmp_path: Path, tried: Tried) -> None:
    """Its logs are those that a repair before it has read: whatever is built again is as it was."""
    link = read_link(shared_chain(folder / "all", lane), "next", "raw_actions")
    shell = open_command_line(folder, link.folder, tmp_path / "site")
    command, raw = pf("repair", "--since", AGAIN), shell.site.directory / "raw_actions" / AGAIN
    completed(shell, command)
    repaired = lane.must("content", shell.root)
    for _ in range(2):
        known = set(raw.glob("build-*"))
        kill_alone(shell, command, lambda known=known: bool(set(raw.glob("build-*")) - known))
        tried.count(KIND, 1)
        assert lane.must("content", shell.root) == repaired
    completed(shell, command)
    assert lane.must("content", shell.root) == repaired
