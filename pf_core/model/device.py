"""Where the model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Threads that start meanwhile compute each on their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
