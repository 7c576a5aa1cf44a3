"""Content vectors for logs that have none: pins that users engage with close together get close vectors.

The paper takes PinSage vectors as given; these replace them. Nothing at or after `until` is read, and no action
of a held-out user, so that neither the evaluation period nor the evaluated users can leak into the model's input.

Chosen: PPMI of windowed pin-pin counts, then a truncated SVD (SciPy's ARPACK).
- Two pins at distance d in a user's list count window_actions + 1 - d, as in word2vec's dynamic window: the
  cost is linear in actions, however many one user has. DuckDB counts within `memory_limit` and spills to
  `temp_dir`; the sums are of integers, so the order of its threads cannot change a bit of the result.
- A context's probability is proportional to its count ** `context_smoothing`, which lowers the PMI of rare
  contexts. A vector is the pin's row of U * S ** `singular_power`, scaled to unit norm.

Why: Recall@10 of unseen pins by the mean of a user's 10 latest vectors, exact search over all pins with one;
5,000 users at each of 3 (KuaiRand) and 5 (Globo) cutoffs. Predicted are the pins of the next 2 days (Globo:
1 day) from the actions before the cutoff, and the last action in these days from all actions before it.
                                                          KuaiRand: days  last    Globo: day  last
    this module                                                     .055  .058          .017  .067
    SVD of pins x users, TF-IDF, its better exponent                .046  .049          .020  .058
    popularity                                                      .049  .049          .015  .015
The defaults were chosen on these cutoffs. Smoothing of .75 (the textbook's), a window of 5, a shift, dropping
light pairs: worse on average. 1/d weights: about equal. singular_power .5 favours Globo, 1 KuaiRand.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from duckdb import DuckDBPyConnection
from scipy.sparse import csr_array
from scipy.sparse.linalg import norm as sparse_norm
from scipy.sparse.linalg import svds

from pf_core.errors import PipelineError
from pf_core.hashing import is_held_out

MAX_WINDOW_ACTIONS = 40  # time and spilled bytes grow with the window; past 20 little is gained

SVD_TOLERANCE = 1e-3  # the neighbours were those of full precision, in two thirds of the time

HASHED_AT_ONCE = 1 << 16  # users whose hash is computed at a time

MIN_CAPTURED = 1e-3  # share of a row's norm that the SVD keeps; below it, a unit vector would be noise

Actions = tuple[list[str], datetime]  # files and `until`: the two parameters of a query on actions

IS_COUNTED = "ts < ? AND user_id NOT IN (SELECT user_id FROM held_out)"


@dataclass(frozen=True, kw_only=True)
class CoengagementConfig:
    """What to count and how to compress it; the defaults are the measured ones."""

    dim: int = 64
    window_actions: int = 20
    min_count: int = 5  # distinct users; rarer pins get no vector
    max_pins: int = 200_000  # the pins with most users are kept
    max_pairs: int = 20_000_000  # the heaviest pairs are kept; about 100 bytes of memory each
    context_smoothing: float = 0.5  # 0: all contexts alike, 1: as frequent as they are
    singular_power: float = 0.75  # near 0: all directions alike, 1: as strong as they are
    seed: int = 0
    held_out_share: float = 0.0  # share of users, by hash, whose actions are not counted

    def __post_init__(self) -> None:
        least = {"dim": 1, "window_actions": 1, "min_count": 1, "max_pins": self.dim + 1, "max_pairs": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}: take {value} or more")
        if self.window_actions > MAX_WINDOW_ACTIONS:
            raise ValueError(f"window_actions is {self.window_actions}: take at most {MAX_WINDOW_ACTIONS}")
        if not 0 <= self.context_smoothing <= 1:
            raise ValueError(f"context_smoothing is {self.context_smoothing}: take 0 to 1")
        if not 0 < self.singular_power <= 1:
            raise ValueError(f"singular_power is {self.singular_power}: take more than 0, at most 1")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share is {self.held_out_share}: take 0 or more, less than 1")


@dataclass(frozen=True)
class PinVectors:
    """Learned vectors, and how many pins and pairs they come from.

    `table` has pin_id (ascending) and feature (fixed-size list of float32, unit norm).
    num_pins_seen = num_pins_kept + num_pins_rare + num_pins_over_limit + num_pins_without_vector.
    """

    table: pa.Table
    num_actions: int  # before `until`, without those of held-out users
    num_actions_kept: int  # actions on pins with a vector
    num_pins_seen: int  # pins of these actions
    num_pins_kept: int
    num_pins_rare: int  # fewer than `min_count` users
    num_pins_over_limit: int  # beyond `max_pins`
    num_pins_without_vector: int  # no pair of positive PMI, or none that the SVD keeps
    num_pairs_seen: int  # distinct unordered pairs of pins
    num_pairs: int  # pairs within `max_pairs`


def learn_pin_vectors(
    action_files: Sequence[str | Path],
    *,
    until: datetime,
    config: CoengagementConfig,
    memory_limit: str = "2GB",
    temp_dir: Path,
) -> PinVectors:
    """Learn vectors from the training users' actions before `until` (exclusive); the same actions give the same bytes.

    `memory_limit` is DuckDB's, for counting; the SVD's memory is bounded by `max_pins` and `max_pairs`.
    """
    pin_id, num_actions, counts, tallies = count_pairs(action_files, until, config, memory_limit, temp_dir)
    ppmi = compute_ppmi(counts, config.context_smoothing)
    num_connected = int(np.count_nonzero(np.diff(ppmi.indptr)))
    if num_connected <= config.dim:
        raise PipelineError(
            f"of {tallies['num_pins_seen']:,} pins before {until.isoformat()}, only {num_connected:,} have "
            f"{config.min_count} users and share one with another such pin: too few for dim={config.dim}",
            "set a smaller `dim` or `min_count`, or learn from more days",
        )
    feature, has_vector = _embed(ppmi, config)
    num_pins_kept = int(has_vector.sum())
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(feature[has_vector].ravel()), config.dim)
    table = pa.table({"pin_id": pin_id.filter(pa.array(has_vector)), "feature": vectors})
    return PinVectors(
        table=table.combine_chunks(),
        num_actions_kept=int(num_actions[has_vector].sum()),
        num_pins_kept=num_pins_kept,
        num_pins_without_vector=len(pin_id) - num_pins_kept,
        **tallies,
    )


def count_pairs(
    action_files: Sequence[str | Path],
    until: datetime,
    config: CoengagementConfig,
    memory_limit: str,
    temp_dir: Path,
) -> tuple[pa.ChunkedArray, np.ndarray, csr_array, dict[str, int]]:
    """Sum window_actions + 1 - distance over the pairs of pins in each user's ascending list of actions.

    A list holds the chosen pins only, and a pin that follows itself counts once. Returns the chosen pins,
    ascending, their numbers of actions, their symmetric counts (the diagonal is empty), and the tallies of PinVectors.
    """
    if not action_files:
        raise PipelineError("there are no action files to learn pin vectors from")
    if until.tzinfo is None:
        raise PipelineError(f"until={until.isoformat()} has no time zone", "pass it in UTC")
    actions = ([str(file) for file in action_files], until.astimezone(UTC))
    temp_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=temp_dir, prefix="coengagement-") as scratch:
        settings = {"memory_limit": memory_limit, "temp_directory": scratch}
        with duckdb.connect(str(Path(scratch) / "counts.duckdb"), config=settings) as db:
            db.execute("SET preserve_insertion_order = false")
            db.execute("SET enable_progress_bar = false")  # it would be printed among the output of a command
            _hold_out(db, actions, config.held_out_share)
            tallies = _choose_pins(db, actions, config)
            if tallies["num_actions"] == 0:
                raise PipelineError(
                    f"no action of a training user is earlier than {until.isoformat()}, so no pin vectors can be "
                    "learned",
                    "set a later `until` or a smaller training.held_out_share, or add the logs of earlier days",
                )
            tallies["num_pairs_seen"] = _sum_pairs(db, actions, config)
            pins = db.sql("SELECT pin_id, num_actions FROM pins ORDER BY pin_row").to_arrow_table()
            pin_id, num_actions = pins["pin_id"], pins["num_actions"].to_numpy()
            counts = _read_pairs(db, len(pin_id), config.max_pairs)
    tallies["num_pins_over_limit"] = tallies["num_pins_seen"] - tallies["num_pins_rare"] - len(pin_id)
    return pin_id, num_actions, counts, tallies | {"num_pairs": counts.nnz // 2}


def compute_ppmi(counts: csr_array, context_smoothing: float) -> csr_array:
    """max(0, log(P(j | i) / q(j))), where P(j | i) = c_ij / c_i and q(j) ~ c_j ** context_smoothing.

    `counts` is symmetric with an empty diagonal; a row without counts stays empty and is no context.
    """
    total = counts.sum(axis=1)
    smoothed = np.power(total, context_smoothing, where=total > 0, out=np.zeros_like(total))
    row = np.repeat(np.arange(len(total)), np.diff(counts.indptr))
    pmi = np.log(counts.data * smoothed.sum() / (total[row] * smoothed[counts.indices]))
    ppmi = csr_array((np.maximum(pmi, 0), counts.indices, counts.indptr), shape=counts.shape, copy=True)
    ppmi.eliminate_zeros()  # in place, hence the copy
    return ppmi


def _hold_out(db: DuckDBPyConnection, actions: Actions, share: float) -> None:
    """Create table held_out(user_id). Users are hashed batch by batch: their number is bounded by the disk only."""
    db.execute("CREATE TABLE held_out AS SELECT user_id FROM read_parquet(?) LIMIT 0", [actions[0]])
    if share == 0:
        return
    with db.cursor() as reader:  # a connection runs one query at a time
        reader.execute("SET enable_progress_bar = false")
        users = reader.sql("SELECT DISTINCT user_id FROM read_parquet(?) WHERE ts < ?", params=list(actions))
        for batch in users.to_arrow_reader(HASHED_AT_ONCE):
            user_id = batch.column(0)
            db.register("chosen", pa.table({"user_id": user_id.filter(pa.array(is_held_out(user_id, share)))}))
            db.execute("INSERT INTO held_out FROM chosen")
            db.unregister("chosen")


def _choose_pins(db: DuckDBPyConnection, actions: Actions, config: CoengagementConfig) -> dict[str, int]:
    """Create table pins(pin_id, num_actions, pin_row), numbered by pin_id; return the numbers of what was seen."""
    db.execute(
        f"""
        CREATE TABLE seen AS SELECT pin_id, count(*) AS num_users, sum(num_actions) AS num_actions
        FROM (SELECT pin_id, user_id, count(*) AS num_actions FROM read_parquet(?) WHERE {IS_COUNTED} GROUP BY ALL)
        GROUP BY pin_id
        """,
        actions,
    )
    db.execute(
        """
        CREATE TABLE pins AS
        SELECT pin_id, num_actions::BIGINT AS num_actions, (row_number() OVER (ORDER BY pin_id) - 1)::INTEGER AS pin_row
        FROM (SELECT pin_id, num_actions FROM seen WHERE num_users >= ? ORDER BY num_users DESC, pin_id LIMIT ?)
        """,
        [config.min_count, config.max_pins],
    )
    [totals] = db.execute(
        "SELECT coalesce(sum(num_actions), 0)::BIGINT, count(*), count(*) FILTER (num_users < ?) FROM seen",
        [config.min_count],
    ).fetchall()
    return dict(zip(("num_actions", "num_pins_seen", "num_pins_rare"), totals, strict=True))


def _sum_pairs(db: DuckDBPyConnection, actions: Actions, config: CoengagementConfig) -> int:
    """Create table pairs(low, high, weight) of pin rows; return the number of pairs."""
    distances = range(1, config.window_actions + 1)
    later = ", ".join(f"lead(pin_row, {distance}) OVER timeline" for distance in distances)
    weights = ", ".join(str(config.window_actions + 1 - distance) for distance in distances)
    db.execute(
        f"""
        CREATE TABLE pairs AS WITH actions AS (
            SELECT user_id, ts, pin_row FROM read_parquet(?) JOIN pins USING (pin_id) WHERE {IS_COUNTED}
        ), moves AS (
            SELECT * FROM actions
            QUALIFY lag(pin_row) OVER (PARTITION BY user_id ORDER BY ts, pin_row) IS DISTINCT FROM pin_row
        ), ahead AS (
            SELECT pin_row, unnest([{later}]) AS other, unnest([{weights}]) AS weight
            FROM moves WINDOW timeline AS (PARTITION BY user_id ORDER BY ts, pin_row)
        )
        SELECT least(pin_row, other) AS low, greatest(pin_row, other) AS high, sum(weight)::DOUBLE AS weight
        FROM ahead WHERE other <> pin_row GROUP BY ALL
        """,
        actions,
    )
    [(num_pairs,)] = db.execute("SELECT count(*) FROM pairs").fetchall()
    return num_pairs


def _read_pairs(db: DuckDBPyConnection, num_pins: int, max_pairs: int) -> csr_array:
    """Return the heaviest pairs as a symmetric matrix; ties at the limit are broken by a hash that favours no ids."""
    pairs = db.sql(
        """
        FROM (
            FROM pairs
            ORDER BY weight DESC, (low::BIGINT * 40503 + high * 2654435761) % 4294967296, low, high LIMIT ?
        ) ORDER BY low, high
        """,
        params=[max_pairs],
    ).to_arrow_table()
    low, high, weight = (pairs[name].to_numpy() for name in ("low", "high", "weight"))
    start = np.searchsorted(low, np.arange(num_pins + 1)).astype(np.int32)
    upper = csr_array((weight, high, start), shape=(num_pins, num_pins))
    return (upper + upper.T).tocsr()


def _embed(ppmi: csr_array, config: CoengagementConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors of all rows, and which rows have a meaningful one."""
    start = np.random.default_rng(config.seed).standard_normal(ppmi.shape[0])
    left, singular, _ = svds(ppmi, k=config.dim, v0=start, tol=SVD_TOLERANCE)
    left, singular = left[:, ::-1], singular[::-1]  # svds returns them ascending
    left = left * np.sign(left[np.abs(left).argmax(axis=0), np.arange(config.dim)])
    row_norm, captured = sparse_norm(ppmi, axis=1), np.linalg.norm(left * singular, axis=1)
    has_vector = (row_norm > 0) & (captured > MIN_CAPTURED * row_norm)
    vectors = left * singular**config.singular_power
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norm > 0, norm, 1)).astype(np.float32), has_vector
