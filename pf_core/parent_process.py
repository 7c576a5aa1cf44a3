"""Processes that end with the process that started them, also if that one is killed and cannot end them.

A worker that outlives its run holds locks, memory and cores, and what it computes is wanted by nobody. A worker of
multiprocessing (the pool of an engine, the processes that sample batches) waits in a thread for the end of the process
that started it; multiprocessing gives it a pipe for that. A command (`tied`) asks the kernel for a signal, which only
Linux knows; elsewhere it outlives its starter. A command that starts others, which know nothing of this (`tied_group`),
runs beside a process that looks whether the starter is there, and else kills the group.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Operation of prctl(2): which signal this process gets when the thread that started it ends."""

GROUP = "--group"
"""First argument of this file as a program, if it guards a group."""

LOOK_EVERY_S = 0.5


def end_with_parent() -> None:
    """End this worker of multiprocessing at once when the process that started it has ended, in whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker of multiprocessing has a parent to wait for"

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to whom an error could be told

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` so that it is killed when this process ends."""
    return [sys.executable, "-I", str(Path(__file__)), str(os.getpid()), *command]


def tied_group(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command`, and kills its process group when this process ends.

    Start it in a group or session of its own.
    """
    return [sys.executable, "-I", str(Path(__file__)), GROUP, str(os.getpid()), *command]


def _guard(starter: int, command: list[str]) -> None:
    """Run the command, and end with its exit code; kill the group once the starter has ended."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the command gets it, too, and is waited for
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.poll() is None:
        if os.getppid() != starter:
            os.killpg(0, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)


def _become(starter: int, command: list[str]) -> None:
    """Replace this process by the command, which keeps the request for the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == GROUP:
        _guard(int(sys.argv[2]), sys.argv[3:])
    _become(int(sys.argv[1]), sys.argv[2:])
