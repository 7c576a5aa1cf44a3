"""`pf dev` starts both servers, or none."""

import importlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pf_assets.cli.main import main
from pf_assets.settings import WORKSPACE
from pf_assets.tracking.tracking import Tracking
from tests.support.sites import SmallSite


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with a Dagster home, which PF_SITE names by a relative path."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    importlib.import_module("pf_assets.cli.dev")  # before a test replaces what its annotations name
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "dagster.yaml").touch()
    (folder / "site.yaml").write_text(SmallSite(tmp_path).site.model_dump_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PF_SITE", "shop/site.yaml")
    return folder


@pytest.fixture
def handler() -> Iterator[None]:
    """The command sets a handler for SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr("sys.argv", ["pf", "dev", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("option", ["--dagster-port", "--mlflow-port"])
def test_a_busy_port_is_a_sentence_and_nothing_is_started(
    home: Path, busy_port: int, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(Tracking, "prepare", refuse)
    other = {"--dagster-port": "--mlflow-port", "--mlflow-port": "--dagster-port"}[option]
    error = error_of(monkeypatch, capsys, option, busy_port, other, free_port())
    assert f"error: port {busy_port} of this machine cannot be opened: Address already in use" in error
    assert f"choose another port with {option}" in error


def test_one_port_for_both_is_a_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "port 3999 is given twice" in error_of(monkeypatch, capsys, "--dagster-port", 3999, "--mlflow-port", 3999)


def test_when_one_server_ends_the_other_is_stopped(
    home: Path, handler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], dict[str, Any], subprocess.Popen[bytes]]] = []
    start = subprocess.Popen

    def pretend(arguments: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Dagster ends at once, MLflow would serve for long."""
        code = "raise SystemExit(3)" if "dagster" in arguments else "import time; time.sleep(300)"
        started.append((arguments, options, start([sys.executable, "-c", code], **options)))
        return started[-1][-1]

    monkeypatch.setattr(subprocess, "Popen", pretend)
    monkeypatch.setattr(Tracking, "prepare", lambda tracking: None)
    error = error_of(monkeypatch, capsys, "--dagster-port", free_port(), "--mlflow-port", free_port())
    assert "error: Dagster's server ended with exit code 3, and pf dev has stopped the other one" in error
    (*_, dagster), (*_, mlflow) = started
    assert dagster.returncode == 3
    assert mlflow.returncode in (-signal.SIGINT, 1), "1 if it was interrupted while Python started"
    for _, options, _ in started:
        assert options["cwd"] == str(home), "not the repository, which an installed wheel does not have"
        assert options["env"]["PF_SITE"] == str(home / "site.yaml")
        assert options["env"]["DAGSTER_HOME"] == str(home)
    assert str(WORKSPACE) in started[0][0]
    assert WORKSPACE.is_absolute()


def test_the_workspace_of_a_clone_is_that_of_the_package() -> None:
    assert (WORKSPACE.parents[1] / "workspace.yaml").resolve() == WORKSPACE
