"""What to do about logs that cannot be used: the remedies in error messages, by the reason of a reject or an error."""

import json
from collections.abc import Sequence
from pathlib import Path

from pf_core.config.files import Encoding

NOT_VALID = "malformed: not valid"

NOT_UTF8 = f"{NOT_VALID} UTF-8"

NOT_AN_OBJECT = "malformed: not a JSON object"

OPEN_QUOTE = "malformed: a quoted value does not end in its line"

WRONG_NUMBER_OF_FIELDS = "fields instead of"

OUTSIDE_SITE_DAYS = "ts: outside the site's days"

AFTER_ITS_FILE = "ts: after its file's day"

TOO_LATE = "ts: too late for its day"

UTF16 = "convert it to UTF-8, for example with: iconv -f UTF-16 -t UTF-8"
"""What to do about a file in UTF-16."""

REMEDIES = {
    NOT_UTF8: (
        "set `encoding: cp1252` in the site file if that is how CSV or JSON lines are written, or convert the files to "
        "UTF-8, for example with: iconv -f CP1250 -t UTF-8"
    ),
    NOT_VALID: "fix `encoding` in the site file, or repair the files",
    NOT_AN_OBJECT: "write one JSON object in each line, or fix `format` in the site file",
    OPEN_QUOTE: "write each row as one line, or set `quote: null` in the site file if nothing is quoted",
    WRONG_NUMBER_OF_FIELDS: "fix `delimiter`, `quote` or `columns` in the site file",
    "malformed: ": "repair the files",
    OUTSIDE_SITE_DAYS: "fix `start_ds`, `end_ds` or the unit of `ts` in the site file",
    AFTER_ITS_FILE: "fix `ts` (unit, timezone) or `early_days` in the site file",
    TOO_LATE: "fix `ts` (unit, timezone) or raise `late_days` in the site file",
}
"""What to do about rows that were rejected for a reason with this text in it; the first that applies counts."""

OTHER_DELIMITERS = (";", "\t", "|", "::", ",")
"""Delimiters that an error suggests for a header of one column."""


def not_valid(encoding: Encoding) -> str:
    """Return the reason of a line with bytes that the encoding does not define."""
    return NOT_UTF8 if encoding == "utf-8" else f"{NOT_VALID} {encoding}"


def remedy_of(reason: str) -> str:
    """Return what to do if this is the reason of many rejects."""
    return next((remedy for part, remedy in REMEDIES.items() if part in reason), "fix the mapping in the site file")


def file_remedy(path: Path, compression: str | None, error: Exception) -> str:
    """Return what to do about a file that cannot be read; `compression` is the one that its suffix names."""
    if isinstance(error, PermissionError):
        return "let the user who runs the pipeline read it"
    if compression is None:
        return "restore the file, or fix `format` in the site file"
    if "Truncated" in str(error):
        return "the file was cut off: restore it"
    return f"restore the file, or rename it without {path.suffix} if it is not compressed with {compression}"


def column_remedy(present: Sequence[str], missing: Sequence[str]) -> str:
    """Return what to do about columns that a file does not have."""
    if len(present) == 1:
        for delimiter in OTHER_DELIMITERS:
            if delimiter in present[0]:
                return f"its header is not divided: set `delimiter: {json.dumps(delimiter)}` in the site file"
    return "fix the column names in the site file"
