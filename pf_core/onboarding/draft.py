"""A site file for logs that nobody has described: what is read of them, what is decided, and the check of the result.

The files are grouped by their columns (`folders.py`), a bounded sample of the group that is the log is read
(`sampled.py`), its columns are described (`columns.py`, `times.py`) and given their roles (`roles.py`, `actions.py`),
the days are counted (`days.py`), and one of the other groups may be the catalogue (`catalogue.py`). The result is
validated as a site file, and the sample is mapped with it as a run would, before anything is written (`trial.py`).
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pf_core.config.files import Files
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.logs.routing import DAY_US, day_number
from pf_core.logs.sample import Plan
from pf_core.onboarding.actions import ActionMapping, choose_mapping
from pf_core.onboarding.catalogue import CatalogueChoice, best_catalogue, note_catalogue, read_as_catalogue
from pf_core.onboarding.columns import Column, describe
from pf_core.onboarding.days import SiteDays, choose_days, quietest_hour, volumes_of
from pf_core.onboarding.folders import Group, Pattern, dated_pattern, group_files, list_files, pattern_of
from pf_core.onboarding.log import Log, Stranger, find_log
from pf_core.onboarding.not_read import note_not_read
from pf_core.onboarding.questions import Decide, Notes, Question, percent
from pf_core.onboarding.roles import Roles
from pf_core.onboarding.sampled import SAMPLE_BYTES, SMALL_BYTES, sample_of
from pf_core.onboarding.times import TimeReader, is_timezone

MAX_LATE_DAYS = 7

LEAST_EARLY = 0.001
"""Share of rows a day younger than their file that `early_days` is set for."""

IN_TIME_SHARE = 0.99
"""Share of the rows of a dated file that must be of its day or near it."""

COMMON_NAMES = ("data", "log", "logs", "raw")
"""Folders and files whose names say nothing: the site has the name of the folder above."""

DOMINANT_SHARE = 0.2
"""A user with so many of the rows may stand for all who are not logged in."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What goes into the site file."""

    name: str
    files: list[Path]
    """The files of the log."""
    root: Path
    actions: dict[str, Any]
    """`source.actions`."""
    pins: dict[str, Any]
    """`source.pins`; empty without a catalogue."""
    positive: dict[str, Any]
    days: SiteDays
    quality: dict[str, float]
    plan: Plan
    num_rows: int
    notes: Notes
    left_out: list[str]
    """Files that are neither log nor catalogue, and why."""

    def content(self) -> dict[str, Any]:
        """Return the content of the site file, with an absolute root."""
        source: dict[str, Any] = {"root": str(self.root), "actions": self.actions}
        source |= {"pins": self.pins} if self.pins else {}
        source |= {"positive": self.positive}
        site = {"name": self.name, "start_ds": self.days.start_ds, "end_ds": self.days.end_ds, "data_dir": "data"}
        return site | {"source": source} | ({"quality": self.quality} if self.quality else {})


def draft_site(paths: Sequence[Path], catalogue: Path | None, decide: Decide) -> Draft:
    """Look at logs, and return what a site file for them says; a PipelineError says why there can be none."""
    notes = Notes(decide)
    catalogue_files = list_files([catalogue]) if catalogue is not None else []
    files = [file for file in list_files(paths) if file not in catalogue_files]
    groups, refused = group_files(files)
    named = None if catalogue is None else _only_group(catalogue_files)
    log, strangers = find_log(groups, refused, notes, named)
    others = [stranger.group for stranger in strangers] if named is None else [named]
    choice = _find_catalogue(others, log.roles, notes, is_named=catalogue is not None)
    zone = _choose_zone(log, notes)
    time = log.roles.time
    us = time.us if zone == "UTC" else TimeReader(zone).read_again(time)
    days = choose_days(volumes_of(us, log.sampled.weight), is_sample=not log.sampled.plan.is_whole)
    mapping = choose_mapping(log.columns, log.roles, " ".join(file.stem for file in log.group.files[:3]), notes)
    _note_dominant_user(log.roles.user, notes)
    _note_days(log, notes)
    pattern = pattern_of(log.group, others)
    dated, options = _dated(log, pattern, us, days, notes)
    pins = None if choice is None else pattern_of(choice.group, [log.group])
    note_not_read(log, mapping, notes)
    root = Path(os.path.commonpath([each.root for each in (pattern, pins) if each is not None]))
    pin_type = "int" if log.roles.pin.is_integer and (choice is None or choice.pin.is_integer) else "string"
    return Draft(
        name=_name_of(paths[0], pattern),
        files=log.group.files,
        root=root,
        actions=_actions(log, mapping, _below(root, dated), zone, pin_type) | options,
        pins=_pins(choice, "" if pins is None else _below(root, pins), pin_type),
        positive={"action_types": mapping.positive, "longer_than_s": {}, "surfaces": None},
        days=days,
        quality=days.quality,
        plan=log.sampled.plan,
        num_rows=log.sampled.num_rows,
        notes=notes,
        left_out=_left_out(strangers, choice, refused),
    )


def _only_group(files: Sequence[Path]) -> Group:
    """Return the group of files of a catalogue; refuse files that are no table, or several."""
    groups, refused = group_files(files)
    if refused:
        raise refused[0]
    if len(groups) > 1:
        raise PipelineError(f"{groups[0]} and {groups[1]} have not the same columns", "name one of them as catalogue")
    return groups[0]


# The log


def _choose_zone(log: Log, notes: Notes) -> str:
    """Return the time zone of times that name none."""
    time = log.roles.time
    if time.zone_share >= 1 or not time.has_clock:
        return "UTC"
    if time.zone_share > 0:
        notes.hints.append(
            f"{percent(time.zone_share)} of the times name a time zone; the others are those of `timezone`, or UTC."
        )
    default, evidence = "UTC", f"the times name none; read as UTC, {quietest_hour(time.us)}"
    for column in log.columns.values():
        if column.num_given and all("/" in value and is_timezone(value) for value in column.top(20)):
            default = column.top(1)[0]
            share = percent(float(column.counts[0] / column.num_rows))
            evidence = f"column {column.name} says {default} in {share} of the rows"
    question = Question(
        text="In which time zone are the times?", evidence=evidence, default=default, accepts=is_timezone
    )
    zone = notes.ask(question)
    notes.guessed["timezone"] = evidence
    return zone


def _note_days(log: Log, notes: Notes) -> None:
    """Note that the times are days."""
    if not log.roles.time.has_clock:
        notes.hints.append("The times are days: the order of actions within a day is not known.")


def _note_dominant_user(user: Column, notes: Notes) -> None:
    shares = list(user.shares().items())[:2]
    if len(shares) == 2 and shares[0][1] > DOMINANT_SHARE and shares[0][1] > 10 * shares[1][1]:
        (value, share), _ = shares
        notes.hints.append(
            f"User {value} has {percent(share)} of the rows. If it stands for nobody, leave it out by a rule of "
            f"action_type: {{skip: true, when: {{{user.name}: {value}}}}}."
        )


def _dated(log: Log, pattern: Pattern, us: np.ndarray, days: SiteDays, notes: Notes) -> tuple[Pattern, dict[str, Any]]:
    """Return the pattern, with {ds} if the files are named by the days of their rows, and the keys of a dated log."""
    found = dated_pattern(log.group, pattern)
    if found is None:
        return pattern, {}
    dated, day_of = found
    file_day = np.array([day_number(day_of[file]) for file in log.group.files])[log.sampled.file]
    lateness = (file_day - us // DAY_US)[us >= 0]
    if float(((lateness >= -1) & (lateness <= MAX_LATE_DAYS)).mean()) < IN_TIME_SHARE:
        notes.hints.append("The names of the files have days, but not those of their rows: the log is read as one.")
        return pattern, {}
    late = int(np.quantile(lateness, IN_TIME_SHARE + (1 - IN_TIME_SHARE) / 2, method="higher"))
    options: dict[str, Any] = {"late_days": late} if late > 1 else {}
    if float((lateness < 0).mean()) > LEAST_EARLY:
        options["early_days"] = 1
    notes.guessed["late_days"] = (
        f"the files are named by day; rows are up to {max(late, 0)} days older than their file"
        f"{', and some a day younger' if 'early_days' in options else ''}"
    )
    known = set(day_of.values())
    absent = [ds for ds in ds_range(days.start_ds, days.end_ds) if ds not in known]
    if absent:
        options["missing_days"] = "allow"
        notes.guessed["missing_days"] = f"{len(absent)} of {days.num_days} days have no file, such as {absent[0]}"
    return dated, options


def _actions(log: Log, mapping: ActionMapping, path: str, zone: str, pin_type: str) -> dict[str, Any]:
    """Return `source.actions`."""
    roles = log.roles
    ts = roles.time.field.model_dump(exclude_none=True, exclude={"timezone"})
    ts |= {"timezone": zone} if zone != "UTC" else {}
    actions = described(log.group.layout.files, path) | {
        "user_id": _id(roles.user.name, "int" if roles.user.is_integer else "string"),
        "pin_id": _id(roles.pin.name, pin_type),
        "ts": ts,
        "action_type": mapping.action_type,
    }
    actions |= {"surface": mapping.surface} if mapping.surface else {}
    return actions | ({"duration_s": mapping.duration_s} if mapping.duration_s else {})


def _id(name: str, kind: str) -> Any:
    return {"column": name, "type": kind} if kind != "int" else name


def described(files: Files, path: str) -> dict[str, Any]:
    """Return the keys that say how files are parsed, without those that follow from the path."""
    kind = files.file_format
    own: dict[str, Any] = {"path": path}
    if Files.model_construct(path=path, format=None).file_format != kind:
        own["format"] = kind
    own |= {"encoding": files.encoding} if files.encoding != "utf-8" else {}
    if kind != "csv":
        return own
    usual = Files.model_validate(own)
    own |= {"delimiter": files.delimiter} if files.delimiter != usual.delimiter else {}
    own |= {"columns": list(files.columns)} if files.columns is not None else {}
    return own | ({"quote": files.quote} if files.quote != usual.quote else {})


def _below(root: Path, pattern: Pattern) -> str:
    """Return a pattern as a path below another folder."""
    folder = os.path.relpath(pattern.root, root)
    return pattern.path if folder == "." else f"{glob.escape(folder)}/{pattern.path}"


def _name_of(path: Path, pattern: Pattern) -> str:
    """Return a name for the site: that of the folder or file that was named."""
    named = path.resolve()
    name = named.name if named.is_dir() else named.name.split(".")[0]
    name = pattern.root.parent.name if name.lower() in COMMON_NAMES else name
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "site"


# The catalogue


def _find_catalogue(groups: Sequence[Group], roles: Roles, notes: Notes, *, is_named: bool) -> CatalogueChoice | None:
    """Return the catalogue among groups of files; one that was named must be one."""
    choices = []
    for group in groups:
        try:
            sampled = sample_of(group, SAMPLE_BYTES if is_named else SMALL_BYTES)
            columns = describe(sampled.table)
        except PipelineError:
            if is_named:
                raise
            continue
        choice = read_as_catalogue(sampled.group, columns, roles)
        if choice is not None:
            choices.append(choice)
        elif is_named:
            raise PipelineError(
                f"{group} is no catalogue of the log: no column has each value once, and ids of the log's column "
                f"{roles.pin.name!r} (such as {roles.pin.examples()}); it has {', '.join(map(repr, columns))}",
                "name the table with one row for each pin",
            )
    chosen = best_catalogue(choices)
    if chosen is not None and not is_named:  # now a larger part of it
        sampled = sample_of(chosen.group, SAMPLE_BYTES)
        chosen = read_as_catalogue(sampled.group, describe(sampled.table), roles)
    if chosen is not None:
        note_catalogue(chosen, choices, notes)
    if chosen is not None and not (is_named or chosen.is_clear(roles.pin)):
        answer = notes.ask(
            Question(
                text=f"Use {chosen.group.files[0].name} as catalogue of pins?",
                evidence=notes.guessed["catalogue"],
                options=["yes", "no"],
                default="yes",
            )
        )
        return chosen if answer == "yes" else None
    return chosen


def _pins(choice: CatalogueChoice | None, path: str, pin_type: str) -> dict[str, Any]:
    """Return `source.pins`."""
    if choice is None:
        return {}
    files = choice.group.layout.files
    names = {choice.pin.name: "pin"} if choice.group.layout.kinds else {}
    if names:
        files = files.model_copy(update={"columns": tuple(names.get(name, name) for name in files.columns or ())})
    pins: dict[str, Any] = {
        "catalogue": described(files, path),
        "pin_id": _id(names.get(choice.pin.name, choice.pin.name), pin_type),
    }
    named = {"interest": choice.interest, "is_candidate": choice.is_candidate}
    pins |= {key: column.name for key, column in named.items() if column is not None}
    return pins | ({"vectors": choice.vectors} if choice.vectors else {})


def _left_out(
    strangers: Sequence[Stranger], choice: CatalogueChoice | None, refused: Sequence[PipelineError]
) -> list[str]:
    """Return a sentence for each group of files that is not used."""
    chosen = set(choice.group.files) if choice is not None else set()
    unused = [stranger for stranger in strangers if not chosen & set(stranger.group.files)]
    return [*(f"{stranger.group}: {stranger.reason}" for stranger in unused), *map(str, refused)]
