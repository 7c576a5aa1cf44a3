"""Progress messages: from per-bucket functions, on whatever worker, to the log of the run, at a bounded rate."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

Progress = Callable[[str], None]
"""A function that shows or logs a message."""


@dataclass
class _Receiver:
    """Where `report` sends messages: a callback in this process, or the queue to the process that started it."""

    send: Progress | None = None


_receiver = _Receiver()


def report(message: str) -> None:
    """Send a message from a per-bucket function to the `progress` callback of the run."""
    if _receiver.send is not None:
        _receiver.send(message)


@contextlib.contextmanager
def reporting_to(send: Progress | None) -> Iterator[None]:
    """Within this context, `report` sends its messages to `send`."""
    _receiver.send = send
    try:
        yield
    finally:
        _receiver.send = None


def report_to_queue(messages: "SimpleQueue[str]") -> None:
    """From now on, `report` in this worker process puts its messages into a queue."""
    _receiver.send = messages.put


class Throttle:
    """Passes on at most one message every `every_s` seconds; the first only after that time has passed."""

    def __init__(self, send: Progress, *, every_s: float = 5.0) -> None:
        self._send, self._every_s = send, every_s
        self._sent_at = time.monotonic()

    def __call__(self, message: Callable[[], str] | str) -> None:
        """`message` may be a function that makes the text: it is called only if the text is sent."""
        if time.monotonic() - self._sent_at > self._every_s:
            self._sent_at = time.monotonic()
            self._send(message if isinstance(message, str) else message())
