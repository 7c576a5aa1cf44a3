"""Faults that are planted to show that the tests find them."""

from collections.abc import Callable
from pathlib import Path

from pf_core.storage import files


def _in_place() -> None:
    """Files are written in two steps under their own names."""

    def write_text(path: Path, text: str) -> None:
        half = len(text) // 2
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text[:half])
        with path.open("a") as file:
            file.write(text[half:])

    files.write_text = write_text


PLANTS: dict[str, Callable[[], None]] = {"in place": _in_place}
