"""`pf ablations` and `pf report`: run the paper's experiments, and write the report on them.

Without PF_SITE both use the site in dagster_home/experiments, whose logs are made first; PF_SITE can name any site that
has days after its training set's cut. Each recipe is a Dagster run of its own, as the UI would start it.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, get_args

import typer

from pf_assets.cli.output import fail, show
from pf_assets.cli.runs import materialize, missing_days
from pf_assets.cli.world import write_world
from pf_assets.settings import DEMO_SITE, EXPERIMENTS_SITE, site_path
from pf_assets.tracking.experiment_store import ExperimentStore
from pf_core.config.site import Site, load_site
from pf_core.errors import PipelineError
from pf_core.experiments.plan import PlannedSeed, plan_experiments
from pf_core.experiments.recipe import Experiment, Set
from pf_core.experiments.recipes import experiments
from pf_core.storage.builds import MANIFEST
from pf_core.world import config as world_config

START_S = 25.0
"""Seconds that a Dagster run takes besides training and judging."""


def ablations(
    sets: Annotated[list[str] | None, typer.Option("--set", help=f"only these: {', '.join(get_args(Set))}")] = None,
    names: Annotated[list[str] | None, typer.Option("--recipe", help="only these recipes")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="seeds of each recipe; by default 2 in the core sets, else 1")
    ] = None,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="count what an older version of the code has finished as finished")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="recipes at a time; each starts the site's training processes")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would be run")] = False,
) -> None:
    """Train and judge every recipe that is not finished, the most important first; a second call goes on."""
    site_file = site_path(os.environ, otherwise=EXPERIMENTS_SITE).resolve()
    site = load_site(site_file, environment=os.environ)
    chosen = choose_experiments(experiments(site), sets=sets or (), names=names or ())
    if dry_run:
        for experiment in chosen:
            show(f"{experiment.name:<24} {', '.join(experiment.sets)}")
        return
    prepare(site, site_file)
    work = _Work(site_file, plan_experiments(site, chosen, num_seeds=seeds), any_code=any_code, jobs=jobs)
    if work.missing:
        ExperimentStore(site).prepare()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            failed = [name for name in pool.map(work.run, list(work.missing)) if name is not None]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # the runs receive the signal themselves
            raise
    done = len(work.plans) - len(failed)
    show(f"{done} of {len(work.plans)} recipes are finished; `pf report` reports on them", bold=True)
    if failed:
        fail(f"these failed, their logs are above: {', '.join(failed)}; the same command runs them again")


class _Work:
    """The chosen recipes, and those of them that are not finished."""

    def __init__(
        self, site_file: Path, plans: Mapping[str, Sequence[PlannedSeed]], *, any_code: bool, jobs: int
    ) -> None:
        self.site_file, self.plans, self.any_code, self.jobs = site_file, plans, any_code, jobs
        self.missing = [name for name, seeds in plans.items() if not all(map(self._is_finished, seeds))]
        self._left = list(self.missing)

    def run(self, name: str) -> str | None:
        """Run a recipe; return its name if it failed: the other recipes do not depend on it."""
        show(self.progress(self._left), keep="\n", bold=True)
        config = {"ops": {"ablation_runs": {"config": {"num_seeds": len(self.plans[name])}}}}
        try:
            materialize("ablation_runs", partition=name, config=config, site_file=self.site_file)
        except PipelineError as error:
            show(str(error), keep="\n\t", err=True, fg="red")
            return name
        finally:
            self._left.remove(name)
        return None

    def progress(self, left: Sequence[str]) -> str:
        """Return how many recipes are finished, and how long the others will take if they are as fast."""
        took_s = [
            judgement["training"]["seconds"] + judgement["judging_seconds"]
            for seeds in self.plans.values()
            for seed in seeds
            if (judgement := seed.judgement or seed.older_judgement) is not None and judgement["training"] is not None
        ]
        untrained = [seed for name in left for seed in self.plans[name] if not self._is_finished(seed)]
        num_models = sum(seed.model is not None for seed in untrained)
        finished = (
            f"\n{len(self.plans) - len(left)} of {len(self.plans)} recipes are finished, {num_models} models to train"
        )
        if not took_s:
            return finished
        left_s = (num_models * sum(took_s) / len(took_s) + len(left) * START_S) / self.jobs
        until = time.strftime("%H:%M", time.localtime(time.time() + left_s))
        return f"{finished}, about {left_s / 60:.0f} min left (until {until})"

    def _is_finished(self, seed: PlannedSeed) -> bool:
        return seed.judgement is not None or (self.any_code and seed.older_judgement is not None)


def choose_experiments(
    known: Mapping[str, Experiment], *, sets: Iterable[str], names: Iterable[str]
) -> list[Experiment]:
    """Return the experiments that are named or in one of the sets; all of them if neither is given."""
    sets, names = set(sets), set(names)
    unknown = sorted(sets - set(get_args(Set))) + sorted(names - set(known))
    if unknown:
        raise PipelineError(
            f"there is no {unknown[0]!r}; the sets are {', '.join(get_args(Set))}, the recipes of this site "
            f"{', '.join(known)}"
        )
    everything = not sets and not names
    return [each for each in known.values() if everything or each.name in names or sets & set(each.sets)]


def prepare(site: Site, site_file: Path) -> None:
    """Make the logs, days and training set that do not exist yet."""
    if site_file == EXPERIMENTS_SITE:
        write_world(world_config.experiments(), site.log_root, "parquet")
    elif site_file == DEMO_SITE:
        write_world(world_config.demo(), site.log_root, "csv.gz")
    if site.end_ds is not None:  # a site without an end is built by its schedule
        for assets, days in missing_days(site, site.end_ds).items():
            materialize(assets, days, site_file=site_file)
    if not (site.directory / "training_set" / MANIFEST).exists():
        materialize("training_set", site_file=site_file)


def report(
    out: Annotated[Path | None, typer.Option(help="copy report.md and its figures into this folder")] = None,
) -> None:
    """Write the page with every table, figure and verdict, from the finished runs."""
    site_file = site_path(os.environ, otherwise=EXPERIMENTS_SITE).resolve()
    site = load_site(site_file, environment=os.environ)
    materialize("paper_report", site_file=site_file)
    made = site.workspace / "paper_report"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / "report.md", out)
        shutil.rmtree(out / "figures", ignore_errors=True)
        shutil.copytree(made / "figures", out / "figures")
        show(f"the text: {out / 'report.md'}")
    show(f"the page: {made / 'index.html'}")
