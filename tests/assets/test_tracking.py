"""MLflow on a real SQLite database: runs that go on, and a registry that knows each model once."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pf_assets.tracking import MAX_PARAM_CHARS, TrackedRun, Tracking, flatten, git_commit, run_url
from pf_core.contracts import PipelineError
from tests.sites import SmallSite

PARAMS = {"model": {"num_layers": 2}, "seed": 1, "types": ["repin", "click"]}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes seconds to make its tables: once, and then copied."""
    site = SmallSite(tmp_path_factory.mktemp("mlflow")).site
    assert Tracking(site).champion() is None
    return Tracking(site).root


@pytest.fixture
def tracking(database: Path, small_site: Callable[..., SmallSite]) -> Tracking:
    tracking = Tracking(small_site().site)
    shutil.copytree(database, tracking.root)
    return tracking


def start(tracking: Tracking, name: str) -> tuple[TrackedRun, Path]:
    """A run with a model in its artifacts."""
    run_dir = tracking.root.parent / name
    run_dir.mkdir(exist_ok=True)
    run = tracking.start(run_dir, name=name, params=PARAMS, tags={"site": "small"})
    (run_dir / "model").mkdir(exist_ok=True)
    (run_dir / "model" / "model.json").write_text(name)
    tracking.keep(run, [run_dir / "model"])
    return run, run_dir


def test_a_run_has_everything(tracking: Tracking) -> None:
    run, run_dir = start(tracking, "a")
    tracking.measure(run, [{"step": 20, "loss": 3.0}, {"step": 40, "loss": 2.0}, {"step": 40, "recall_at_10": 0.1}])
    (run_dir / "training.png").write_bytes(b"png")
    tracking.keep(run, [run_dir / "training.png"])
    found = tracking._client.get_run(run.run_id)
    assert found.data.params == {"model.num_layers": "2", "seed": "1", "types": '["repin", "click"]'}
    assert found.data.metrics == {"loss": 2.0, "recall_at_10": 0.1}
    assert found.data.tags["site"] == "small"
    history = tracking._client.get_metric_history(run.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(20, 3.0), (40, 2.0)]
    assert {file.path for file in tracking._client.list_artifacts(run.run_id)} == {"model", "training.png"}
    assert found.info.artifact_uri.startswith(tracking.artifacts.as_uri())


def test_what_nobody_reported_is_added(tracking: Tracking) -> None:
    run, _ = start(tracking, "a")
    assert tracking.measure_live(run, [{"step": 20, "loss": 3.0}]) is None
    unknown = TrackedRun(experiment_id=run.experiment_id, run_id="0" * 32)
    assert "refused 1 measurements" in str(tracking.measure_live(unknown, [{"step": 40, "loss": 2.0}]))
    history = [{"step": 20, "loss": 3.0}, {"step": 20, "recall_at_10": 0.1}, {"step": 40, "loss": 2.0}]
    for _ in range(2):
        tracking.measure_missing(run, history)
        losses = tracking._client.get_metric_history(run.run_id, "loss")
        assert [(metric.step, metric.value) for metric in losses] == [(20, 3.0), (40, 2.0)]
        assert [metric.step for metric in tracking._client.get_metric_history(run.run_id, "recall_at_10")] == [20]


def test_a_run_goes_on_until_its_database_is_gone(tracking: Tracking) -> None:
    run, run_dir = start(tracking, "a")
    with pytest.raises(KeyboardInterrupt), tracking.watching(run):
        raise KeyboardInterrupt
    assert tracking._client.get_run(run.run_id).info.status == "KILLED"
    with pytest.raises(PipelineError), tracking.watching(run):
        raise PipelineError("it diverged")
    assert tracking._client.get_run(run.run_id).info.status == "FAILED"
    assert start(tracking, "a")[0] == run
    assert tracking._client.get_run(run.run_id).info.status == "RUNNING"
    with tracking.watching(run):
        pass
    assert tracking._client.get_run(run.run_id).info.status == "FINISHED"
    tracking._client.delete_run(run.run_id)
    assert tracking.find(run_dir) is None
    assert start(tracking, "a")[0] != run


def test_the_registry_knows_each_model_once(tracking: Tracking) -> None:
    assert tracking.champion() is None
    assert tracking.candidate() is None
    first, first_dir = start(tracking, "a")
    assert tracking.register(first, first_dir, model_version="a").version == 1
    assert tracking.champion() == tracking.candidate()
    second, second_dir = start(tracking, "b")
    registered = tracking.register(second, second_dir, model_version="b")
    assert registered == dataclasses.replace(second, version=2)
    assert tracking.find(second_dir) == registered
    champion, candidate = tracking.champion(), tracking.candidate()
    assert champion is not None
    assert candidate is not None
    assert (champion.model_version, candidate.model_version) == ("a", "b")
    assert (candidate.path / "model.json").read_text() == "b"
    assert tracking.register(first, first_dir, model_version="a").version == 1
    assert tracking.candidate() == champion
    assert len(tracking._client.search_model_versions(f"name = '{tracking.name}'")) == 2


def test_promotion_is_explicit_and_says_why(tracking: Tracking) -> None:
    for name in ("a", "b"):
        tracking.register(*start(tracking, name), model_version=name)
    tags = tracking._client.get_model_version(tracking.name, "1").tags
    assert tags == {"model_version": "a", "promoted_because": "first model"}
    tracking.promote(2, because="better recall")
    champion = tracking.champion()
    assert champion is not None
    assert champion.model_version == "b"
    assert tracking._client.get_model_version(tracking.name, "2").tags["promoted_because"] == "better recall"
    with pytest.raises(PipelineError, match="has no version 7"):
        tracking.promote(7, because="a typo")


def test_long_parameters_are_cut(tracking: Tracking) -> None:
    run_dir = tracking.root.parent / "long"
    run_dir.mkdir()
    run = tracking.start(run_dir, name="long", params={"types": ["x" * 10_000]}, tags={})
    assert len(tracking._client.get_run(run.run_id).data.params["types"]) == MAX_PARAM_CHARS


def test_names(tmp_path: Path) -> None:
    assert flatten({"a": {"b": {"c": None}}, "d": 0.5, "e": "text"}) == {"a.b.c": "null", "d": "0.5", "e": "text"}
    run = TrackedRun(experiment_id="3", run_id="abc")
    assert run_url(run, "http://localhost:5000").startswith("http://localhost:5000/#/experiments/3/runs/abc?")
    assert git_commit(tmp_path) == "unknown"
