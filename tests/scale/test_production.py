"""The production home of Dagster, and MLflow, on a real PostgreSQL."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import pytest
from mlflow import MlflowClient

from pf_core.config.site import Site
from tests.scale.servers import create_database, postgres
from tests.support.tiny_world import make_tiny_site

pytestmark = pytest.mark.scale

REPOSITORY = Path(__file__).parents[2]
HOME = REPOSITORY / "dagster_home" / "production" / "dagster.yaml"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_tiny_site(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def environment(server: str, site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As an operator would set it: two databases, a home, a site."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(HOME, home)
    (home / "site.yaml").write_text(site.model_dump_json())
    return {
        "DAGSTER_HOME": str(home),
        "DAGSTER_POSTGRES_URL": with_driver(create_database(server, "dagster")),
        "PF_MLFLOW_URI": with_driver(create_database(server, "mlflow")),
        "PF_SITE": str(home / "site.yaml"),
    }


@pytest.fixture(scope="module")
def run(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*("dagster", "asset", "materialize", "--select", "pinnerformer_model"), "-m", "pf_assets.definitions"]
    return started(command, environment)


def started(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def with_driver(address: str) -> str:
    """SQLAlchemy would take psycopg 3 otherwise, which dagster-postgres does not bring."""
    return address.replace("postgresql://", "postgresql+psycopg2://")


def rows(database: str, query: str) -> list[Any]:
    import psycopg2

    connection = psycopg2.connect(database.replace("+psycopg2", ""))
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()
    finally:
        connection.close()


def test_a_run_is_kept_in_postgres(environment: dict[str, str], run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stderr[-3000:]
    assert rows(environment["DAGSTER_POSTGRES_URL"], "SELECT status FROM runs") == [("SUCCESS",)]
    [(materialized,)] = rows(
        environment["DAGSTER_POSTGRES_URL"],
        "SELECT count(*) FROM event_logs WHERE dagster_event_type = 'ASSET_MATERIALIZATION'",
    )
    assert materialized == 1
    assert not list(Path(environment["DAGSTER_HOME"]).rglob("*.db"))


def test_mlflow_is_kept_in_postgres(
    environment: dict[str, str], site: Site, run: subprocess.CompletedProcess[str]
) -> None:
    client = MlflowClient(environment["PF_MLFLOW_URI"], environment["PF_MLFLOW_URI"])
    [model] = client.search_registered_models()
    assert model.name == f"pinnerformer-{site.name}"
    assert model.aliases.keys() == {"candidate"}
    assert not list(Path(site.data_dir).rglob("*.db"))
    shown = started(["pf_assets.cli.main", "promote"], environment)
    assert shown.returncode == 0, shown.stderr
    assert "candidate" in shown.stdout


def test_no_password_is_told(environment: dict[str, str], site: Site, run: subprocess.CompletedProcess[str]) -> None:
    password = str(urlsplit(environment["PF_MLFLOW_URI"]).password)
    assert password not in run.stdout + run.stderr
    for table in ("runs", "event_logs"):
        assert password not in str(rows(environment["DAGSTER_POSTGRES_URL"], f"SELECT * FROM {table}"))
    for table in ("params", "tags", "runs", "experiments", "model_versions"):
        assert password not in str(rows(environment["PF_MLFLOW_URI"], f"SELECT * FROM {table}"))
    for path in Path(site.data_dir).rglob("*.json"):
        assert password not in path.read_text(), path


def test_a_wrong_password_is_a_clear_error(environment: dict[str, str], run: subprocess.CompletedProcess[str]) -> None:
    password = str(urlsplit(environment["PF_MLFLOW_URI"]).password)
    wrong = environment["PF_MLFLOW_URI"].replace(password, "wrong-secret")
    refused = started(["pf_assets.cli.main", "promote"], {**environment, "PF_MLFLOW_URI": wrong})
    assert refused.returncode == 1
    assert "error: MLflow's database at 127.0.0.1" in refused.stderr
    assert "password authentication failed" in refused.stderr
    assert "wrong-secret" not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


def test_the_queue_has_its_limits(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with dg.DagsterInstance.get() as instance:
        assert type(instance.run_storage).__name__ == "PostgresRunStorage"
        assert type(instance.event_log_storage).__name__ == "PostgresEventLogStorage"
        assert type(instance.schedule_storage).__name__ == "PostgresScheduleStorage"
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        assert queue.max_concurrent_runs == 8
        assert queue.tag_concurrency_limits == [{"key": "dagster/backfill", "limit": 4}]
