"""The scores of an embedder for each evaluated user: table cells, intervals and verdicts are computed from them.

Scores of two embedders can be compared if their `question` is the same: the same users, positives and index. They
are written as Parquet, one row for each (frequency, user), so that other tools can read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.serving import Frequency
from pf_core.evaluation.manifest import BY_TYPE
from pf_core.logs.deletion_list import without_listed
from pf_core.storage.files import read_parquet, write_file

NUMBERS = (
    *("num_positives", "num_unaskable", "num_new", "recall_at_10", "recall_at_50", "askable_recall_at_10"),
    *("discovery_at_10", "discovery_at_50"),
)
"""Columns of the file that are one number of each user."""

ENTROPY = "interest_entropy_at_50"


@dataclass(frozen=True, kw_only=True, eq=False)
class UserScores:
    """Scores of the evaluated users, in one order for all embedders; NaN where undefined. U users, A days of age."""

    num_positives: np.ndarray
    """Distinct pins to find, those that are unknown at the cut included."""
    num_unaskable: np.ndarray
    """How many of them are unknown at the cut, and are misses."""
    num_new: np.ndarray
    """How many of them are new to the user: the question `discovery`."""
    recall_at_10: np.ndarray
    recall_at_50: np.ndarray
    askable_recall_at_10: np.ndarray
    """Recall of the pins that are known at the cut."""
    discovery_at_10: np.ndarray
    """Recall of the new pins, when pins that the user has seen are no candidates."""
    discovery_at_50: np.ndarray
    recall_at_10_by_type: Mapping[str, np.ndarray]
    """Recall by action type of the positives; NaN for users without positives of that type."""
    interest_entropy_at_50: np.ndarray | None
    """None if the site's pins have no interests."""
    top_10: np.ndarray
    """top_UK (int32): rows of the index, nearest first; -1 where there is no result, as for a user without an
    embedding."""
    hits_UA: np.ndarray
    """Positives found within the first ten, by the day after the cut on which they happened (int32)."""
    positives_UA: np.ndarray
    """All positives, by the same day (int32)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    question: str
    """Fingerprint of users, positives and index."""
    index_size: int
    user_ids: pa.Array
    frequencies: Mapping[Frequency, UserScores]

    def write(self, path: Path, *, forgotten: pa.Array) -> None:
        """Write the scores; of users on the deletion list without their ids, as `pf forget` leaves them."""
        user_ids = without_listed(self.user_ids, forgotten)
        tables = [_to_table(user_ids, name, scores) for name, scores in self.frequencies.items()]
        description = {"question": self.question, "index_size": str(self.index_size)}
        with write_file(path) as partial:
            pq.write_table(pa.concat_tables(tables).replace_schema_metadata(description), partial, compression="zstd")


def recall_by_day(scores: Scores) -> dict[Frequency, list[float]]:
    """Return, by frequency, the share of each day's positives that was found; NaN for a day without positives."""
    return {
        frequency: [
            float(hits / num) if num else float("nan")
            for hits, num in zip(each.hits_UA.sum(0), each.positives_UA.sum(0), strict=True)
        ]
        for frequency, each in scores.frequencies.items()
    }


def read_scores(path: Path) -> Scores:
    table = read_parquet(path)
    description = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    parts = {name: table.filter(pc.equal(table["frequency"], name)) for name in get_args(Frequency)}
    parts = {name: part for name, part in parts.items() if part.num_rows}
    return Scores(
        question=description["question"],
        index_size=int(description["index_size"]),
        user_ids=next(iter(parts.values()))["user_id"].combine_chunks(),
        frequencies={name: _from_table(part) for name, part in parts.items()},
    )


def _to_table(user_ids: pa.Array, frequency: str, scores: UserScores) -> pa.Table:
    return pa.table(
        {
            "frequency": [frequency] * len(user_ids),
            "user_id": user_ids,
            **{name: getattr(scores, name) for name in NUMBERS},
            **({} if scores.interest_entropy_at_50 is None else {ENTROPY: scores.interest_entropy_at_50}),
            "top_10": _to_lists(scores.top_10),
            "hits_by_day": _to_lists(scores.hits_UA),
            "positives_by_day": _to_lists(scores.positives_UA),
            **{BY_TYPE + name: recall for name, recall in scores.recall_at_10_by_type.items()},
        }
    )


def _from_table(table: pa.Table) -> UserScores:
    def column(name: str) -> np.ndarray:
        return np.array(table[name].combine_chunks().to_numpy(zero_copy_only=False))

    def matrix(name: str) -> np.ndarray:
        lists = table[name].combine_chunks()
        return np.array(lists.flatten().to_numpy()).reshape(len(lists), -1)

    return UserScores(
        **{name: column(name) for name in NUMBERS},
        recall_at_10_by_type={
            name.removeprefix(BY_TYPE): column(name) for name in table.column_names if name.startswith(BY_TYPE)
        },
        interest_entropy_at_50=column(ENTROPY) if ENTROPY in table.column_names else None,
        top_10=matrix("top_10"),
        hits_UA=matrix("hits_by_day"),
        positives_UA=matrix("positives_by_day"),
    )


def _to_lists(values: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel(), pa.int32()), values.shape[1])
