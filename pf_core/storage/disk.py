"""Errors of the disk as sentences: it is full, read-only, not ours to write, or broken.

Whatever library meets one raises an error of its own: an OSError, with its number or only with a text, or another
exception of Lance, DuckDB, SQLite or safetensors, whose text names it.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pf_core.errors import PipelineError

REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota, or free some space there",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "give this user access to it",
    errno.EPERM: "give this user access to it",
    errno.EIO: "check the disk, and whether it is full",
}
"""What to do about a problem, by its number."""

OTHER_TEXTS = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    "disk I/O error": errno.EIO,
}
"""What SQLite says."""

NUMBER = re.compile(r"os error (\d+)|\[?[Ee]rrno (\d+)")


def disk_problem(error: BaseException) -> int | None:
    """Return the number of the disk's problem that an exception tells of; None if it is another error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        return problem_in(str(error))
    return number if number in REMEDIES else None


def problem_in(text: str) -> int | None:
    """Return the number of the disk's problem that the text of an error names; None if it names none."""
    found = NUMBER.search(text)
    if found is not None:
        number = int(found[1] or found[2])
        return number if number in REMEDIES else None
    known = OTHER_TEXTS | {os.strerror(each): each for each in REMEDIES}
    return next((each for words, each in known.items() if words in text), None)


def disk_sentence(error: Exception) -> str:
    """Return a sentence about a problem of the disk that a command met; any other error is raised again."""
    number = disk_problem(error)
    if number is None:
        raise error
    return f"{_problem(error, number, None)}; {REMEDIES[number]}, then re-run"


def _problem(error: BaseException, number: int, folder: Path | None) -> str:
    """Return the problem and its place: the file that the error names, or the folder."""
    place = getattr(error, "filename", None) or folder
    return os.strerror(number) if place is None else f"{os.strerror(number)}: {place}"


@contextlib.contextmanager
def disk_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn a problem of the disk into a sentence; `what` was to be written in the folder."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        number = disk_problem(error)
        if number is None:
            raise
        raise PipelineError(
            f"{what}: {_problem(error, number, folder)}; what was published before is unchanged",
            f"{REMEDIES[number]}, then re-run",
        ) from error
