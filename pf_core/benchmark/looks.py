"""The record of looks at the test users: one line of a CSV file for each benchmark that scored them.

Settings are chosen on other users. If somebody still runs the benchmark again and again until a figure is good, this
file shows it; the table names the file.
"""

import csv
import fcntl
import io
import os
from collections.abc import Sequence
from pathlib import Path

COLUMNS = ("date", "log", "seed", "commit", "contenders", "budget")


def append_look(
    path: Path, *, date: str, log: str, seed: int, commit: str, contenders: Sequence[str], budget: str
) -> None:
    """Append a line, after a header if the file is new. A file lock lets processes that end together take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if size == 0:
            writer.writerow(COLUMNS)
        writer.writerow([date, log, seed, commit, "; ".join(contenders), budget])
        file.write(text.getvalue())


def read_looks(path: Path) -> list[dict[str, str]]:
    """Return all looks by column name, oldest first; none if there is no file."""
    return list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else []
