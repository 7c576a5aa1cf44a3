"""Group `experiments`: every recipe of the paper's tables and figures, and the report on their results (section 4.2).

A recipe is a partition: Dagster shows its status and its page, and retries it. Its seeds are trained one after the
other and evaluated with the same question as all others; what is finished is left alone, and an interrupted training
continues.
"""

import dagster as dg

from pf_assets.launch.experiments import run_experiment
from pf_assets.metadata.experiments import describe_recipe
from pf_assets.metadata.pages import table
from pf_assets.settings import TRAINING_POOL, mlflow_server
from pf_assets.tracking.runs import run_url
from pf_core.config.site import Site
from pf_core.experiments.recipes import experiments
from pf_core.training.plan import code_fingerprint

GROUP = "experiments"


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
        """One recipe: the site's model with one thing changed, trained, and evaluated as all others (section 4.2).

        The paper's claims can be tested on this site's own data, one claim at a time. Baselines are partitions, too;
        nothing is trained for them.
        """
        done = run_experiment(context, site, known[context.partition_key], num_seeds=config.num_seeds)
        url = run_url(done.run, mlflow_server())
        return dg.MaterializeResult(
            metadata=describe_recipe(done.plans, done.judgements, done.means, url),
            data_version=dg.DataVersion(done.version),
        )

    return ablation_runs


def paper_report_asset(site: Site) -> dg.AssetsDefinition:
    @dg.asset(group_name=GROUP, deps=["ablation_runs"], kinds={"mlflow"})
    def paper_report(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        """Every table and figure of the paper beside ours, with a verdict for each of its claims.

        No verdict is written by hand: one rule computes all of them from the scores in MLflow, for the recipes that
        have been run.
        """
        from pf_assets.report.run import write_report  # brings torch, which takes seconds

        written = write_report(site, progress=context.log.info)
        return dg.MaterializeResult(metadata=written)

    return paper_report
