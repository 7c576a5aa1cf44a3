"""The rows of the site's log, in its own words and units, and their defects: duplicates, unknown and malformed rows.

Defects are drawn from a random stream of their own, so that the same world without defects has the same true rows.
(Late rows are not made here: lateness belongs to the sessions.)
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pf_core.world.behaviour import ACTION_TYPES, SURFACES
from pf_core.world.column_tables import Ints, take
from pf_core.world.config import DefectConfig
from pf_core.world.simulate import Actions

EVENT_OF_ACTION = {action: "save" if action == "repin" else action for action in ACTION_TYPES}

UNKNOWN_EVENTS = ("share", "collage_cutout", "story_tap")

EVENTS = (*EVENT_OF_ACTION.values(), *UNKNOWN_EVENTS)

SURFACE_NAMES = {"homefeed": "home", "search": "search", "related_pins": "related"}

NO_DWELL = -1

SOUND = -1

NUM_DEFECTS = 12
"""Malformed rows have a defect from 0 to 11; each file format maps these onto its own 3 or 4 ways to be malformed."""

LOG_COLUMNS = ("event_time_ms", "user", "pin", "event", "surface", "dwell_ms")


@dataclass(frozen=True, kw_only=True)
class LogRows:
    """Rows of the log; users and pins are indices."""

    event_time_ms: Ints
    user: Ints
    pin: Ints
    event: Ints  # index into EVENTS
    surface: Ints  # index into SURFACES
    dwell_ms: Ints  # NO_DWELL if missing
    defect: Ints  # SOUND if the row is well-formed

    def __len__(self) -> int:
        return len(self.user)


def clean_rows(actions: Actions) -> LogRows:
    """Return the log of the actions without defects."""
    return LogRows(
        event_time_ms=np.rint(actions.ts_s * 1000).astype(np.int64),
        user=actions.user,
        pin=actions.pin,
        event=actions.action,
        surface=actions.surface,
        dwell_ms=np.rint(actions.duration_s * 1000).astype(np.int64),
        defect=np.full(len(actions), SOUND),
    )


def add_defects(rows: LogRows, rates: DefectConfig, rng: np.random.Generator) -> LogRows:
    """Return the log with defects; each added row follows the true row that it was made from."""
    blank = rng.random(len(rows)) < rates.missing_dwell
    rows = replace(rows, dwell_ms=np.where(blank, NO_DWELL, rows.dwell_ms))

    duplicate, unknown, malformed = (
        np.flatnonzero(rng.random(len(rows)) < rate) for rate in (rates.duplicate, rates.unknown_event, rates.malformed)
    )
    source = np.concatenate((np.arange(len(rows)), duplicate, unknown, malformed))
    out = take(rows, source)
    first_unknown, first_malformed = len(rows) + len(duplicate), len(source) - len(malformed)
    out.event[first_unknown:first_malformed] = rng.integers(len(ACTION_TYPES), len(EVENTS), len(unknown))
    out.dwell_ms[first_unknown:first_malformed] = NO_DWELL
    out.defect[first_malformed:] = rng.integers(0, NUM_DEFECTS, len(malformed))
    return take(out, np.argsort(source, kind="stable"))


def to_table(rows: LogRows, user_id: Ints, pin_id: pa.StringArray) -> pa.Table:
    """Return the log's columns, with malformed rows still well-formed."""
    events = pa.array(EVENTS)
    surfaces = pa.array([SURFACE_NAMES[surface] for surface in SURFACES])
    columns = (
        rows.event_time_ms,
        user_id,
        pin_id,
        events.take(pa.array(rows.event)),
        surfaces.take(pa.array(rows.surface)),
        pa.array(rows.dwell_ms, mask=rows.dwell_ms == NO_DWELL),
    )
    return pa.table(dict(zip(LOG_COLUMNS, columns, strict=True)))


def break_table(table: pa.Table, rows: LogRows) -> pa.Table:
    """Apply the defects that a typed file can have: no user, a negative dwell time, a time in the far future."""
    broken = np.flatnonzero(rows.defect != SOUND)
    if not len(broken):
        return table
    kind = np.full(len(rows), SOUND)
    kind[broken] = rows.defect[broken] % 3
    user = pa.array(table["user"].to_numpy(), mask=kind == 0)
    dwell = np.where(kind == 1, -7_000, rows.dwell_ms)
    time = np.where(kind == 2, np.int64(99_999_999_999_999), rows.event_time_ms)
    missing = (rows.dwell_ms == NO_DWELL) & (kind != 1)
    return (
        table.set_column(0, "event_time_ms", pa.array(time))
        .set_column(1, "user", user)
        .set_column(5, "dwell_ms", pa.array(dwell, mask=missing))
    )


def break_line(line: str, defect: int) -> str:
    """Return a line with a defect of a text file: truncated, an extra field, a time that is not a number, no user."""
    fields = line.split(",")
    match defect % 4:
        case 0:
            return line[: len(line) * 2 // 5]
        case 1:
            return line + ",1"
        case 2:
            return ",".join(["n/a", *fields[1:]])
        case _:
            return ",".join([fields[0], "", *fields[2:]])
