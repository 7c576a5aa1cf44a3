"""`pf ablations` and `pf report`: run the paper's experiments, and write the report on them.

Without PF_SITE both use the site in dagster_home/experiments, whose logs are made first; PF_SITE can name any site that
has days after its training set's cut. Each recipe is a Dagster run of its own, as the UI would start it.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import typer

from pf_assets.cli.output import fail, show
from pf_assets.cli.pipeline import DagsterRun
from pf_assets.cli.results import result_of
from pf_assets.cli.runs import RunFailedError, interrupt_runs, materialize, missing_days
from pf_assets.cli.stages import StagesView
from pf_assets.cli.world import write_world
from pf_assets.demo_site import world_of
from pf_assets.settings import EXPERIMENTS_SITE, dagster_home, demo_site_path, site_path
from pf_assets.tracking.experiment_store import ExperimentStore
from pf_core.config.site import Site, load_site
from pf_core.errors import PipelineError
from pf_core.experiments.plan import JUDGEMENT, PlannedSeed, experiments_dir, plan_experiments
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
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
) -> None:
    """Train and judge every recipe that is not finished, the most important first; a second call goes on."""
    site_file = site_path(os.environ, otherwise=EXPERIMENTS_SITE).resolve()
    site = load_site(site_file, environment=os.environ)
    chosen = choose_experiments(experiments(site), sets=sets or (), names=names or ())
    if dry_run:
        for experiment in chosen:
            show(f"{experiment.name:<24} {', '.join(experiment.sets)}")
        return
    prepare(site, site_file, verbose=verbose)
    work = _Work(site_file, plan_experiments(site, chosen, num_seeds=seeds), any_code=any_code, jobs=jobs)
    failed: list[str] = []
    if work.missing:
        ExperimentStore(site).prepare()
        failed = work.run_all(verbose=verbose)
    done = len(work.plans) - len(failed)
    show(f"{done} of {len(work.plans)} recipes are finished; `pf report` reports on them", bold=True)
    if failed:
        fail(f"these failed: {', '.join(failed)}; the same command runs them again")


class _Work:
    """The chosen recipes, and those of them that are not finished."""

    def __init__(
        self, site_file: Path, plans: Mapping[str, Sequence[PlannedSeed]], *, any_code: bool, jobs: int
    ) -> None:
        self.site_file, self.plans, self.any_code, self.jobs = site_file, plans, any_code, jobs
        self.missing = [name for name, seeds in plans.items() if not all(map(self._is_finished, seeds))]
        self._left = list(self.missing)
        self._left_s: float | None = None

    def run_all(self, *, verbose: bool) -> list[str]:
        """Run the recipes that are missing, a row for each, and return those that failed."""
        show(self.progress(self._left), bold=True)
        self._left_s = self.seconds_left(self._left)
        home = Path(dagster_home(self.site_file))
        view = StagesView(
            self.missing,
            home=home,
            verbose=verbose,
            result_of=self.result_of,
            seconds_left=lambda stages: self._left_s,
        )
        failures: dict[str, PipelineError] = {}
        with view, ThreadPoolExecutor(self.jobs) as pool:
            try:
                for name, error in zip(
                    self.missing, pool.map(partial(self._run, view=view), self.missing), strict=True
                ):
                    failures |= {} if error is None else {name: error}
            except KeyboardInterrupt:
                view.interrupt()
                view.say("interrupted: the runs are ending")
                pool.shutdown(wait=False, cancel_futures=True)
                interrupt_runs()
                raise
        for name, error in failures.items():
            show(f"\n{name}", keep="\n", err=True, bold=True)
            if isinstance(error, RunFailedError):
                error.show_lines()
            show(str(error), keep="\n\t", err=True, fg="red")
        return list(failures)

    def _run(self, name: str, *, view: StagesView) -> PipelineError | None:
        """Run a recipe; return its error: the other recipes do not depend on it."""
        config = {"ops": {"ablation_runs": {"config": {"num_seeds": len(self.plans[name])}}}}
        try:
            materialize(
                "ablation_runs",
                partition=name,
                config=config,
                site_file=self.site_file,
                view=view,
                row=name,
                again=f"pf ablations --recipe {name}",
            )
        except PipelineError as error:
            return error
        finally:
            self._left.remove(name)
            self._left_s = self.seconds_left(self._left)  # it reads files, so not for every frame
        return None

    def result_of(self, name: str) -> str:
        """Return what a recipe came to: the first metric of its seeds."""
        found = [seed.judgement["metrics"]["once"]["recall_at_10"] for seed in self.plans[name] if seed.judgement]
        return "recall@10 " + ", ".join(f"{value:.4f}" for value in found) if found else ""

    def seconds_left(self, left: Sequence[str]) -> float | None:
        """Return how long recipes will take if they are as fast as the finished ones; None before there is one."""
        took_s = [
            judgement["training"]["seconds"] + judgement["judging_seconds"]
            for seeds in self.plans.values()
            for seed in seeds
            if (judgement := seed.judgement or seed.older_judgement) is not None and judgement["training"] is not None
        ]
        if not took_s:
            return None
        return (self._num_models(left) * sum(took_s) / len(took_s) + len(left) * START_S) / self.jobs

    def _num_models(self, left: Sequence[str]) -> int:
        untrained = [seed for name in left for seed in self.plans[name] if not self._is_finished(seed)]
        return sum(seed.model is not None for seed in untrained)

    def progress(self, left: Sequence[str]) -> str:
        """Return how many recipes are finished, and how long the others will take."""
        num_finished, left_s = len(self.plans) - len(left), self.seconds_left(left)
        finished = f"{num_finished} of {len(self.plans)} recipes are finished, {self._num_models(left)} models to train"
        if left_s is None:
            return finished
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


def prepare(site: Site, site_file: Path, *, verbose: bool) -> None:
    """Make the logs, days and training set that do not exist yet."""
    if site_file == EXPERIMENTS_SITE:
        write_world(world_config.experiments(), site.log_root, "parquet")
    elif site_file == demo_site_path():
        write_world(world_of(site_file, site), site.log_root, "csv.gz")
    runs: list[DagsterRun] = []
    if site.end_ds is not None:  # a site without an end is built by its schedule
        runs += [DagsterRun.of(assets, days) for assets, days in missing_days(site, site.end_ds).items()]
    if not (site.directory / "training_set" / MANIFEST).exists():
        runs.append(DagsterRun.of("training_set"))
    if not runs:
        return
    names = [asset for each in runs for asset in each.assets]
    ds = site.end_ds or site.start_ds
    with StagesView(
        names, home=Path(dagster_home(site_file)), verbose=verbose, result_of=partial(result_of, site, ds)
    ) as view:
        for each in runs:
            materialize(",".join(each.assets), each.days, site_file=site_file, view=view, again="pf ablations")


def report(
    out: Annotated[Path | None, typer.Option(help="copy report.md and its figures into this folder")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the run")] = False,
) -> None:
    """Write the page with every table, figure and verdict, from the finished runs."""
    site_file = site_path(os.environ, otherwise=EXPERIMENTS_SITE).resolve()
    site = load_site(site_file, environment=os.environ)
    if not any(experiments_dir(site).glob(f"*/*/{JUDGEMENT}")):
        raise PipelineError(f"no recipe of {site.name} is finished yet: there is nothing to report", "pf ablations")
    with StagesView(["paper_report"], home=Path(dagster_home(site_file)), verbose=verbose) as view:
        materialize("paper_report", site_file=site_file, view=view, again="pf report")
    made = site.workspace / "paper_report"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / "report.md", out)
        shutil.rmtree(out / "figures", ignore_errors=True)
        shutil.copytree(made / "figures", out / "figures")
        show(f"the text: {out / 'report.md'}")
    show(f"the page: {made / 'index.html'}")
