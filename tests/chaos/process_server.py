"""A process with all libraries loaded, which forks a child for every call: a call then takes a tenth of a second.

    python -m tests.chaos.process_server SOCKET

It ends when its standard input closes. Every connection to the socket is a lane: its calls run one after the other,
each in a child of its own, which may be told to kill itself at a moment (`kill_points.py`) or after a time. The
libraries whose threads a fork would break (Lance, DuckDB, torch) are loaded, and not used before the fork.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # the first step of an optimizer imports it, which takes seconds

from pf_core.errors import PipelineError
from tests.chaos.chaos_stages import CALLS as STAGE_CALLS
from tests.chaos.faults import PLANTS
from tests.chaos.kill_points import KINDS, KillPoint
from tests.chaos.stress_calls import CALLS as STRESS_CALLS

CALLS = STAGE_CALLS | STRESS_CALLS

Request = dict[str, Any]


def serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(16)
        print("ready", flush=True)
        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _serve_lane(connection)
                os._exit(0)
            connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # lanes end with their connections; their processor time then counts as this process' own


def _serve_lane(connection: socket.socket) -> None:
    with connection.makefile("rw") as stream:
        for line in stream:
            stream.write(json.dumps(_answer(json.loads(line))) + "\n")
            stream.flush()


def _answer(request: Request) -> dict[str, Any]:
    """Run a call in a child; return what it answers, whether it was killed, and how long it took."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_call(request)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    after_s = request.get("kill_after_s")
    with os.fdopen(reading, "rb") as pipe:
        if after_s is not None and not select.select([pipe], [], [], after_s)[0]:
            os.kill(child, signal.SIGKILL)
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    answer: dict[str, Any] = {"is_killed": is_killed, "seconds": time.monotonic() - started, "error": None}
    answer["pid"] = child
    if not content and not is_killed:
        answer["error"] = f"the process ended with status {status}"
    return answer | (json.loads(content) if content else {})


def _call(request: Request) -> dict[str, Any]:
    root = Path(request["root"])
    os.setsid()  # what it starts can be found by its session
    warnings.simplefilter("ignore")
    if request.get("plant") is not None:
        PLANTS[request["plant"]]()
    kill_at = request.get("kill_at")
    points = {kind: KillPoint(kind, None, root) for kind in KINDS} if request.get("counts") else {}
    if kill_at is not None:
        KillPoint(kill_at["kind"], kill_at["number"], root)
    try:
        result = CALLS[request["call"]](root, *request["arguments"], **request["options"])
        answer: dict[str, Any] = {"result": result}
    except PipelineError as error:
        answer = {"refused": str(error)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    sys.setprofile(None)
    return answer | {"counts": {kind: point.num_seen for kind, point in points.items()}}


if __name__ == "__main__":
    serve(sys.argv[1])
