"""The client of `process_server.py`: lanes, on which calls run one after the other in processes of their own."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.kill_points import Kind

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a call."""

    seconds: float
    pid: int
    is_killed: bool = False
    result: Any = None
    refused: str | None = None
    """The sentence of a PipelineError."""
    error: str | None = None
    """The traceback of any other error."""
    counts: dict[Kind, int] = field(default_factory=dict)


class Lane:
    """Calls run one after the other; several lanes run at once."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._stream = self._socket.makefile("rw")

    def call(
        self,
        name: str,
        root: Path,
        *arguments: Any,
        kill_at: tuple[Kind, int] | None = None,
        kill_after_s: float | None = None,
        counts: bool = False,
        plant: str | None = None,
        **options: Any,
    ) -> Answer:
        """Call a function in a new process, which is killed at a moment, or after a time.

        With `counts`, the moments are counted. `plant` names a fault of `faults.PLANTS`, to be found by a test.
        """
        request = {"call": name, "root": str(root), "arguments": arguments, "options": options, "counts": counts}
        request["plant"] = plant
        request["kill_at"] = None if kill_at is None else {"kind": kill_at[0], "number": kill_at[1]}
        request["kill_after_s"] = kill_after_s
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        return Answer(**json.loads(self._stream.readline()))

    def must(self, name: str, root: Path, *arguments: Any, **options: Any) -> Any:
        """Call a function that has to succeed; return its result."""
        answer = self.call(name, root, *arguments, **options)
        assert answer.error is None, answer.error
        assert answer.refused is None, answer.refused
        assert not answer.is_killed
        return answer.result

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


@contextlib.contextmanager
def open_lanes(num_lanes: int) -> Iterator[list[Lane]]:
    """Start a server with this many lanes; everything ends with the context."""
    with tempfile.TemporaryDirectory(prefix="pf-lanes-") as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-m", "tests.chaos.process_server", path]
        server = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        lanes: list[Lane] = []
        try:
            assert server.stdout.readline() == "ready\n", "the server did not start"
            lanes = [Lane(path) for _ in range(num_lanes)]
            yield lanes
        finally:
            for lane in lanes:
                lane.close()
            server.stdin.close()
            server.wait()
            server.stdout.close()
