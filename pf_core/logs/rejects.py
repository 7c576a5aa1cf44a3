"""Whose are the rows that were rejected? Rows of forgotten users may not stay in the quarantine.

A rejected row with the id of a user on the deletion list is dropped and counted as forgotten. A row of which nobody can
tell whose it is stays without its content (`quarantine.REDACTED`): one without a readable user id, every malformed
line, and a row whose id looks like one of the list. For a site with string ids 0777, " 777" and 777.0 are other users
than 777, and their good rows are theirs; but in a row that is broken, the id may be broken, too.
"""

import json
import unicodedata
from decimal import Decimal
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.fields import IdField
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import parse_user_id
from pf_core.schemas import IdType, id_arrow_type

MALFORMED = "malformed: "
"""Beginning of the reasons of rows that the format's parser rejected."""


class Forgotten:
    """The users on the deletion list, as rejected rows may name them."""

    def __init__(self, user_ids: pa.Array) -> None:
        self._user_ids = user_ids

    def __len__(self) -> int:
        return len(self._user_ids)

    def are_listed(self, users: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Return which of the users are on the list."""
        if not len(self._user_ids) or not len(users):
            return np.zeros(len(users), bool)
        return np.asarray(pc.is_in(users, self._user_ids).to_numpy(zero_copy_only=False))

    def may_be(self, users: pa.Array) -> np.ndarray:
        """Return which of the rows that these users (null: unknown) are in may be of a user on the list."""
        if not len(self._user_ids):
            return np.zeros(len(users), bool)
        if pa.types.is_integer(users.type):
            return np.asarray(users.is_null().to_numpy(zero_copy_only=False))
        return np.array([user is None or looks(user) in self._looks for user in users.to_pylist()], bool)

    @cached_property
    def _looks(self) -> set[str]:
        return {looks(user) for user in self._user_ids.to_pylist()}


def looks(user_id: str) -> str:
    """Return what the spellings of an id have in common: its number, or its letters and digits without their case."""
    text = unicodedata.normalize("NFKC", user_id).strip()
    try:
        return str(Decimal(text).normalize())
    except ArithmeticError:
        return "".join(char for char in text.casefold() if char.isalnum()) or text


def users_of(rows: pa.Table, field: IdField) -> pa.Array:
    """Return the user of each row of a quarantine, null where its content names none that can be relied on.

    The content of a row is what the mapping read, as JSON. Whatever JSON shows otherwise than a log has it, such as
    bytes and times, is not relied on.
    """
    users = [
        None if reason.startswith(MALFORMED) else _user_of(raw, field)
        for reason, raw in zip(rows["reason"].to_pylist(), rows["raw"].to_pylist(), strict=True)
    ]
    return pa.array(users, id_arrow_type(field.type))


def _user_of(raw: str, field: IdField) -> int | str | None:
    try:
        value = json.loads(raw)[field.column]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        return None
    if field.type == "string" and str(value).startswith(("b'", 'b"')):  # as JSON shows bytes
        return None
    return _parsed(str(value), field.type)


def _parsed(text: str, id_type: IdType) -> int | str | None:
    try:
        text.encode()
        return parse_user_id(text, id_type)
    except (PipelineError, UnicodeEncodeError):
        return None
