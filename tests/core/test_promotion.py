"""Candidate against champion: the same question for everybody, in each model's own words, and a rule that decides."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pf_core import promotion
from pf_core.contracts import PipelineError, ds_range, shift_ds
from pf_core.evaluation import Future, at_the_cut
from pf_core.model import PinnerFormer, Sequences
from pf_core.promotion import Contender, Judged, bootstrap_interval, cut_sequences, decide, evaluate_models, judge
from pf_core.serving_config import PromotionConfig
from pf_core.site import Site
from pf_core.training_set import TrainingSet, latest_training_set, open_training_set
from pf_core.validation import HeldOut, ModelEmbedder
from tests.judging import CUT, LAST, NUM_PINS, make_judged_site, make_model, write_model
from tests.planted import FEATURE_DIM, write_planted_set
from tests.sites import START

TYPES = ["click", "closeup", "repin"]
CPU = torch.device("cpu")


def silent(message: str) -> None:
    pass


# One contender


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    return open_training_set(write_planted_set(tmp_path_factory.mktemp("planted") / "set", num_held_out=150))


@pytest.fixture(scope="module")
def held_out(planted: TrainingSet) -> HeldOut:
    """Everybody's whole timeline, and two positives a user: the last pins that they saw, of the planted interest."""
    ends = planted.held_out.offsets[1:]
    user = np.repeat(np.arange(planted.held_out.num_users), 2)
    pin = planted.held_out.pin[np.stack([ends - 1, ends - 2], axis=1)].astype(np.int64).ravel()
    return at_the_cut(planted, Future(user, pin, 0, 0), sequence_length=10**9, num_pins=120, seed=0)


def contender(data: TrainingSet, model: PinnerFormer, **changes: Any) -> Contender:
    words = {"action_types": TYPES, "surfaces": ["homefeed"]} | changes
    embedder = ModelEmbedder(model=model, data=data, device=CPU)
    return Contender(name="it", embedder=embedder, sequence_length=model.config.sequence_length, **words)


def test_recall_is_that_of_the_evaluation(planted: TrainingSet, held_out: HeldOut) -> None:
    model = make_model(feature_dim=FEATURE_DIM)
    users, positives = held_out.positive_user, held_out.positive_pin
    judged = at_the_cut(planted, Future(users, positives, 0, 0), sequence_length=12, num_pins=120, seed=0)
    expected = judged.recall(ModelEmbedder(model=model, data=planted, device=CPU), k=10)
    result = judge(contender(planted, model), held_out, progress=silent)
    assert result.recall_at_10 == expected
    assert 0.1 < result.recall_at_10 < 1
    assert result.recall_interval[0] < result.recall_at_10 < result.recall_interval[1]
    assert result.users_without_embedding == 0


def test_coverage_counts_the_ten_nearest_pins(planted: TrainingSet, held_out: HeldOut) -> None:
    it = contender(planted, make_model(feature_dim=FEATURE_DIM))
    sequences = promotion.collate_sequences(
        planted.held_out, planted.pin_feature, np.maximum(held_out.starts, held_out.ends - 11), held_out.ends
    )
    with torch.no_grad():
        scores = it.embedder.users(sequences) @ it.embedder.pins(held_out.index_pin).T
    counts = sorted(scores.argsort(dim=1, descending=True)[:, :10].flatten().bincount(minlength=120).tolist())
    total, num_pins = 0, 0
    while total < 0.9 * 10 * 150:
        total, num_pins = total + counts.pop(), num_pins + 1
    assert judge(it, held_out, progress=silent).p90_coverage_at_10 == num_pins / 120


def test_chunks_do_not_matter(planted: TrainingSet, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = judge(contender(planted, make_model(feature_dim=FEATURE_DIM)), held_out, progress=silent)
    monkeypatch.setattr(promotion, "CHUNK_USERS", 47)
    monkeypatch.setattr(promotion, "SCORES_AT_ONCE", 1000)
    assert judge(contender(planted, make_model(feature_dim=FEATURE_DIM)), held_out, progress=silent) == expected


def test_a_model_with_its_words_in_another_order_is_the_same_model(planted: TrainingSet, held_out: HeldOut) -> None:
    model, other = make_model(feature_dim=FEATURE_DIM), make_model(feature_dim=FEATURE_DIM)
    order = [2, 0, 1]
    other.actions.action_type.weight.data = model.actions.action_type.weight.data[order]
    expected = judge(contender(planted, model), held_out, progress=silent)
    recoded = judge(contender(planted, other, action_types=[TYPES[code] for code in order]), held_out, progress=silent)
    assert recoded == expected
    assert judge(contender(planted, other), held_out, progress=silent) != expected


def test_unknown_words_drop_their_actions_before_the_newest_are_cut(planted: TrainingSet, held_out: HeldOut) -> None:
    it = contender(planted, make_model(feature_dim=FEATURE_DIM, num_types=2), action_types=["repin", "click"])
    rows = np.array([7, 0, 123])
    cut = cut_sequences(it, planted, held_out.starts[rows], held_out.ends[rows])
    timelines = planted.held_out
    for number, row in enumerate(rows):
        actions = range(timelines.offsets[row], timelines.offsets[row + 1])
        known = [action for action in actions if TYPES[timelines.action_type[action]] != "closeup"][-12:]
        mine = slice(cut.offsets[number], cut.offsets[number + 1])
        assert cut.ts[mine].tolist() == timelines.ts[known].tolist()
        assert cut.pin[mine].tolist() == timelines.pin[known].tolist()
        assert cut.duration[mine].tolist() == timelines.duration[known].tolist()
        words = [TYPES[timelines.action_type[action]] for action in known]
        assert [it.action_types[code] for code in cut.action_type[mine]] == words
        assert set(cut.surface[mine].tolist()) == {0}
    assert cut.num_users == 3


def test_nothing_is_found_for_a_user_without_an_embedding(planted: TrainingSet, held_out: HeldOut) -> None:
    it = contender(planted, make_model(feature_dim=FEATURE_DIM, num_types=1), action_types=["repin"])
    everybody = judge(it, held_out, progress=silent)
    blank = contender(planted, make_model(feature_dim=FEATURE_DIM, num_types=1), action_types=["a new word"])
    nobody = judge(blank, held_out, progress=silent)
    assert everybody.users_without_embedding == 0
    assert (nobody.recall_at_10, nobody.recall_interval, nobody.users_without_embedding) == (0, (0, 0), 150)
    assert math.isnan(nobody.p90_coverage_at_10)


def test_long_judgements_show_progress(
    planted: TrainingSet, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(promotion, "SAY_EVERY_S", -1.0)
    judge(contender(planted, make_model(feature_dim=FEATURE_DIM)), held_out, progress=lines.append)
    assert lines == ["it: 128 of 150 users judged", "it: 150 of 150 users judged"]


def test_the_interval_of_a_mean() -> None:
    assert bootstrap_interval(np.full(50, 0.25)) == (0.25, 0.25)
    values = (np.arange(400) % 4 == 0).astype(np.float64)  # a quarter are 1: the mean's deviation is sqrt(3 / 16 / 400)
    low, high = bootstrap_interval(values)
    deviation = (3 / 16 / 400) ** 0.5
    assert low == pytest.approx(0.25 - 1.96 * deviation, abs=0.005)
    assert high == pytest.approx(0.25 + 1.96 * deviation, abs=0.005)
    assert bootstrap_interval(values) == (low, high)


# The rule


def judged(name: str, recall: float, coverage: float) -> Judged:
    interval = (recall, recall)
    return Judged(
        name=name, recall_at_10=recall, recall_interval=interval, p90_coverage_at_10=coverage, users_without_embedding=0
    )


RULE = PromotionConfig(recall_tolerance=0.125, coverage_tolerance=0.5)
CHAMPION = judged("old", 0.5, 0.25)


@pytest.mark.parametrize(
    ("recall", "coverage", "promotes"),
    [
        (0.6, 0.3, True),
        (0.5, 0.25, True),
        (0.4375, 0.125, True),  # exactly what may be lost
        (0.4374, 0.25, False),
        (0.6, 0.1249, False),
        (math.nan, 0.3, False),
        (0.6, math.nan, False),
    ],
)
def test_a_candidate_may_lose_so_much_and_no_more(recall: float, coverage: float, promotes: bool) -> None:
    assert decide(judged("new", recall, coverage), CHAMPION, RULE).promote == promotes


def test_the_reason_is_a_sentence() -> None:
    assert decide(judged("new", 0.6, 0.3), CHAMPION, RULE).reason == (
        "recall@10 0.6000 against the champion's 0.5000; P90 coverage@10 0.3000 against the champion's 0.2500"
    )
    worse = decide(judged("new", 0.25, 0.3), CHAMPION, RULE).reason
    assert worse == ("recall@10 0.2500 against the champion's 0.5000, of which it may lose 12.5 %: it needs 0.4375")
    both = decide(judged("new", 0.25, 0.1), CHAMPION, RULE).reason
    assert "recall@10 0.2500" in both
    assert "P90 coverage@10 0.1000" in both


def test_without_a_champion_and_against_itself() -> None:
    first = decide(judged("new", 0.0, 0.0), None, RULE)
    assert (first.promote, first.reason) == (True, "there is no champion yet")
    itself = decide(CHAMPION, CHAMPION, RULE)
    assert (itself.promote, itself.reason) == (False, "old is the champion already")
    useless = decide(judged("new", 0.1, 0.1), judged("old", 0.0, math.nan), RULE)
    assert useless.promote


# A site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_judged_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def data(site: Site) -> TrainingSet:
    return open_training_set(latest_training_set(site))


def test_models_and_baselines_are_asked_the_same(
    site: Site, data: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = write_model(tmp_path / "good"), write_model(tmp_path / "bad", is_good=False)
    asked: list[tuple[bytes, ...]] = []

    def note(it: Contender, held_out: HeldOut, *, progress: Callable[[str], None]) -> Judged:
        asked.append(
            tuple(
                array.tobytes()
                for array in (held_out.starts, held_out.positive_user, held_out.positive_pin, held_out.index_pin)
            )
        )
        return judge(it, held_out, progress=progress)

    monkeypatch.setattr(promotion, "judge", note)
    lines: list[str] = []
    evaluation = evaluate_models(site, data, {"good": good, "bad": bad}, progress=lines.append)
    assert len(asked) == 6
    assert len(set(asked)) == 1
    assert (evaluation.cut_ds, evaluation.last_ds) == (CUT, LAST)
    assert evaluation.num_users == data.held_out.num_users
    assert evaluation.num_pins == NUM_PINS
    assert evaluation.training_set == data.fingerprint
    assert list(evaluation.models) == ["good", "bad"]
    assert list(evaluation.baselines) == [
        *("popularity, 7 days", "popularity, 365 days", "mean of 20 newest pins", "mean of 100 newest pins")
    ]
    assert evaluation.models["good"].recall_at_10 > 1.2 * evaluation.models["bad"].recall_at_10
    assert lines[0].startswith(f"{evaluation.num_users} held-out users, {evaluation.num_positives} positives in 1 days")
    assert len(lines) == 1 + 6
    assert evaluate_models(site, data, {"good": good, "bad": bad}, progress=silent) == evaluation


def test_a_sample_of_the_users_judges(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    rule = PromotionConfig(num_users=7, num_pins=100)
    site = site.model_copy(update={"serving": site.serving.model_copy(update={"promotion": rule})})
    evaluation = evaluate_models(site, data, {"it": write_model(tmp_path / "it")}, progress=silent)
    assert evaluation.num_users == 7
    assert 7 <= evaluation.num_positives <= 7 * 3


def test_at_most_two_weeks_judge(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "ingested_days", lambda _: ds_range(START, shift_ds(START, 30)))
    assert promotion._last_day(site, shift_ds(START, 10)) == shift_ds(START, 24)
    assert promotion._last_day(site, shift_ds(START, 20)) == shift_ds(START, 30)


def test_without_days_after_the_cut(
    site: Site, data: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for days in ([], [START, CUT]):
        monkeypatch.setattr(promotion, "ingested_days", lambda _, days=days: days)
        with pytest.raises(PipelineError, match=f"ends with {CUT}, and raw_actions has no day after it") as error:
            evaluate_models(site, data, {"it": write_model(tmp_path / "it")}, progress=silent)
        assert "--select training_set,pinnerformer_model" in str(error.value)


def test_models_that_cannot_be_judged(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    for folder, match in (
        (write_model(tmp_path / "later", cut_ds=LAST), f"model it was trained on days until {LAST}"),
        (write_model(tmp_path / "wide", feature_dim=5), "reads vectors of 5 numbers, the training set has 2"),
        (tmp_path / "nowhere", "no model in"),
    ):
        with pytest.raises(PipelineError, match=match):
            evaluate_models(site, data, {"it": folder}, progress=silent)


def test_the_device_is_the_sites(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, wanted, expected in ((True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        chosen = site.model_copy(update={"serving": site.serving.model_copy(update={"device": wanted})})
        assert promotion._device(chosen).type == expected


class Spy:
    """An embedder that remembers what it was shown."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def users(self, sequences: Sequences) -> Tensor:
        self.lengths += sequences.length_R.tolist()
        return torch.ones(len(sequences.length_R), 1)

    def pins(self, pin: np.ndarray) -> Tensor:
        return torch.ones(len(pin), 1)


def test_each_contender_reads_as_much_as_it_can(planted: TrainingSet, held_out: HeldOut) -> None:
    length = np.diff(planted.held_out.offsets)
    for sequence_length in (1, 25, 1000):
        spy = Spy()
        it = Contender(
            name="it", embedder=spy, sequence_length=sequence_length, action_types=TYPES, surfaces=["homefeed"]
        )
        result = judge(it, held_out, progress=silent)
        assert spy.lengths == np.minimum(length, sequence_length).tolist()
        assert result.recall_at_10 == 0  # all scores are equal, and ties count against the positive
