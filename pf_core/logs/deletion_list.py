"""The site's deletion list: a text file with one line for each user who must be forgotten.

A line is a JSON object with the key `user_id`: {"user_id": 777} or {"user_id": "alice"}. In it every id is itself,
whatever characters it has. `pf forget` appends such lines, with the time of the request as `since`; other keys are the
operator's own. A line of plain text, as in older lists, is the id, if no other id can be meant: a line with spaces
around it, or with characters that cannot be seen, is refused.

Every stage that stores users reads the list: ingestion drops their rows, timelines, snapshot and releases drop the
users, so that they stay out although old logs still hold their actions.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.printable import printable
from pf_core.schemas import IdType, id_arrow_type
from pf_core.storage.files import etag_of, is_remote, path_of, reaching, write_if_unchanged

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

LOCK_WAIT_S = 60.0
"""Seconds for which a writer waits for others, who need milliseconds."""

LOCK_POLL_S = 0.02

MAX_LINE_BYTES = 16 << 20
"""A longer line is no id; a log's lines are shorter."""

IDS_AT_ONCE = 1 << 16
"""Number of ids that are held as Python objects while the list is read."""

SHOWN_CHARS = 200

INTEGER = re.compile("(?P<sign>-?)0*(?P<digits>[0-9]{1,19})")

NAME = "deletion_list"
"""Key of the site file that names the list."""

KEY, SINCE = "user_id", "since"

WRITTEN: dict[IdType, re.Pattern[str]] = {
    "int": re.compile(r'\{"user_id": (-?[0-9]{1,19}), "since": "([0-9T:.+-]+)"\}'),
    "string": re.compile(r'\{"user_id": "([ !#-\[\]-~]+)", "since": "([0-9T:.+-]+)"\}'),
}
"""The lines of `pf forget` whose id needs no escape: read so, a million of them take a third of the time."""

EXAMPLE: dict[IdType, str] = {"int": '{"user_id": 777}', "string": '{"user_id": "alice"}'}


class Entry(TypedDict):
    """A user on the list."""

    user_id: int | str
    since: str | None
    """When `pf forget` was called, ISO 8601 (UTC); None for a line that was written by hand."""


def parse_user_id(text: str, id_type: IdType) -> int | str:
    """Convert the text of a user id to the type that the logs use."""
    if id_type == "string":
        if not _is_text(text):
            raise PipelineError(f"{_shown(text)} is not UTF-8 text, and so no user id")
        return text
    found = INTEGER.fullmatch(text)
    if found is None or not -(2**63) <= (user_id := int(found["sign"] + found["digits"])) < 2**63:
        raise PipelineError(f"{_shown(text)} is not an integer user id")
    return user_id


def list_path(site: Site) -> Path:
    """Path of the site's deletion list; a site without one is an error."""
    if site.deletion_list is None:
        raise PipelineError(
            "the site file names no deletion_list",
            "add `deletion_list: forget.jsonl` to it, and make the file beside it: touch forget.jsonl",
        )
    path = path_of(site.deletion_list)
    with reaching(path):
        if not path.is_file():
            raise PipelineError(
                f"deletion_list: no file at {path}", "create an empty one if there is no user to forget"
            )
    return path


def read_deletion_list(site: Site) -> pa.Array:
    """Return the user ids on the deletion list, sorted and distinct; empty if the site has no list."""
    id_type = site.source.actions.user_id.type
    if site.deletion_list is None:
        return pa.array([], id_arrow_type(id_type))
    return read_ids(list_path(site), id_type)


def read_ids(path: Path, id_type: IdType, *, key: str = NAME) -> pa.Array:
    """Return the user ids in a list, sorted and distinct; `key` of the site file names it."""
    arrow_type = id_arrow_type(id_type)
    parts, held = [], []
    for entry in read_entries(path, id_type, key=key):
        held.append(entry["user_id"])
        if len(held) == IDS_AT_ONCE:
            parts.append(pa.array(held, arrow_type))
            held = []
    return pa.chunked_array([*parts, pa.array(held, arrow_type)], arrow_type).unique().sort()


def without_listed(user_ids: pa.Array | pa.ChunkedArray, listed: pa.Array) -> pa.Array | pa.ChunkedArray:
    """Return the ids with null for those on a list: what stands beside them stays, without saying whose it is."""
    return pc.if_else(pc.is_in(user_ids, listed), pa.scalar(None, user_ids.type), user_ids)


def find_entry(site: Site, user_id: int | str) -> Entry | None:
    """Return the first line of the list with this user; None if the user is not on it."""
    if site.deletion_list is None:
        return None
    entries = read_entries(list_path(site), site.source.actions.user_id.type)
    return next((entry for entry in entries if entry["user_id"] == user_id), None)


def read_entries(path: Path, id_type: IdType, *, key: str = NAME) -> Iterator[Entry]:
    """Yield the lines of a list in their order. A line that could mean another user is an error that names it."""
    for number, line in _lines(path, key):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise PipelineError(
                f"{key}: {path} is not UTF-8 text: line {number}: {error.reason}", "convert it to UTF-8"
            ) from None
        try:
            entry = _read_line(text, id_type)
        except PipelineError as error:
            raise PipelineError(f"{_named(path, key)}, line {number}: {error.what}", error.remedy) from None
        if entry is not None:
            yield entry


def _named(path: Path, key: str) -> str:
    """Return how errors name a list: the deletion list by its path, which `pf forget` prints, too."""
    return str(path) if key == NAME else f"{key}: {path}"


def _lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line, in bounded memory. Lines end with LF or CRLF, and with nothing else."""
    try:
        with reaching(path), path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise PipelineError(
                        f"{_named(path, key)}, line {number}: longer than {MAX_LINE_BYTES:,} bytes, which no user id is"
                    )
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line.startswith(b"{") and not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
                    cut_off = f"{_named(path, key)}, line {number} is cut off: {_shown(line.decode(errors='replace'))}"
                    if key != NAME:
                        raise PipelineError(cut_off, "write the file again")
                    raise PipelineError(
                        f"{cut_off}. A `pf forget` was interrupted while it wrote the line",
                        "delete the line, then run `pf forget` again for the user whom it was about",
                    )
                yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise PipelineError(f"{key}: {path} cannot be read: {error.strerror or error}") from error


def _read_line(text: str, id_type: IdType) -> Entry | None:
    """Return the user of a line; None for a blank line."""
    written = WRITTEN[id_type].fullmatch(text)
    if written is not None:
        return {"user_id": parse_user_id(written[1], id_type), "since": written[2]}
    if text.lstrip(" \t").startswith("{"):
        return _read_object(text, id_type)
    if not text or (id_type == "int" and not text.strip()):
        return None
    if id_type == "int":
        return {"user_id": parse_user_id(text.strip(), id_type), "since": None}
    if not text.isprintable() or text != text.strip() or text.startswith('"'):
        raise PipelineError(
            f"{_shown(text)} may mean more than one user: spaces around it, quotes, or characters that cannot be seen "
            "may be a part of the id, or not",
            f"write the line as JSON, with the id exactly as in the logs: {json.dumps({KEY: text})}, or "
            f"{json.dumps({KEY: _tidy(text)})}, or both",
        )
    return {"user_id": text, "since": None}


def _read_object(text: str, id_type: IdType) -> Entry:
    try:
        content = json.loads(text, object_pairs_hook=_with_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{_shown(text)} is not a JSON object ({error})", f"write {EXAMPLE[id_type]}") from None
    user_id, since = content.get(KEY), content.get(SINCE)
    if id_type == "int":
        is_id = type(user_id) is int and -(2**63) <= user_id < 2**63
    else:
        is_id = isinstance(user_id, str) and user_id != "" and _is_text(user_id)
    if not is_id:
        kind = "an integer of 64 bits" if id_type == "int" else "a text"
        raise PipelineError(f"{_shown(text)} has no {KEY} that is {kind}", f"write {EXAMPLE[id_type]}")
    return {"user_id": user_id, "since": since if isinstance(since, str) else None}


def _with_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key appears twice")
    return content


def _is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8: JSON can hold halves of surrogate pairs, which no log has."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tidy(text: str) -> str:
    return "".join(char for char in text if char.isprintable()).strip().strip('"')


def _shown(text: str) -> str:
    return printable(repr(text), max_chars=SHOWN_CHARS)


# Writing


def add_to_deletion_list(site: Site, user_ids: Sequence[int | str]) -> int:
    """Append the users who are not on the list yet; return their number. When it returns, their lines are durable.

    Writers wait for each other, and a line that another program appends meanwhile is kept.
    """
    path, id_type = list_path(site), site.source.actions.user_id.type
    for user_id in user_ids:
        _read_line(_line_of(user_id, since=""), id_type)  # refuses what no log can have, before anything is written
    if is_remote(path):
        return _add_to_object(site, path, user_ids)
    try:
        with _locked(path) as file:
            lines = _lines_to_add(site, user_ids)
            _append(file, "".join(lines).encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise PipelineError(
            f"the deletion list {path} cannot be written: {error.strerror or error}; nothing was added",
            "make the file writable, or free some space, then run `pf forget` again",
        ) from error
    return len(lines)


def _line_of(user_id: int | str, *, since: str) -> str:
    return json.dumps({KEY: user_id, SINCE: since})


def _lines_to_add(site: Site, user_ids: Sequence[int | str]) -> list[str]:
    known, since = read_deletion_list(site), datetime.now(UTC).isoformat()
    wanted = pa.array(dict.fromkeys(user_ids), known.type)
    new = wanted.filter(pc.invert(pc.is_in(wanted, known)))
    return [_line_of(user_id, since=since) + "\n" for user_id in new.to_pylist()]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    """Open the list for appending when no other writer has it; an editor may replace the file meanwhile."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        with FileIO(descriptor, "a+") as file:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"another process has locked the deletion list {path} for {LOCK_WAIT_S:.0f} s; nothing was "
                        "added",
                        "end it, then run `pf forget` again",
                    ) from None
                time.sleep(LOCK_POLL_S)
                continue
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                yield file
                return


def _append(file: FileIO, lines: bytes) -> None:
    """Append whole lines; if that fails, the file is as before."""
    end = file.seek(0, os.SEEK_END)
    if end and lines:
        file.seek(end - 1)
        lines = lines if file.read(1) == b"\n" else b"\n" + lines
    num_written = 0
    try:
        while num_written < len(lines):
            num_written += file.write(lines[num_written:]) or 0
    except OSError:
        if file.seek(0, os.SEEK_END) == end + num_written:  # otherwise another program has appended, too
            file.truncate(end)
        raise


def _add_to_object(site: Site, path: Path, user_ids: Sequence[int | str]) -> int:
    """Append to an object, on the condition that nobody has replaced it since it was read."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline:
        stamp = etag_of(path)
        lines = _lines_to_add(site, user_ids)
        with reaching(path):
            before = path.read_bytes().decode()
        separator = "" if before.endswith("\n") or not before else "\n"
        if not lines or write_if_unchanged(path, before + separator + "".join(lines), stamp):
            return len(lines)
    raise PipelineError(
        f"the deletion list {path} was replaced by others for {LOCK_WAIT_S:.0f} s; nothing was added",
        "run `pf forget` again",
    )
