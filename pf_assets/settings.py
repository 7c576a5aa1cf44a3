"""Settings that the assets of a site share: its site file, its Dagster home, pools and engine.

It does not import Dagster, so that commands which only read a release work without it.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from pf_core.config.site import Site, load_site
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.engine.spark import SparkEngine
from pf_core.errors import PipelineError
from pf_core.storage.files import reaching

ENGINE_POOL = "engine"
"""Pool of the assets that use the whole machine; the instance runs one of them at a time."""

TRAINING_POOL = "training"
"""Pool of the training set and the models trained on it: one run at a time, so that the set stays as it is."""

REPOSITORY = Path(__file__).resolve().parent.parent

"""Folder of the packages: the clone, or the site-packages of an installed wheel."""

DEMO_SITE = Path(__file__).with_name("demo.yaml")
"""The demo's site file with the days of its published figures; `pf demo` writes one with the newest days."""

WORKSPACE = Path(__file__).with_name("workspace.yaml")

EXPERIMENTS_SITE = REPOSITORY / "dagster_home" / "experiments" / "experiments.yaml"

INSTANCE_FILE = "dagster.yaml"

INSTANCE_TEXT = Path(__file__).with_name(INSTANCE_FILE)
"""What a new site's dagster.yaml says; installed with the package."""

SITE_FILE = "site.yaml"
"""Name of the site file that `pf init` writes."""


def in_clone() -> bool:
    """Whether this code runs from a clone, not from an installed wheel."""
    return EXPERIMENTS_SITE.is_file()


def demo_site_path() -> Path:
    """Path of the site file that `pf demo` writes: in a clone beside its other sites', else in ./demo."""
    return REPOSITORY / "dagster_home" / "demo.yaml" if in_clone() else Path("demo", SITE_FILE).resolve()


def site_path(environment: Mapping[str, str], *, otherwise: Path | None = None) -> Path:
    """Path of the site file that PF_SITE names; without PF_SITE, the default of the command.

    For most commands this is ./site.yaml if it exists, and else the demo's.
    """
    if environment.get("PF_SITE"):
        return Path(environment["PF_SITE"])
    own = Path(SITE_FILE)
    return otherwise or (own if own.is_file() else demo_site_path())


def own_site_path(environment: Mapping[str, str]) -> Path:
    """Path of the site file of a command that works on somebody's own logs: PF_SITE, or ./site.yaml."""
    path = site_path(environment, otherwise=Path(SITE_FILE))
    if not path.exists():
        raise PipelineError(f"no site file at {path}", "make one from your logs with `pf init LOGS`, or name one")
    return path


def dagster_home(site_file: Path | None = None) -> str:
    """Folder where Dagster keeps the runs and partitions of a site, by default of the site of PF_SITE.

    DAGSTER_HOME belongs to PF_SITE. Any other site file needs a dagster.yaml in its folder, which then is its Dagster
    home. There is no default: two sites have assets of the same names, and in one home their partitions would mix.
    """
    chosen = site_path(os.environ).resolve()
    if os.environ.get("DAGSTER_HOME") and site_file in (None, chosen):
        _refuse_home_of_another_site(chosen)
        return os.environ["DAGSTER_HOME"]
    site_file = site_file or chosen
    folder = site_file.parent
    if site_file == DEMO_SITE:
        raise PipelineError(
            f"{site_file} is an example, and its folder is no Dagster home",
            "`pf demo` writes a copy of it; or set PF_SITE to it and DAGSTER_HOME to a folder that no other site uses",
        )
    if not (folder / INSTANCE_FILE).exists():
        raise PipelineError(
            f"{site_file} has no Dagster home: there is no {INSTANCE_FILE} in its folder, and DAGSTER_HOME is not set "
            "for it",
            f"make one with `cp {shlex.quote(str(INSTANCE_TEXT))} {shlex.quote(str(folder))}`, or set PF_SITE to this "
            "file and DAGSTER_HOME to a folder that no other site uses",
        )
    return str(folder)


def environment_of_runs(home: str, site_file: Path) -> dict[str, str]:
    """Return the environment of the processes that `pf` starts for a site, whose current folder is its Dagster home."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait in loops take the cores from other work, and it from them
        **os.environ,
        "DAGSTER_HOME": home,
        "PF_SITE": str(site_file.resolve()),
        "PYTHONSAFEPATH": "1",  # a module in the site's folder shadows none of the libraries
    }


def _refuse_home_of_another_site(site_file: Path) -> None:
    """The homes of the repository's own sites are for these sites."""
    home = os.environ.get("DAGSTER_HOME")
    for own in (demo_site_path(), EXPERIMENTS_SITE):
        if home and Path(home).resolve() == own.parent and site_file.resolve() != own:
            raise PipelineError(
                f"DAGSTER_HOME is {home}, the Dagster home of {own}, and PF_SITE is {site_file}: the partitions of two "
                "sites would mix",
                "set DAGSTER_HOME to a folder that only this site uses, with a dagster.yaml in it",
            )


def current_site() -> Site:
    """Return the site of PF_SITE; refuse it if DAGSTER_HOME belongs to another one."""
    path = site_path(os.environ)
    _refuse_home_of_another_site(path)
    if not path.is_file() and not os.environ.get("PF_SITE"):
        raise PipelineError(
            f"no site here: PF_SITE is not set, and there is neither ./{SITE_FILE} nor {path}",
            "make a site from your logs with `pf init LOGS`, or the demo with `pf demo`",
        )
    return load_site(path, environment=os.environ)


def mlflow_server() -> str:
    """Address of the MLflow UI for links; `pf dev` serves it on this machine."""
    return os.environ.get("PF_MLFLOW_SERVER") or "http://localhost:5000"


def start_engine(site: Site) -> Engine:
    """Start the engine of the site file; raise a PipelineError if the site's data cannot be reached."""
    for path in (site.directory, site.log_root):
        with reaching(path):
            path.exists()
    config = site.engine
    if config.kind == "spark":
        assert config.master is not None
        return SparkEngine(
            master=config.master, num_workers=config.num_workers, memory_mb=config.memory_mb, settings=config.spark
        )
    return LocalEngine(
        num_workers=site.engine.num_workers, memory_mb=site.engine.memory_mb, temp_dir=site.workspace / "tmp"
    )
