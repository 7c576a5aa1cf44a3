"""Retention: keep the newest folders or days, remove the others.

Daily state (`engine/daily_state.py`) drops versions of Lance datasets and releases (`serving/retention.py`) wait for
their readers; both only share the rule of which days are kept.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from pf_core.errors import PipelineError
from pf_core.storage.files import remove_tree


def keep_newest(folders: Sequence[Path], num_kept: int, *, description: str) -> None:
    """Remove all but the last `num_kept` of these folders, which are sorted from old to new.

    The file `description`, without which a folder does not count, is removed first: a removal that is interrupted
    leaves no folder that looks complete.
    """
    for folder in folders[:-num_kept]:
        (folder / description).unlink(missing_ok=True)
        remove_tree(folder)


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
