"""Both questions and the counting baselines, against values worked out by hand on a log of five users, and against a
brute-force computation in numpy on random data."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from pf_core.config.serving import Frequency
from pf_core.evaluation import protocol
from pf_core.evaluation import question as question_module
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS
from pf_core.evaluation.increments import Increments, QueryVectors
from pf_core.evaluation.manifest import ORACLES
from pf_core.evaluation.protocol import score_baseline, score_embedder
from pf_core.evaluation.queries import ask
from pf_core.evaluation.question import Question, Unaskable
from pf_core.evaluation.scores import NUMBERS, UserScores, read_scores
from pf_core.evaluation.summary import summarize
from pf_core.layouts import marked
from pf_core.training.training_set import TrainingSet, open_training_set
from tests.support.planted import DAY_US, START_US
from tests.support.questions import Action, draw_question

CUT_DAYS = 400
NUM_PINS = 100
EVERY: tuple[Frequency, ...] = ("once", "daily", "realtime")
NAN = math.nan


def silent(message: str) -> None:
    pass


# A log of five held-out users and three training users; days count from the cut, capitals are positives.

TRAIN: list[list[Action]] = [
    # Pin p of 0 to 9 has 20 - p positives 100 days ago: the most popular pins ever are 0, 1, …, 9.
    [(-100.0, pin, "REPIN") for pin in range(10) for _ in range(20 - pin)],
    # In the last 28 days, pins 20 to 29 have 12 to 3 positives, and 30 has none: only clicks that are not positive.
    [(-20.0, pin, "REPIN") for pin in range(20, 30) for _ in range(32 - pin)] + [(-20.0, 30, "click")] * 40,
    # In the last week, pins 40 to 49 have two each and 50 has one.
    [(-3.0, pin, "REPIN") for pin in range(40, 50) for _ in range(2)] + [(-2.0, 50, "REPIN")],
]

FIVE: list[list[Action]] = [
    # Pins 60 (three times, long ago) and 61 (twice, just now) are her own; 40 is new to her.
    [
        *[(-300.0, 60, "click")] * 3,
        *[(-1.0, 61, "click")] * 2,
        *((0.5, 61, "REPIN"), (1.5, 61, "REPIN"), (2.5, 40, "REPIN"), (3.5, 90, "REPIN")),
    ],
    # Saw the ten most popular pins of the week, of which she comes back to 40; 50 is new.
    [*((-2.0, pin, "click") for pin in range(40, 50)), (0.5, 40, "CLICK"), (0.6, 50, "REPIN")],
    # Eleven own pins, 70 to 80: 70 twelve times, 71 eleven times, …, 80 twice; comes back to 79 and to 80.
    [
        *((-9.0, pin, "click") for pin in range(70, 81) for _ in range(82 - pin)),
        *((0.5, 79, "REPIN"), (0.7, 80, "REPIN")),
    ],
    # Nothing that she will like has a vector (`UNASKABLE`).
    [(-5.0, 10, "click")],
    # No repeats: 0 is new, and 99 is not in the index.
    [(-5.0, 11, "click"), (0.5, 0, "REPIN"), (0.5, 99, "REPIN")],
]

UNASKABLE = [  # user, day, pin without a vector
    *((0, 4.5, -1), (0, 4.6, -1), (0, 5.5, -2)),  # two distinct pins
    (3, 0.5, -1),
]


def write_set(folder: Path, train: list[list[Action]], *, interests: int = 4) -> TrainingSet:
    words = ["click", "repin"]
    for split, users in (("train", train), ("held_out", [[(-1.0, 0, "click")]])):
        actions = [action for user in users for action in user]
        columns = {
            "offsets": np.cumsum([0, *map(len, users)]),
            "pin": np.array([pin for _, pin, _ in actions], np.int32),
            "ts": np.array([START_US + round((CUT_DAYS + days) * DAY_US) for days, _, _ in actions]),
            "action_type": np.array([words.index(word.lower()) for _, _, word in actions], np.int16),
            "surface": np.zeros(len(actions), np.int16),
            "duration": np.ones(len(actions), np.float32),
            "is_positive": np.array([word.isupper() for _, _, word in actions], bool),
        }
        _save(folder / split, columns)
    rng = np.random.default_rng(0)
    feature = rng.normal(size=(NUM_PINS, 4)).astype(np.float32)
    interest = (np.arange(NUM_PINS) % interests).astype(np.int32)
    pins = {"feature": feature, "candidates": np.arange(NUM_PINS), "interest": interest}
    _save(folder / "pins", pins | {"has_feature": np.ones(NUM_PINS, bool)})
    manifest = {
        "cut_ds": "2027-02-04",
        "cut_us": START_US + CUT_DAYS * DAY_US,
        "vocabularies": {"action_type": words, "surface": ["homefeed"]},
        **marked("training_set"),
        "fingerprint": "five",
    }
    (folder / "training_set.json").write_text(json.dumps(manifest))
    return open_training_set(folder)


def _save(folder: Path, columns: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True)
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    return write_set(tmp_path_factory.mktemp("five") / "set", TRAIN)


def with_unaskable(question: Question, rows: list[tuple[int, float, int]]) -> Question:
    user, days, pin = zip(*rows, strict=True)
    ts = np.array([question.data.cut_us + round(day * DAY_US) for day in days])
    first = dict(zip(reversed([*zip(user, pin, strict=True)]), reversed(ts), strict=True))  # times ascend
    first_ts = np.array([first[key] for key in zip(user, pin, strict=True)])
    unaskable = Unaskable(np.array(user), ts, np.array(pin), np.ones(len(rows), np.int64), first_ts)
    return replace(question, unaskable=unaskable)


@pytest.fixture(scope="module")
def question(data: TrainingSet) -> Question:
    """All pins but 99 are in the index."""
    return with_unaskable(draw_question(data, FIVE, index_pin=np.arange(99)), UNASKABLE)


def once(question: Question, name: str) -> UserScores:
    return score_baseline(question, name, frequencies=("once",), progress=silent).frequencies["once"]


def equal(values: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_array_equal(values, expected)


# By hand


def test_what_is_to_be_found(question: Question) -> None:
    """The first user has 61, 40, 90 and two pins without a vector; all but 61 are new to her."""
    scores = once(question, "popularity_7d")
    assert scores.num_positives.tolist() == [3 + 2, 2, 2, 1, 2]
    assert scores.num_unaskable.tolist() == [2, 0, 0, 1, 0]
    assert scores.num_new.tolist() == [2 + 2, 1, 0, 1, 2]
    assert question.share_unaskable == (2 + 1) / (5 + 2 + 2 + 1 + 2)
    assert scores.positives_UA.sum(0)[:6].tolist() == [1 + 2 + 2 + 1 + 2, 1, 1, 1, 2, 1]


def test_popularity(question: Question) -> None:
    """The pins 40 to 49 have two positives in the week, 50 one, all others none, also not the clicked 30.

    40 has nine rivals: found. 50 has ten pins before it: found at 50. When the second user's ten pins are dropped, 50
    comes first. Among 49 pins with 0, ties count against a positive: 0, 61, 79 and 99 have 11 + 87 rivals.
    """
    week = once(question, "popularity_7d")
    equal(week.recall_at_10, [1 / 5, 1 / 2, 0, 0, 0])
    equal(week.askable_recall_at_10, [1 / 3, 1 / 2, 0, NAN, 0])
    equal(week.recall_at_50, [1 / 5, 2 / 2, 0, 0, 0])
    equal(week.discovery_at_10, [1 / 4, 1 / 1, NAN, 0, 0])
    equal(week.discovery_at_50, [1 / 4, 1 / 1, NAN, 0, 0])
    summary = summarize(score_baseline(question, "popularity_7d", frequencies=("once",), progress=silent))["once"]
    assert summary["recall_at_10"] == pytest.approx((1 / 5 + 1 / 2 + 0 + 0 + 0) / 5)
    assert summary["askable_recall_at_10"] == pytest.approx((1 / 3 + 1 / 2 + 0 + 0) / 4)
    assert summary["discovery_at_10"] == pytest.approx((1 / 4 + 1 + 0 + 0) / 4)
    # 28 days: 20 to 29 have 12, 11, …, 3 and come before 40 to 49, which have 2; 50 has 20 pins before it.
    month = once(question, "popularity_28d")
    equal(month.recall_at_10, [0, 0, 0, 0, 0])
    equal(month.recall_at_50, [1 / 5, 2 / 2, 0, 0, 0])
    equal(month.discovery_at_10, [0, 0, NAN, 0, 0])
    # Ever: 0 has 20, …, 9 has 11 positives, 20 has 12, 21 has 11, …; 0 is first for the last user.
    ever = once(question, "popularity_ever")
    equal(ever.recall_at_10, [0, 0, 0, 0, 1 / 2])
    equal(ever.discovery_at_10, [0, 0, NAN, 0, 1 / 2])
    counts = BASELINE_EMBEDDERS["popularity_ever"](question).pins(np.array([0, 9, 20, 29, 30, 40, 50]))
    assert counts.ravel().tolist() == [20, 11, 12, 3, 0, 2, 1]


def test_own_frequency(question: Question) -> None:
    """61 of two own pins is found, and so is 40 of ten that tie: nine rivals. 79 has nine of 70 to 80 before it, 80 has
    ten. Nothing else is found, and nothing in discovery."""
    scores = once(question, "own_frequency")
    equal(scores.recall_at_10, [1 / 5, 1 / 2, 1 / 2, 0, 0])
    equal(scores.recall_at_50, [1 / 5, 1 / 2, 2 / 2, 0, 0])
    equal(scores.discovery_at_10, [0, 0, NAN, 0, 0])
    equal(scores.discovery_at_50, [0, 0, NAN, 0, 0])
    assert scores.top_10[0].tolist() == [60, 61] + [-1] * 8  # three actions come before two
    assert scores.top_10[2].tolist() == list(range(70, 80))
    assert scores.top_10[3].tolist() == [10] + [-1] * 9


class ByNumber:
    """Every user has the same vector; pins are in the order of their numbers: pin p has the cosine (99 - p) / 100."""

    ranks = None

    def __init__(self, increments: Increments | None) -> None:
        self.increments = increments

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        return QueryVectors(np.arange(len(user_Q) + 1), torch.ones(len(user_Q), 1), self.increments)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.from_numpy((99 - pin) / 100).float().unsqueeze(1)


def test_memory_raises_pins_and_takes_others_out(question: Question) -> None:
    """-2 is below the difference of any two cosines. The vector alone finds 0 of the last user, and nothing else.

    With memory: 61 of the first user comes first with .38 + 1, her 0 last with .99 - 2; 50 of the second one has
    .49 + .6, above the .99 of pin 0, and is new to her; 40 of hers, and 0 of the last user, are not shown again.
    """
    increments = Increments(
        np.array([0, 0, 1, 1, 4]), np.array([0, 61, 40, 50, 0]), np.array([-2, 1, -2, 0.6, -2], np.float32)
    )
    served, alone = (
        score_embedder(question, ByNumber(each), "it", frequencies=("once",), progress=silent).frequencies["once"]
        for each in (increments, None)
    )
    equal(alone.recall_at_10, [0, 0, 0, 0, 1 / 2])
    equal(alone.discovery_at_10, [0, 0, NAN, 0, 1 / 2])
    equal(alone.recall_at_50, [1 / 5, 1 / 2, 0, 0, 1 / 2])
    equal(served.recall_at_10, [1 / 5, 1 / 2, 0, 0, 0])
    equal(served.discovery_at_10, [0, 1 / 1, NAN, 0, 0])
    equal(served.recall_at_50, [2 / 5, 1 / 2, 0, 0, 0])
    assert alone.top_10.tolist() == [list(range(10))] * 5
    assert served.top_10.tolist() == [
        [61, *range(1, 10)],
        [50, *range(9)],
        *[list(range(10))] * 2,
        list(range(1, 11)),
    ]


def test_own_frequency_that_decays(question: Question) -> None:
    """Three actions 300 days ago weigh 3 exp(-300 / 120) = .25, two of yesterday 2 exp(-1 / 120) = 1.98."""
    assert 3 * math.exp(-300 / 120) < 2 * math.exp(-1 / 120)
    scores = once(question, "own_frequency_120d")
    equal(scores.recall_at_10, [1 / 5, 1 / 2, 1 / 2, 0, 0])
    assert scores.top_10[0].tolist() == [61, 60] + [-1] * 8
    assert scores.top_10[2].tolist() == list(range(70, 80))


def test_very_old_actions_are_still_ranked(data: TrainingSet) -> None:
    """After 3,000 days an action weighs 1e-11: the pin with two of them comes before the eleven with one."""
    past: list[Action] = [(-3000.0, pin, "click") for pin in range(12)]
    user = [*past, (-3000.0, 5, "click"), (0.5, 5, "REPIN"), (0.6, 7, "REPIN")]
    question = draw_question(data, [user], index_pin=np.arange(99))
    assert once(question, "own_frequency_120d").recall_at_10.tolist() == [1 / 2]


def test_other_frequencies(question: Question) -> None:
    """Own frequency with embeddings made daily and in real time.

    Daily, the first user: the embedding of day 0 knows what was before -1 d, so 61 is new then and not found; on day 1
    it is found. 40, 90, the first pin without a vector on day 4 (twice, counted once) and the second on day 5 are not:
    1 / 6. The second: 40 is found among ten that tie, 50 is not. In real time, 61 is found both times, and no action
    lies between the positives without a vector: one embedding searches for them, and they are two distinct pins.
    """
    scores = score_baseline(question, "own_frequency", frequencies=EVERY, progress=silent).frequencies
    assert scores["daily"].num_positives.tolist() == [6, 2, 2, 1, 2]
    equal(scores["daily"].recall_at_10, [1 / 6, 1 / 2, 1 / 2, 0, 0])
    assert scores["daily"].num_new.tolist() == [5, 1, 0, 1, 2]
    assert scores["realtime"].num_positives.tolist() == [6, 2, 2, 1, 2]
    equal(scores["realtime"].recall_at_10, [2 / 6, 1 / 2, 1 / 2, 0, 0])
    equal(scores["realtime"].discovery_at_10, [0, 0, NAN, 0, 0])


def test_a_pin_without_a_vector_is_new_once(data: TrainingSet) -> None:
    drawn = draw_question(data, [[(-1.0, 0, "click"), (2.5, 1, "REPIN"), (6.5, 2, "REPIN")]], index_pin=np.arange(99))
    question = with_unaskable(drawn, [(0, 0.5, -1), (0, 5.5, -1)])
    for frequency, expected in (("once", [True]), ("daily", [True, False]), ("realtime", [True, False])):
        queries = ask(question, frequency)
        is_unaskable = (queries.pin_P < 0) & queries.is_counted_P
        assert queries.is_new_P[is_unaskable].tolist() == expected


# What may enter a statistic


def test_no_action_of_a_held_out_user_is_counted(data: TrainingSet) -> None:
    """A planted user with a thousand positives on pin 95 before the cut, and a thousand on 96 after it."""
    before: list[Action] = [(-1.0, 95, "REPIN")] * 1000
    after: list[Action] = [(0.5, 96, "REPIN")] * 1000
    planted = draw_question(data, [*FIVE, before + after], index_pin=np.arange(99))
    plain = draw_question(data, FIVE, index_pin=np.arange(99))
    for name in BASELINE_EMBEDDERS:
        expected, found = once(plain, name), once(planted, name)
        for column in NUMBERS:
            np.testing.assert_array_equal(getattr(found, column)[:5], getattr(expected, column), err_msg=name)
        np.testing.assert_array_equal(found.top_10[:5], expected.top_10, err_msg=name)
        if name.startswith("popularity"):
            count = BASELINE_EMBEDDERS[name](planted).pins(np.array([95, 96]))
            assert count.ravel().tolist() == [0, 0]


def test_later_actions_change_nothing_before_them(data: TrainingSet) -> None:
    """What a user does after the cut on pins 0 to 89 changes none of the embeddings made at the cut."""
    later: list[Action] = [(0.25, pin, "click") for pin in range(90)]
    past, future = FIVE[0][:5], FIVE[0][5:]
    users = [[*past, *future], [*past, *later, *future]]
    plain, busy = (draw_question(data, [user], index_pin=np.arange(99)) for user in users)
    for name in BASELINE_EMBEDDERS:
        for column in NUMBERS:
            np.testing.assert_array_equal(getattr(once(plain, name), column), getattr(once(busy, name), column))


# Against numpy


class Random:
    """A vector for each (user, end), and increments for some pins: what the next model will be."""

    def __init__(self, question: Question, *, with_increments: bool) -> None:
        rng = np.random.default_rng(7)
        self.question, self.with_increments = question, with_increments
        self.by_end = rng.normal(size=(len(question.timelines.pin) + 1, 6)).astype(np.float32)
        self.by_pin = rng.normal(size=(NUM_PINS, 6)).astype(np.float32)

    def increment(self, user: int, end: int) -> dict[int, float]:
        first = self.question.timelines.offsets[user]
        own = np.unique(self.question.timelines.pin[first:end]).tolist() if self.with_increments else []
        return {int(pin): 0.5 + (pin * end) % 7 / 3 for pin in own}

    ranks = None

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        rows = [
            (query, pin, value)
            for query, (user, end) in enumerate(zip(user_Q.tolist(), end_Q.tolist(), strict=True))
            for pin, value in self.increment(user, end).items()
        ]
        query, pin, value = zip(*rows, strict=True) if rows else ((), (), ())
        increments = Increments(np.array(query, np.int64), np.array(pin, np.int64), np.array(value, np.float32))
        vectors = torch.from_numpy(self.by_end[end_Q])
        return QueryVectors(np.arange(len(end_Q) + 1), vectors, increments if self.with_increments else None)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.from_numpy(self.by_pin[pin])


def random_question(data: TrainingSet, *, num_users: int, index_size: int, seed: int = 3) -> Question:
    rng, users, missing = np.random.default_rng(seed), [], []
    for user in range(num_users):
        days = np.sort(np.concatenate([-50 * rng.random(rng.integers(1, 60)), 14 * rng.random(rng.integers(1, 30))]))
        words = [("click", "REPIN")[int(rng.random() < 0.4)] for _ in days]
        users.append(list(zip(days.tolist(), rng.integers(NUM_PINS, size=len(days)).tolist(), words, strict=True)))
        missing += [(user, float(day), -1 - int(rng.integers(3))) for day in np.sort(14 * rng.random(rng.integers(3)))]
    index_pin = np.sort(rng.permutation(NUM_PINS)[:index_size])
    question = draw_question(data, users, index_pin=index_pin)
    return with_unaskable(question, missing)


def brute_force(question: Question, embedder: Random, frequency: Frequency) -> dict[str, list[float]]:
    """Recall of each user from the definitions: dense scores in float64, and sets of pins in Python."""
    queries, timelines = ask(question, frequency), question.timelines
    hits: dict[int, dict[str, list[bool]]] = {user: {} for user in range(question.num_users)}
    asked = set()
    first_moment: dict[tuple[int, int], int] = {}
    for user, ts, pin in zip(*question.unaskable[:3], strict=True):
        first_moment.setdefault((int(user), int(pin)), int(ts))
    for query, pin, ts in zip(queries.query_P.tolist(), queries.pin_P.tolist(), queries.ts_P.tolist(), strict=True):
        if (query, pin) in asked:
            continue
        asked.add((query, pin))
        user, end = int(queries.user_Q[query]), int(queries.end_Q[query])
        seen = set(timelines.pin[timelines.offsets[user] : end].tolist())
        moment = {"once": question.data.cut_us, "realtime": ts}.get(
            frequency, question.data.cut_us + ((ts - question.data.cut_us) // DAY_US - 1) * DAY_US
        )
        is_new = pin not in seen if pin >= 0 else first_moment[user, pin] >= moment
        increment = embedder.increment(user, end)
        vector = embedder.by_end[end].astype(np.float64)
        score = {
            int(each): float(embedder.by_pin[each].astype(np.float64) @ vector) + increment.get(int(each), 0)
            for each in [*question.index_pin, *([pin] if pin >= 0 else [])]
        }
        rivals = [each for each in question.index_pin.tolist() if each != pin and score[each] >= score.get(pin, NAN)]
        unseen = [each for each in rivals if each not in seen]
        mine = hits[user]
        for k in (10, 50):
            mine.setdefault(f"recall_at_{k}", []).append(pin >= 0 and len(rivals) < k)
            if is_new:
                mine.setdefault(f"discovery_at_{k}", []).append(pin >= 0 and len(unseen) < k)
        if pin >= 0:
            mine.setdefault("askable_recall_at_10", []).append(len(rivals) < 10)
    return {
        name: [float(np.mean(mine[name])) if name in mine else NAN for mine in hits.values()]
        for name in NUMBERS
        if "_at_" in name
    }


@pytest.mark.parametrize("with_increments", [False, True])
@pytest.mark.parametrize("chunk_actions", [1 << 21, 40])
def test_both_questions_are_those_of_a_brute_force_search(
    data: TrainingSet, with_increments: bool, chunk_actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CHUNK_ACTIONS", chunk_actions)
    monkeypatch.setattr(question_module, "ACTIONS_AT_ONCE", chunk_actions)
    question = random_question(data, num_users=25, index_size=80)
    embedder = Random(question, with_increments=with_increments)
    scores = score_embedder(question, embedder, "it", frequencies=EVERY, progress=silent)
    for frequency in EVERY:
        for name, expected in brute_force(question, embedder, frequency).items():
            got = getattr(scores.frequencies[frequency], name)
            np.testing.assert_allclose(got, expected, err_msg=f"{frequency} {name}")
            assert 0 < np.nanmean(got) < 1


def test_own_frequency_is_that_of_a_count(data: TrainingSet) -> None:
    question = random_question(data, num_users=25, index_size=80)
    timelines, cut_us = question.timelines, data.cut_us
    for name, decay_days in (("own_frequency", None), ("own_frequency_120d", 120)):
        expected = []
        for user in range(question.num_users):
            weight: dict[int, float] = {}
            wanted: set[int] = set(question.unaskable.pin_P[question.unaskable.user_P == user].tolist())
            for row in range(timelines.offsets[user], timelines.offsets[user + 1]):
                pin, age = int(timelines.pin[row]), (cut_us - timelines.ts[row]) / DAY_US
                if age > 0:
                    weight[pin] = weight.get(pin, 0) + (1 if decay_days is None else math.exp(-age / decay_days))
                elif timelines.is_positive[row]:
                    wanted.add(pin)
            rank = {
                pin: sum(weight.get(int(each), 0) >= own for each in question.index_pin if each != pin)
                for pin, own in weight.items()
            }
            found = [rank.get(pin, NUM_PINS) < 10 for pin in wanted]
            expected.append(sum(found) / len(found) if found else NAN)
        np.testing.assert_array_equal(once(question, name).recall_at_10, expected)
        assert 0 < np.nanmean(expected) < 1


def test_popularity_is_that_of_a_count(data: TrainingSet) -> None:
    question, train = random_question(data, num_users=25, index_size=80), data.train
    queries, timelines = ask(question, "once"), question.timelines
    for name, num_days in (("popularity_7d", 7), ("popularity_28d", 28), ("popularity_ever", 10_000)):
        is_counted = train.is_positive & (train.ts >= data.cut_us - num_days * DAY_US)
        count_N = np.bincount(train.pin[is_counted], minlength=NUM_PINS)
        found: list[list[bool]] = [[] for _ in range(question.num_users)]
        for place in np.flatnonzero(queries.is_counted_P & queries.is_new_P):
            user, pin = int(queries.user_Q[queries.query_P[place]]), int(queries.pin_P[place])
            end = int(queries.end_Q[queries.query_P[place]])
            left = np.setdiff1d(question.index_pin, [*timelines.pin[timelines.offsets[user] : end], pin])
            found[user].append(pin >= 0 and int((count_N[left] >= count_N[pin]).sum()) < 10)
        expected = [sum(each) / len(each) if each else NAN for each in found]
        np.testing.assert_array_equal(once(question, name).discovery_at_10, expected)
        assert np.nanmean(expected) > 0


# Bad input


def test_fewer_pins_than_k(data: TrainingSet) -> None:
    """With six pins in the index every pin with a vector is among the ten, except for what only ranks own pins."""
    question = with_unaskable(draw_question(data, FIVE, index_pin=np.arange(40, 46)), UNASKABLE)
    for name in BASELINE_EMBEDDERS:
        scores = once(question, name)
        if name.startswith("own_frequency"):
            equal(scores.discovery_at_50, [0, 0, NAN, 0, 0])
            equal(scores.recall_at_10, [1 / 5, 1 / 2, 2 / 2, 0, 0])
        else:
            equal(scores.recall_at_10, [3 / 5, 1, 1, 0, 1])
            equal(scores.discovery_at_10, [2 / 4, 1, NAN, 0, 1])


def test_no_positive_is_new(data: TrainingSet, tmp_path: Path) -> None:
    """One user, who comes back to what she has seen."""
    question = draw_question(data, [[(-1.0, 5, "click"), (0.5, 5, "REPIN")]], index_pin=np.arange(99))
    for name in BASELINE_EMBEDDERS:
        scores = score_baseline(question, name, frequencies=EVERY, progress=silent)
        summary = summarize(scores)["once"]
        assert math.isnan(summary["discovery_at_10"])
        assert math.isnan(summary["discovery_at_50"])
        assert all(map(math.isnan, summary["discovery_at_10_interval"]))
        scores.write(tmp_path / "scores.parquet", forgotten=pa.array([], pa.int64()))
        assert read_scores(tmp_path / "scores.parquet").frequencies["once"].num_new.tolist() == [0]
    assert (
        summarize(score_baseline(question, "own_frequency", frequencies=("once",), progress=silent))["once"][
            "recall_at_10"
        ]
        == 1
    )


def test_nothing_can_be_asked(data: TrainingSet) -> None:
    drawn = draw_question(data, [[(-1.0, 5, "click")]], index_pin=np.arange(99))
    question = with_unaskable(drawn, [(0, 0.5, -1)])
    for name in BASELINE_EMBEDDERS:
        summary = summarize(score_baseline(question, name, frequencies=EVERY, progress=silent))["once"]
        assert (summary["recall_at_10"], summary["recall_at_50"], summary["discovery_at_10"]) == (0, 0, 0)
        assert math.isnan(summary["askable_recall_at_10"])
        assert math.isfinite(summary["p90_coverage_at_10"])


def test_without_interests_there_is_no_entropy(tmp_path: Path) -> None:
    for interests, is_there in ((1, False), (2, True)):
        data = write_set(tmp_path / str(interests), TRAIN, interests=interests)
        question = draw_question(data, FIVE, index_pin=np.arange(99))
        scores = score_baseline(question, "popularity_7d", frequencies=("once",), progress=silent)
        scores.write(tmp_path / "scores.parquet", forgotten=pa.array([], pa.int64()))
        for each in (scores, read_scores(tmp_path / "scores.parquet")):
            assert ("interest_entropy_at_50" in summarize(each)["once"]) == is_there
            assert (each.frequencies["once"].interest_entropy_at_50 is not None) == is_there
        columns = pq.read_schema(tmp_path / "scores.parquet").names
        assert ("interest_entropy_at_50" in columns) == is_there


def test_oracles_are_baselines() -> None:
    assert set(ORACLES) < set(BASELINE_EMBEDDERS)
