"""The wheel, installed with the base dependencies only into an environment of its own, reads a release."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.releases import make_site, publish_day

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
DAYS = ["2026-01-01", "2026-01-02"]
EXTRAS = ["dev", "pipeline", "production", "s3", "scale", "spark"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy: setuptools leaves a folder with files, which later wheels would contain."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for package in ("pf_core", "pf_assets"):
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(out), str(source))
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("base") / "bin"
    subprocess.run([sys.executable, "-m", "venv", str(folder.parent)], check=True)
    pip(folder / "python", "install", "--constraint", str(REPOSITORY / "constraints.txt"), str(wheel))
    return folder


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def run(*command: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """In another folder than the repository's, so that nothing is imported from there."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PF_SITE")}
    return subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, cwd="/", env=clean | environment
    )


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for package in ("pf_core", "pf_assets") for path in (REPOSITORY / package).rglob("*")]
    expected = {str(path.relative_to(REPOSITORY)) for path in files if path.suffix in (".py", ".j2", ".txt", ".yaml")}
    assert packed == expected


def test_the_metadata_lists_the_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    required = [
        re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line
    ]
    assert sorted(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert not set(required) & {"torch", "dagster", "mlflow", "duckdb", "pylance", "scipy"}
    of_pipeline = [line for line in metadata.get_all("Requires-Dist", []) if line.endswith('extra == "pipeline"')]
    assert {re.split(r"[^\w-]", line)[0] for line in of_pipeline} >= {"torch", "dagster", "mlflow", "duckdb", "pylance"}


def test_the_base_installation_lists_commands_and_imports_the_client(base: Path) -> None:
    listed = run(base / "pf", "--help")
    assert listed.returncode == 0, listed.stderr
    assert "recommend" in listed.stdout
    assert run(base / "python", "-m", "pf_assets.cli.main", "--help").returncode == 0
    imported = run(base / "python", "-c", "import pf_core.serving.client")
    assert imported.returncode == 0, imported.stderr


def test_a_command_of_the_pipeline_names_its_extra(base: Path) -> None:
    result = run(base / "pf", "status")
    assert result.returncode == 1
    assert result.stderr.endswith("pip install 'pinnerformer[pipeline]'\n")
    assert len(result.stderr.splitlines()) == 1


def test_the_base_installation_reads_a_release(base: Path, tmp_path: Path) -> None:
    site = make_site(tmp_path)
    for version, ds in enumerate(DAYS):
        publish_day(site, ds, range(20), version)
    (tmp_path / "site.yaml").write_text(site.model_dump_json())

    def pf(*arguments: str) -> str:
        result = run(base / "pf", *arguments, PF_SITE=str(tmp_path / "site.yaml"))
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert [line.split()[0] for line in pf("releases").splitlines()] == ["→", "2026-01-01.1"]
    shown = pf("recommend", "7", "-k", "3")
    assert "newest actions: not shown, they need Lance" in shown
    assert len(shown.split("recommended pins:")[1].strip().splitlines()) == 3
    assert len(pf("similar", "pin03", "-k", "4").splitlines()) == 4
    assert pf("rollback").startswith("current is 2026-01-01.1: 20 users, model model-0")


def test_the_version_is_that_of_the_project(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == importlib.metadata.version("pinnerformer")
