"""The wheel, installed into an environment of its own.

With the base dependencies only it reads a release; with those of the pipeline everything works in an empty folder.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from pf_core.world.config import tiny
from pf_core.world.logs import write_logs
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


# With the pipeline


SMALL_DEMO = """
from pf_core.world import config
config.demo = lambda: config.tiny(num_users=200, num_days=90)
from pf_assets.cli.main import main
if __name__ == "__main__":
    main()
"""
"""`pf` with a demo of the same days and fewer users: everything else is as installed."""


@pytest.fixture(scope="module")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `site-packages` of an environment with the wheel, beside the packages that these tests run with."""
    folder = tmp_path_factory.mktemp("pipeline")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    others = [sysconfig.get_paths()["purelib"], str(Path(pytest.__file__).parents[1])]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return packages


class Installed:
    """`pf` of the wheel in an empty folder, without any variable of ours."""

    def __init__(self, packages: Path, root: Path) -> None:
        self.folder = root / "empty"
        self.folder.mkdir()
        (root / "small_demo.py").write_text(SMALL_DEMO)
        self._small_demo = str(root / "small_demo.py")
        self._python = str(packages.parents[2] / "bin" / "python")
        ours = ("PF_", "DAGSTER_", "MLFLOW_", "PYTHON")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._options: dict[str, Any] = {
            "cwd": self.folder,
            "env": clean | {"XDG_CACHE_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"},
            "text": True,
        }

    def pf(self, *arguments: object, exit_codes: tuple[int, ...] = (0,)) -> str:
        program = [self._small_demo] if arguments[0] == "demo" else ["-m", "pf_assets.cli.main"]
        command = [self._python, *program, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, **self._options)
        assert result.returncode in exit_codes, f"{arguments}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        return result.stdout

    def dev(self, *ports: int) -> "subprocess.Popen[str]":
        command = [self._python, "-m", "pf_assets.cli.main", "dev"]
        command += ["--dagster-port", str(ports[0]), "--mlflow-port", str(ports[1])]
        return subprocess.Popen(command, **self._options)


@pytest.fixture
def installed(packages: Path, tmp_path: Path) -> Installed:
    return Installed(packages, tmp_path)


def test_the_demo_runs_in_an_empty_folder(installed: Installed, packages: Path) -> None:
    before = {path for path in packages.rglob("*") if "__pycache__" not in str(path)}
    shown = installed.pf("demo", "--until", "2026-04-01")
    demo = installed.folder / "demo"
    assert f"the demo: {demo}/site.yaml on days 2026-01-01 to 2026-03-31, in {demo}/data\n" in shown
    assert [path.name for path in installed.folder.iterdir()] == ["demo"]
    assert {"site.yaml", "dagster.yaml", "data"} <= {path.name for path in demo.iterdir()}
    user = re.search(r"user (\d+) in release 2026-03-31\.1", shown)
    assert user is not None, shown
    assert "recommended pins:" in installed.pf("recommend", user[1])
    assert "2026-03-31" in installed.pf("status", exit_codes=(0, 1))
    assert "2026-03-31.1" in installed.pf("releases")
    assert "kept" in installed.pf("check", "demo/site.yaml")
    assert "is released, and nothing is missing" in installed.pf("demo")
    served(installed)
    after = {path for path in packages.rglob("*") if "__pycache__" not in str(path)}
    assert after == before, "nothing is written where the packages are"


def served(installed: Installed) -> None:
    """`pf dev` serves the assets in Dagster, and MLflow, and ends both."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    process = installed.dev(*ports)
    try:
        until = time.monotonic() + 300
        query = json.dumps({"query": "{assetNodes{assetKey{path}}}"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{ports[0]}/graphql", data=query, headers={"Content-Type": "application/json"}
        )
        assets: set[str] = set()
        while not assets and process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
                assets = {node["assetKey"]["path"][0] for node in json.load(answer)["data"]["assetNodes"]}
            time.sleep(0.5)
        assert {"raw_actions", "pinnerformer_model", "release"} <= assets
        is_up = False
        while not is_up and process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/health") as answer:
                is_up = answer.status == 200
            time.sleep(0.5)
        assert is_up
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_own_logs_become_recommendations_in_an_empty_folder(installed: Installed) -> None:
    world = tiny(num_users=200, num_days=21)
    write_logs(world, installed.folder / "logs", file_format="csv.gz")
    assert "wrote site.yaml and dagster.yaml" in installed.pf("init", "logs/actions", "--yes")
    assert "kept" in installed.pf("check")
    user = re.search(r"user (\d+) in release", installed.pf("run"))
    assert user is not None
    assert "recommended pins:" in installed.pf("recommend", user[1])
    assert world.dates[-1] in installed.pf("status", exit_codes=(0, 1))
    assert {path.name for path in installed.folder.iterdir()} >= {"logs", "site.yaml", "dagster.yaml"}
