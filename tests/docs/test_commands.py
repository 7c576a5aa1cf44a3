"""Every command and Python snippet of README and docs runs, on the demo's site file with a tiny world.

A block after `<!-- not run: reason -->` is left out; the targets of `make` must exist, and CI runs the README's two.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml

from pf_assets.settings import DEMO_SITE
from pf_core.config.site import Site
from pf_core.config.training_section import TrainingConfig
from pf_core.serving.client import Serving
from pf_core.world.config import tiny
from pf_core.world.logs import write_logs
from tests.support.demo_site import Runs, write_site_file
from tests.support.documents import REPOSITORY, Block, blocks
from tests.support.shared import SharedSites
from tests.support.training_here import RUN_RANKS, run_rank_here

WORLD = replace(tiny(num_users=200, num_days=18), start_ds="2026-03-14")
"""The same last day as the demo's, so that the documented days exist."""
DAYS = WORLD.dates
DOCUMENTED_USER, DOCUMENTED_PIN = "8971492192194414", "p7grg9z91"


def make_documented_site(root: Path) -> Site:
    """Everything up to a second release; the model is trained for four steps."""
    environment = {"PF_DATA_DIR": str(root / "data")}
    (root / "dagster_home").mkdir()
    (root / "dagster_home" / "dagster.yaml").write_text((DEMO_SITE.parent / "dagster.yaml").read_text())
    site = write_site_file(root / "dagster_home" / "demo.yaml", WORLD, environment=environment)
    write_logs(WORLD, site.log_root, file_format="csv.gz")
    with dg.DagsterInstance.ephemeral() as instance, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUN_RANKS, run_rank_here)
        runs = Runs(site, instance)
        runs.materialize("raw_actions,pin_features,user_timelines", DAYS)
        runs.materialize("training_set,pinnerformer_model,offline_evaluation")
        for days in (DAYS[-4:-1], DAYS[-1:]):
            runs.materialize("user_embeddings,user_embedding_snapshot,pin_embeddings,pin_index,release", days)
    return site


class Shell:
    """Runs commands as a reader of the pages would, in a folder that looks like the repository."""

    def __init__(self, root: Path, site: Site) -> None:
        self._root = root
        release = Serving(site).release()
        pin = release.index.pin_ids[0].as_py()
        self._names = {DOCUMENTED_USER: str(a_user(site)), DOCUMENTED_PIN: pin}
        self._names |= {f"/tmp/{name}": f"{root}/tmp/{name}" for name in ("site", "users")}
        (root / "tmp").mkdir()
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "PF_SITE": str(root / "dagster_home" / "demo.yaml"),
            "PF_DATA_DIR": str(root / "data"),
            "DAGSTER_HOME": str(root / "dagster_home"),
        }

    def run(self, command: list[str]) -> None:
        for written, ours in self._names.items():
            command = [part.replace(written, ours) for part in command]
        result = subprocess.run(command, cwd=self._root, env=self._environment, capture_output=True, text=True)
        if command[-1].startswith("pf status") and "model_beats_baselines    failed" in result.stdout:
            assert result.returncode == 1, "four steps of training need not beat the baselines"
            return
        assert result.returncode == 0, f"{command[-1]}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def a_user(site: Site) -> int:
    from pf_core.embeddings.snapshot import read_snapshot

    return int(read_snapshot(site, DAYS[-1], 0)["user_id"][0].as_py())


def pages_with(language: str) -> dict[str, list[Block]]:
    pages: dict[str, list[Block]] = {}
    for block in blocks(language):
        if block.reason is None:
            pages.setdefault(block.page, []).append(block)
    return pages


@pytest.fixture
def shell(shared_sites: SharedSites, tmp_path: Path) -> Shell:
    site = shared_sites.copy("documented", make_documented_site, tmp_path / "repository")
    return Shell(tmp_path / "repository", site)


@pytest.mark.service
@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_run(page: str, shell: Shell) -> None:
    for block in pages_with("sh")[page]:
        for command in block.commands:
            if command.startswith("make "):
                dry = subprocess.run(["make", "-n", *command.split()[1:]], cwd=REPOSITORY, capture_output=True)
                assert dry.returncode == 0, command
            else:
                shell.run(["bash", "-c", command])


@pytest.mark.service
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_snippets_run(page: str, shell: Shell) -> None:
    for block in pages_with("python")[page]:
        shell.run([sys.executable, "-c", block.text])


def test_training_sections_are_valid() -> None:
    sections = [yaml.safe_load(block.text) for block in blocks("yaml")]
    training = [section["training"] for section in sections if "training" in section]
    assert len(training) == 2
    for section in training:
        TrainingConfig.model_validate(section)
