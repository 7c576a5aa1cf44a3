"""Group `experiments`: every recipe of the paper's tables and figures, and the report that is made of them.

A recipe is a partition: its status, its retry and its pages are Dagster's. Its seeds are trained one after the other
and judged by the same question as everything else; what is finished is left alone, and what was interrupted goes on.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from pf_assets.launch.training import model_tags, source_tags, train_planned
from pf_assets.metadata.model import plot_training
from pf_assets.metadata.pages import Metadata, picture, save_figure, table
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking.experiment_store import ExperimentStore
from pf_assets.tracking.tracking import TrackedRun, run_url
from pf_core.config.site import Site
from pf_core.experiments.plan import (
    JUDGEMENT,
    SCORES,
    PlannedSeed,
    experiments_dir,
    make_training_set,
    plan_experiments,
)
from pf_core.experiments.recipes import experiments
from pf_core.storage.files import remove_tree
from pf_core.storage.locks import exclusive, relying_on
from pf_core.training.plan import code_fingerprint, training_fault
from pf_core.training.training_set import latest_training_set, open_training_set

if TYPE_CHECKING:
    from pf_core.evaluation.question import Question


GROUP = "experiments"

NOT_IN_A_NAME = re.compile(r"[^/\w.\- :]")
"""What MLflow takes in no metric's name, and a site's action type may have."""


class AblationRun(dg.Config):
    """`num_seeds`: train the recipe with another number of seeds than its own."""

    num_seeds: int | None = None


def ablation_runs_asset(site: Site) -> dg.AssetsDefinition:
    known = experiments(site)

    @dg.asset(
        group_name=GROUP,
        pool=TRAINING_POOL,
        partitions_def=dg.StaticPartitionsDefinition(list(known)),
        deps=[
            "training_set",
            dg.AssetDep("raw_actions", partition_mapping=dg.LastPartitionMapping()),
        ],
        kinds={"pytorch", "mlflow"},
        code_version=code_fingerprint(),
        metadata={"recipes": table([{"recipe": name, "why": each.why} for name, each in known.items()])},
    )
    def ablation_runs(context: dg.AssetExecutionContext, config: AblationRun) -> dg.MaterializeResult[None]:
        """One recipe: the site's model with one thing changed, trained, and judged as everything else (section 4.2).

        What the paper claims can be tested on this site's own data, one claim at a time. Baselines are partitions,
        too; nothing is trained for them.
        """
        from pf_core.evaluation.question import open_question  # brings torch, which takes seconds

        name = context.partition_key
        plans = plan_experiments(site, [known[name]], num_seeds=config.num_seeds)[name]
        folder, store = experiments_dir(site) / name, ExperimentStore(site)
        with exclusive(folder, f"ablation_runs {name}"), relying_on(latest_training_set(site).parent, "training_set"):
            make_training_set(site, plans[0])
            question = open_question(site, open_training_set(plans[0].training_set), progress=context.log.info)
            context.log.info(
                f"{name}: {known[name].why} Judged by {question.num_users:,} held-out users and "
                f"{question.num_pins:,} pins"
            )
            parent = store.start_recipe(folder, known[name], source_tags(context, site))
            with store.watching(parent):
                runs = [_Seed(context, site, store, parent, plan, question).finish() for plan in plans]
                means = _means([_numbers(judgement) for _, judgement in runs])
                store.measure(parent, [{"step": 0, **means}])
                store.tag(parent, {"training_set": plans[0].fingerprint, "question": question.fingerprint})
        url = run_url(parent, mlflow_server())
        return dg.MaterializeResult(
            metadata=describe_recipe(plans, [judgement for _, judgement in runs], means, url),
            data_version=dg.DataVersion(_version(plans, question.fingerprint)),
        )

    return ablation_runs


def paper_report_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(group_name=GROUP, deps=["ablation_runs"], kinds={"mlflow"})
    def paper_report(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        """Every table and figure of the paper beside ours, with a verdict for each of its claims.

        No verdict is typed by hand: all follow by one rule from the scores in MLflow, of whichever recipes are there.
        """
        from pf_assets.report.run import write_report  # brings torch, which takes seconds

        written = write_report(site, progress=context.log.info)
        return dg.MaterializeResult(metadata=written)

    return paper_report


@dataclass(frozen=True)
class _Seed:
    """One seed of a recipe on its way to a judgement."""

    context: dg.AssetExecutionContext
    site: Site
    store: ExperimentStore
    parent: TrackedRun
    plan: PlannedSeed
    question: "Question"

    def finish(self) -> tuple[TrackedRun, dict[str, Any]]:
        """Do what is left to do; the run and its judgement."""
        from pf_core.experiments.judge import judge_experiment  # brings torch, too

        plan, store = self.plan, self.store
        run, judgement = store.find(plan.run_dir), self._judgement()
        if run is not None and judgement is not None and store.is_finished(run):
            self.context.log.info(f"{self._name} is finished already: {plan.run_dir}")
            return run, judgement
        tags = source_tags(self.context, self.site) | {"question": self.question.fingerprint}
        tags |= {} if plan.model is None else model_tags(self.site, plan.model)
        run = store.start_seed(plan, self.parent, tags)
        self.context.log.info(f"{self._name}; MLflow run {run_url(run, mlflow_server())}")
        with store.watching(run):
            self._train(run)
            judgement = self._judgement() or judge_experiment(plan, self.question, progress=self.context.log.info)
            store.measure(run, [{"step": 0, **_numbers(judgement)}])
            names = (SCORES, JUDGEMENT, *(() if plan.model is None else ("training.png", "history.jsonl")))
            store.keep(run, [plan.run_dir / name for name in names])
        return run, judgement

    @property
    def _name(self) -> str:
        return self.plan.title

    def _judgement(self) -> dict[str, Any] | None:
        found = self.plan.judgement
        return found if found is not None and found["question"] == self.question.fingerprint else None

    def _train(self, run: TrackedRun) -> None:
        model = self.plan.model
        if model is None:
            return
        train_planned(self.context, self.site, model, self.store, run)
        save_figure(plot_training(model.history), model.run_dir / "training.png")
        remove_tree(model.run_dir / "checkpoints")  # it will not be continued
        fault = training_fault(model.history)
        if fault is not None:
            self.context.log.warning(f"{self._name}: {fault}")


def _numbers(judgement: Mapping[str, Any]) -> dict[str, float]:
    """`{"once": {"recall_at_10": …}}` as `{"once/recall_at_10": …}`; an interval as its two ends."""
    numbers: dict[str, float] = {}
    for frequency, metrics in judgement["metrics"].items():
        for name, value in metrics.items():
            if isinstance(value, list):
                ends = zip(("low", "high"), value, strict=True)
                numbers |= {f"{frequency}/{name}_{end}": number for end, number in ends}
            else:
                numbers[f"{frequency}/{name}"] = value
    return {NOT_IN_A_NAME.sub("_", name): value for name, value in numbers.items()}


def _means(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(numbers[name] for numbers in seeds) / len(seeds) for name in seeds[0] if "_interval_" not in name}


def _version(plans: Sequence[PlannedSeed], question: str) -> str:
    decisive = [question, *(f"{plan.run_dir.name} {plan.judged_by}" for plan in plans)]
    return hashlib.sha256("\n".join(decisive).encode()).hexdigest()[:16]


def describe_recipe(
    plans: Sequence[PlannedSeed], judgements: Sequence[Mapping[str, Any]], means: Mapping[str, float], url: str
) -> Metadata:
    experiment, first = plans[0].experiment, plans[0]
    rows = [
        {
            "seed": judgement["seed"],
            "frequency": frequency,
            "recall_at_10": f"{metrics['recall_at_10']:.4f}",
            "95 % interval": "{:.4f} to {:.4f}".format(*metrics["recall_at_10_interval"]),
            "p90_coverage_at_10": f"{metrics['p90_coverage_at_10']:.4f}",
            "interest_entropy_at_50": f"{metrics['interest_entropy_at_50']:.4f}",
        }
        for judgement in judgements
        for frequency, metrics in judgement["metrics"].items()
    ]
    trained: Metadata = {}
    if first.model is not None:
        history, file = first.model.history, first.run_dir / "training.png"
        trained = {
            "training": picture(plot_training(history), file),
            "training_png": dg.MetadataValue.path(str(file)),
            "training_seconds": round(sum(judgement["training"]["seconds"] for judgement in judgements), 1),
            "parameters": judgements[0]["training"]["num_parameters"],
            "config": dg.MetadataValue.json(judgements[0]["config"]),
            "fault": training_fault(history) or "none",
        }
    return {
        "recipe": experiment.name,
        "why": experiment.why,
        "sets": ", ".join(experiment.sets),
        "recall_at_10": means["once/recall_at_10"],
        "p90_coverage_at_10": means["once/p90_coverage_at_10"],
        "seeds": table(rows),
        "users": judgements[0]["counts"]["users"],
        "positives": judgements[0]["counts"]["positives"],
        "index_pins": judgements[0]["counts"]["pins"],
        "training_set": first.fingerprint,
        "question": judgements[0]["question"],
        "mlflow_run": dg.MetadataValue.url(url),
        "path": dg.MetadataValue.path(str(first.run_dir.parent)),
        **trained,
    }
