"""MLflow's store: what cannot be reached or used ends in a sentence at once, without the password."""

import stat
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pf_assets.cli.main import main
from pf_assets.tracking import database
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from tests.support.sites import SmallSite
from tests.support.small_disk import small_disk

SECRET = "s3cret-pass"


@pytest.fixture
def site(small_site: Callable[..., SmallSite]) -> Site:
    return small_site().site


def refusal(site: Site, monkeypatch: pytest.MonkeyPatch, uri: str) -> str:
    monkeypatch.setenv("PF_MLFLOW_URI", uri)
    with pytest.raises(PipelineError) as refused:
        Tracking(site).champion()
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


UNUSABLE = {
    "no driver, psycopg": (
        f"postgresql://user:{SECRET}@db.example:5432/mlflow",
        "at db.example:5432/mlflow needs the Python package psycopg, which is not installed; install it: pip install "
        "'pinnerformer[production]', and write postgresql+psycopg2://…",
    ),
    "no driver, psycopg2": (
        f"postgresql+psycopg2://user:{SECRET}@db.example/mlflow",
        "needs the Python package psycopg2, which is not installed; install it: pip install 'pinnerformer[production]'",
    ),
    "no driver, mysql": (f"mysql://user:{SECRET}@db.example/mlflow", "needs the Python package MySQLdb, which is not"),
    "unknown driver": (f"postgresql+carrier://user:{SECRET}@db.example/mlflow", "cannot be used: Can't load plugin"),
    "nobody there": (
        f"http://user:{SECRET}@127.0.0.1:9/",
        "MLflow's server at 127.0.0.1:9/ does not answer: [Errno 111] Connection refused; start it, or correct PF",
    ),
    "no such host": ("http://mlflow.invalid:5000", "MLflow's server at mlflow.invalid:5000 does not answer: "),
    "no port": ("http://127.0.0.1:port", "does not answer: "),
    "a path": ("/var/mlflow.db", "PF_MLFLOW_URI is not the address of a database or of an MLflow server; write postg"),
    "a typo": (f"postgrsql://user:{SECRET}@db/mlflow", "PF_MLFLOW_URI is not the address of a database"),
    "files": ("file:///tmp/mlruns", "PF_MLFLOW_URI is not the address of a database"),
    "no folder": ("sqlite:////nowhere/at/all/mlflow.db", "cannot be used: unable to open database file"),
    "no database": (
        "sqlite:////etc/hostname",
        "MLflow at /etc/hostname: (sqlite3.DatabaseError) file is not a ",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_store_is_a_sentence(what: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, sentence = UNUSABLE[what]
    if "no driver" in what:
        pytest.importorskip("sqlalchemy")
        hide(monkeypatch, "psycopg", "psycopg2", "MySQLdb")
    assert sentence in refusal(site, monkeypatch, uri)


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages look as if they were not installed, wherever these tests run."""
    for package in packages:
        monkeypatch.setitem(__import__("sys").modules, package, None)


def test_pf_prints_it_without_a_traceback(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "psycopg2")
    (tmp_path / "site.yaml").write_text(site.model_dump_json())
    monkeypatch.setenv("PF_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("PF_MLFLOW_URI", f"postgresql+psycopg2://user:{SECRET}@db.example/mlflow")
    monkeypatch.setattr("sys.argv", ["pf", "promote"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert printed.startswith("error: MLflow's database at db.example/mlflow needs the Python package psycopg2")
    assert len(printed.splitlines()) == 1


class Broken(BaseHTTPRequestHandler):
    """A server that is up, and answers every question with an error."""

    def do_GET(self) -> None:
        self.send_error(200 if self.path == "/health" else 403, f"no {SECRET}")

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_that_refuses_is_a_sentence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        sentence = refusal(site, monkeypatch, f"http://user:{SECRET}@127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert sentence.startswith(f"MLflow at 127.0.0.1:{server.server_port}: ")
    assert "403" in sentence


def test_the_file_is_private_and_appears_when_it_is_complete(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking, seen = Tracking(site), []
    new_client = database._new_client

    def watched(uri: str) -> Any:
        seen.append((uri, (tracking.root / "mlflow.db").exists()))
        return new_client(uri)

    monkeypatch.setattr(database, "_new_client", watched)
    tracking.prepare()
    (temporary, was_there), (final, _) = seen
    assert temporary != final
    assert not was_there
    assert [path.name for path in tracking.root.iterdir()] == ["mlflow.db"]
    assert stat.S_IMODE((tracking.root / "mlflow.db").stat().st_mode) == 0o600
    assert stat.S_IMODE(tracking.root.stat().st_mode) == 0o700


def test_a_faster_process_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process creates the file, and writes to it, while this one makes its own."""
    path = tmp_path / "mlflow.db"

    def slower(uri: str) -> None:
        Path(uri.removeprefix("sqlite:///")).write_text("ours")
        path.write_text("theirs, with a run")

    monkeypatch.setattr(database, "_new_client", slower)
    database._create_file(path)
    assert path.read_text() == "theirs, with a run"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_sentence_without_a_traceback_in_the_log(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", megabytes=4) as disk:
        tracking = Tracking(site.model_copy(update={"data_dir": str(disk.path)}))
        tracking.prepare()
        disk.leave_free(0)
        with pytest.raises(PipelineError) as refused:
            tracking.start(tmp_path / "run", name="model", params={}, tags={"text": "x" * 5000})
        assert str(refused.value) == (
            f"MLflow's database: No space left on device: {disk.path}/mlflow/mlflow.db; free some space there, "
            "then re-run"
        )
        printed = capfd.readouterr()
        assert "Traceback" not in printed.out + printed.err
        disk.empty()
        tracking.start(tmp_path / "run", name="model", params={}, tags={})
