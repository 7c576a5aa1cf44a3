"""ablation_runs through real Dagster runs with a real MLflow, and the results read back from it."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
from typer.testing import CliRunner

from pf_assets.cli import experiments as experiments_cli
from pf_assets.cli.experiments import choose_experiments
from pf_assets.cli.main import app
from pf_assets.definitions import build_definitions
from pf_assets.tracking.experiment_store import ExperimentStore, read_results
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.evaluation.scores import read_scores
from pf_core.experiments.plan import JUDGEMENT, SCORES, experiments_dir, plan_experiments
from pf_core.experiments.recipes import experiments
from pf_core.storage.files import write_json
from pf_core.storage.locks import exclusive
from tests.support.shared import SharedSites, copy_site
from tests.support.tiny_world import STEPS, make_tiny_site
from tests.support.training_here import RUN_RANKS, run_rank_here

RECIPE, BASELINE = "next_action", "popularity_7d"
NUM_SEEDS = 2
FREQUENCIES = {"once", "daily", "realtime"}


@dataclass(frozen=True)
class Ablated:
    """A recipe and a baseline that were run on the tiny world."""

    root: Path
    site: Site
    recipe: dg.ExecuteInProcessResult
    baseline: dg.ExecuteInProcessResult


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture(autouse=True, scope="module")
def ranks_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUN_RANKS, run_rank_here)
        yield


@pytest.fixture(scope="module")
def ablated(
    tmp_path_factory: pytest.TempPathFactory,
    shared_sites: SharedSites,
    instance: dg.DagsterInstance,
    ranks_in_this_process: None,
) -> Ablated:
    root = tmp_path_factory.mktemp("ablated")
    site = shared_sites.add_mlflow(shared_sites.copy("tiny-world", make_tiny_site, root))
    return Ablated(root, site, run(site, instance, RECIPE), run(site, instance, BASELINE))


@pytest.fixture
def site(ablated: Ablated, tmp_path: Path) -> Site:
    """A copy, so that no test sees what another has run."""
    return copy_site(ablated.site, ablated.root, tmp_path / "site")


@pytest.fixture
def recipe(ablated: Ablated) -> dg.ExecuteInProcessResult:
    return ablated.recipe


@pytest.fixture
def baseline(ablated: Ablated) -> dg.ExecuteInProcessResult:
    return ablated.baseline


def run(site: Site, instance: dg.DagsterInstance, recipe: str, **config: Any) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(site)
    return dg.materialize(
        list(definitions.assets or []),
        selection=dg.AssetSelection.assets("ablation_runs"),
        partition_key=recipe,
        instance=instance,
        run_config={"ops": {"ablation_runs": {"config": config}}},
        raise_on_error=False,
    )


def log_of(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    return "\n".join(entry.user_message for entry in instance.all_logs(result.run_id))


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    data = result.failure_data_for_node("ablation_runs")
    assert data is not None
    assert data.error is not None
    return data.error.to_string()


def plans(site: Site, name: str) -> list[Any]:
    return plan_experiments(site, [experiments(site)[name]])[name]


def test_a_recipe_is_trained_and_judged(site: Site, recipe: dg.ExecuteInProcessResult) -> None:
    assert recipe.success
    seeds = plans(site, RECIPE)
    assert [(seed.seed, seed.model.config.seed) for seed in seeds] == [(0, 0), (1, 1)]
    assert seeds[0].model.config.sampling.objective == "next_action"
    for seed in seeds:
        kept = {path.name for path in seed.run_dir.iterdir()}
        assert {"model", "history.jsonl", "result.json", "training.png", SCORES, JUDGEMENT} <= kept
        assert "checkpoints" not in kept
        assert seed.judgement["metrics"].keys() == FREQUENCIES
        assert seed.judgement["training"]["num_steps"] == 3
        scores = read_scores(seed.run_dir / SCORES)
        mean = float(np.nanmean(scores.frequencies["once"].recall_at_10))
        assert seed.judgement["metrics"]["once"]["recall_at_10"] == pytest.approx(mean)
    weights = [(seed.run_dir / "model" / "model.safetensors").read_bytes() for seed in seeds]
    assert weights[0] != weights[1]


def test_the_page_shows_the_seeds(site: Site, instance: dg.DagsterInstance, recipe: dg.ExecuteInProcessResult) -> None:
    shown = recipe.asset_materializations_for_node("ablation_runs")[0].metadata
    rows = [record.data for record in shown["seeds"].value.records]
    assert [(row["seed"], row["frequency"]) for row in rows] == [
        (seed, frequency) for seed in range(NUM_SEEDS) for frequency in ("once", "daily", "realtime")
    ]
    found = [seed.judgement["metrics"]["once"]["recall_at_10"] for seed in plans(site, RECIPE)]
    assert shown["recall_at_10"].value == pytest.approx(sum(found) / 2)
    assert shown["training"].value.startswith("![")
    assert shown["mlflow_run"].value.startswith("http")
    observed = [event.asset_observation_data.asset_observation for event in recipe.get_asset_observation_events()]
    assert {observation.partition for observation in observed} == {RECIPE}
    assert [observation.metadata["step"].value for observation in observed] == [
        f"{step} of 3" for _ in range(NUM_SEEDS) for step in (1, 2, 3)
    ]
    assert instance.get_materialized_partitions(dg.AssetKey("ablation_runs")) >= {RECIPE}


def test_mlflow_has_a_run_of_the_recipe_and_one_of_each_seed(site: Site, recipe: dg.ExecuteInProcessResult) -> None:
    store = ExperimentStore(site)
    parent = store.find(experiments_dir(site) / RECIPE)
    assert parent is not None
    above = store._client.get_run(parent.run_id)
    assert (above.info.run_name, above.info.status) == (RECIPE, "FINISHED")
    seeds = plans(site, RECIPE)
    means = [seed.judgement["metrics"]["once"]["recall_at_10"] for seed in seeds]
    assert above.data.metrics["once/recall_at_10"] == pytest.approx(sum(means) / 2)
    for seed in seeds:
        tracked = store.find(seed.run_dir)
        assert tracked is not None
        run_of_seed = store._client.get_run(tracked.run_id)
        expected = {
            "mlflow.parentRunId": parent.run_id,
            "recipe": RECIPE,
            "seed": str(seed.seed),
            "training_set": seed.fingerprint,
            "question": seed.judgement["question"],
            "model_version": seed.model.model_version,
        }
        assert expected.items() <= run_of_seed.data.tags.items()
        assert run_of_seed.data.params["sampling.objective"] == RECIPE
        assert run_of_seed.data.params["seed"] == str(seed.seed)
        low, high = seed.judgement["metrics"]["daily"]["recall_at_10_interval"]
        assert run_of_seed.data.metrics["daily/recall_at_10_interval_low"] == low
        assert run_of_seed.data.metrics["daily/recall_at_10_interval_high"] == high
        assert {metric.step for metric in store._client.get_metric_history(tracked.run_id, "loss")} == {1, 2, 3}
        kept = {file.path for file in store._client.list_artifacts(tracked.run_id)}
        assert kept == {SCORES, JUDGEMENT, "training.png", "history.jsonl"}


def test_a_baseline_is_judged_once(
    site: Site, instance: dg.DagsterInstance, baseline: dg.ExecuteInProcessResult
) -> None:
    assert baseline.success
    (seed,) = plans(site, BASELINE)
    assert seed.judgement["training"] is None
    assert {path.name for path in seed.run_dir.iterdir()} == {SCORES, JUDGEMENT, "mlflow.json"}
    assert "starting" not in log_of(instance, baseline)
    shown = baseline.asset_materializations_for_node("ablation_runs")[0].metadata
    assert "training" not in shown
    assert shown["recall_at_10"].value == seed.judgement["metrics"]["once"]["recall_at_10"]


def test_what_is_finished_is_left_alone(
    site: Site, instance: dg.DagsterInstance, recipe: dg.ExecuteInProcessResult
) -> None:
    before = {path: path.stat().st_mtime_ns for path in experiments_dir(site).glob(f"{RECIPE}/*/*")}
    again = run(site, instance, RECIPE)
    assert again.success
    said = log_of(instance, again)
    assert said.count("is finished already") == NUM_SEEDS
    assert "starting" not in said
    after = {path: path.stat().st_mtime_ns for path in experiments_dir(site).glob(f"{RECIPE}/*/*")}
    assert {path for path in before if before[path] != after[path]} <= {plans(site, RECIPE)[0].run_dir / "training.png"}
    versions = [result.asset_materializations_for_node("ablation_runs")[0].tags for result in (recipe, again)]
    assert versions[0]["dagster/data_version"] == versions[1]["dagster/data_version"]


def test_another_code_judges_anew_and_trains_nothing(
    site: Site, instance: dg.DagsterInstance, recipe: dg.ExecuteInProcessResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = plans(site, RECIPE)
    found = first.judgement
    write_json(first.run_dir / JUDGEMENT, found | {"judged_by": "older"})
    assert first.judgement is None
    assert first.older_judgement["judged_by"] == "older"
    again = run(site, instance, RECIPE)
    assert again.success
    said = log_of(instance, again)
    assert "starting" not in said
    assert said.count("is finished already") == 1
    assert {**found, "judging_seconds": 0} == {**first.judgement, "judging_seconds": 0}
    assert second.judgement is not None


def test_a_removed_database_is_filled_again(
    site: Site, instance: dg.DagsterInstance, recipe: dg.ExecuteInProcessResult, tmp_path: Path
) -> None:
    shutil.copytree(site.directory, tmp_path / site.name)
    moved = site.model_copy(update={"data_dir": str(tmp_path)})
    again = run(moved, instance, RECIPE)
    assert again.success
    assert "starting" not in log_of(instance, again)
    assert {name: len(seeds) for name, seeds in read_results(moved).outcomes.items()} == {RECIPE: NUM_SEEDS}


def test_two_runs_of_a_recipe_do_not_meet(site: Site, instance: dg.DagsterInstance) -> None:
    with exclusive(experiments_dir(site) / "mean_of_20", "ablation_runs"):
        failed = run(site, instance, "mean_of_20")
    assert not failed.success
    assert "another run is writing ablation_runs mean_of_20" in failure_of(failed)


def test_a_training_that_fails_is_told(site: Site, instance: dg.DagsterInstance) -> None:
    changes = STEPS | {"optimizer": {"num_steps": 3, "learning_rate": 1e5, "warmup_steps": 0}}
    training = site.training.model_copy(update={"changes": changes})
    wild = site.model_copy(update={"training": training})
    failed = run(wild, instance, "no_surface", num_seeds=1)
    assert not failed.success
    assert "training diverged" in failure_of(failed)
    assert not list(experiments_dir(site).glob(f"no_surface/*/{JUDGEMENT}"))
    store = ExperimentStore(wild)
    (seed,) = [run for run in store.seeds() if run.data.tags["recipe"] == "no_surface"]
    assert seed.info.status == "FAILED"
    parent = store.find(experiments_dir(site) / "no_surface")
    assert parent is not None
    assert not store.is_finished(parent)
    assert [reason for reason in read_results(site).left_out if "no_surface" in reason] == [
        "no_surface, seed 0: its status is FAILED"
    ]


# Reading the results


def test_the_results_are_the_scores(
    site: Site, recipe: dg.ExecuteInProcessResult, baseline: dg.ExecuteInProcessResult
) -> None:
    stored = read_results(site)
    assert {name: [outcome.seed for outcome in seeds] for name, seeds in stored.outcomes.items()} == {
        BASELINE: [0],
        RECIPE: [0, 1],
    }
    for seed, scores in zip(plans(site, RECIPE), stored.scores()[RECIPE], strict=True):
        assert scores.question == stored.question == seed.judgement["question"]
        assert scores.frequencies.keys() == FREQUENCIES
        expected = read_scores(seed.run_dir / SCORES).frequencies["daily"]
        np.testing.assert_array_equal(scores.frequencies["daily"].recall_at_10, expected.recall_at_10)
        np.testing.assert_array_equal(scores.frequencies["daily"].top_10, expected.top_10)
    assert stored.outcomes[RECIPE][1].judgement()["config"]["seed"] == 1


def test_noisy_vectors_make_another_question(
    site: Site, instance: dg.DagsterInstance, recipe: dg.ExecuteInProcessResult
) -> None:
    result = run(site, instance, "noise_2")
    assert result.success, failure_of(result)
    stored = read_results(site)
    assert "noise_2" not in stored.outcomes
    assert list(stored.noisy) == [2]
    assert stored.noisy[2].question != stored.question
    assert stored.noisy[2].training_set == plans(site, "noise_2")[0].fingerprint != stored.training_set
    judged = stored.noisy[2].judgement()["beside_rivals"]
    assert judged.keys() == {"pinnerformer", "pinnersage_20", "pinnersage_5", "mean_of_100"}
    of_all, of_discovery = (
        {name: [by_size[size][key] for size in sorted(by_size, key=int)] for name, by_size in judged.items()}
        for key in ("recall_at_10", "discovery_at_10")
    )
    for recall in (of_all, of_discovery):
        assert all(values == sorted(values, reverse=True) for values in recall.values())  # more pins, more to confuse
        assert all(more >= less for more, less in zip(recall["pinnersage_20"], recall["pinnersage_5"], strict=True))
    assert of_all != of_discovery


def test_what_does_not_count_is_named(
    site: Site, recipe: dg.ExecuteInProcessResult, baseline: dg.ExecuteInProcessResult, tmp_path: Path
) -> None:
    shutil.copytree(site.data_dir, tmp_path / "data")
    copy = site.model_copy(update={"data_dir": str(tmp_path / "data")})
    store = ExperimentStore(copy)
    tracked = {
        (run.data.tags["recipe"], int(run.data.tags["seed"])): run.info.run_id
        for run in store.seeds()
        if run.info.status == "FINISHED"
    }
    store._client.set_tag(tracked[RECIPE, 1], "question", "another")
    store._client.set_terminated(tracked[RECIPE, 0])  # the newest, whose question is asked
    left_out = read_results(copy).left_out
    assert f"{RECIPE}, seed 1: it was judged by another question" in left_out
    store._client.set_tag(tracked[RECIPE, 1], "training_set", "another")
    store._client.set_tag(tracked[BASELINE, 0], "recipe", "gone")
    stored = read_results(copy)
    assert f"{RECIPE}, seed 1: its training set was another" in stored.left_out
    assert f"{BASELINE}: there is no recipe 'gone' any more" in stored.left_out
    assert list(stored.outcomes) == [RECIPE]
    longer = site.training.model_copy(update={"changes": STEPS | {"optimizer": {"num_steps": 4}}})
    with pytest.raises(PipelineError, match=r"`pf ablations` runs them") as refused:
        read_results(copy.model_copy(update={"training": longer}))
    assert f"{RECIPE}, seed 0: its configuration was another one (optimizer.num_steps)" in str(refused.value)


def test_the_report_is_made_of_what_is_there(
    site: Site,
    instance: dg.DagsterInstance,
    recipe: dg.ExecuteInProcessResult,
    baseline: dg.ExecuteInProcessResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = dg.materialize(
        list(build_definitions(site).assets or []),
        selection=dg.AssetSelection.assets("paper_report"),
        instance=instance,
    )
    shown = made.asset_materializations_for_node("paper_report")[0].metadata
    stored = read_results(site)
    assert shown["recipes"].value == len(stored.outcomes) + len(stored.noisy)
    verdicts = ("reproduced", "not_distinguishable", "contradicted", "not_run")
    assert shown["claims"].value == sum(shown[verdict].value for verdict in verdicts)
    page = (site.directory / "paper_report" / "index.html").read_text()
    assert read_results(site).training_set in page
    assert "/runs/" in page
    (tmp_path / "site.yaml").write_text(site.model_dump_json())
    monkeypatch.setenv("PF_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setattr(experiments_cli, "materialize", lambda assets, **options: None)
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "docs")])
    assert result.exit_code == 0, result.output
    copied = {path.relative_to(tmp_path / "docs") for path in (tmp_path / "docs").rglob("*")}
    written = site.directory / "paper_report"
    expected = {path.relative_to(written) for path in written.rglob("*") if path.suffix != ".html"}
    assert copied == expected
    assert f"the page: {written / 'index.html'}" in result.output


def test_experiments_are_chosen_by_set_and_name(site: Site) -> None:
    known = experiments(site)
    assert choose_experiments(known, sets=(), names=()) == list(known.values())
    chosen = [each.name for each in choose_experiments(known, sets=["heads"], names=["popularity_7d"])]
    assert chosen == ["pinnerformer", "popularity_7d", "heads_4", "heads_8"]  # two heads are tiny's own number
    with pytest.raises(PipelineError, match=r"there is no 'losses'; the sets are .* heads, content-noise, ours"):
        choose_experiments(known, sets=["losses"], names=())


def test_the_time_left_follows_from_what_is_finished(
    site: Site, recipe: dg.ExecuteInProcessResult, tmp_path: Path
) -> None:
    known = experiments(site)
    planned = plan_experiments(site, [known[RECIPE], known["sasrec"], known["mean_of_100"]])
    took_s = [seed.judgement["training"]["seconds"] + seed.judgement["judging_seconds"] for seed in planned[RECIPE]]
    minutes = (2 * sum(took_s) / 2 + 2 * experiments_cli.START_S) / 60
    work = experiments_cli._Work(tmp_path, planned, any_code=False, jobs=1)
    assert work.missing == ["sasrec", "mean_of_100"]
    said = work.progress(work.missing)
    assert f"1 of 3 recipes are finished, 2 models to train, about {minutes:.0f} min left" in said
    fresh = plan_experiments(site, [known["sasrec"]])
    assert (
        experiments_cli._Work(tmp_path, fresh, any_code=False, jobs=1)
        .progress(["sasrec"])
        .endswith("2 models to train")
    )


def test_pf_ablations_runs_what_is_missing(
    site: Site, recipe: dg.ExecuteInProcessResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.yaml").write_text(site.model_dump_json())
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("PF_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    arguments = ["ablations", "--recipe", RECIPE, "--recipe", "mean_of_100"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 of 2 recipes are finished, 0 models to train" in result.output
    assert re.search(r"^mean_of_100 +\d+ s  recall@10 0\.\d{4}$", result.output, re.MULTILINE)
    assert "2 of 2 recipes are finished" in result.output
    assert plans(site, "mean_of_100")[0].judgement is not None
    again = CliRunner().invoke(app, arguments)
    assert "recall@10" not in again.output
    assert "2 of 2 recipes are finished" in again.output
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("ablation_runs")) == {"mean_of_100"}


def test_a_recipe_that_fails_does_not_stop_the_others(
    site: Site, recipe: dg.ExecuteInProcessResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def materialize(assets: str, *, partition: str, **options: Any) -> None:
        asked.append(partition)
        raise PipelineError("the run failed")

    (tmp_path / "site.yaml").write_text(site.model_dump_json())
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("PF_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setattr(experiments_cli, "materialize", materialize)
    result = CliRunner().invoke(app, ["ablations", "--set", "masking", "--seeds", "1"])
    assert result.exit_code == 1
    assert asked == ["pinnerformer", "no_causal_mask"]
    assert "these failed: pinnerformer, no_causal_mask" in result.output
    assert "0 of 2 recipes are finished" in result.output


def test_a_dry_run_only_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("PF_SITE", raising=False)
    result = CliRunner().invoke(app, ["ablations", "--dry-run", "--set", "sequence-length"])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()] == [
        *("pinnerformer", "length_4", "length_8", "length_16", "length_32", "length_128"),
    ]
    assert not list(tmp_path.iterdir())
