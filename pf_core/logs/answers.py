"""Answers: who agreed to be learned from, if `training.users` names a column of the log.

raw_actions does not have the column. A day that is ingested with it has, beside its actions, the answer of each user
with an action on the day, and nothing else of the column:

    raw_actions/2026-01-03/build-000002/
        answers.parquet             user_id, answer: whether the user's newest row of the day has one of the values

The rows that count are those that are kept. A row without a value does not agree. Of rows of the same microsecond all
must agree. A user's answer as of a day is that of the newest day, up to it, on which the user has an action.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.training_section import AnswerColumn, AnswerValue
from pf_core.schemas import ANSWER, IdType, answers_schema
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_parquet, write_file

ANSWERS = "answers.parquet"

ROWS_AT_ONCE = 1 << 22
"""Answers of days that are collected before only the newest of each user are kept."""


class AnswersEntry(TypedDict):
    """A day's answers, in the manifest of its partition."""

    column: str
    values: list[AnswerValue]
    name: str
    num_users: int


def is_made_of(entry: AnswersEntry | None, answers: AnswerColumn) -> bool:
    """Return whether a day's answers are those of the column and the values that the site file names."""
    if entry is None or entry["column"] != answers.column:
        return False
    return [(type(value), value) for value in entry["values"]] == [(type(value), value) for value in answers.values]


# Writing


def answers_of(actions: pa.Table) -> pa.Table:
    """Return the answer of each user of sorted actions, which have the column ANSWER."""
    user, ts = actions["user_id"].combine_chunks(), actions["ts"].combine_chunks()
    if not len(user):
        return actions.select(["user_id", ANSWER])
    is_new_user = _differs_from_before(user)
    start = np.flatnonzero(is_new_user | _differs_from_before(ts))  # of the rows of one user at one time
    agrees = np.logical_and.reduceat(actions[ANSWER].to_numpy(), start)
    is_newest = np.append(is_new_user[start[1:]], True)
    return pa.table({"user_id": user.take(pa.array(start[is_newest])), ANSWER: agrees[is_newest]})


def _differs_from_before(values: pa.Array) -> np.ndarray:
    differs = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate([[True], differs])


def part_name(bucket: int) -> str:
    """Return the name of the file with a bucket's answers, until the day is published."""
    return f"answers-{bucket:05d}.parquet"


def write_part(path: Path, answers: pa.Table, user_id: IdType) -> None:
    _write(path, [answers], user_id)


def join_parts(build: Path, buckets: Iterable[int], user_id: IdType) -> int:
    """Join the answers of the buckets into the day's file; return the number of users. One bucket is in memory."""
    parts = [build / part_name(bucket) for bucket in sorted(buckets)]
    num_users = _write(build / ANSWERS, map(read_parquet, parts), user_id)
    for part in parts:
        part.unlink()
    return num_users


def write_without(source: Path, target: Path, user_ids: pa.Array, user_id: IdType) -> int:
    """Copy a day's answers without some users; return the number of the others."""
    left = (rows.filter(pc.invert(pc.is_in(rows["user_id"], user_ids))) for rows in _row_groups(source))
    return _write(target, left, user_id)


def _row_groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(fetched(path)) as file:
        yield from map(file.read_row_group, range(file.num_row_groups))


def _write(path: Path, tables: Iterable[pa.Table], user_id: IdType) -> int:
    """Write a row group for each table that has rows."""
    schema, num_users = answers_schema(user_id), 0
    with write_file(path) as local, pq.ParquetWriter(local, schema, compression="zstd") as writer:
        for table in tables:
            if table.num_rows:
                writer.write_table(table.cast(schema))
                num_users += table.num_rows
    return num_users


# Reading


def agreed_users(before: Sequence[Path], after: Sequence[Path], user_id: IdType) -> pa.Array:
    """Return the users, ascending, whose newest answer of the days `before` agrees, and who did not revoke it `after`.

    The files are those of days, the oldest first. A user who agreed after `before` alone is not among them. Memory
    holds the users who agree, and ROWS_AT_ONCE answers or as many as there are such users.
    """
    nobody = pa.array([], answers_schema(user_id).field("user_id").type)
    agreed = _newest(nobody, before)
    still = _newest(agreed, after) if after else agreed
    agreed = agreed.filter(pc.is_in(agreed, value_set=still))
    return agreed.take(pc.sort_indices(agreed))


def _newest(agreed: pa.Array, days: Sequence[Path]) -> pa.Array:
    """Return who agrees after some days, given who agreed before them."""
    held, num_held = [_keyed(agreed, np.ones(len(agreed), bool), 0)], 0
    for number, path in enumerate(days, start=1):
        answers = read_parquet(path)
        held.append(_keyed(answers["user_id"], answers[ANSWER].to_numpy(), number))
        num_held += answers.num_rows
        if num_held > max(ROWS_AT_ONCE, held[0].num_rows):
            held, num_held = [_newest_of(held)], 0
    users = _newest_of(held)["user_id"]
    return users.combine_chunks() if isinstance(users, pa.ChunkedArray) else users


def _keyed(users: pa.Array | pa.ChunkedArray, agrees: np.ndarray, number: int) -> pa.Table:
    """Return the users with a key that is the larger the newer the answer is, and odd if it agrees."""
    return pa.table({"user_id": users, "key": 2 * number + agrees.astype(np.int64)})


def _newest_of(parts: Sequence[pa.Table]) -> pa.Table:
    """Return those who agree, with their keys: whoever does not may be left out, as later keys are larger."""
    newest = pa.concat_tables(parts).group_by("user_id").aggregate([("key", "max")]).rename_columns(["user_id", "key"])
    return newest.filter(pc.equal(pc.bit_wise_and(newest["key"], 1), 1))
