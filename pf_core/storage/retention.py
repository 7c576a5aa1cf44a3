"""Retention: keep the newest folders or days, remove the others.

Daily state (`engine/daily_state.py`) drops versions of Lance datasets and releases (`serving/retention.py`) wait for
their readers; both only share the rule of which days are kept.
"""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pf_core.errors import PipelineError
from pf_core.storage.files import remove_tree

TICK_NS = 1_000_000
"""Least difference of two times of use, which every file system can store."""


def keep_newest(folders: Sequence[Path], num_kept: int, *, description: str) -> None:
    """Remove all but the last `num_kept` of these folders, which are sorted from old to new.

    The file `description`, without which a folder does not count, is removed first: a removal that is interrupted
    leaves no folder that looks complete.
    """
    for folder in folders[:-num_kept]:
        (folder / description).unlink(missing_ok=True)
        remove_tree(folder)


def mark_used(path: Path, others: Iterable[Path]) -> None:
    """Make a local file or folder the last used one of several, by its time.

    If the clock was set back, the time is just after the newest of the others, so that the order stays that of use.
    """
    newest = max((time_of(other) for other in others if other != path), default=0)
    now = max(time.time_ns(), newest + TICK_NS)
    os.utime(path, ns=(now, now))


def time_of(path: Path) -> int:
    """Time of the last use that `mark_used` gave; 0 if another run has removed the file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def refuse_expired(
    asset: str, days: Sequence[str], *, existing: Iterable[str], num_days: int, setting: str = "retention_days"
) -> None:
    """Refuse to build ascending days of which the last is older than what is kept: it would be removed at once."""
    kept = sorted({*existing, *days})[-num_days:]
    if days[-1] < kept[0]:
        raise PipelineError(
            f"{asset} {days[-1]} is older than the {num_days} days that are kept (from {kept[0]} on)",
            f"raise {setting} in the site file to build it",
        )
