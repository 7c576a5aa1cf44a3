"""offline_evaluation through real Dagster runs with a real MLflow, and `pf promote`, which overrules it."""

import logging
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from pf_assets.assets.evaluation import PromoteWhen, evaluation_checks, evaluation_dir, offline_evaluation_asset
from pf_assets.assets.logs import raw_actions_asset
from pf_assets.assets.model import pinnerformer_model_asset, training_set_asset
from pf_assets.cli import promotion as promotion_cli
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.evaluation import promotion
from pf_core.evaluation.manifest import BY_TYPE
from pf_core.evaluation.scores import read_scores
from pf_core.evaluation.verdict import judge_baselines
from pf_core.names import path_name_of
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.storage.locks import exclusive
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.evaluated import ABOVE, make_manifest, write_evaluation
from tests.support.judging import CUT, LAST, NUM_PINS, make_judged_site, write_model
from tests.support.registry import promote_first
from tests.support.shared import SharedSites


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return shared_sites.copy("judged", lambda root: shared_sites.add_mlflow(make_judged_site(root)), tmp_path)


@pytest.fixture
def instance(memory_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return memory_instance


def register(site: Site, name: str, *, is_good: bool) -> RegisteredModel:
    tracking, run_dir = Tracking(site), site.directory / "pinnerformer_model" / name
    write_model(run_dir / "model", is_good=is_good)
    run = tracking.start(run_dir, name=name, params={}, tags={})
    tracking.keep(run, [run_dir / "model"])
    tracking.register(run, run_dir, model_version=name)
    candidate = tracking.candidate()
    assert candidate is not None
    return candidate


def register_champion(site: Site, name: str, *, is_good: bool) -> RegisteredModel:
    champion = register(site, name, is_good=is_good)
    promote_first(Tracking(site))
    return champion


def evaluate(
    site: Site, instance: dg.DagsterInstance, promote: PromoteWhen = PromoteWhen.auto
) -> dg.ExecuteInProcessResult:
    assets = [raw_actions_asset(site), training_set_asset(site), pinnerformer_model_asset(site)]
    return dg.materialize(
        [*assets, offline_evaluation_asset(site), *evaluation_checks(site)],
        selection=dg.AssetSelection.assets("offline_evaluation"),
        instance=instance,
        run_config={"ops": {"offline_evaluation": {"config": {"promote": promote.value}}}},
        raise_on_error=False,
    )


def verdict(result: dg.ExecuteInProcessResult) -> tuple[bool, str]:
    assert result.success
    check = checks_of(result)["candidate_was_promoted"]
    return check.passed, check.description or ""


def checks_of(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert checks.keys() == {"candidate_was_promoted", "model_beats_baselines"}
    assert all(check.severity == dg.AssetCheckSeverity.WARN and not check.blocking for check in checks.values())
    return checks


def champion_of(site: Site) -> str:
    champion = Tracking(site).champion()
    assert champion is not None
    return champion.served_version


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    data = result.failure_data_for_node("offline_evaluation")
    assert data is not None
    assert data.error is not None
    return data.error.to_string()


def test_a_better_candidate_becomes_champion(site: Site, instance: dg.DagsterInstance) -> None:
    register_champion(site, "bad", is_good=False)
    good = register(site, "good", is_good=True)
    result = evaluate(site, instance)
    passed, reason = verdict(result)
    assert passed
    assert "against the champion's" in reason
    assert champion_of(site) == "good-2"
    assert Tracking(site).promotions()[-1].because == reason

    manifest = read_json(evaluation_dir(site) / MANIFEST)
    assert (manifest["candidate"], manifest["champion"], manifest["candidate_is_champion"]) == ("good-2", "bad-1", True)
    assert (manifest["cut_ds"], manifest["last_ds"]) == (CUT, LAST)
    assert manifest["decision"] == {"promote": True, "reason": reason, "asked_for": "auto"}
    assert {"good-2", "bad-1"} < set(manifest["summaries"])
    assert len(manifest["summaries"]) >= 2 + 6

    ours = manifest["summaries"]["good-2"]["once"]
    low, high = ours["recall_at_10_interval"]
    run = Tracking(site)._client.get_run(good.run_id)
    noted = {
        "evaluation_recall_at_10": ours["recall_at_10"],
        "evaluation_recall_at_10_low": low,
        "evaluation_recall_at_10_high": high,
        "evaluation_p90_coverage_at_10": ours["p90_coverage_at_10"],
        "evaluation_recall_at_10_realtime": manifest["summaries"]["good-2"]["realtime"]["recall_at_10"],
        "evaluation_recall_at_10/closeup_once": ours["recall_at_10/closeup"],
    }
    assert noted.items() <= run.data.metrics.items()
    kept = {file.path for file in Tracking(site)._client.list_artifacts(good.run_id)}
    assert {"scores.parquet", "recall_by_day.png"} <= kept
    scores = read_scores(evaluation_dir(site) / "scores.parquet")
    assert np.nanmean(scores.frequencies["once"].recall_at_10) == ours["recall_at_10"]
    tags = Tracking(site).versions()[0].tags
    assert tags["evaluation_decision"] == run.data.tags["evaluation_decision"] == f"promoted: {reason}"
    assert tags["evaluation_recall_at_10"] == f"{ours['recall_at_10']:.4f}"

    shown = result.asset_materializations_for_node("offline_evaluation")[0].metadata
    assert shown["decision"].value == f"promoted: {reason}"
    assert shown["recall_at_10"].value == ours["recall_at_10"]
    assert shown["index_pins"].value == NUM_PINS
    assert f"/runs/{good.run_id}" in shown["mlflow_candidate"].value
    assert "/runs/" in shown["mlflow_champion"].value
    rows = [record.data for record in shown["judged"].value.records]
    assert [row["who"] for row in rows[:2]] == ["good-2 (candidate)", "bad-1 (champion)"]
    assert len(rows) == len(manifest["summaries"])
    assert rows[0]["95 % interval"] == f"{low:.4f} to {high:.4f}"
    embedded = [record.data["embedded"] for record in shown["by_frequency"].value.records]
    assert embedded == ["once", "daily", "realtime"] * 2
    assert shown["by_action_type"].value.records[0].data["closeup"] == f"{ours['recall_at_10']:.4f}"
    assert shown["users_without_positives"].value == 0
    assert "data:image/png;base64" in shown["recall_by_day"].value
    assert any("held-out users" in entry.user_message for entry in instance.all_logs(result.run_id))


def test_a_worse_candidate_waits_for_a_person(site: Site, instance: dg.DagsterInstance) -> None:
    register_champion(site, "good", is_good=True)
    bad = register(site, "bad", is_good=False)
    passed, reason = verdict(evaluate(site, instance))
    assert not passed
    assert reason.startswith("recall@10")
    assert champion_of(site) == "good-1"
    assert Tracking(site)._client.get_run(bad.run_id).data.tags["evaluation_decision"] == f"not promoted: {reason}"
    passed, forced = verdict(evaluate(site, instance, PromoteWhen.always))
    assert passed
    assert forced == f"promote: always was asked for (the rule finds: {reason})"
    assert champion_of(site) == "bad-2"


def test_never_means_never_and_an_undone_promotion_stays_undone(site: Site, instance: dg.DagsterInstance) -> None:
    register_champion(site, "bad", is_good=False)
    register(site, "good", is_good=True)
    passed, reason = verdict(evaluate(site, instance, PromoteWhen.never))
    assert not passed
    assert reason.startswith("promote: never was asked for (the rule finds: recall@10")
    assert champion_of(site) == "bad-1"
    assert verdict(evaluate(site, instance))[0]
    Tracking(site).undo_promotion(because="complaints")
    passed, reason = verdict(evaluate(site, instance))
    assert not passed
    assert reason.startswith("its promotion was undone at ")
    assert champion_of(site) == "bad-1"


AWKWARD = [
    *(
        "save+",
        "save-",
        "save ",
        "保存",
        "two\nlines",
        "\x1b[31mred",
        "<b>|`$x$",
        "a/../b",
        ".",
        "..",
        "...",
        "/",
        "a" * 400,
    ),
    *("a" * 399 + "b", "who", "::", "save:2b:", "café", "cafe\u0301", "\u202etxt"),
]
"""Action types and surfaces as a log may have them; an empty one counts as missing."""


def test_any_action_type_and_surface_can_be_evaluated(
    tmp_path: Path, shared_sites: SharedSites, instance: dg.DagsterInstance
) -> None:
    site = shared_sites.add_mlflow(make_judged_site(tmp_path, action_types=AWKWARD))
    data = open_training_set(latest_training_set(site))
    assert data.action_types == data.surfaces == sorted(AWKWARD)
    run_dir, tracking = site.directory / "pinnerformer_model" / "awkward", Tracking(site)
    write_model(run_dir / "model", action_types=data.action_types, surfaces=data.surfaces)
    run = tracking.start(run_dir, name="awkward", params={}, tags={})
    tracking.register(run, run_dir, model_version="awkward")
    tracking.keep(run, [run_dir / "model"])
    result = evaluate(site, instance)
    assert result.success, failure_of(result)

    summary = read_json(evaluation_dir(site) / MANIFEST)["summaries"]["awkward-1"]["once"]
    words = {key.removeprefix(BY_TYPE) for key in summary if key.startswith(BY_TYPE)}
    assert words == set(AWKWARD)
    metrics = tracking._client.get_run(run.run_id).data.metrics
    for word in words:
        assert metrics[path_name_of(f"evaluation_{BY_TYPE}{word}_once")] == summary[BY_TYPE + word]
    assert metrics["evaluation_recall_at_10/save:2b:_once"] == summary["recall_at_10/save+"]
    shown = result.asset_materializations_for_node("offline_evaluation")[0].metadata["by_action_type"].value
    names = set(shown.records[0].data)
    assert len(names) == 1 + len(words)
    assert all(name.isprintable() and len(name) < 210 for name in names)
    assert {"who", "who (action type)", "save+", "\\x1b[31mred", "two\\nlines"} <= names


def test_the_champion_alone(site: Site, instance: dg.DagsterInstance) -> None:
    register_champion(site, "good", is_good=True)
    for wish in (PromoteWhen.never, PromoteWhen.always):
        result = evaluate(site, instance, wish)
        assert verdict(result) == (True, "good-1 is the champion already")
    shown = result.asset_materializations_for_node("offline_evaluation")[0].metadata
    assert shown["judged"].value.records[0].data["who"] == "good-1 (candidate and champion)"
    assert len(Tracking(site).promotions()) == 1


def test_the_evaluation_decides_about_the_first_model(site: Site, instance: dg.DagsterInstance) -> None:
    register(site, "good", is_good=True)
    assert not verdict(evaluate(site, instance, PromoteWhen.never))[0]
    assert Tracking(site).champion() is None
    passed, reason = verdict(evaluate(site, instance))
    assert passed
    assert "already" not in reason
    assert champion_of(site) == "good-1"
    assert [one.because for one in Tracking(site).promotions()] == [reason]


def test_a_first_model_that_loses_is_promoted_and_the_run_says_so(site: Site, instance: dg.DagsterInstance) -> None:
    register(site, "bad", is_good=False)
    result = evaluate(site, instance)
    assert result.success
    passed, reason = verdict(result)
    assert passed
    assert champion_of(site) == "bad-1"
    assert "serving.promotion.first is always, although a baseline is better in all positives" in reason
    assert not checks_of(result)["model_beats_baselines"].passed
    [warning] = [entry.user_message for entry in instance.all_logs(result.run_id) if entry.level == logging.WARNING]
    assert warning.startswith("model_beats_baselines failed")
    assert "bad-1 is below the best baseline in all positives" in warning
    assert "It is the champion all the same (serving.promotion). `pf status` has exit code 1, and this run" in warning


def test_a_champion_that_changes_meanwhile_is_not_replaced(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person promotes another model while the candidate is compared with the champion."""
    register_champion(site, "bad", is_good=False)
    chosen = register(site, "other", is_good=False)
    register(site, "good", is_good=True)
    decide = promotion.evaluate_and_decide

    def decide_and_meddle(*arguments: Any, **options: Any) -> Any:
        found = decide(*arguments, **options)
        Tracking(site).promote(chosen.version, because="a person knows better")
        return found

    monkeypatch.setattr(promotion, "evaluate_and_decide", decide_and_meddle)
    assert (
        "another model became the champion while good-3 was compared with the one before it; nothing was decided; run "
        "again: dagster asset materialize --select offline_evaluation"
    ) in failure_of(evaluate(site, instance))
    assert champion_of(site) == "other-2"
    assert not (evaluation_dir(site) / MANIFEST).exists()


def test_what_cannot_be_judged_is_told_in_a_sentence(site: Site, instance: dg.DagsterInstance) -> None:
    assert "no model is registered yet; train one: dagster asset materialize" in failure_of(evaluate(site, instance))
    register(site, "good", is_good=True)
    with exclusive(site.directory / "training_set", "training_set"):
        assert "another run is writing training_set" in failure_of(evaluate(site, instance))
    shutil.rmtree(site.directory / "raw_actions" / LAST)
    assert f"ends with {CUT}, and raw_actions has no day after it" in failure_of(evaluate(site, instance))
    assert not (evaluation_dir(site) / MANIFEST).exists()


def check_alone(site: Site, instance: dg.DagsterInstance) -> dict[str, dg.AssetCheckEvaluation]:
    """The checks on the manifest that is there."""
    result = dg.materialize(
        [offline_evaluation_asset(site), *evaluation_checks(site)],
        selection=dg.AssetSelection.checks_for_assets("offline_evaluation"),
        instance=instance,
    )
    assert result.success
    return checks_of(result)


def test_the_checks_without_an_evaluation(site: Site, instance: dg.DagsterInstance) -> None:
    for check in check_alone(site, instance).values():
        assert (check.passed, check.description) == (False, "nothing was evaluated yet")


def test_a_candidate_below_a_baseline_fails_the_check(site: Site, instance: dg.DagsterInstance) -> None:
    write_evaluation(site, make_manifest())
    check = check_alone(site, instance)["model_beats_baselines"]
    assert not check.passed
    assert check.description == judge_baselines(make_manifest()).reason
    for figure in ("0.0435", "0.0457", "-0.0081 to +0.0036", "0.0312", "0.0183", "+0.0052 to +0.0201"):
        assert figure in (check.description or "")
    shown = check.metadata["questions"]
    assert isinstance(shown, dg.TableMetadataValue)
    assert [record.data["question"] for record in shown.records] == ["all positives", "discovery"]
    assert [record.data["best baseline"] for record in shown.records] == ["own_frequency", "popularity_7d"]


def test_a_candidate_above_the_baselines_passes_the_check(site: Site, instance: dg.DagsterInstance) -> None:
    write_evaluation(site, make_manifest(against_baselines={"all": ABOVE, "discovery": ABOVE}))
    assert check_alone(site, instance)["model_beats_baselines"].passed


# pf promote


@pytest.fixture
def app(site: Site, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(promotion_cli, "current_site", lambda: site)
    app = typer.Typer()
    app.command()(promotion_cli.promote)
    return app


def output_of(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, PipelineError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output
    return result.output


def test_a_person_promotes_and_takes_it_back(app: typer.Typer, site: Site, instance: dg.DagsterInstance) -> None:
    assert output_of(app).startswith("error: no model is registered yet")
    register_champion(site, "good", is_good=True)
    register(site, "bad", is_good=False)
    verdict(evaluate(site, instance))
    assert output_of(app, "2").startswith("error: a promotion needs a reason")
    assert "the champion is version 2, model bad-2" in output_of(app, "2", "--because", "for a test")
    assert champion_of(site) == "bad-2"
    assert output_of(app, "2", "--undo").startswith("error: a version and --undo are given")
    assert output_of(app, "7", "--because", "a typo").startswith("error: pinnerformer-small has no version 7")
    assert "the champion is version 1, model good-1" in output_of(app, "--undo", "--because", "it was a test")
    assert champion_of(site) == "good-1"
    lines = output_of(app).splitlines()
    recall = Tracking(site).versions()[0].tags["evaluation_recall_at_10"]
    assert lines[0].split()[:6] == ["version", "2", "bad-2", "candidate", "recall@10", recall]
    assert lines[1].startswith("  not promoted: recall@10")
    assert lines[2] in ("  model_beats_baselines passed", "  model_beats_baselines failed")
    assert lines[3].split()[:6] == ["version", "1", "good-1", "champion", "recall@10", "-"]
    assert lines[4] == "champions, newest first"
    assert "version 2: for a test (undone " in lines[5]
    assert lines[5].endswith(": it was a test)")
    assert lines[6].endswith("version 1: first model")
