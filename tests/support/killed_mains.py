"""Programs whose main process is killed alone, as the kernel does when memory is short, and what they leave running."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""Bound of the waits below, so that a test ends; on a machine with other work a program may take long to start."""

SOON_S = 20.0
"""What is left after this time was not ended by the end of its parent: the programs of the tests run for minutes."""


def left_after_the_kill(code: str, *arguments: str, at_least: int, environment: Mapping[str, str]) -> list[str]:
    """Run a program until it touches the file that is its first argument, kill its main process alone, and return the
    command lines of the processes that it leaves behind. It must have at least so many."""
    ready = Path(arguments[0])
    main = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, env=dict(environment))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not ready.exists():
            assert main.poll() is None, f"the program ended with {main.returncode}"
            assert time.monotonic() < deadline, "the program did not get ready"
            time.sleep(0.05)
        started = psutil.Process(main.pid).children(recursive=True)
    finally:
        main.send_signal(signal.SIGKILL)
        main.wait()
    assert len(started) >= at_least, [process.pid for process in started]
    left = psutil.wait_procs(started, timeout=SOON_S)[1]
    found = []
    for process in left:
        try:
            found.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return found
