"""Workers end with the process that started them, also if that is killed alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pf_core.config.training import TrainConfig, auto, change_auto, choose
from pf_core.parent_process import tied, tied_group
from tests.support.killed_mains import left_after_the_kill
from tests.support.parts import complete_parts_set
from tests.support.planted import write_planted_set

POOL = """
import sys, time
from pathlib import Path
from pf_core.engine.local import LocalEngine
from tests.engine.test_parent_process import work
if __name__ == "__main__":
    folder = Path(sys.argv[1]).parent
    with LocalEngine(num_workers=2, memory_mb=64, temp_dir=folder) as engine:
        list(engine.map_buckets(work, [(str(folder), sys.argv[2], number) for number in range(4)]))
"""

TRAINING = """
import json, sys, time
from pathlib import Path
from pf_core.config.training import TrainConfig
from pf_core.training.trainer import train
class Observer:
    def say(self, message): pass
    def measure(self, step, values):
        Path(sys.argv[1]).touch()
        time.sleep(600)
if __name__ == "__main__":
    config = TrainConfig.model_validate_json(sys.argv[3])
    folder = Path(sys.argv[1]).parent
    train(config, training_set=Path(sys.argv[2]), run_dir=folder / "run", num_workers=2, observer=Observer())
"""

COMMAND = """
import subprocess, sys, time
from pathlib import Path
from pf_core.parent_process import tied
code = f"import pathlib, time; pathlib.Path({sys.argv[1]!r}).touch(); time.sleep(600)"
child = subprocess.Popen(tied([sys.executable, "-c", code]))
child.wait()
"""

GROUP = """
import subprocess, sys, time
from pathlib import Path
from pf_core.parent_process import tied_group
worker = f"import pathlib, time; pathlib.Path({sys.argv[1]!r}).touch(); time.sleep(600)"
server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
child = subprocess.Popen(tied_group([sys.executable, "-c", server]), start_new_session=True)
child.wait()
"""

WORLD = """
import sys, time
from pathlib import Path
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
from pf_core.world import config, logs
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(2, mp_context=context, initializer=logs._open_world, initargs=(config.tiny(),))
    waiting = [pool.submit(time.sleep, 1 if number < 2 else 600) for number in range(4)]
    waiting[0].result(), waiting[1].result()
    Path(sys.argv[1]).touch()
    waiting[2].result()
"""


def work(task: tuple[str, str, int]) -> None:
    """Take minutes: asleep, or busy in the interpreter; the second worker says that both work."""
    folder, how, number = task
    (Path(folder) / f"worker-{number}").touch()
    if len(list(Path(folder).glob("worker-*"))) == 2:
        (Path(folder) / "ready").touch()
    while how == "busy":
        sum(range(1000))
    time.sleep(600)


@pytest.fixture
def ready(tmp_path: Path) -> str:
    return str(tmp_path / "ready")


@pytest.mark.parametrize("how", ["asleep", "busy"])
def test_the_pool_of_the_engine_ends_with_its_run(ready: str, how: str) -> None:
    assert left_after_the_kill(POOL, ready, how, at_least=2, environment=os.environ) == []


FEW_STEPS = {"log_every": 5, "evaluate_every": 100, "checkpoint_every": 100}
"""So that processes still sample ahead when the first measurement comes."""


@pytest.mark.parametrize(
    "config",
    [
        choose("tiny", {"optimizer": {"num_steps": 10_000}, **FEW_STEPS}),
        change_auto(auto(), {"optimizer": {"num_steps": 10_000}, "batch_users": 48, **FEW_STEPS}),
    ],
    ids=["towers", "parts"],
)
def test_processes_that_sample_batches_end_with_the_training(ready: str, tmp_path: Path, config: TrainConfig) -> None:
    training_set = complete_parts_set(write_planted_set(tmp_path / "set"))
    arguments = ready, str(training_set), config.model_dump_json()
    assert left_after_the_kill(TRAINING, *arguments, at_least=2, environment=os.environ) == []


def test_processes_that_make_a_world_end_with_it(ready: str) -> None:
    assert left_after_the_kill(WORLD, ready, at_least=2, environment=os.environ) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a command that its starter has ended")
def test_a_tied_command_ends_with_its_starter(ready: str) -> None:
    assert left_after_the_kill(COMMAND, ready, at_least=1, environment=os.environ) == []


def test_a_tied_group_ends_with_its_starter(ready: str) -> None:
    """A server, its worker, and the process that guards both."""
    assert left_after_the_kill(GROUP, ready, at_least=3, environment=os.environ) == []


def test_a_tied_group_ends_as_its_command_does(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:], flush=True); sys.exit(7)"
    done = subprocess.run(tied_group([sys.executable, "-c", code, "a b"]), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b']\n")
    polite = f"import time, pathlib\ntry:\n  pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)\n"
    polite += "except KeyboardInterrupt:\n  raise SystemExit(5)"
    process = subprocess.Popen(tied_group([sys.executable, "-c", polite]), start_new_session=True)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 5


def test_a_tied_command_is_the_command(tmp_path: Path) -> None:
    """Its arguments, input, exit code and name are those of the command itself."""
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(7)"
    done = subprocess.run(tied([sys.executable, "-c", code, "a b", "-x"]), input="in", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b', '-x'] in\n")
    process = subprocess.Popen(tied(["sleep", "30"]))
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:1]:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
