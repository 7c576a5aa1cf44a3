"""A site in object storage: a real S3 server on loopback, reached as any other would be."""

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from pf_assets.definitions import build_definitions
from pf_core.config.site import EngineConfig, Site
from pf_core.errors import PipelineError
from pf_core.logs.partition import bucket_files
from pf_core.serving.client import Serving, UnknownIdError
from pf_core.serving.releases import PublishedReleases, list_releases, read_published, release_root, write_published
from pf_core.serving.rollback import forget_users, rollback
from pf_core.storage.cache import fetched
from pf_core.storage.files import object_store, path_of
from pf_core.storage.locks import exclusive
from pf_core.timelines.build import timeline_state
from pf_core.training.plan import current_model, models_dir
from tests.scale.servers import free_port, new_bucket, object_storage
from tests.support import releases
from tests.support.daily import day, run
from tests.support.engine_contract import contract_site, run_daily_path
from tests.support.sites import START
from tests.support.tiny_world import make_tiny_site

pytestmark = pytest.mark.scale

LOCAL = EngineConfig(num_workers=1, memory_mb=256)
TIMELINES = ("raw_actions", "pin_features", "user_timelines")
USERS = list(range(1, 30))


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with object_storage() as settings:
        yield settings


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return new_bucket(server, tmp_path, monkeypatch)


# The daily path


def test_the_daily_path_gives_the_same(bucket: str, tmp_path: Path, server: dict[str, str]) -> None:
    local = run_daily_path(tmp_path / "local", LOCAL)
    stored = run_daily_path(tmp_path / "stored", LOCAL, bucket=f"{bucket}/site")
    for asset, values in local.items():
        assert values, asset
        assert stored[asset] == values, asset
    assert not (tmp_path / "stored" / "data").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]  # Dagster's and MLflow's databases, too
    assert any(path.suffix == ".db" for path in written)
    for path in written:
        assert server["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


def failure_of(site: Site, tmp_path: Path, first: str, last: str | None = None, *assets: str) -> str:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        result = run(site, instance, first, last, assets=assets or TIMELINES)
    assert not result.success
    return "\n".join(str(event.step_failure_data.error) for event in result.get_step_failure_events())


def test_faults_are_named_and_nothing_is_published(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = contract_site(tmp_path / "site", LOCAL, bucket=f"{bucket}/site")
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        assert run(site, instance, START, day(1), assets=TIMELINES).success
        assert run(site, instance, day(2), assets=TIMELINES[:2]).success

        with exclusive(timeline_state(site).root, "user_timelines"):
            assert "another run is writing user_timelines" in failure_of(site, tmp_path, day(2), None, "user_timelines")
        path = next(iter(bucket_files(site, day(2)).values()))
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert path.name in failure_of(site, tmp_path, day(2), None, "user_timelines")
        path.unlink()
        assert path.name in failure_of(site, tmp_path, day(2), None, "user_timelines")
        assert timeline_state(site).days() == [START, day(1)]
        path.write_bytes(content)
        assert run(site, instance, day(2), assets=("user_timelines",)).success

    store, _ = object_store(path_of(bucket))
    store.clear_instance_cache()
    with monkeypatch.context() as other:
        other.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        assert "cannot be reached (EndpointConnectionError)" in failure_of(site, tmp_path, day(3))
    store.clear_instance_cache()
    nowhere = site.model_copy(update={"data_dir": "s3://pf-no-such-bucket/data"})
    assert "there is no such bucket" in failure_of(nowhere, tmp_path, START)


# Releases


@pytest.fixture
def served(bucket: str, tmp_path: Path) -> Site:
    """Two releases."""
    site = releases.make_site(tmp_path / "site").model_copy(
        update={"data_dir": f"{bucket}/data", "deletion_list": None}
    )
    releases.publish_day(site, "2026-01-01", USERS, 1)
    releases.publish_day(site, "2026-01-02", USERS, 2)
    return site


def test_a_release_is_read_as_it_was_published(served: Site) -> None:
    release = Serving(served).release()
    vectors, is_found = release.embeddings([*USERS, 999])
    assert is_found.tolist() == [True] * len(USERS) + [False]
    np.testing.assert_array_equal(vectors[:-1], [releases.vector_of(user, 2).astype(np.float32) for user in USERS])
    assert {hit.interest for hit in release.recommend(USERS[0], k=5)} == {"interest-2"}
    assert [each["release"] for each in list_releases(served)] == ["2026-01-02.1", "2026-01-01.1"]
    assert not [path for path in release_root(served).iterdir() if path.name.startswith(".building")]


def test_services_follow_current_json(served: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pf_core.serving.client.LOOK_EVERY_S", 0.0)
    serving = Serving(served)
    assert serving.release().manifest["release"] == "2026-01-02.1"
    rollback(served)
    assert serving.release().manifest["release"] == "2026-01-01.1"
    rollback(served, to="2026-01-02.1")
    assert serving.release().manifest["release"] == "2026-01-02.1"


def test_a_forgotten_user_leaves_the_copies_of_other_machines(
    served: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pf_core.serving.client.LOOK_EVERY_S", 0.0)
    serving = Serving(served)
    assert serving.release().look_up([USERS[3]]).found_N.all()
    with monkeypatch.context() as other:
        other.setenv("PF_LOCAL_DIR", str(tmp_path / "another-machine"))
        assert forget_users(served, pa.array([USERS[3]]), str) == {"2026-01-01.1": 1, "2026-01-02.1": 1}
    with pytest.raises(UnknownIdError):
        serving.release().recommend(USERS[3])
    assert serving.release().look_up([USERS[4]]).found_N.all()


def test_a_current_json_that_another_run_replaced_is_not_overwritten(served: Site) -> None:
    stale = read_published(served)
    rollback(served)
    with pytest.raises(PipelineError, match=r"was replaced by another run meanwhile, nothing was published; re-run"):
        write_published(served, stale)
    with pytest.raises(PipelineError, match="was replaced by another run"):
        write_published(served, PublishedReleases(current="2026-01-02.1"))
    assert read_published(served).current == "2026-01-01.1"


# Training


def test_a_model_is_trained_from_there_and_kept_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights as on disk; another machine, without a copy of anything, finds it trained."""
    weights = []
    for root, where in ((tmp_path / "local", None), (tmp_path / "stored", f"{bucket}/data")):
        root.mkdir()
        site = make_tiny_site(root, bucket=where)
        with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
            for asset in ("pinnerformer_model", "offline_evaluation"):
                assert materialized(site, instance, asset).success
        manifest = current_model(site)
        assert manifest is not None
        folder = fetched(models_dir(site) / manifest["model_version"] / "model")
        weights.append(load_file(folder / "model.safetensors"))
    for name, values in weights[0].items():
        np.testing.assert_array_equal(weights[1][name], values)
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "another-machine"))
    monkeypatch.setenv("PF_MLFLOW_URI", f"sqlite:///{tmp_path}/this-machine/mlflow/mlflow.db")
    before = os.listdir(tmp_path)  # noqa: PTH208
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        result = materialized(site, instance, "pinnerformer_model")
    assert result.success
    assert "another-machine" not in before
    assert current_model(site) == manifest


def materialized(site: Site, instance: dg.DagsterInstance, asset: str) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(site)
    return dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.assets(asset),
        instance=instance,
        run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}},
    )
