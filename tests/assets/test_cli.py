import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app, main
from pf_assets.cli.runs import prepare_instance
from pf_assets.settings import DEMO_SITE, EXPERIMENTS_SITE, dagster_home

runner = CliRunner()


@pytest.fixture
def demo_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One day of the demo's format with a good, an unknown and a broken row."""
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path))
    folder = tmp_path / "demo_site" / "actions" / "2026-01-01"
    folder.mkdir(parents=True)
    lines = [
        "event_time_ms,user,pin,event,surface,dwell_ms",
        "1767225600123,5,p1,save,home,",
        "1767225600124,5,p1,dance,home,",
        "broken",
    ]
    (folder / "actions.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def test_check_shows_how_a_site_file_reads_the_logs(demo_logs: Path) -> None:
    result = runner.invoke(app, ["check", str(DEMO_SITE)])
    assert result.exit_code == 0, result.output
    assert "1 kept, 0 skipped" in result.output
    assert "1 quarantined: action_type: unknown value (column event); first in row 3" in result.output
    assert "1 quarantined: malformed: 1 fields instead of 6; first in row 4" in result.output
    assert "user_id=5" in result.output
    assert "2026-01-01 00:00:00.123" in result.output


def test_check_names_what_is_missing(demo_logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = runner.invoke(app, ["check", str(DEMO_SITE), "--ds", "2026-01-02"])
    assert result.exit_code == 1
    assert "no file matches" in result.output


def test_a_mistake_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text("name: x\nstart_ds: 2026-01-01\nsauce: {}\n")
    monkeypatch.setattr("sys.argv", ["pf", "check", str(tmp_path / "site.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    captured = capsys.readouterr().err
    assert "sauce: is not a known key (a typo?)" in captured
    assert "Traceback" not in captured


def test_world_writes_a_site(tmp_path: Path) -> None:
    arguments = ["world", str(tmp_path / "site"), "--preset", "tiny", "--file-format", "parquet"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert len(list((tmp_path / "site" / "actions").iterdir())) == 21
    assert runner.invoke(app, ["world", str(tmp_path / "other"), "--preset", "huge"]).exit_code == 1


def test_a_site_has_a_dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("PF_SITE", raising=False)
    assert dagster_home() == dagster_home(DEMO_SITE) == str(DEMO_SITE.parent)
    assert dagster_home(EXPERIMENTS_SITE) == str(EXPERIMENTS_SITE.parent)
    assert dagster_home(tmp_path / "site.yaml") == str(DEMO_SITE.parent), "there is no dagster.yaml beside it"
    (tmp_path / "dagster.yaml").touch()
    assert dagster_home(tmp_path / "site.yaml") == str(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "/elsewhere")
    assert dagster_home() == dagster_home(DEMO_SITE) == "/elsewhere"
    assert dagster_home(EXPERIMENTS_SITE) == str(EXPERIMENTS_SITE.parent), "it is not the site of DAGSTER_HOME"
    monkeypatch.setenv("PF_SITE", str(EXPERIMENTS_SITE))
    assert dagster_home(EXPERIMENTS_SITE) == "/elsewhere"


def test_an_instance_is_made_before_runs_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("PF_SITE", raising=False)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    prepare_instance(tmp_path / "site.yaml")
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.db"))
    assert made == ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"]
