"""Candidate against champion: the same question for both, and a rule that decides."""

import math
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
import torch

from pf_assets.metadata.evaluation import selection_rows
from pf_core.config.serving import PromotionConfig
from pf_core.config.site import Site
from pf_core.config.training_section import UsersConfig
from pf_core.errors import PipelineError
from pf_core.evaluation import promotion
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS
from pf_core.evaluation.manifest import ORACLES, Comparison, Promote, QuestionName, recall_by_type
from pf_core.evaluation.promotion import (
    Decision,
    NamedModel,
    compare_with_baselines,
    decide_promotion,
    evaluate_and_decide,
    evaluate_models,
    overrule,
)
from pf_core.evaluation.protocol import score_model
from pf_core.evaluation.scores import Scores, UserScores, read_scores, recall_by_day
from pf_core.evaluation.selection import by_selection, describe_selection
from pf_core.evaluation.summary import summarize
from pf_core.evaluation.verdict import judge_baselines
from pf_core.metrics.bootstrap import bootstrap_interval
from pf_core.model.device import single_threaded
from pf_core.training.plan import resolve_config
from pf_core.training.trainer import train
from pf_core.training.training_set import TrainingSet, latest_training_set, open_training_set
from tests.support.judging import CUT, LAST, NUM_PINS, make_judged_site, write_model

RULE = PromotionConfig(recall_tolerance=0.125, coverage_tolerance=0.5)
INDEX_SIZE = 160


def silent(message: str) -> None:
    pass


def scores(recall_U: list[float], num_covered: int) -> Scores:
    """`num_covered` pins, retrieved equally often, account for all that is retrieved."""
    num_users = len(recall_U)
    top = np.arange(num_users * 10).reshape(num_users, 10) % max(num_covered, 1)
    each = UserScores(
        num_positives=np.ones(num_users, np.int64),
        num_unaskable=np.zeros(num_users, np.int64),
        num_new=np.ones(num_users, np.int64),
        recall_at_10=np.array(recall_U),
        recall_at_50=np.array(recall_U),
        askable_recall_at_10=np.array(recall_U),
        discovery_at_10=np.array(recall_U) / 2,
        discovery_at_50=np.array(recall_U),
        recall_at_10_by_type={},
        interest_entropy_at_50=np.zeros(num_users),
        top_10=(top if num_covered else np.full_like(top, -1)).astype(np.int32),
        hits_UA=np.zeros((num_users, 1), np.int32),
        positives_UA=np.ones((num_users, 1), np.int32),
    )
    return Scores(question="q", index_size=INDEX_SIZE, user_ids=pa.array(range(num_users)), frequencies={"once": each})


AGAINST: dict[QuestionName, Comparison] = {
    name: {"candidate": 0.5, "baseline": 0.25, "best": "own_frequency", "difference_interval": [0.125, 0.375]}
    for name in ("all", "discovery")
}


def decided(candidate: Scores, champion: Scores) -> Decision:
    return decide_promotion("new", "old", {"new": candidate, "old": champion}, AGAINST, RULE)


CHAMPION = scores([0.5] * 80, 80)


@pytest.mark.parametrize(
    ("recall", "num_covered", "promotes"),
    [
        (0.6, 100, True),
        (0.5, 80, True),
        (0.4375, 40, True),  # exactly what may be lost
        (0.43, 80, False),
        (0.6, 30, False),
        (0.6, 0, False),  # coverage is undefined
    ],
)
def test_a_candidate_may_lose_so_much_and_no_more(recall: float, num_covered: int, promotes: bool) -> None:
    assert decided(scores([recall] * 80, num_covered), CHAMPION).promote == promotes


def test_a_loss_that_chance_explains_does_not_count() -> None:
    """The mean falls from 32/80 to 24/80 both times: once it is eight of eighty users, once it may as well be luck."""
    champion = scores([1.0] * 32 + [0.0] * 48, 80)
    surely = scores([1.0] * 24 + [0.0] * 56, 80)
    perhaps = scores([0.0] * 32 + [1.0] * 24 + [0.0] * 24, 80)
    assert not decided(surely, champion).promote
    assert decided(perhaps, champion).promote


def test_the_reason_is_a_sentence() -> None:
    better = decided(scores([0.625] * 80, 80), CHAMPION)
    assert better.reason == (
        "recall@10 0.6250 against the champion's 0.5000 (95 % of the difference: +0.1250 to +0.1250); "
        "P90 coverage@10 0.4500 against the champion's 0.4500; "
        "discovery@10 0.3125 against the champion's 0.2500 does not decide"
    )
    worse = decided(scores([0.25] * 80, 80), CHAMPION)
    assert worse.reason == (
        "recall@10 0.2500 against the champion's 0.5000 (95 % of the difference: -0.2500 to -0.2500), of which it may "
        "lose 12.5 %: it needs 0.4375; discovery@10 0.1250 against the champion's 0.2500 does not decide"
    )
    both = decided(scores([0.25] * 80, 16), CHAMPION).reason
    assert "recall@10 0.2500" in both
    assert "P90 coverage@10 0.0938" in both


def test_without_a_champion_and_against_itself() -> None:
    judged = {"old": CHAMPION}
    assert decide_promotion("old", "old", judged, AGAINST, RULE) == Decision(
        promote=False, reason="old is the champion already"
    )
    assert decided(scores([0.1] * 80, 80), scores([0.0] * 80, 0)).promote


@pytest.mark.parametrize(
    ("first", "candidate", "promotes"),
    [
        ("always", 0.125, True),
        ("always", 0.5, True),
        ("only_if_better", 0.5, True),
        ("only_if_better", 0.25, False),  # as good is not better
        ("only_if_better", 0.125, False),
    ],
)
def test_the_first_model(first: str, candidate: float, promotes: bool) -> None:
    against = AGAINST | {"all": AGAINST["all"] | {"candidate": candidate}}
    rule = PromotionConfig(first=first)
    decision = decide_promotion("new", None, {"new": CHAMPION}, against, rule)
    assert decision.promote == promotes
    assert decision.reason.startswith("there is no champion yet")
    assert f"all positives: recall@10 {candidate:.4f} against 0.2500 of own_frequency" in decision.reason
    assert "discovery: recall@10 0.5000 against 0.2500" in decision.reason
    assert f"there is no champion yet and serving.promotion.first is {first}" in decision.reason
    is_said = "although a baseline is better in all positives; " in decision.reason
    assert is_said == (promotes and candidate < 0.25)


def test_the_best_baseline_of_each_question_is_compared_by_user() -> None:
    """`scores` gives half of the recall in discovery. The oracle is better than all others, and does not count."""
    candidate = scores([0.5, 0.25, 0.75, 0.5], 10)
    baselines = {
        "popularity_7d": scores([0.0, 0.0, 0.25, 0.0], 10),
        "own_frequency": scores([0.5, 0.5, 1.0, 0.75], 10),
        "pinnersage_20": scores([1.0] * 4, 10),
    }
    found = compare_with_baselines(candidate, baselines)
    assert list(found) == ["all", "discovery"]
    everything = found["all"]
    assert everything["best"] == "own_frequency"
    assert everything["candidate"] == (0.5 + 0.25 + 0.75 + 0.5) / 4
    assert everything["baseline"] == (0.5 + 0.5 + 1.0 + 0.75) / 4
    assert everything["difference_interval"] == list(bootstrap_interval(np.array([0, -0.25, -0.25, -0.25])))
    assert everything["difference_interval"][0] == -0.25
    assert found["discovery"]["candidate"] == everything["candidate"] / 2


BETTER = Decision(promote=True, reason="it is better")
WORSE = Decision(promote=False, reason="it is worse")


@pytest.mark.parametrize(
    ("rule", "promote", "undone_at", "expected"),
    [
        (BETTER, "auto", None, BETTER),
        (WORSE, "auto", None, WORSE),
        (BETTER, "always", None, BETTER),
        (WORSE, "never", None, WORSE),
        (BETTER, "never", None, (False, "promote: never was asked for (the rule finds: it is better)")),
        (WORSE, "always", None, (True, "promote: always was asked for (the rule finds: it is worse)")),
        (BETTER, "auto", "noon", (False, "its promotion was undone at noon (the rule finds: it is better)")),
        (WORSE, "auto", "noon", WORSE),
        (BETTER, "always", "noon", BETTER),  # a run's own request goes before
    ],
)
def test_a_run_overrules_the_rule(
    rule: Decision, promote: Promote, undone_at: str | None, expected: Decision | tuple[bool, str]
) -> None:
    decision = overrule(rule, promote, undone_at=undone_at)
    assert decision == expected or (decision.promote, decision.reason) == expected


# A site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_judged_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def data(site: Site) -> TrainingSet:
    return open_training_set(latest_training_set(site))


def test_models_and_baselines_are_asked_the_same(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    models = {"good": write_model(tmp_path / "good"), "bad": write_model(tmp_path / "bad", is_good=False)}
    lines: list[str] = []
    evaluation = evaluate_models(site, data, models, progress=lines.append)
    all_scores = evaluation.models | evaluation.baselines
    assert {scores.question for scores in all_scores.values()} == {evaluation.question.fingerprint}
    assert evaluation.question.last_ds == LAST
    assert evaluation.question.num_users == data.held_out.num_users
    assert evaluation.question.num_pins == NUM_PINS
    assert list(evaluation.models) == ["good", "bad"]
    assert list(evaluation.models["good"].frequencies) == ["once", "daily", "realtime"]
    assert list(evaluation.baselines) == [
        *("popularity_7d", "popularity_28d", "popularity_ever", "own_frequency", "own_frequency_120d"),
        *("mean_of_20", "mean_of_100", "pinnersage_5", "pinnersage_20"),
    ]
    recall = {name: summarize(scores)["once"]["recall_at_10"] for name, scores in all_scores.items()}
    assert recall["good"] > 1.2 * recall["bad"]
    assert len(lines) == 1 + 2 + 9
    assert lines[-1].startswith("pinnersage_20 (an oracle): recall@10 ")
    again = evaluate_models(site, data, models, progress=silent)
    assert {name: summarize(scores)["once"]["recall_at_10"] for name, scores in again.models.items()} == {
        name: recall[name] for name in models
    }


def test_models_that_cannot_be_judged(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    for folder, match in (
        (write_model(tmp_path / "later", cut_ds=LAST), f"model it was trained on days until {LAST}"),
        (write_model(tmp_path / "wide", feature_dim=5), "reads vectors of 5 numbers, the training set has 2"),
        (tmp_path / "nowhere", "no model in"),
    ):
        with pytest.raises(PipelineError, match=match):
            evaluate_models(site, data, {"it": folder}, progress=silent)


def test_the_device_is_the_sites(
    site: Site, data: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    def stop(*_: object, device: torch.device, **__: object) -> Scores:
        raise StopError(device.type)

    monkeypatch.setattr(promotion, "score_model", stop)
    for has_gpu, wanted, expected in ((True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        chosen = site.model_copy(update={"serving": site.serving.model_copy(update={"device": wanted})})
        with pytest.raises(StopError, match=f"^{expected}$"):
            evaluate_models(chosen, data, {"it": tmp_path}, progress=silent)


def test_selected_users_and_others_are_compared(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    """Users 0, 2 and 4 may be learned from: (1 + 0 + 1) / 3, and the others, 1 and 3, have (0.5 + 0) / 2."""
    (tmp_path / "consent.txt").write_text("0\n2\n4\n77\n")
    users = UsersConfig(file=str(tmp_path / "consent.txt"))
    chosen = site.model_copy(update={"training": site.training.model_copy(update={"users": users})})
    judged = scores([1.0, 0.5, 0.0, 0.0, 1.0], 5)
    found = by_selection(chosen, judged)
    assert found is not None
    assert (found["selected"]["users"], found["others"]["users"]) == (3, 2)
    assert found["selected"]["recall_at_10"] == pytest.approx((1 + 0 + 1) / 3)
    assert found["others"]["recall_at_10"] == pytest.approx((0.5 + 0) / 2)
    assert found["others"]["discovery_at_10"] == pytest.approx((0.25 + 0) / 2)
    assert found["selected"]["recall_at_10_interval"] == list(bootstrap_interval(np.array([1.0, 0.0, 1.0])))
    assert describe_selection(found).startswith("training.users: recall@10 0.6667 for 3 users who are selected (95 %: ")
    rows = selection_rows(found)
    assert [row["users"] for row in rows] == ["3 selected", "2 not selected"]
    assert rows[1]["recall_at_10"] == "0.2500"
    (tmp_path / "consent.txt").write_text("77\n")
    nobody = by_selection(chosen, judged)
    assert nobody is not None
    assert selection_rows(nobody)[0]["recall_at_10"] == "undefined"
    assert "are selected" not in describe_selection(nobody)
    assert by_selection(site, judged) is None
    good, lines = NamedModel(name="good", path=write_model(tmp_path / "good")), list[str]()
    whole = {"champion": None, "scores_path": tmp_path / "scores.parquet", "progress": lines.append}
    assert "by_selection" not in evaluate_and_decide(site, data, good, **whole)
    (tmp_path / "consent.txt").write_text("".join(f"{user}\n" for user in range(0, 60, 2)))
    manifest = evaluate_and_decide(chosen, data, good, **whole)
    counted = manifest["by_selection"]
    assert counted["selected"]["users"] + counted["others"]["users"] == manifest["counts"]["users"]
    assert describe_selection(counted) in lines


def test_the_manifest_of_an_evaluation(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    good = NamedModel(name="good", path=write_model(tmp_path / "good"))
    bad = NamedModel(name="bad", path=write_model(tmp_path / "bad", is_good=False))
    lines: list[str] = []
    file = tmp_path / "scores.parquet"
    manifest = evaluate_and_decide(site, data, good, bad, scores_path=file, progress=lines.append)
    written = read_scores(file)
    assert manifest["question"] == written.question
    assert (manifest["training_set"], manifest["cut_ds"], manifest["last_ds"]) == (data.fingerprint, CUT, LAST)
    assert (manifest["candidate"], manifest["champion"]) == ("good", "bad")
    assert list(manifest["summaries"]) == ["good", "bad", *BASELINE_EMBEDDERS]
    assert manifest["summaries"]["good"] == summarize(written)
    assert manifest["by_day"].keys() == {"good", "bad"}
    assert manifest["by_day"]["good"] == recall_by_day(written)
    assert manifest["num_pins"] == NUM_PINS
    assert manifest["counts"]["users"] == data.held_out.num_users
    assert recall_by_type(manifest["summaries"]["good"]["once"]).keys() == {"closeup"}
    reason = manifest["decision"]["reason"]
    assert manifest["decision"] == {"promote": True, "reason": reason, "asked_for": "auto"}
    assert manifest["candidate_is_champion"]
    assert manifest["index"] == "paper"
    assert manifest["without_vector"] == {
        "share_of_actions": 0,
        "share_of_positives": 0,
        "remedy": "source.pins.catalogue: pins/{ds}.parquet has no row with `vector` for these pins at the cut",
    }
    once = {name: each["once"] for name, each in manifest["summaries"].items() if name not in ORACLES}
    for name, recall in (
        ("all", {name: each["recall_at_10"] for name, each in once.items()}),
        ("discovery", {name: each["discovery_at_10"] for name, each in once.items()}),
    ):
        compared = manifest["against_baselines"][cast("QuestionName", name)]
        assert compared["candidate"] == recall["good"]
        assert (
            compared["baseline"]
            == recall[compared["best"]]
            == max(recall[each] for each in once.keys() - {"good", "bad"})
        )
    assert judge_baselines(manifest).ds == LAST
    assert "interest_entropy_at_50" not in manifest["summaries"]["good"]["once"]  # the site has no interests
    assert lines[-1] == f"promoted: {reason}"


def test_who_is_champion_after_an_evaluation(site: Site, data: TrainingSet, tmp_path: Path) -> None:
    good = NamedModel(name="good", path=write_model(tmp_path / "good"))
    bad = NamedModel(name="bad", path=write_model(tmp_path / "bad", is_good=False))

    def decided_for(candidate: NamedModel, champion: NamedModel | None, promote: Promote) -> tuple[bool, bool]:
        file = tmp_path / "scores.parquet"
        manifest = evaluate_and_decide(
            site, data, candidate, champion, promote=promote, scores_path=file, progress=silent
        )
        return manifest["decision"]["promote"], manifest["candidate_is_champion"]

    assert decided_for(bad, good, "auto") == (False, False)
    assert decided_for(bad, good, "always") == (True, True)
    assert decided_for(good, bad, "never") == (False, False)
    assert decided_for(good, good, "always") == (False, True)  # nothing is promoted, and it is champion
    assert decided_for(good, None, "auto") == (True, True)


def test_once_decides_and_must_be_asked() -> None:
    with pytest.raises(ValueError, match="frequencies must contain once"):
        PromotionConfig(frequencies=("daily",))
    assert math.isclose(PromotionConfig().recall_tolerance, 0.02)


# A model of parts


@pytest.fixture(scope="module")
def parts_model(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, run_dir = latest_training_set(site), tmp_path_factory.mktemp("parts") / "run"
    config, _ = resolve_config(path, "auto", {"optimizer": {"num_steps": 3}, "parts": {"memory": True}})
    with single_threaded():
        train(config, training_set=path, run_dir=run_dir, num_workers=0, observer=Silent())
    return run_dir / "model"


class Silent:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def test_the_vector_of_a_candidate_of_parts_is_scored_alone_and_decides_nothing(
    site: Site, data: TrainingSet, parts_model: Path, tmp_path: Path
) -> None:
    parts = NamedModel(name="parts", path=parts_model)
    towers = NamedModel(name="towers", path=write_model(tmp_path / "towers"))
    lines: list[str] = []
    file = tmp_path / "scores.parquet"
    manifest = evaluate_and_decide(site, data, parts, towers, scores_path=file, progress=lines.append)
    assert list(manifest["summaries"]) == ["parts", "parts vector alone", "towers", *BASELINE_EMBEDDERS]
    served, alone = (manifest["summaries"][name] for name in ("parts", "parts vector alone"))
    assert served == summarize(read_scores(file))
    assert list(served) == ["once", "daily", "realtime"]
    assert list(alone) == ["once"]
    assert served["once"]["recall_at_10"] != alone["once"]["recall_at_10"]
    question = evaluate_models(site, data, {}, progress=silent).question
    expected = score_model(question, parts_model, frequencies=("once",), has_memory=False, progress=silent)
    assert alone == summarize(expected)
    assert manifest["vector_against_baselines"]["all"]["candidate"] == alone["once"]["recall_at_10"]
    assert manifest["vector_against_baselines"]["discovery"]["candidate"] == alone["once"]["discovery_at_10"]
    assert manifest["vector_against_baselines"]["all"]["best"] == manifest["against_baselines"]["all"]["best"]
    assert f"recall@10 {served['once']['recall_at_10']:.4f} against the champion's" in manifest["decision"]["reason"]
    assert manifest["by_day"].keys() == {"parts", "towers"}
    assert manifest["without_vector"]["share_of_positives"] == 0
    assert [line for line in lines if line.startswith("parts vector alone: recall@10 ")]
    other = evaluate_and_decide(site, data, towers, parts, scores_path=file, progress=silent)
    assert list(other["summaries"]) == ["towers", "parts", *BASELINE_EMBEDDERS]
    assert "vector_against_baselines" not in other
    assert other["summaries"]["parts"] == served
