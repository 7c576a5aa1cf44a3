"""Runs of experiments in MLflow, without a server: paths of their artifacts, names of their metrics."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pf_assets.tracking import experiment_store
from pf_assets.tracking.experiment_store import Outcome
from pf_assets.tracking.runs import artifact_path
from pf_core.experiments.plan import JUDGEMENT
from pf_core.storage.files import is_remote


@pytest.fixture
def with_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote path can be made without s3fs; only reading it needs the library."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "s3fs" else find_spec(name))


def outcome_at(artifact_uri: str) -> Outcome:
    tags = {"recipe": "sasrec", "seed": "1", "training_set": "t", "question": "q"}
    info = SimpleNamespace(experiment_id="3", run_id="abc", end_time=60_000, artifact_uri=artifact_uri)
    run: Any = SimpleNamespace(info=info, data=SimpleNamespace(tags=tags, params={}))
    return experiment_store._outcome(run)


def test_artifacts_in_object_storage_are_read_from_there(with_s3fs: None) -> None:
    outcome = outcome_at("s3://bucket/mlflow/artifacts/abc/artifacts")
    assert is_remote(outcome.artifacts)
    assert str(outcome.artifacts / JUDGEMENT) == f"s3://bucket/mlflow/artifacts/abc/artifacts/{JUDGEMENT}"
    assert (outcome.recipe, outcome.seed, outcome.ended_at) == ("sasrec", 1, "1970-01-01 00:01")


@pytest.mark.parametrize("uri", ["file:///data/my%20site/artifacts", "/data/my site/artifacts"])
def test_artifacts_on_disk_are_read_from_there(uri: str) -> None:
    assert outcome_at(uri).artifacts == artifact_path(uri) == Path("/data/my site/artifacts")
    assert not is_remote(outcome_at(uri).artifacts)
