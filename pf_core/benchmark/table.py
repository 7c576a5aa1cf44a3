"""The benchmark's table: what every contender reached on one log, as JSON; a figure that is not defined is null."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

from pf_core.benchmark.log import BenchmarkLog
from pf_core.benchmark.scoring import ListScores, ScoreSummary, compare, summarize
from pf_core.evaluation.manifest import QuestionName


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """The result of one contender: scores, or the sentence that says why there are none."""

    name: str
    scores: ListScores | None = None
    failure: str | None = None
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    actions_without_vector: float | None = None
    """Share of the test users' actions before the cut on pins for which the contender has no vector."""
    positives_without_vector: float | None = None
    """Share of the positives on pins for which the contender has no vector."""
    num_unranked_pins: int | None = None
    """Number of the index's pins for which the contender has no vector."""

    def __post_init__(self) -> None:
        assert (self.scores is None) != (self.failure is None), "either scores or a failure"


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the table was made, so that it can be made again."""

    command: str
    date: str
    seed: int
    commit: str
    budget: str
    """quick, full or the default one."""
    looks_file: str
    """File that records every look at the test users."""


class LogFacts(TypedDict):
    name: str
    index: Literal["catalogue"]
    num_pins: int
    num_cold_pins: int
    num_train_users: int
    num_train_actions: int
    num_test_users: int
    num_positives: int
    """Distinct pins of each test user, with those that are not in the index."""
    num_unaskable: int
    unaskable_share: float | None
    cut_ds: str
    num_days: int
    notes: list[str]


class Row(TypedDict):
    name: str
    seconds: float
    settings: dict[str, Any]
    note: str
    failure: NotRequired[str]
    summary: NotRequired[ScoreSummary]
    minus_ours: NotRequired[dict[QuestionName, list[float | None]]]
    """This contender minus our default at recall@10: mean, and the two ends of its paired 95 % interval."""
    minus_ours_at_50: NotRequired[dict[QuestionName, list[float | None]]]
    """The same at recall@50."""
    actions_without_vector: NotRequired[float]
    positives_without_vector: NotRequired[float]
    num_unranked_pins: NotRequired[int]


class Table(TypedDict):
    log: LogFacts
    run: dict[str, Any]
    ours: str | None
    """Name of the contender that the others are compared with: our model as it is served."""
    vector_alone: NotRequired[str | None]
    """Name of the row of the same model without its memory."""
    single_vector: NotRequired[list[str]]
    """Names of the contenders whose score is an inner product of two vectors."""
    rows: list[Row]


def make_table(
    log: BenchmarkLog,
    contenders: Sequence[Contender],
    *,
    run: Run,
    ours: str | None,
    vector_alone: str | None = None,
    single_vector: Sequence[str] = (),
) -> Table:
    """Return the table as JSON; `ours` names our default among the contenders, `vector_alone` the same model's vector.

    Without our default, or if it failed, there are no differences. `single_vector` names the peers whose score is an
    inner product of two vectors.
    """
    default = next((each.scores for each in contenders if each.name == ours), None)
    rows = [_row(each, None if each.name == ours else default) for each in contenders]
    names = [each.name for each in contenders if each.name in single_vector]
    table = {
        "log": _facts(log),
        "run": run.__dict__,
        "ours": ours,
        "vector_alone": vector_alone,
        "single_vector": names,
        "rows": rows,
    }
    return cast("Table", _without_nan(table))


def _facts(log: BenchmarkLog) -> LogFacts:
    num_unaskable = int(log.num_unaskable_U.sum())
    num_positives = len(log.positive_pin_P) + num_unaskable
    return {
        "name": log.name,
        "index": "catalogue",
        "num_pins": len(log.pin_ids),
        "num_cold_pins": int(log.is_cold_pin.sum()),
        "num_train_users": len(log.train_user_ids),
        "num_train_actions": len(log.train.user),
        "num_test_users": len(log.test_user_ids),
        "num_positives": num_positives,
        "num_unaskable": num_unaskable,
        "unaskable_share": num_unaskable / num_positives if num_positives else None,
        "cut_ds": log.cut_ds,
        "num_days": log.num_days,
        "notes": list(log.notes),
    }


def _row(contender: Contender, default: ListScores | None) -> Row:
    row: Row = {
        "name": contender.name,
        "seconds": round(contender.seconds, 1),
        "settings": dict(contender.settings),
        "note": contender.note,
    }
    if contender.scores is None:
        row["failure"] = str(contender.failure)
        return row
    row["summary"] = summarize(contender.scores)
    if default is not None:
        row["minus_ours"] = _differences(contender.scores, default, 10)
        row["minus_ours_at_50"] = _differences(contender.scores, default, 50)
    if contender.actions_without_vector is not None:
        row["actions_without_vector"] = contender.actions_without_vector
    if contender.positives_without_vector is not None:
        row["positives_without_vector"] = contender.positives_without_vector
    if contender.num_unranked_pins is not None:
        row["num_unranked_pins"] = contender.num_unranked_pins
    return row


def _differences(scores: ListScores, default: ListScores, k: Literal[10, 50]) -> dict[QuestionName, list[float | None]]:
    return {question: [each.mean, *each.interval] for question, each in compare(scores, default, k=k).items()}


def _without_nan(value: Any) -> Any:
    """Replace NaN by None, which JSON has."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
