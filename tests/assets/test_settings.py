"""Every site has a Dagster home of its own."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pf_assets.cli.main import main
from pf_assets.settings import DEMO_SITE, current_site, dagster_home, environment_of_runs
from pf_core.errors import PipelineError
from tests.support.sites import SmallSite


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("PF_SITE", raising=False)
    path = tmp_path / "my site" / "site.yaml"
    path.parent.mkdir()
    path.write_text(SmallSite(tmp_path).site.model_dump_json())
    return path


def test_a_site_without_a_dagster_home_is_refused_until_it_has_one(site_file: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"has no Dagster home: there is no dagster\.yaml in its") as refused:
        dagster_home(site_file)
    remedy = re.search("`(cp .*)`", str(refused.value.remedy))
    assert remedy is not None
    subprocess.run(remedy[1], shell=True, check=True, cwd=tmp_path)
    assert dagster_home(site_file) == str(site_file.parent)


def test_pf_site_without_a_dagster_home_is_refused_until_it_has_one(
    site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PF_SITE", os.path.relpath(site_file))
    with pytest.raises(PipelineError, match="has no Dagster home"):
        dagster_home()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    assert dagster_home() == dagster_home(site_file) == str(tmp_path / "home")


def test_dagster_home_of_another_site_is_not_used(
    site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home of PF_SITE, which is the demo's"))
    with pytest.raises(PipelineError, match="has no Dagster home"):
        dagster_home(site_file)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [("dev", "{site_file} has no Dagster home"), ("report", "no recipe of small is finished yet")],
)
def test_commands_refuse_in_a_sentence(
    site_file: Path, command: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PF_SITE", str(site_file))
    monkeypatch.setattr("sys.argv", ["pf", command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert f"error: {sentence.format(site_file=site_file)}" in capsys.readouterr().err


def test_the_demos_home_is_for_the_demo(site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dagster asset materialize` reads both variables itself: the site is refused when the assets are defined."""
    made = tmp_path / "demo" / "site.yaml"
    made.parent.mkdir()
    made.write_text(DEMO_SITE.read_text())
    monkeypatch.setattr("pf_assets.settings.demo_site_path", lambda: made)
    monkeypatch.setenv("DAGSTER_HOME", str(made.parent))
    assert current_site().name == "demo"
    monkeypatch.setenv("PF_SITE", str(site_file))
    for refused in (current_site, dagster_home):
        with pytest.raises(PipelineError, match="the partitions of two sites would mix"):
            refused()
    monkeypatch.setenv("DAGSTER_HOME", str(site_file.parent))
    assert current_site().name == "small"


def test_processes_know_their_site_wherever_they_start(site_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site_file.parent)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    environment = environment_of_runs("/home", Path("site.yaml"))
    assert environment["PF_SITE"] == str(site_file)
    assert environment["DAGSTER_HOME"] == "/home"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment_of_runs("/home", Path("site.yaml"))["OMP_WAIT_POLICY"] == "ACTIVE", "a person decides"
