"""One experiment, seed after seed: train what is not trained, judge what is not judged, and record it in MLflow.

A seed that is finished is left alone, and one that was interrupted continues where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from pf_assets.launch.training import model_tags, source_tags, train_planned
from pf_assets.metadata.model import plot_training
from pf_assets.metadata.pages import save_figure
from pf_assets.settings import mlflow_server
from pf_assets.tracking.experiment_store import ExperimentStore
from pf_assets.tracking.runs import TrackedRun, run_url
from pf_core.config.site import Site
from pf_core.experiments.judgement import Judgement, flat_metrics, mean_metrics
from pf_core.experiments.plan import (
    JUDGEMENT,
    SCORES,
    PlannedSeed,
    experiments_dir,
    make_training_set,
    plan_experiments,
    results_version,
)
from pf_core.experiments.recipe import Experiment
from pf_core.storage.files import remove_tree
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.plan import training_fault
from pf_core.training.training_set import latest_training_set, open_training_set

if TYPE_CHECKING:
    from pf_core.evaluation.question import Question


@dataclass(frozen=True, kw_only=True)
class FinishedExperiment:
    """The seeds of an experiment, their judgements, and the mean metrics."""

    plans: Sequence[PlannedSeed]
    judgements: Sequence[Judgement]
    means: dict[str, float]
    run: TrackedRun
    version: str
    """Hash of all that decides the judgements."""


def run_experiment(
    context: dg.AssetExecutionContext, site: Site, experiment: Experiment, *, num_seeds: int | None
) -> FinishedExperiment:
    """Train and judge the seeds of an experiment; `num_seeds` overrides the experiment's own number."""
    from pf_core.evaluation.question import open_question  # brings torch, which takes seconds

    name = experiment.name
    folder, store = experiments_dir(site) / name, ExperimentStore(site)
    with relying_on(latest_training_set(site).parent, "training_set"), exclusive(folder, f"ablation_runs {name}"):
        plans = plan_experiments(site, [experiment], num_seeds=num_seeds)[name]
        make_training_set(site, plans[0])
        question = open_question(site, open_training_set(plans[0].training_set), progress=context.log.info)
        context.log.info(
            f"{name}: {experiment.why} Evaluated on {question.num_users:,} held-out users, {question.num_pins:,} pins"
        )
        parent = store.start_recipe(folder, experiment, source_tags(context, site))
        with store.watching(parent):
            judgements = [_run_seed(context, site, store, parent, plan, question) for plan in plans]
            means = mean_metrics(judgements)
            store.measure_final(parent, means)
            store.tag(parent, {"training_set": plans[0].fingerprint, "question": question.fingerprint})
    return FinishedExperiment(
        plans=plans,
        judgements=judgements,
        means=means,
        run=parent,
        version=results_version(plans, question.fingerprint),
    )


def _run_seed(
    context: dg.AssetExecutionContext,
    site: Site,
    store: ExperimentStore,
    parent: TrackedRun,
    plan: PlannedSeed,
    question: "Question",
) -> Judgement:
    """Do what is left to do for one seed, and return its judgement."""
    from pf_core.experiments.judge import judge_seed  # brings torch, too

    run, judgement = store.find(plan.run_dir), _judgement_on(plan, question)
    if run is not None and judgement is not None and store.is_finished(run):
        context.log.info(f"{plan.title} is finished already: {plan.run_dir}")
        return judgement
    tags = source_tags(context, site) | {"question": question.fingerprint}
    tags |= {} if plan.model is None else model_tags(site, plan.model)
    run = store.start_seed(plan, parent, tags)
    context.log.info(f"{plan.title}; MLflow run {run_url(run, mlflow_server())}")
    with store.watching(run):
        _train(context, site, store, run, plan)
        judgement = _judgement_on(plan, question) or judge_seed(site, plan, question, progress=context.log.info)
        store.measure_final(run, flat_metrics(judgement))
        names = (SCORES, JUDGEMENT, *(() if plan.model is None else ("training.png", "history.jsonl")))
        store.keep(run, [plan.run_dir / name for name in names])
    return judgement


def _judgement_on(plan: PlannedSeed, question: "Question") -> Judgement | None:
    """The seed's judgement, if the current code has made it on this question."""
    found = plan.judgement
    return found if found is not None and found["question"] == question.fingerprint else None


def _train(
    context: dg.AssetExecutionContext, site: Site, store: ExperimentStore, run: TrackedRun, plan: PlannedSeed
) -> None:
    """Train the model of a seed, if there is one; afterwards its checkpoints are removed."""
    model = plan.model
    if model is None:
        return
    train_planned(context, site, model, store, run)
    save_figure(plot_training(model.history), model.run_dir / "training.png")
    remove_tree(model.run_dir / "checkpoints")  # it will not be continued
    fault = training_fault(model.history)
    if fault is not None:
        context.log.warning(f"{plan.title}: {fault}")
