"""The files through which the benchmark and its peers meet: a peer runs in an environment of its own.

    train.parquet       user, pin, day, is_positive of the training users, in the order of (user, time)
    past.parquet        the same of the test users, up to the cut
    meta.json           numbers of users and pins, and the length that each test user's list needs (LogMeta)
    positives.parquet   user, pin of the test users' positives, pin -1 if not in the index: only in logs for tuning
    pins.parquet        pin_id, is_cold: row -> pin; a peer needs it only to find content vectors
    train_users.parquet, test_users.parquet     user_id: row -> user

A peer's answer is a Parquet file with the columns user, pin, score, sorted by user and descending score.
"""

from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.benchmark.log import LIST_LENGTH, Actions, BenchmarkLog, RankedLists, seen_pins, split_askable
from pf_core.errors import PipelineError
from pf_core.storage.files import read_json, read_parquet, write_file, write_json

META = "meta.json"

LIST_COLUMNS = ("user", "pin", "score")


class LogMeta(TypedDict):
    """Content of meta.json."""

    name: str
    cut_ds: str
    num_days: int
    num_pins: int
    num_train_users: int
    num_test_users: int
    list_length: int
    """Pins that a list needs, besides as many as the user has seen."""
    num_seen: list[int]
    """Number of distinct pins that each test user has seen."""
    notes: list[str]


# The log


def write_log(log: BenchmarkLog, folder: Path, *, with_positives: bool = False) -> None:
    """Write the files of a log; the positives only on demand: no peer may read those of the test users."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, actions in (("train", log.train), ("past", log.past)):
        _write(folder / f"{name}.parquet", {key: getattr(actions, key) for key in Actions.__dataclass_fields__})
    _write(folder / "pins.parquet", {"pin_id": log.pin_ids, "is_cold": log.is_cold_pin})
    _write(folder / "train_users.parquet", {"user_id": log.train_user_ids})
    _write(folder / "test_users.parquet", {"user_id": log.test_user_ids})
    if with_positives:
        unaskable = np.repeat(np.arange(len(log.num_unaskable_U), dtype=np.int32), log.num_unaskable_U)
        user = np.concatenate([log.positive_user_P, unaskable])
        pin = np.concatenate([log.positive_pin_P, np.full(len(unaskable), -1, np.int32)])
        _write(folder / "positives.parquet", {"user": user, "pin": pin})
    meta: LogMeta = {
        "name": log.name,
        "cut_ds": log.cut_ds,
        "num_days": log.num_days,
        "num_pins": len(log.pin_ids),
        "num_train_users": len(log.train_user_ids),
        "num_test_users": len(log.test_user_ids),
        "list_length": LIST_LENGTH,
        "num_seen": seen_pins(log).num_U.tolist(),
        "notes": list(log.notes),
    }
    write_json(folder / META, meta)


def read_written_log(folder: Path) -> BenchmarkLog:
    """Read a log that `write_log` wrote; without a file of positives it has none."""
    if not (folder / META).is_file():
        raise PipelineError(f"no benchmark log in {folder}: there is no {META}", "run the benchmark again")
    meta: LogMeta = read_json(folder / META)
    train, past = (_read_actions(folder / f"{name}.parquet") for name in ("train", "past"))
    pins = read_parquet(folder / "pins.parquet")
    train_users, test_users = (read_parquet(folder / f"{name}_users.parquet")["user_id"] for name in ("train", "test"))
    user, pin = np.zeros(0, np.int32), np.zeros(0, np.int32)
    if (folder / "positives.parquet").exists():
        positives = read_parquet(folder / "positives.parquet")
        user, pin = positives["user"].to_numpy(), positives["pin"].to_numpy()
    user, pin, num_unaskable = split_askable(user, pin, num_users=len(test_users))
    return BenchmarkLog(
        name=meta["name"],
        cut_ds=meta["cut_ds"],
        num_days=meta["num_days"],
        pin_ids=pins["pin_id"].combine_chunks(),
        is_cold_pin=pins["is_cold"].to_numpy(),
        train_user_ids=train_users.combine_chunks(),
        train=train,
        test_user_ids=test_users.combine_chunks(),
        past=past,
        positive_user_P=user,
        positive_pin_P=pin,
        num_unaskable_U=num_unaskable,
        notes=tuple(meta["notes"]),
    )


def _read_actions(path: Path) -> Actions:
    table = read_parquet(path)
    return Actions(**{name: table[name].to_numpy() for name in Actions.__dataclass_fields__})


def _write(path: Path, columns: dict[str, Any]) -> None:
    with write_file(path) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")


# The lists


def write_lists(lists: RankedLists, path: Path) -> None:
    """Write lists as a peer would."""
    user = np.repeat(np.arange(len(lists.offsets_U) - 1, dtype=np.int32), np.diff(lists.offsets_U))
    _write(path, {"user": user, "pin": lists.pin.astype(np.int32), "score": lists.score})


def read_lists(path: Path, log: BenchmarkLog) -> RankedLists:
    """Read the lists of a contender; one that breaks the rules is a PipelineError that names the first bad row."""
    table = read_parquet(path)
    if not set(LIST_COLUMNS) <= set(table.column_names):
        raise PipelineError(f"{path} has the columns {table.column_names}", f"write {', '.join(LIST_COLUMNS)}")
    for name in LIST_COLUMNS:
        is_right = pa.types.is_floating if name == "score" else pa.types.is_integer
        if table[name].null_count or not is_right(table.schema.field(name).type):
            kind = "numbers with a fraction" if name == "score" else "integers"
            raise PipelineError(f"{path}: the column {name} must have {kind}, and no nulls")
    user, pin, score = (table[name].to_numpy() for name in LIST_COLUMNS)
    num_users, num_pins = len(log.test_user_ids), len(log.pin_ids)
    is_same_user = user[1:] == user[:-1]
    _refuse(path, (user < 0) | (user >= num_users), f"the user is not a row of the {num_users:,} test users")
    _refuse(path, (pin < 0) | (pin >= num_pins), f"the pin is not a row of the {num_pins:,} pins of the index")
    _refuse(path, ~np.isfinite(score), "the score is not finite")
    _refuse(path, np.append(False, user[1:] < user[:-1]), "the rows are not sorted by user")
    _refuse(path, np.append(False, is_same_user & (score[1:] > score[:-1])), "the scores of a user do not descend")
    key = user.astype(np.int64) * num_pins + pin
    order = np.argsort(key, kind="stable")
    is_repeated = np.zeros(len(key), bool)
    is_repeated[order[1:]] = key[order[1:]] == key[order[:-1]]
    _refuse(path, is_repeated, "the pin is in the user's list twice")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=num_users))])
    return RankedLists(offsets_U=offsets, pin=pin.astype(np.int32), score=score)


def _refuse(path: Path, is_bad: np.ndarray, what: str) -> None:
    if is_bad.any():
        raise PipelineError(f"{path}, row {int(np.argmax(is_bad))} (of {int(is_bad.sum()):,} such rows): {what}")
