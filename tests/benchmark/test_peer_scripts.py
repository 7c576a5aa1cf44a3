"""The peers' scripts against independent computations; they are imported by path, as they are no modules of ours."""

import ast
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from pf_core.benchmark.peers.run import SCRIPTS

NUM_USERS, NUM_TEST_USERS, NUM_PINS = 14, 5, 12


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def random_log(exchange: Any, seed: int = 0, *, num_train: int = 90, num_past: int = 30) -> Any:
    rng = np.random.default_rng(seed)

    def actions(num_users: int, number: int) -> Any:
        user = np.sort(rng.integers(num_users, size=number)).astype(np.int32)
        pin = (NUM_PINS * rng.random(number) ** 2).astype(np.int32)
        day = -1 - rng.integers(60, size=number)
        return exchange.Actions(user, pin, day.astype(np.int32), rng.random(number) < 0.8)

    return exchange.Log(
        NUM_PINS, NUM_USERS, NUM_TEST_USERS, 4, actions(NUM_USERS, num_train), actions(NUM_TEST_USERS, num_past)
    )


def task_of(exchange: Any, log: Any, settings: dict[str, Any]) -> Any:
    return exchange.Task(log, settings, 100.0, time.time(), Path("unused"), False)


def counted(actions: Any, num_users: int) -> np.ndarray:
    counts = np.zeros((num_users, NUM_PINS))
    for user, pin in zip(actions.user, actions.pin, strict=True):
        counts[user, pin] += 1
    return counts


def lists_of(scores_UN: np.ndarray, log: Any) -> list[tuple[int, int]]:
    """(user, pin) of the lists that the scores give; NaN is a pin that is not scored."""
    seen = counted(log.past, NUM_TEST_USERS) > 0
    rows = []
    for user, scores in enumerate(scores_UN):
        pins = sorted(np.flatnonzero(~np.isnan(scores)), key=lambda pin: (-scores[pin], pin))
        rows += [(user, int(pin)) for pin in pins[: log.list_length + seen[user].sum()]]
    return rows


def assert_lists(lists: Any, expected_UN: np.ndarray, log: Any) -> None:
    """The lists have the pins and the values of the expected scores."""
    table = lists.table().to_pydict()
    rows = list(zip(table["user"], table["pin"], strict=True))
    values = np.array([expected_UN[user, pin] for user, pin in rows])
    np.testing.assert_allclose(table["score"], values, rtol=1e-9)
    rounded_UN = np.round(expected_UN, 9)  # equal up to the order of a sum is equal
    best = lists_of(rounded_UN, log)
    assert len(rows) == len(best)
    np.testing.assert_allclose(values, [expected_UN[user, pin] for user, pin in best], atol=1e-8)
    assert len(set(rows)) == len(rows)


# Item-kNN


def dense_bm25(weights: np.ndarray) -> np.ndarray:
    lengths = weights.sum(axis=1)
    active = lengths[lengths > 0]
    result = np.zeros_like(weights)
    for user in range(len(weights)):
        for pin in range(NUM_PINS):
            if weights[user, pin] > 0:
                norm = 1 - 0.75 + 0.75 * lengths[user] / active.mean()
                idf = np.log(1 + len(active) / np.count_nonzero(weights[:, pin]))
                result[user, pin] = weights[user, pin] * 2.2 / (weights[user, pin] + 1.2 * norm) * idf
    return result


def dense_similarity(weights: np.ndarray, num_neighbours: int, shrinkage: float, keep_self: bool) -> np.ndarray:
    similar = np.zeros((NUM_PINS, NUM_PINS))
    for j in range(NUM_PINS):
        found = []
        for i in range(NUM_PINS):
            product = weights[:, j] @ weights[:, i]
            if product > 0 and (keep_self or i != j):
                lengths = np.sqrt(weights[:, j] @ weights[:, j]) * np.sqrt(weights[:, i] @ weights[:, i])
                found.append((product / (lengths + shrinkage), i))
        for value, i in sorted(found, key=lambda pair: (-pair[0], pair[1]))[:num_neighbours]:
            similar[j, i] = value
    return similar


@pytest.mark.parametrize("weights", ["binary", "log_count", "count"])
@pytest.mark.parametrize("weighting", ["none", "bm25"])
@pytest.mark.parametrize(
    ("num_neighbours", "shrinkage", "keep_self"), [(3, 0.0, True), (5, 10.0, False), (99, 1.0, True)]
)
def test_item_knn_equals_loops(
    script: Any, weights: str, weighting: str, num_neighbours: int, shrinkage: float, keep_self: bool
) -> None:
    exchange, item_knn = script("exchange"), script("item_knn")
    log = random_log(exchange)
    settings = {
        "actions": "all",
        "weights": weights,
        "weighting": weighting,
        "num_neighbours": num_neighbours,
        "shrinkage": shrinkage,
        "keep_self": keep_self,
    }
    lists, note = item_knn.rank(task_of(exchange, log, settings))
    weigh = {"binary": np.sign, "log_count": np.log1p, "count": np.asarray}[weights]
    train, own = weigh(counted(log.train, NUM_USERS)), weigh(counted(log.past, NUM_TEST_USERS))
    if weighting == "bm25":
        train = dense_bm25(train)
    scores = own @ dense_similarity(train, num_neighbours, shrinkage, keep_self)
    assert note == ""
    assert_lists(lists, np.where(scores > 0, scores, np.nan), log)


def test_blocks_of_item_knn_give_the_same(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    item_knn = script("item_knn")
    matrix = sparse.csr_array(np.random.default_rng(1).random((8, 9)).round(1))
    pins = np.array([0, 3, 8])
    whole = item_knn.neighbours(matrix, pins, 4, 1.0, keep_self=True).toarray()
    monkeypatch.setattr(item_knn, "MAX_PRODUCTS", 1)
    assert item_knn.row_blocks(np.array([5.0, 0.0, 5.0, 0.5, 0.5])) == [(0, 1), (1, 2), (2, 3), (3, 5)]
    np.testing.assert_array_equal(item_knn.neighbours(matrix, pins, 4, 1.0, keep_self=True).toarray(), whole)


# EASE


def dense_ease(train: np.ndarray, own: np.ndarray, ridge: float) -> np.ndarray:
    inverse = np.linalg.inv(train.T @ train + ridge * np.eye(train.shape[1]))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return own @ weights


@pytest.mark.parametrize("shape", [(30, 9), (9, 30), (12, 12)])
@pytest.mark.parametrize("ridge", [0.5, 20.0])
def test_ease_equals_the_inverse(script: Any, shape: tuple[int, int], ridge: float) -> None:
    """More users than pins is solved in one way, fewer in the other."""
    ease = script("ease")
    rng = np.random.default_rng(0)
    train, own = rng.poisson(0.4, shape).astype(float), rng.poisson(0.5, (6, shape[1])).astype(float)
    scores = ease.invert_gram(sparse.csr_array(train), ridge).scores(sparse.csr_array(own))
    np.testing.assert_allclose(scores, dense_ease(train, own, ridge), rtol=1e-9, atol=1e-12)


def test_large_matrices_of_ease_are_float32_and_close(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ease = script("ease")
    monkeypatch.setattr(ease, "MAX_FLOAT64_ORDER", 5)
    monkeypatch.setattr(ease, "BLOCK", 4)
    train = np.random.default_rng(0).poisson(0.4, (40, 9)).astype(float)
    assert ease.gram(sparse.csr_array(train.T), 1.0).dtype == np.float32
    scores = ease.invert_gram(sparse.csr_array(train), 2.0).scores(sparse.csr_array(train[:3]))
    np.testing.assert_allclose(scores, dense_ease(train, train[:3], 2.0), atol=1e-5)


@pytest.mark.parametrize("own_weight", [0.0, 0.3])
def test_ease_lists(script: Any, own_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, ease = script("exchange"), script("ease")
    monkeypatch.setattr(ease, "user_batches", lambda *_: [slice(0, 2), slice(2, 5)])
    log = random_log(exchange)
    settings = {"actions": "positive", "weights": "binary", "ridge": 3.0, "own_weight": own_weight}
    lists, note = ease.rank(task_of(exchange, log, settings))
    train, past = log.train.chosen("positive"), log.past.chosen("positive")
    used = counted(train, NUM_USERS).any(axis=0)
    own = np.sign(counted(past, NUM_TEST_USERS))
    scores = np.full((NUM_TEST_USERS, NUM_PINS), np.nan)
    scores[:, used] = dense_ease(np.sign(counted(train, NUM_USERS))[:, used], own[:, used], 3.0)
    if own_weight:
        for user, pin, day in zip(past.user, past.pin, past.day, strict=True):
            scores[user, pin] = np.nan_to_num(scores[user, pin]) + own_weight * np.exp(day / 120)
    assert note == ""
    assert_lists(lists, scores, log)


def test_ease_of_a_large_catalogue_scores_the_most_used_pins(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, ease = script("exchange"), script("ease")
    monkeypatch.setattr(ease, "MAX_PINS", 6)
    log = random_log(exchange)
    settings = {"actions": "all", "weights": "binary", "ridge": 3.0, "own_weight": 0.0}
    lists, note = ease.rank(task_of(exchange, log, settings))
    num_users = np.sign(counted(log.train, NUM_USERS)).sum(axis=0)
    kept = np.sort(np.argsort(-num_users, kind="stable")[:6])
    assert note == f"scores the 6 most used of {np.count_nonzero(num_users)} pins"
    assert set(np.concatenate(lists.pins)) == set(kept)
    # With more users than the order allows, fewer pins are kept: the matrix has the order of the pins.
    _, note = ease.rank(task_of(exchange, log, settings | {"max_order": 4}))
    assert note.startswith("scores the 4 most used")
    # What own history adds is not limited.
    lists, _ = ease.rank(task_of(exchange, log, settings | {"own_weight": 1.0}))
    assert set(log.past.pin) <= set(np.concatenate(lists.pins))


# All of them


@pytest.mark.parametrize("name", ["item_knn", "ease"])
def test_an_action_of_a_test_user_changes_only_that_users_list(script: Any, name: str) -> None:
    exchange, module = script("exchange"), script(name)
    log = random_log(exchange)
    settings = {
        "actions": "all",
        "weights": "log_count",
        "ridge": 2.0,
        "own_weight": 0.1,
        "weighting": "bm25",
        "num_neighbours": 5,
        "shrinkage": 1.0,
    }
    before, _ = module.rank(task_of(exchange, log, settings))
    planted = 2
    at = int(np.searchsorted(log.past.user, planted, side="right"))
    past = exchange.Actions(
        *(
            np.insert(getattr(log.past, column), at, value)
            for column, value in (("user", planted), ("pin", NUM_PINS - 1), ("day", -1), ("is_positive", True))
        )
    )
    sizes = (log.num_pins, log.num_train_users, log.num_test_users, log.list_length)
    after, _ = module.rank(task_of(exchange, exchange.Log(*sizes, log.train, past), settings))
    changed = set()
    for user in range(NUM_TEST_USERS):
        old, new = ([row for row in each.table().to_pylist() if row["user"] == user] for each in (before, after))
        if old != new:
            changed.add(user)
    assert changed == {planted}


def test_users_without_a_past_and_logs_without_training_actions(script: Any) -> None:
    exchange, item_knn, ease = script("exchange"), script("item_knn"), script("ease")
    log = random_log(exchange, num_past=0)
    settings = {"actions": "all", "weights": "binary", "ridge": 2.0, "own_weight": 0.1}
    settings |= {"weighting": "bm25", "num_neighbours": 5, "shrinkage": 1.0}
    for module in (item_knn, ease):
        lists, _ = module.rank(task_of(exchange, log, settings))
        assert lists.table().num_rows == 0
    lists, _ = item_knn.rank(task_of(exchange, random_log(exchange, num_train=0), settings))
    assert lists.table().num_rows == 0
    alone = random_log(exchange, num_train=0)
    lists, _ = ease.rank(task_of(exchange, alone, settings))
    frequency = exchange.own_frequency(alone.past, NUM_TEST_USERS, NUM_PINS).toarray()
    assert_lists(lists, np.where(frequency > 0, 0.1 * frequency, np.nan), alone)


def test_equal_scores_are_in_the_order_of_pins(script: Any) -> None:
    lists = script("exchange").Lists()
    lists.add(3, np.array([9, 4, 7, 1]), np.array([1.0, 1.0, 2.0, 1.0]), 3)
    assert lists.table().to_pydict() == {"user": [3, 3, 3], "pin": [7, 1, 4], "score": [2.0, 1.0, 1.0]}


def test_list_lengths_count_distinct_pins(script: Any) -> None:
    exchange = script("exchange")
    past = exchange.Actions(
        *(np.array(values) for values in ([0, 0, 0, 2], [1, 1, 5, 3], [-3, -2, -1, -1], [True] * 4))
    )
    log = exchange.Log(NUM_PINS, 1, 3, 51, past, past)
    assert log.list_lengths().tolist() == [51 + 2, 51 + 0, 51 + 1]


def test_bad_settings_are_refused(script: Any) -> None:
    exchange = script("exchange")
    log = random_log(exchange)
    with pytest.raises(ValueError, match="'binary', 'log_count' or 'count', not 'tfidf'"):
        exchange.weight_matrix(log.train, NUM_USERS, NUM_PINS, "tfidf")
    with pytest.raises(ValueError, match="'positive' or 'all', not 'some'"):
        log.train.chosen("some")


def test_positive_actions_are_chosen(script: Any) -> None:
    exchange = script("exchange")
    train = random_log(exchange).train
    assert len(train.chosen("positive").pin) == train.is_positive.sum() < len(train.pin) == len(train.chosen("all").pin)


def test_sequences(script: Any) -> None:
    exchange, sequences = script("exchange"), script("sequences")
    user, pin = np.array([0] * 5 + [1] + [3] * 2), np.array([4, 5, 6, 7, 8, 4, 9, 5])
    actions = exchange.Actions(user, pin, np.zeros(8), np.ones(8, bool))
    assert sequences.segment_ids(actions, 2).tolist() == [0, 1, 1, 2, 2, 3, 4, 4]
    assert sequences.segment_ids(actions, 3).tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    code_of_pin = np.zeros(10, int)
    code_of_pin[[4, 5, 6, 7, 8]] = [1, 2, 3, 4, 5]  # 9 is a pin that the model does not know
    assert sequences.newest(actions, 5, 3, code_of_pin).tolist() == [
        [3, 4, 5],
        [0, 0, 1],
        [0, 0, 0],
        [0, 0, 2],
        [0, 0, 0],
    ]


def test_scripts_import_nothing_of_ours() -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    allowed = {"numpy", "scipy", "pyarrow", "implicit", "rectools", "torch", "pandas", "pytorch_lightning"}
    for path in SCRIPTS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert str(module).split(".")[0] in names | allowed | sys.stdlib_module_names, path


def test_settings_are_json() -> None:
    from pf_core.benchmark.peers.tuning import BUDGETS, PEERS

    for name, peer in PEERS.items():
        assert json.loads(json.dumps(peer.settings)) == list(peer.settings), name
        assert len(peer.settings) == BUDGETS["full"].num_settings == 12
        assert len({json.dumps(each, sort_keys=True) for each in peer.settings}) == 12, f"{name}: a setting is repeated"
        assert (SCRIPTS / peer.script).exists()
