"""What people see of an evaluation: the asset's page, the figures in MLflow, `pf status` and the demo's last lines."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pf_assets.assets.evaluation import _note
from pf_assets.cli import status
from pf_assets.cli.pipeline import is_evaluated
from pf_assets.cli.summary import comparison_lines, decision_line
from pf_assets.metadata.evaluation import describe_evaluation, describe_without_vector
from pf_assets.tracking.served_models import ServedModels
from pf_assets.tracking.tracking import DECISION_TAG, VERDICT_TAG, RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.manifest import EvaluationManifest, VectorCoverage
from tests.support.evaluated import ABOVE, BELOW, REMEDY, UNDEFINED, make_manifest, make_summary, write_evaluation
from tests.support.shared import SharedSites
from tests.support.sites import make_site

ALL_LINE = (
    "all positives: recall@10 0.0435 against 0.0457 of own_frequency (95 % of the difference: -0.0081 to +0.0036)"
)
DISCOVERY_LINE = (
    "discovery: recall@10 0.0312 against 0.0183 of popularity_7d (95 % of the difference: +0.0052 to +0.0201)"
)
VECTOR_LINE = (
    "46.0 % of the positives, which count as misses, and 12.5 % of the actions before the cut are on pins without a "
    f"vector; see {REMEDY}"
)
OLD: dict[str, Any] = {"index": None, "without_vector": None, "against_baselines": None}
"""Changes that make a manifest one of an older version."""


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return shared_sites.add_mlflow(make_site(tmp_path / "site"))


def register(site: Site, name: str) -> RegisteredModel:
    tracking, run_dir = Tracking(site), site.directory / name
    (run_dir / "model").mkdir(parents=True)
    run = tracking.start(run_dir, name=name, params={}, tags={})
    tracking.register(run, run_dir, model_version=name)
    candidate = tracking.candidate()
    assert candidate is not None
    return candidate


# The asset's page


def rows_of(page: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [dict(record.data) for record in page[name].records]


def test_the_page_shows_both_questions_and_what_has_no_vector(tmp_path: Path) -> None:
    page = describe_evaluation(tmp_path, make_manifest(), {})
    assert next(iter(page.items())) == ("without_vector", VECTOR_LINE)
    assert page["index"] == "paper: 1,200 pins, random candidates (section 4.1)"
    assert page["model_beats_baselines"].startswith("new-2 is below the best baseline in all positives")
    assert page["discovery_at_10"] == 0.0435 / 4
    candidate, frequent, oracle = rows_of(page, "judged")
    assert [candidate["who"], frequent["who"], oracle["who"]] == [
        *("new-2 (candidate)", "own_frequency"),
        "oracle: PinnerSage over 20",
    ]
    assert list(candidate) == [
        *("who", "recall_at_10", "95 % interval", "askable_recall_at_10", "recall_at_50"),
        *("discovery_at_10", "95 % interval, discovery", "discovery_at_50"),
        *("interest_entropy_at_50", "p90_coverage_at_10", "users without embedding"),
    ]
    assert (candidate["recall_at_10"], candidate["askable_recall_at_10"]) == ("0.0435", "0.0870")
    assert candidate["95 % interval, discovery"] == f"{0.0435 / 8:.4f} to {0.0435 / 2:.4f}"
    everything, new = rows_of(page, "against_baselines")
    assert everything == {
        "candidate": "as served",
        "question": "all positives",
        "recall_at_10": "0.0435",
        "best baseline": "own_frequency",
        "its recall_at_10": "0.0457",
        "95 % of the difference": "-0.0081 to +0.0036",
    }
    assert (new["question"], new["best baseline"]) == ("discovery", "popularity_7d")


WITH_VECTOR: dict[str, Any] = {
    "summaries": {
        "new-2": {"once": make_summary(0.0435)},
        "new-2 vector alone": {"once": make_summary(0.04)},
        "mean_of_100": {"once": make_summary(0.02)},
    },
    "vector_against_baselines": {"all": BELOW | {"candidate": 0.04}, "discovery": ABOVE},
}
"""Changes that make the candidate one of parts, whose vector is scored alone."""

RATIOS = (
    f"as served {0.0435 / 0.02:.2f} × mean_of_100, {0.0435 / 0.02:.2f} × in discovery; "
    f"vector alone {0.04 / 0.02:.2f} × mean_of_100, {0.04 / 0.02:.2f} × in discovery"
)


def test_the_page_shows_the_vector_alone(tmp_path: Path) -> None:
    page = describe_evaluation(tmp_path, make_manifest(**WITH_VECTOR), {})
    rows = rows_of(page, "against_baselines")
    assert [(row["candidate"], row["question"]) for row in rows] == [
        *(("as served", "all positives"), ("as served", "discovery")),
        *(("vector alone", "all positives"), ("vector alone", "discovery")),
    ]
    assert [row["recall_at_10"] for row in rows] == ["0.0435", "0.0312", "0.0400", "0.0312"]
    assert [row["who"] for row in rows_of(page, "judged")][:2] == ["new-2 (candidate)", "new-2 vector alone"]
    assert [row["who"] for row in rows_of(page, "by_frequency")] == ["new-2 (candidate)"]
    assert (page["recall_at_10"], page["vector_recall_at_10"]) == (0.0435, 0.04)
    assert page["vector_alone"].startswith("vector alone, all positives: recall@10 0.0400 against 0.0457")
    assert page["vector_alone"].endswith(RATIOS)
    assert "vector_alone" not in describe_evaluation(tmp_path, make_manifest(), {})


def test_a_share_that_is_not_known_is_not_a_number() -> None:
    coverage = VectorCoverage(share_of_actions=math.nan, share_of_positives=0.5, remedy=REMEDY)
    assert "50.0 % of the positives" in describe_without_vector(coverage)
    assert "and an unknown share of the actions" in describe_without_vector(coverage)
    complete = VectorCoverage(share_of_actions=0.0, share_of_positives=0.0, remedy=REMEDY)
    assert REMEDY not in describe_without_vector(complete)


def test_a_metric_that_no_summary_has_is_absent(tmp_path: Path) -> None:
    summaries = {name: {"once": make_summary(0.1, interest_entropy_at_50=None)} for name in ("new-2", "own_frequency")}
    page = describe_evaluation(tmp_path, make_manifest(summaries=summaries), {})
    assert "interest_entropy_at_50" not in page
    assert all("interest_entropy_at_50" not in row for row in rows_of(page, "judged"))
    summaries["own_frequency"]["once"] = make_summary(0.1)
    page = describe_evaluation(tmp_path, make_manifest(summaries=summaries), {})
    assert [row["interest_entropy_at_50"] for row in rows_of(page, "judged")] == ["", "1.5000"]


def test_a_question_without_positives_is_undefined(tmp_path: Path) -> None:
    undefined = {"discovery_at_10": math.nan, "discovery_at_10_interval": [math.nan] * 2, "discovery_at_50": math.nan}
    manifest = make_manifest(
        summaries={"new-2": {"once": make_summary(0.1, **undefined)}},
        against_baselines={"all": ABOVE, "discovery": UNDEFINED},
    )
    page = describe_evaluation(tmp_path, manifest, {})
    assert page["discovery_at_10"] == "undefined"
    assert rows_of(page, "judged")[0]["95 % interval, discovery"] == "undefined to undefined"
    assert rows_of(page, "against_baselines")[1]["recall_at_10"] == "undefined"


# MLflow


def test_the_figures_are_in_mlflow(site: Site) -> None:
    tracking, candidate = Tracking(site), register(site, "new")
    manifest = make_manifest(candidate.served_version)
    _note(tracking, candidate, manifest)
    run = tracking._client.get_run(candidate.run_id).data
    expected = {
        "evaluation_recall_at_10": 0.0435,
        "evaluation_recall_at_50": 2 * 0.0435,
        "evaluation_askable_recall_at_10": 0.0435 / 0.5,
        "evaluation_discovery_at_10": 0.0435 / 4,
        "evaluation_discovery_at_10_low": 0.0435 / 8,
        "evaluation_discovery_at_10_high": 0.0435 / 2,
        "evaluation_discovery_at_10_daily": 0.05 / 4,
        "evaluation_all_best_baseline": 0.0457,
        "evaluation_all_difference_low": -0.0081,
        "evaluation_discovery_difference_high": 0.0201,
        "evaluation_positives_without_vector": 0.46,
        "evaluation_actions_without_vector": 0.125,
    }
    assert expected.items() <= run.metrics.items()
    tags = tracking.versions()[0].tags
    assert tags[VERDICT_TAG].startswith("failed: new-1 is below the best baseline in all positives")
    assert tags[DECISION_TAG] == "promoted: there is no champion yet"
    assert tags["evaluation_index"].startswith("paper: 1,200 pins")
    assert tags["evaluation_without_vector"] == VECTOR_LINE
    assert tags["evaluation_discovery_at_10"] == run.tags["evaluation_discovery_at_10"] == f"{0.0435 / 4:.4f}"


def test_the_figures_of_the_vector_alone_are_in_mlflow(site: Site) -> None:
    tracking, candidate = Tracking(site), register(site, "new")
    name = candidate.served_version
    summaries = {name: {"once": make_summary(0.0435)}, f"{name} vector alone": {"once": make_summary(0.04)}}
    _note(tracking, candidate, make_manifest(name, summaries=summaries))
    metrics = tracking._client.get_run(candidate.run_id).data.metrics
    assert (metrics["evaluation_recall_at_10"], metrics["evaluation_vector_recall_at_10"]) == (0.0435, 0.04)
    assert metrics["evaluation_vector_discovery_at_10"] == 0.04 / 4


def test_undefined_figures_are_not_in_mlflow(site: Site) -> None:
    tracking, candidate = Tracking(site), register(site, "new")
    manifest = make_manifest(candidate.served_version, against_baselines={"all": ABOVE, "discovery": UNDEFINED})
    _note(tracking, candidate, manifest)
    metrics = tracking._client.get_run(candidate.run_id).data.metrics
    assert "evaluation_all_best_baseline" in metrics
    assert "evaluation_discovery_best_baseline" not in metrics
    assert tracking.versions()[0].tags[VERDICT_TAG].startswith("passed: ")


# pf status


def status_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(status, "current_site", lambda: site)
    app = typer.Typer()
    app.command()(status.status)
    result = CliRunner().invoke(app)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_status_fails_if_a_baseline_is_better(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    served = register(site, "new").served_version
    write_evaluation(site, make_manifest(served))
    exit_code, shown = status_of(site, monkeypatch)
    assert exit_code == 1
    assert f"model_beats_baselines    failed: {served} is below the best baseline in all positives" in shown
    assert ALL_LINE in shown
    assert DISCOVERY_LINE in shown
    assert VECTOR_LINE in shown
    assert "raw_actions " in shown, "what the command showed before is still there"
    write_evaluation(site, make_manifest(served, against_baselines={"all": ABOVE, "discovery": ABOVE}))
    exit_code, shown = status_of(site, monkeypatch)
    assert exit_code == 0
    assert "model_beats_baselines    passed" in shown
    assert "not evaluated" not in shown


@pytest.mark.parametrize("question", ["all", "discovery"])
def test_either_question_can_fail(site: Site, monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    against = {"all": ABOVE, "discovery": ABOVE} | {question: BELOW}
    write_evaluation(site, make_manifest(register(site, "new").served_version, against_baselines=against))
    assert status_of(site, monkeypatch)[0] == 1


def test_status_without_a_verdict_does_not_fail(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_code, shown = status_of(site, monkeypatch)
    assert exit_code == 0
    assert "model_beats_baselines" not in shown
    register(site, "old")
    exit_code, shown = status_of(site, monkeypatch)
    assert exit_code == 0
    assert f"the candidate was not evaluated yet: {materialize_command('offline_evaluation')}" in shown
    write_evaluation(site, make_manifest("old-1", **OLD))
    exit_code, shown = status_of(site, monkeypatch)
    assert exit_code == 0
    assert "not judged: this evaluation was made by a version that did not compare" in shown
    register(site, "newer")
    assert "the candidate was not evaluated yet" in status_of(site, monkeypatch)[1]


# The demo


def test_the_summary_compares_the_model_with_the_baselines_in_both_questions() -> None:
    below = comparison_lines(make_manifest())
    assert below[1] == "(index paper: 1,200 pins, random candidates (section 4.1))"
    assert below[2].split() == ["all", "positives", "new", "pins", "only"]
    assert below[3].split() == ["the", "model,", "as", "served", "0.0435", f"{0.0435 / 4:.4f}"]
    assert any(
        line.startswith("below a baseline (95 % of the difference to the best: all positives ") for line in below
    )
    assert VECTOR_LINE in below
    good = comparison_lines(make_manifest(against_baselines={"all": ABOVE, "discovery": ABOVE}))
    assert any(line.startswith("not below the best baseline in either question") for line in good)
    assert any("not judged" in line for line in comparison_lines(make_manifest(**OLD)))
    assert any(line.startswith("its vector alone ") for line in comparison_lines(make_manifest(**WITH_VECTOR)))


def test_the_summary_labels_oracles_and_never_lists_them_as_the_best() -> None:
    lines = comparison_lines(make_manifest())
    baselines = [line.rsplit(maxsplit=2)[0] for line in lines[4:] if re.search(r" 0\.\d{4}$", line)]
    assert baselines == ["own_frequency", "oracle: PinnerSage over 20"], "although the oracle finds three times as many"


def test_the_summary_says_who_serves() -> None:
    assert decision_line(make_manifest(champion=None)) == "first model: champion"
    candidate = make_manifest()["candidate"]
    assert decision_line(make_manifest(champion=candidate)) == "champion"
    decision = {"promote": False, "reason": "a baseline is better", "asked_for": "auto"}
    refused = make_manifest(decision=decision, candidate_is_champion=False)
    assert decision_line(refused) == "it does not serve: a baseline is better"


def test_the_demo_evaluates_every_candidate(site: Site) -> None:
    assert not is_evaluated(site)
    first = register(site, "a")
    write_evaluation(site, make_manifest(first.served_version))
    assert not is_evaluated(site), "there is no champion to serve"
    Tracking(site).promote(first.version, because="a test")
    assert is_evaluated(site)
    register(site, "b")
    assert not is_evaluated(site)


# Without a champion


def refusal(site: Site) -> str:
    with pytest.raises(PipelineError) as refused:
        ServedModels(site).newest("2026-01-01")
    return str(refused.value)


def test_without_a_champion_the_error_names_the_next_command(site: Site) -> None:
    train = materialize_command("training_set,pinnerformer_model,offline_evaluation")
    assert refusal(site) == (
        f"there is no champion to embed with, and no model is registered; train and evaluate one: {train}"
    )
    candidate = register(site, "new")
    evaluate = materialize_command("offline_evaluation")
    assert refusal(site).startswith(
        "there is no champion to embed with: candidate new-1 was not evaluated yet; evaluate it, which decides about "
        f"its promotion: {evaluate} (or"
    )
    decision = {"promote": False, "reason": "a baseline is better", "asked_for": "auto"}
    manifest: EvaluationManifest = make_manifest(candidate.served_version, decision=decision)
    _note(Tracking(site), candidate, manifest)
    assert refusal(site) == (
        "there is no champion to embed with: candidate new-1 was evaluated and not promoted: a baseline is better; "
        "train a better one, or promote it nevertheless: pf promote 1 --because TEXT"
    )
    Tracking(site).promote(1, because="a test")
    assert ServedModels(site).newest("2026-01-01").model_version == "new-1"
