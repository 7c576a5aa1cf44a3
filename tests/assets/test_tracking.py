"""MLflow on a real SQLite database: runs that go on, and a registry that knows each model once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from pf_assets.tracking import runs
from pf_assets.tracking.runs import MAX_PARAM_CHARS, TrackedRun, artifact_path, flatten, git_commit, run_url
from pf_assets.tracking.tracking import Tracking
from pf_core.errors import PipelineError
from pf_core.names import path_name_of
from tests.support.registry import promote_first
from tests.support.shared import SharedSites
from tests.support.sites import SmallSite

PARAMS = {"model": {"num_layers": 2}, "seed": 1, "types": ["repin", "click"]}


@pytest.fixture
def tracking(shared_sites: SharedSites, small_site: Callable[..., SmallSite]) -> Tracking:
    return Tracking(shared_sites.add_mlflow(small_site().site))


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


def test_metrics_of_any_action_type_are_kept_apart(tracking: Tracking) -> None:
    """Names that MLflow refuses are encoded, and read back for a history that is incomplete."""
    run, _ = start(tracking, "a")
    words = ["add,to(cart)", "add_to_cart_", "save+", "a/../b", "..", "", "two\nlines", "é" * 300, "é" * 300 + "è"]
    values = {f"once/recall_at_10/{word}": number / 10 for number, word in enumerate(words)}
    for _ in range(2):
        tracking.measure_missing(run, [{"step": 0, **values}])
    found = tracking._client.get_run(run.run_id).data.metrics
    assert found == {path_name_of(name): value for name, value in values.items()}
    assert len(found) == len(words)
    assert all(len(tracking._client.get_metric_history(run.run_id, name)) == 1 for name in found)


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
    assert tracking.champion() is None
    promote_first(tracking)
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
    register(tracking, "a", "b")
    tags = tracking._client.get_model_version(tracking.name, "1").tags
    assert tags == {"model_version": "a", "promoted_because": "first model"}
    tracking.promote(2, because="better recall")
    champion = tracking.champion()
    assert champion is not None
    assert champion.model_version == "b"
    assert tracking._client.get_model_version(tracking.name, "2").tags["promoted_because"] == "better recall"
    with pytest.raises(PipelineError, match="has no version 7"):
        tracking.promote(7, because="a typo")


def register(tracking: Tracking, *names: str) -> None:
    """Register models, of which the first becomes champion."""
    for name in names:
        tracking.register(*start(tracking, name), model_version=name)
        promote_first(tracking)


def test_registering_makes_no_champion(tracking: Tracking) -> None:
    for name in ("a", "b"):
        tracking.register(*start(tracking, name), model_version=name)
    assert tracking.champion() is None
    assert tracking.promotions() == []
    candidate = tracking.candidate()
    assert candidate is not None
    assert candidate.model_version == "b"
    tracking.promote(2, because="the first evaluation")
    assert history_of(tracking) == [(2, "the first evaluation", False)]


def champion_of(tracking: Tracking) -> int | None:
    champion = tracking.champion()
    return None if champion is None else champion.version


def history_of(tracking: Tracking) -> list[tuple[int, str, bool]]:
    return [(one.version, one.because, one.undone_at is not None) for one in tracking.promotions()]


def test_promotions_are_undone_one_by_one(tracking: Tracking) -> None:
    assert tracking.promotions() == []
    register(tracking, "a", "b", "c")
    tracking.promote(2, because="better")
    tracking.promote(3, because="better still")
    assert history_of(tracking) == [(1, "first model", False), (2, "better", False), (3, "better still", False)]
    assert tracking.undo_promotion(because="complaints").version == 2
    assert champion_of(tracking) == 2
    assert tracking.undo_promotion().version == champion_of(tracking) == 1
    assert history_of(tracking) == [(1, "first model", False), (2, "better", True), (3, "better still", True)]
    assert [one.undone_because for one in tracking.promotions()] == [None, None, "complaints"]
    with pytest.raises(PipelineError, match="no champion before the current one"):
        tracking.undo_promotion()
    tracking.promote(3, because="they were wrong")
    assert history_of(tracking)[-1] == (3, "they were wrong", False)
    assert tracking.undo_promotion().version == 1
    assert all(one.promoted_at is not None for one in tracking.promotions())


def test_promoting_the_champion_changes_its_reason_alone(tracking: Tracking) -> None:
    register(tracking, "a", "b")
    tracking.promote(2, because="better")
    tracking.promote(2, because="much better")
    assert history_of(tracking) == [(1, "first model", False), (2, "better", False)]
    assert tracking._client.get_model_version(tracking.name, "2").tags["promoted_because"] == "much better"


def test_an_alias_that_was_moved_in_mlflow_is_part_of_the_history(tracking: Tracking) -> None:
    register(tracking, "a", "b", "c")
    tracking._client.set_registered_model_alias(tracking.name, "champion", "2")
    assert history_of(tracking) == [(1, "first model", False), (2, "its alias was set in MLflow", False)]
    tracking.promote(3, because="better")
    assert [one.version for one in tracking.promotions()] == [1, 2, 3]
    assert tracking.promotions()[1].promoted_at is None
    assert tracking.undo_promotion().version == 2


def test_a_champion_from_before_the_history_began_can_be_gone_back_to(tracking: Tracking) -> None:
    register(tracking, "a", "b")
    tracking._client.delete_registered_model_tag(tracking.name, "promotion-0000")
    assert history_of(tracking) == [(1, "first model", False)]
    tracking.promote(2, because="better")
    assert tracking.undo_promotion().version == 1


@pytest.mark.parametrize("interrupted", ["set_registered_model_alias", "set_registered_model_tag"])
def test_an_interrupted_promotion_or_undoing_can_be_repeated(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    register(tracking, "a", "b")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for step, expected in (
        (lambda: tracking.promote(2, because="better"), 2),
        (tracking.undo_promotion, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(tracking._client, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                step()
        standing = [one.version for one in tracking.promotions() if one.undone_at is None]
        assert standing[-1] == champion_of(tracking)
        step()
        assert champion_of(tracking) == expected


def test_a_champion_that_left_the_registry_is_skipped(tracking: Tracking) -> None:
    register(tracking, "a", "b", "c")
    tracking.promote(2, because="better")
    tracking.promote(3, because="better still")
    tracking._client.delete_model_version(tracking.name, "2")
    assert tracking.undo_promotion().version == 1


def test_models_are_found_by_the_name_that_they_serve_under(tracking: Tracking) -> None:
    register(tracking, "a", "b")
    (start(tracking, "a")[1] / "mlflow.json").unlink()  # retrained: the same model_version, another run
    tracking.register(*start(tracking, "a"), model_version="a")
    assert [model.served_version for model in tracking.versions()] == ["a-3", "b-2", "a-1"]
    for model in tracking.versions():
        assert tracking.find_served(model.served_version) == model
        assert tracking.run_of(model) == TrackedRun(
            experiment_id=tracking._experiment_id(), run_id=model.run_id, version=model.version
        )
    assert tracking.find_served("a") is None
    assert tracking.find_served("a-2") is None


def test_what_is_found_out_later_stays_with_the_model(tracking: Tracking) -> None:
    register(tracking, "a")
    model = tracking.champion()
    assert model is not None
    for recall in (0.1, 0.2):
        tracking.note(model, metrics={"evaluation_recall": recall}, tags={"evaluation": f"recall {recall}"})
    run = tracking._client.get_run(model.run_id)
    assert run.data.metrics["evaluation_recall"] == 0.2
    assert run.data.tags["evaluation"] == tracking.versions()[0].tags["evaluation"] == "recall 0.2"


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


def test_artifact_uris_are_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    local = Path("/data/my models/a")
    assert artifact_path(local.as_uri()) == artifact_path(str(local)) == local
    monkeypatch.setattr(runs, "path_of", PurePosixPath)  # s3fs is an extra
    assert str(artifact_path("s3://bucket/data/a")) == str(PurePosixPath("s3://bucket/data/a"))
