import gzip
import importlib
import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import COMMANDS, app, main
from pf_assets.cli.runs import prepare_instance
from pf_assets.settings import DEMO_SITE, EXPERIMENTS_SITE, REPOSITORY, dagster_home, demo_site_path

runner = CliRunner()


@pytest.fixture
def demo_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One day of the demo's format with a good, an unknown and a broken row."""
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path))
    folder = tmp_path / "demo_site" / "actions" / "2026-01-01"
    folder.mkdir(parents=True)
    (tmp_path / "demo_site" / "forget.txt").touch()
    (tmp_path / "demo_site" / "pins").mkdir()
    pins = {"pin": ["p1"], "vector": [[0.0, 1.0]], "topic": ["art"], "on_homefeed": [True]}
    pq.write_table(pa.table(pins), tmp_path / "demo_site" / "pins" / "2026-01-01.parquet")
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
    assert "1 kept, 1 of them positive, 0 skipped" in result.output
    assert "1 quarantined: action_type: unknown value (column event); first in row 3" in result.output
    assert "1 quarantined: malformed: 1 fields instead of 6; first in row 4" in result.output
    assert "user_id=5" in result.output
    assert "2026-01-01 00:00:00.123" in result.output
    assert result.exit_code == 1
    assert f"error: {2 / 3:.2%} of 3 rows quarantined, at most 2.00% allowed; most often: " in result.output


def write_demo_rows(folder: Path, *rows: str) -> None:
    text = "\n".join(["event_time_ms,user,pin,event,surface,dwell_ms", *rows])
    (folder / "actions.csv.gz").write_bytes(gzip.compress(text.encode()))


def test_check_refuses_a_day_without_a_positive_action(demo_logs: Path) -> None:
    write_demo_rows(demo_logs, "1767225600123,5,p1,closeup,home,10000", "1767225600124,5,p1,save,search,1")
    result = runner.invoke(app, ["check", str(DEMO_SITE)])
    assert result.exit_code == 1
    assert "2 kept, 0 of them positive" in result.output
    assert "none of the 2 actions that were read is positive: source.positive is {action_types: [repin" in result.output
    assert (
        "the actions have action_type: closeup, repin; surface: homefeed, search; fix source.positive" in result.output
    )
    (demo_logs / "later.csv.gz").write_bytes((demo_logs / "actions.csv.gz").read_bytes())
    write_demo_rows(demo_logs, "1767225600123,5,p1,closeup,home,10001")
    assert runner.invoke(app, ["check", str(DEMO_SITE), "--ds", "2026-01-01"]).exit_code == 0
    (demo_logs / "actions.csv.gz").rename(demo_logs / "latest.csv.gz")  # not the first file any more
    assert runner.invoke(app, ["check", str(DEMO_SITE), "--ds", "2026-01-01"]).exit_code == 0


def test_check_accepts_a_day_without_actions_but_no_log_without(demo_logs: Path) -> None:
    write_demo_rows(demo_logs)
    result = runner.invoke(app, ["check", str(DEMO_SITE)])
    assert result.exit_code == 1
    assert "the log has no rows" in result.output
    (demo_logs.parent / "2026-01-02").mkdir()
    write_demo_rows(demo_logs.parent / "2026-01-02", "1767312000123,5,p1,closeup,home,10001")
    result = runner.invoke(app, ["check", str(DEMO_SITE)])
    assert "the log has no rows" not in result.output
    assert "error: the log is too small to train on: 1 user and 1 action on 1 day" in result.output
    assert runner.invoke(app, ["check", str(DEMO_SITE), "--ds", "2026-01-01"]).exit_code == 0


def test_check_shows_control_characters_of_the_log_as_escapes(demo_logs: Path) -> None:
    write_demo_rows(demo_logs, "1767225600123,5,\x1b[2Jp1,save,home,")
    result = runner.invoke(app, ["check", str(DEMO_SITE)])
    assert "pin_id=\\x1b[2Jp1" in result.output
    assert "\x1b[2J" not in result.output


def test_check_shows_log_content_and_does_not_execute_it(demo_logs: Path) -> None:
    pins = ["\x1b[31mred", "[bold]b[/bold]", "<script>|`", "y" * 3_000_000]
    lines = ["event_time_ms,user,pin,event,surface,dwell_ms", *(f"1767225600123,5,{pin},save,home," for pin in pins)]
    (demo_logs / "actions.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    result = runner.invoke(
        app, ["check", str(DEMO_SITE), "--ds", "2026-01-01"], color=True
    )  # otherwise the runner removes escapes
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    for shown in ("\\x1b[31mred", "[bold]b[/bold]", "<script>|`", "y" * 199 + "…"):
        assert f"pin_id={shown}  " in result.output
    assert len(result.output) < 5_000


def test_check_names_what_is_missing(demo_logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = runner.invoke(app, ["check", str(DEMO_SITE), "--ds", "2026-01-02"])
    assert result.exit_code == 1
    assert "no file matches" in str(result.exception)


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


def test_an_error_does_not_execute_log_content(
    demo_logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (demo_logs / "actions.csv.gz").write_bytes(gzip.compress(b"event_time_ms,\x1b[2Juser,[red]pin\n1,2,3\n"))
    monkeypatch.setattr("sys.argv", ["pf", "check", str(DEMO_SITE)])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr().err
    assert "\\x1b[2Juser" in captured
    assert "[red]pin" in captured
    assert "\x1b[2J" not in captured


# The list of commands


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=True
    ).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_has_the_docstring_of_every_command(name: str) -> None:
    function = getattr(importlib.import_module(COMMANDS[name].module), name)
    assert inspect.getdoc(function) == COMMANDS[name].summary


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pf_assets.cli.main import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "print(sorted(name for name in sys.modules if name.startswith(('pf_', 'dagster', 'pyarrow', 'numpy'))))"
    )
    *listed, imported = run_python(code).strip().splitlines()
    assert all(any(line.startswith(f"│ {name} ") for line in listed) for name in COMMANDS)
    ours = ["pf_assets", "pf_assets.cli", *(f"pf_assets.cli.{name}" for name in ("lazy", "main", "output"))]
    assert imported == str([*ours, "pf_core", "pf_core.errors", "pf_core.printable"])


def test_commands_that_read_a_release_import_nothing_that_builds() -> None:
    modules = sorted({command.module for command in COMMANDS.values() if not command.needs_pipeline})
    assert modules == ["pf_assets.cli.releases", "pf_assets.cli.world"]
    builds = ("torch", "duckdb", "scipy", "lance", "dagster", "mlflow", "matplotlib", "jinja2", "pandas")
    code = f"import sys, {', '.join(modules)}; print([name for name in {builds!r} if name in sys.modules])"
    assert run_python(code) == "[]\n"


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.needs_pipeline])
def test_a_command_of_the_pipeline_names_the_extra_that_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pf_assets.cli.lazy.PIPELINE_PACKAGE", "a_package_that_is_not_installed")
    monkeypatch.setattr("sys.argv", ["pf", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: pf {name} needs the packages of the pipeline, which are not installed; "
        "pip install 'pinnerformer[pipeline]'\n"
    )


def test_an_unknown_command_is_an_error_with_a_suggestion() -> None:
    result = runner.invoke(app, ["recomend"])
    assert result.exit_code == 2
    assert "Did you mean 'recommend'" in result.output


def test_the_help_of_a_command_has_its_options() -> None:
    result = runner.invoke(app, ["recommend", "--help"], prog_name="pf")
    assert result.exit_code == 0
    assert "Usage: pf recommend [OPTIONS]" in result.output
    assert "--recent" in result.output


# Commands


def test_world_writes_a_site(tmp_path: Path) -> None:
    arguments = ["world", str(tmp_path / "site"), "--preset", "tiny", "--file-format", "parquet"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert len(list((tmp_path / "site" / "actions").iterdir())) == 21
    assert runner.invoke(app, ["world", str(tmp_path / "other"), "--preset", "huge"]).exit_code == 1


def test_a_site_has_a_dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("PF_SITE", raising=False)
    made = demo_site_path()
    assert dagster_home() == dagster_home(made) == str(made.parent) == str(REPOSITORY / "dagster_home")
    assert dagster_home(EXPERIMENTS_SITE) == str(EXPERIMENTS_SITE.parent)
    (tmp_path / "dagster.yaml").touch()
    assert dagster_home(tmp_path / "site.yaml") == str(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "/elsewhere")
    assert dagster_home() == dagster_home(made) == "/elsewhere"
    assert dagster_home(EXPERIMENTS_SITE) == str(EXPERIMENTS_SITE.parent), "it is not the site of DAGSTER_HOME"
    monkeypatch.setenv("PF_SITE", str(EXPERIMENTS_SITE))
    assert dagster_home(EXPERIMENTS_SITE) == "/elsewhere"


def test_an_instance_is_made_before_runs_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.delenv("PF_SITE", raising=False)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with ThreadPoolExecutor(4) as threads:  # at once: without the lock, its databases are damaged for good
        list(threads.map(prepare_instance, [tmp_path] * 4))
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.db"))
    assert made == ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"]
