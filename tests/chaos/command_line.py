"""A copy of the chaos site with a registry and a Dagster home, and its commands in processes that kill themselves."""

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pf_assets.cli.runs import prepare_instance
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from tests.chaos.chaos_site import SITE_FILE, make_site, open_site
from tests.support.daily import register_model
from tests.support.shared import _replace_paths

REPOSITORY = Path(__file__).parents[2]

INSTANCE = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"

RUN = """
import runpy, sys
from pathlib import Path
from tests.chaos.kill_points import KillPoint
number, root, module = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if number:
    KillPoint("change", number, root)
sys.argv = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Run a module as `python -m` does; it kills itself at its n-th change of a file of the site."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The commands of a site."""

    root: Path
    site: Site

    def start(self, *command: str, kill_at_change: int = 0) -> "subprocess.Popen[str]":
        """Start `python -m` of a command."""
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(kill_at_change), str(self.root), *command],
            cwd=REPOSITORY,
            env={**os.environ, "PF_SITE": str(self.root / SITE_FILE), "DAGSTER_HOME": str(_home_of(self.root))},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *command: str, kill_at_change: int = 0) -> tuple[int, str]:
        """Run a command to its end; return its exit code and its output."""
        process = self.start(*command, kill_at_change=kill_at_change)
        output, _ = process.communicate()
        return process.returncode, output


def pf(*arguments: str) -> tuple[str, ...]:
    return "pf_assets.cli.main", *arguments


def materialize(assets: str, ds: str | None = None) -> tuple[str, ...]:
    partition = () if ds is None else ("--partition", ds)
    return "dagster", "asset", "materialize", "--select", assets, *partition, "-m", "pf_assets.definitions"


def open_command_line(shared: Path, before: Path, root: Path) -> CommandLine:
    """Copy a site to `root`, with a registry in which model A is the champion, and with a Dagster home."""
    registered = _registered(shared / "registered")
    shutil.copytree(before, root)
    site = open_site(root)
    (root / SITE_FILE).write_text(site.model_dump_json())
    shutil.copytree(registered / "data" / "mlflow", Tracking(site).root)
    _replace_paths(Tracking(site).root / "mlflow.db", str(registered), str(root))
    shutil.copytree(_home_of(registered), _home_of(root))
    return CommandLine(root=root, site=site)


def _registered(folder: Path) -> Path:
    """A site of which nothing is materialized, whose databases take seconds to make: once for all workers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            register_model(make_site(folder))
            home = _home_of(folder)
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            (home / "dagster.yaml").write_text(INSTANCE)
            prepare_instance(home)
            (folder / "complete").touch()
    return folder


def _home_of(root: Path) -> Path:
    """The Dagster home of a site: not below it, because changes there are no changes of the site."""
    return root.with_name(f"{root.name}-dagster")
