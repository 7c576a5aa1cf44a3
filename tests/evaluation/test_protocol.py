"""Judging: recall, diversity and staleness by user, against values worked out by hand and a brute-force search."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from pf_core.config.serving import Frequency
from pf_core.errors import PipelineError
from pf_core.evaluation import protocol
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS, SequenceQueryEmbedder, open_model_embedder
from pf_core.evaluation.increments import QueryVectors
from pf_core.evaluation.protocol import recall_by_density, score_baseline, score_embedder, score_model, with_index
from pf_core.evaluation.queries import ask
from pf_core.evaluation.question import Question
from pf_core.evaluation.scores import NUMBERS, Scores, UserScores, read_scores, recall_by_day
from pf_core.evaluation.summary import summarize
from pf_core.metrics.bootstrap import bootstrap_interval
from pf_core.model.checkpoint import load_model, save_model
from pf_core.model.sequences import Sequences
from pf_core.training.training_set import TrainingSet, open_training_set
from tests.support.judging import make_model
from tests.support.planted import FEATURE_DIM, NUM_INTERESTS, write_planted_set
from tests.support.questions import draw_question, planted_question

TYPES = ["click", "closeup", "repin"]
CPU = torch.device("cpu")
EVERY: tuple[Frequency, ...] = ("once", "daily", "realtime")


def silent(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    return open_training_set(write_planted_set(tmp_path_factory.mktemp("planted") / "set", num_held_out=150))


@pytest.fixture(scope="module")
def question(planted: TrainingSet) -> Question:
    return planted_question(planted, num_users=150)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def write(
    folder: Path, *, action_types: list[str] | None = None, cut_ds: str = "2026-02-01", **changes: object
) -> Path:
    words = TYPES if action_types is None else action_types
    description = {
        "feature_dim": FEATURE_DIM,
        "feature_scale": 1.0,
        "action_types": words,
        "surfaces": ["homefeed"],
        "time_origin_us": 0,
        "cut_ds": cut_ds,
    }
    save_model(folder, make_model(feature_dim=FEATURE_DIM, num_types=len(words), **changes), description)
    return folder


def same(one: Scores, other: Scores) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True)
        for a, b in ((one.frequencies[name], other.frequencies[name]) for name in one.frequencies)
        for name in (*NUMBERS, "interest_entropy_at_50", "top_10", "hits_UA", "positives_UA")
    )


# By hand


class ByNumber:
    """Users and pins on a line: a user stands at the pin that she saw last, pins at their own row; nearer is better."""

    ranks = None

    def embed(self, user_Q: np.ndarray, end_Q: np.ndarray) -> QueryVectors:
        at = torch.from_numpy(self.question.timelines.pin[end_Q - 1]).float()
        return QueryVectors(np.arange(len(end_Q) + 1), torch.stack([at, torch.ones(len(at))], 1))

    def __init__(self, question: Question) -> None:
        self.question = question

    def pins(self, pin: np.ndarray) -> Tensor:
        at = torch.from_numpy(np.asarray(pin)).float()
        return torch.stack([2 * at, -(at**2)], 1)  # <u, p> = 2up - p^2 = u^2 - (u - p)^2


def test_recall_by_hand(planted: TrainingSet) -> None:
    users = [
        # At 50 at the cut. 48 has 49, 50, 51 before it and 52 beside it: found. 44 has 45 … 55 before it, and 56 beside
        # it: not found. 10 is far away.
        [(-1.5, 50, "click"), (0.5, 48, "REPIN"), (1.5, 44, "CLICK"), (1.6, 44, "REPIN"), (2.5, 10, "REPIN")],
        # At 10; then at 100, where 103 is near.
        [(-1.5, 10, "click"), (0.25, 11, "REPIN"), (5.0, 100, "click"), (9.5, 103, "REPIN")],
    ]
    question = draw_question(planted, users, index_pin=np.arange(150))
    scores = score_embedder(question, ByNumber(question), "it", frequencies=EVERY, progress=silent)
    once = scores.frequencies["once"]
    assert once.num_positives.tolist() == [3, 2]
    assert once.recall_at_10.tolist() == [1 / 3, 1 / 2]
    assert once.recall_at_10_by_type["repin"].tolist() == [1 / 3, 1 / 2]  # of 48, 44, 10; of 11, 103
    assert once.recall_at_10_by_type["click"].tolist()[0] == 0
    assert math.isnan(once.recall_at_10_by_type["click"][1])
    assert "closeup" not in once.recall_at_10_by_type
    assert once.top_10[1].tolist() == [10, 9, 11, 8, 12, 7, 13, 6, 14, 5]
    assert once.positives_UA.sum(0).tolist() == [2, 2, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert once.hits_UA.sum(0).tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert recall_by_day(scores)["once"][:3] == [2 / 2, 0 / 2, 0 / 1]
    # Daily: on day 2 the first user stands where she was on day 0, at 48, and 10 is still far away; on day 9 the second
    # stands at 100. The first has 44 twice on day 1, one distinct pin.
    daily = scores.frequencies["daily"]
    assert daily.num_positives.tolist() == [3, 2]
    assert daily.recall_at_10.tolist() == [1 / 3, 2 / 2]
    # Realtime: 44 is near 48, and 44 itself is nearest when it comes again; every action counts.
    realtime = scores.frequencies["realtime"]
    assert realtime.num_positives.tolist() == [4, 2]
    assert realtime.recall_at_10.tolist() == [3 / 4, 2 / 2]


def test_entropy_and_coverage_by_hand(planted: TrainingSet) -> None:
    users = [[(-1.0, 50, "click"), (0.5, 48, "REPIN")]] * 4 + [[(-1.0, 150, "click"), (0.5, 48, "REPIN")]]
    question = draw_question(planted, users, index_pin=np.arange(200))
    scores = score_embedder(question, ByNumber(question), "it", frequencies=("once",), progress=silent)
    # 50 neighbouring pins of interests row % 8: two interests have 7 of them, six have 6.
    expected = -(2 * 7 / 50 * math.log(7 / 50) + 6 * 6 / 50 * math.log(6 / 50))
    np.testing.assert_allclose(scores.frequencies["once"].interest_entropy_at_50, [expected] * 5)
    # 50 results: ten pins four times, ten once. 45 results are 10 * 4 + 5 * 1.
    assert summarize(scores)["once"]["p90_coverage_at_10"] == 15 / 200


# Against the model itself


def test_recall_is_that_of_a_brute_force_search(question: Question, model_dir: Path) -> None:
    scores = score_model(question, model_dir, frequencies=EVERY, progress=silent)
    model, _ = load_model(model_dir)
    reader = open_model_embedder(question, model_dir, name="it", device=CPU)
    with torch.no_grad():
        index = reader.pins(question.index_pin)
        for frequency in EVERY:
            queries = ask(question, frequency)
            found: dict[int, list[bool]] = {}
            for query in range(len(queries.user_Q)):
                user, end = int(queries.user_Q[query]), int(queries.end_Q[query])
                rows = np.arange(max(question.timelines.offsets[user], end - 12), end)
                vector = model.embed_users(_as_sequences(question, rows))[0] if len(rows) else None
                mine = queries.positive_A[(queries.query_P == query) & queries.is_counted_P]
                for pin in question.timelines.pin[mine]:
                    is_hit = False
                    if vector is not None:
                        score = float(reader.pins(np.array([pin]))[0] @ vector)
                        rivals = (index @ vector >= score - 1e-6).numpy() & (question.index_pin != pin)
                        is_hit = bool(rivals.sum() < 10)
                    found.setdefault(user, []).append(is_hit)
            expected = [sum(hits) / len(hits) for _, hits in sorted(found.items())]
            np.testing.assert_allclose(scores.frequencies[frequency].recall_at_10, expected)
    assert 0.1 < summarize(scores)["once"]["recall_at_10"] < 1


def _as_sequences(question: Question, rows: np.ndarray) -> Sequences:
    timelines = question.timelines
    return Sequences(
        torch.from_numpy(question.data.pin_feature[timelines.pin[rows]])[None],
        torch.from_numpy(timelines.action_type[rows].astype(np.int64))[None],
        torch.from_numpy(timelines.surface[rows].astype(np.int64))[None],
        torch.from_numpy(timelines.duration[rows])[None],
        torch.from_numpy(timelines.ts[rows])[None],
        torch.tensor([len(rows)]),
    )


def test_chunks_do_not_matter(question: Question, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score_model(question, model_dir, frequencies=EVERY, progress=silent)
    sage = score_baseline(question, "pinnersage_5", frequencies=("once",), progress=silent)
    monkeypatch.setattr(protocol, "CHUNK_QUERIES", 47)
    assert same(score_model(question, model_dir, frequencies=EVERY, progress=silent), expected)
    assert same(score_baseline(question, "pinnersage_5", frequencies=("once",), progress=silent), sage)


def test_a_model_with_its_words_in_another_order_is_the_same_model(question: Question, tmp_path: Path) -> None:
    model, order = make_model(feature_dim=FEATURE_DIM), [2, 0, 1]
    write(tmp_path / "one")
    write(tmp_path / "other", action_types=[TYPES[code] for code in order])
    other, description = load_model(tmp_path / "other")
    other.actions.action_type.weight.data = model.actions.action_type.weight.data[order]
    save_model(tmp_path / "other", other, {key: value for key, value in description.items() if key != "model"})
    expected = score_model(question, tmp_path / "one", frequencies=("once",), progress=silent)
    assert same(score_model(question, tmp_path / "other", frequencies=("once",), progress=silent), expected)


class Spy:
    """An embedder that remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def users(self, sequences: Sequences) -> Tensor:
        for length, ts in zip(sequences.length_R.tolist(), sequences.ts_RS.tolist(), strict=True):
            self.seen.append(ts[:length])
        return torch.ones(len(sequences.length_R), 1)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.ones(len(pin), 1)


@pytest.mark.parametrize("sequence_length", [1, 25, 1000])
@pytest.mark.parametrize("dropped_by", ["unknown word", "sequence_types"])
def test_each_embedder_reads_the_newest_actions_that_it_knows(
    question: Question, sequence_length: int, dropped_by: str
) -> None:
    spy, known = Spy(), ["repin", "click"]
    reader = SequenceQueryEmbedder(
        question=question,
        embedder=spy,
        sequence_length=sequence_length,
        action_types=known if dropped_by == "unknown word" else TYPES,
        surfaces=["homefeed"],
        sequence_types=None if dropped_by == "unknown word" else known,
    )
    scores = score_embedder(question, reader, "it", frequencies=("once",), progress=silent)
    timelines, expected = question.timelines, []
    for user in range(question.num_users):
        rows = range(timelines.offsets[user], timelines.offsets[user + 1])
        is_read = [
            timelines.ts[row] < question.data.cut_us and TYPES[timelines.action_type[row]] in known for row in rows
        ]
        expected.append(timelines.ts[[row for row, read in zip(rows, is_read, strict=True) if read]].tolist())
    assert sorted(spy.seen) == sorted(ts[-sequence_length:] for ts in expected)
    assert np.nanmax(scores.frequencies["once"].recall_at_10) == 0  # all are equal: ties count against the positive


def test_nothing_is_found_for_a_user_without_an_embedding(question: Question, tmp_path: Path) -> None:
    blank = write(tmp_path / "blank", action_types=["a new word"])
    scores = score_model(question, blank, frequencies=("once",), progress=silent)
    summary = summarize(scores)["once"]
    assert (summary["recall_at_10"], summary["recall_at_10_interval"]) == (0, [0, 0])
    assert summary["users_without_embedding"] == 150
    assert math.isnan(summary["p90_coverage_at_10"])
    assert math.isnan(summary["interest_entropy_at_50"])
    assert (scores.frequencies["once"].top_10 == -1).all()


def test_baselines_find_a_planted_interest_or_do_not(question: Question) -> None:
    recall = {
        name: summarize(score_baseline(question, name, frequencies=("once",), progress=silent))["once"]["recall_at_10"]
        for name in BASELINE_EMBEDDERS
    }
    by_interest = min(recall["mean_of_20"], recall["mean_of_100"])
    assert by_interest > 2 * max(recall["popularity_7d"], recall["popularity_ever"])
    assert recall["pinnersage_20"] >= recall["pinnersage_5"] > recall["popularity_ever"]


def test_models_that_cannot_be_evaluated(question: Question, tmp_path: Path) -> None:
    late = write(tmp_path / "late", cut_ds="2026-03-02")
    with pytest.raises(PipelineError, match="model late was trained on days until 2026-03-02"):
        open_model_embedder(question, late, name="late", device=CPU)
    with pytest.raises(PipelineError, match="no model in"):
        open_model_embedder(question, tmp_path / "nowhere", name="it", device=CPU)


def test_long_evaluations_show_progress(question: Question, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(protocol, "REPORT_EVERY_S", -1.0)
    monkeypatch.setattr(protocol, "CHUNK_QUERIES", 128)
    score_model(question, model_dir, name="it", frequencies=("once",), progress=lines.append)
    assert lines == ["it, once: 128 of 150 embeddings scored", "it, once: 150 of 150 embeddings scored"]


def test_recall_grows_as_the_index_thins(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "INDEX_SHARES", (1 / 8, 1 / 2, 1))
    for name in ("mean_of_20", "pinnersage_5"):
        found = recall_by_density(question, BASELINE_EMBEDDERS[name](question), name, progress=silent)
        assert list(found) == ["25", "100", "200"]
        assert found["25"]["recall_at_10"] >= found["100"]["recall_at_10"] >= found["200"]["recall_at_10"]
    assert len(np.unique(with_index(question, 25).index_pin)) == 25


# Scores


def test_scores_survive_their_file(question: Question, model_dir: Path, tmp_path: Path) -> None:
    scores = score_model(question, model_dir, frequencies=EVERY, progress=silent)
    scores.write(tmp_path / "scores.parquet", forgotten=pa.array([], pa.int64()))
    read = read_scores(tmp_path / "scores.parquet")
    assert (read.question, read.index_size) == (question.fingerprint, 120)
    assert read.user_ids.equals(scores.user_ids)
    assert list(read.frequencies) == list(EVERY)
    assert same(read, scores)
    for word, recall in scores.frequencies["daily"].recall_at_10_by_type.items():
        np.testing.assert_array_equal(read.frequencies["daily"].recall_at_10_by_type[word], recall)
    assert [path.name for path in tmp_path.glob("*scores*")] == ["scores.parquet"]


def test_scores_have_no_id_of_a_user_who_was_forgotten_meanwhile(
    question: Question, model_dir: Path, tmp_path: Path
) -> None:
    """A training set keeps its users until the next one: an evaluation on it must not write their ids again."""
    scores = score_model(question, model_dir, frequencies=("once",), progress=silent)
    _, *stay = scores.user_ids.to_pylist()
    scores.write(tmp_path / "scores.parquet", forgotten=scores.user_ids.slice(0, 1))
    assert read_scores(tmp_path / "scores.parquet").user_ids.to_pylist() == [None, *stay]
    assert same(read_scores(tmp_path / "scores.parquet"), scores)


def test_the_interval_of_a_mean() -> None:
    assert bootstrap_interval(np.full(50, 0.25)) == (0.25, 0.25)
    values = (np.arange(400) % 4 == 0).astype(np.float64)  # a quarter are 1: the mean's deviation is sqrt(3 / 16 / 400)
    low, high = bootstrap_interval(np.append(values, math.nan))
    deviation = (3 / 16 / 400) ** 0.5
    assert low == pytest.approx(0.25 - 1.96 * deviation, abs=0.005)
    assert high == pytest.approx(0.25 + 1.96 * deviation, abs=0.005)
    assert bootstrap_interval(values) == (low, high)


def test_the_planted_interests_are_the_pins_own(planted: TrainingSet) -> None:
    assert planted.interests()[:10].tolist() == [row % NUM_INTERESTS for row in range(10)]


def test_types(question: Question, model_dir: Path) -> None:
    once = score_model(question, model_dir, frequencies=("once",), progress=silent).frequencies["once"]
    assert isinstance(once, UserScores)
    assert set(once.recall_at_10_by_type) == set(TYPES)
