"""The promises of `pf` as a whole: exit codes, --version, completion, --json, and sentences instead of tracebacks."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pf_assets.cli.main import COMMANDS, EXIT_CODES
from pf_core.days import day_ranges, days_text, ds_range
from tests.support.shop import shop_file, write_shop

REPOSITORY = Path(__file__).parents[2]

COUNT_IMPORTS = """
import atexit, sys
atexit.register(lambda: print(sorted({'torch', 'dagster', 'mlflow', 'duckdb'} & set(sys.modules)), file=sys.stderr))
from pf_assets.cli.main import main
sys.argv[0] = 'pf'
main()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a site file, of which nothing is materialized."""
    folder = tmp_path / "site"
    write_shop(folder)
    (folder / "site.yaml").write_text(yaml.safe_dump(shop_file(folder)))
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    return folder


def pf(*arguments: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `pf` in a folder, with no site of its own but ./site.yaml."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PF_", "DAGSTER_"))}
    settings = clean | {"PYTHONPATH": str(REPOSITORY), "TERMINAL_WIDTH": "100"} | environment
    command = [sys.executable, "-W", "ignore", "-c", COUNT_IMPORTS, *arguments]
    return subprocess.run(command, cwd=folder, env=settings, text=True, capture_output=True, stdin=subprocess.DEVNULL)


def test_the_version(tmp_path: Path) -> None:
    result = pf("--version", folder=tmp_path)
    assert (result.returncode, result.stdout) == (0, "pinnerformer 0.1.0\n")
    assert result.stderr == "[]\n"


def test_help_states_the_exit_codes(tmp_path: Path) -> None:
    result = pf("--help", folder=tmp_path)
    assert result.returncode == 0
    words = " ".join(result.stdout.replace("│", " ").split())
    assert EXIT_CODES in words
    assert "--install-completion" in words


def test_completion_imports_nothing_that_is_slow(tmp_path: Path) -> None:
    script = pf("--show-completion", "bash", folder=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.returncode == 0, script.stderr
    assert "_PF_COMPLETE=complete_bash" in script.stdout
    for line, completions in {
        "pf re": {"repair", "recommend", "releases", "report"},
        "pf recommend --n": {"--new-only"},
    }.items():
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_PF_COMPLETE": "complete_bash"}
        result = pf(folder=tmp_path, **words)
        assert set(result.stdout.split()) == completions
        assert result.stderr == "[]\n"
    assert pf(folder=tmp_path, COMP_WORDS="pf run --", COMP_CWORD="2", _PF_COMPLETE="complete_bash").stderr == "[]\n"


@pytest.mark.parametrize("arguments", [["recomend"], ["run", "--fast"], ["recommend"], ["recommend", "5", "-k", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], home: Path) -> None:
    result = pf(*arguments, folder=home)
    assert result.returncode == 2, result.stderr
    assert "Usage: pf" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "."], ". is a folder; name the site file in it"),
        (["run", "nowhere.yaml"], "no site file at nowhere.yaml; "),
        (["run", "/proc/self/mem"], "/proc/self/mem cannot be read: Input/output error"),
        (["report"], "no recipe of shop is finished yet: there is nothing to report; pf ablations"),
        (["export", "users", "out", "--ds", "2026-02-30"], "'2026-02-30' is not a day; write it as YYYY-MM-DD"),
        (["export", "users", "out", "--ds", "../2026"], "'../2026' is not a day; write it as YYYY-MM-DD"),
        (["export", "films", "out"], "cannot export 'films'; choose users or pins"),
        (["repair", "--since", "yesterday"], "'yesterday' is not a day; write it as YYYY-MM-DD"),
        (["repair", "--since", "2026-01-02", "--until", "20260103"], "'20260103' is not a day; write it as YYYY-MM-DD"),
        (["repair", "--since", "2026-01-02"], "raw_actions has no day yet: there is nothing to repair"),
        (["recommend", "5"], "site shop has no release yet; "),
        (["recommend", "alice"], "site shop has no release yet; "),
        (["rollback"], "there is no earlier release to go back to"),
        (["promote"], "no model is registered yet; "),
        (["promote", "3", "--json"], "--json lists the models, and promotes none; pf promote --json"),
        (["forget", "alice"], "'alice' is not an integer user id"),
    ],
)
def test_an_error_is_a_sentence_and_exit_code_1(arguments: list[str], sentence: str, home: Path) -> None:
    result = pf(*arguments, folder=home, PF_SITE="site.yaml")
    assert result.returncode == 1, result.stderr
    assert f"error: {sentence}" in result.stderr
    assert "Traceback" not in result.stderr
    assert "nanobind" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (["releases", "--json"], []),
        (["promote", "--json"], {"models": [], "champions": []}),
    ],
)
def test_json_of_a_site_without_anything(arguments: list[str], content: object, home: Path) -> None:
    result = pf(*arguments, folder=home, PF_SITE="site.yaml")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == content


def test_the_status_as_json(home: Path) -> None:
    result = pf("status", "--json", folder=home, PF_SITE="site.yaml")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["site"] == "shop"
    assert content["assets"]["raw_actions"] == {"days": [], "missing": [], "stale": {}}
    assert [content[key] for key in ("champion", "candidate", "evaluation")] == [None] * 3


@pytest.mark.parametrize("name", ["run", "status", "recommend", "similar", "releases", "promote", "forget"])
def test_every_command_that_a_script_reads_has_json(name: str) -> None:
    function = getattr(importlib.import_module(COMMANDS[name].module), name)
    assert "as_json" in inspect.signature(function).parameters


# Days


def test_days_are_printed_as_ranges() -> None:
    days = [*ds_range("2026-01-30", "2026-02-02"), "2026-03-01", *ds_range("2026-03-05", "2026-03-06")]
    assert days_text(days) == "2026-01-30 to 2026-02-02, 2026-03-01, 2026-03-05 to 2026-03-06"
    assert day_ranges(reversed([*days, *days])) == [
        *(("2026-01-30", "2026-02-02"), ("2026-03-01", "2026-03-01"), ("2026-03-05", "2026-03-06"))
    ]
    assert days_text(days, max_ranges=1) == "2026-01-30 to 2026-02-02, and 2 more ranges"
    assert days_text([]) == ""


def test_another_site_in_the_folder_is_told(home: Path, tmp_path: Path) -> None:
    """PF_SITE wins over ./site.yaml, also where somebody has forgotten it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "site.yaml").write_text((home / "site.yaml").read_text().replace("shop", "other"))
    told = "site.yaml; ./site.yaml is another site, and is read only if you name it\n"
    assert told in pf("releases", folder=other, PF_SITE=str(home / "site.yaml")).stderr
    assert told not in pf("releases", folder=home, PF_SITE=str(home / "site.yaml")).stderr
    assert told not in pf("releases", folder=other).stderr
