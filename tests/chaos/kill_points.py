"""Moments at which a process kills itself: its n-th change of a file, or its n-th call of a function of the pipeline.

Both are counted without changing the code that runs: changes by the audit events of the interpreter (what native code
writes has none), calls by its profiler, which also tells the moments between two native writes.
"""

import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pf_core

Kind = Literal["change", "call"]

KINDS: tuple[Kind, ...] = ("change", "call")

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class KillPoint:
    """Counts events of a kind, and kills this process before the n-th; with None, it only counts.

    Changes are those of files below `root`.
    """

    def __init__(self, kind: Kind, number: int | None, root: Path) -> None:
        self._root = str(root)
        self._number, self._next = number, itertools.count(1)
        self.num_seen = 0
        if kind == "change":
            sys.addaudithook(self._on_event)
        else:
            self._code = str(Path(pf_core.__path__[0]))
            threading.setprofile(self._on_call)
            sys.setprofile(self._on_call)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            is_change = isinstance(arguments[0], str) and isinstance(arguments[2], int) and arguments[2] & WRITING
        else:
            is_change = event in CHANGES
        if is_change:
            path = os.fspath(arguments[0])
            if path.startswith(self._root) or not path.startswith("/"):  # shutil.rmtree removes by names
                self._count()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._code):
            self._count()

    def _count(self) -> None:
        self.num_seen = next(self._next)
        if self.num_seen == self._number:
            os.kill(os.getpid(), signal.SIGKILL)
