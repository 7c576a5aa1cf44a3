"""Processes that end with the process that started them, also if that one is killed and cannot end them.

A worker that outlives its run holds locks, memory and cores, and what it computes is wanted by nobody. A worker of
multiprocessing (the pool of an engine, the processes that sample batches) waits in a thread for the end of the process
that started it; multiprocessing gives it a pipe for that. A command (`tied`) asks the kernel for a signal, which only
Linux knows; elsewhere it outlives its starter.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Operation of prctl(2): which signal this process gets when the thread that started it ends."""


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


def _become(starter: int, command: list[str]) -> None:
    """Replace this process by the command, which keeps the request for the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
