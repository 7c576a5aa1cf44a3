"""`pf`: the list of its commands. Each command is a function in the module that the list names."""

from pf_assets.cli.lazy import LazyCommand, lazy_app
from pf_assets.cli.output import fail
from pf_core.errors import PipelineError

COMMANDS = {
    "demo": LazyCommand(
        "pf_assets.cli.demo",
        "Write the demo site's logs and materialize every asset on them; keep what exists already.",
    ),
    "dev": LazyCommand("pf_assets.cli.dev", "Serve the Dagster UI and the MLflow UI until Ctrl-C."),
    "world": LazyCommand(
        "pf_assets.cli.world",
        "Write the logs of a synthetic site: tiny, demo, experiments, or large (with --num-users and --num-days).",
        needs_pipeline=False,
    ),
    "check": LazyCommand(
        "pf_assets.cli.check",
        "Validate a site file and show how it reads the first file of your logs, without writing anything.",
    ),
    "status": LazyCommand(
        "pf_assets.cli.operations",
        "Show existing, missing and stale days, and the models. Exit code 1: the newest model loses to a baseline.",
    ),
    "repair": LazyCommand(
        "pf_assets.cli.operations",
        "Rebuild everything that depends on bad logs, after they were fixed upstream (paper, section 3.6).",
    ),
    "forget": LazyCommand(
        "pf_assets.cli.operations",
        "Add users to the deletion list, and delete them from every release at once and from all other data by a run.",
    ),
    "export": LazyCommand(
        "pf_assets.cli.operations",
        "Write a day's user or pin embeddings as Parquet, for tools that do not read Lance.",
    ),
    "promote": LazyCommand(
        "pf_assets.cli.promotion",
        "Make a registered model the champion, or undo the last promotion; without arguments, list the models.",
    ),
    "recommend": LazyCommand(
        "pf_assets.cli.releases",
        "Show the best pins for a user in the current release, and the user's newest actions.",
        needs_pipeline=False,
    ),
    "similar": LazyCommand(
        "pf_assets.cli.releases", "Show the pins nearest to a pin in the current release.", needs_pipeline=False
    ),
    "releases": LazyCommand(
        "pf_assets.cli.releases",
        "List the releases, newest first; an arrow marks the current one.",
        needs_pipeline=False,
    ),
    "rollback": LazyCommand(
        "pf_assets.cli.releases",
        "Make an earlier release the current one, at once, and withdraw the releases after it.",
        needs_pipeline=False,
    ),
    "benchmark": LazyCommand(
        "pf_assets.cli.benchmark",
        "Compare our model with baselines and other recommenders on a public log or on your own site, in one table.",
    ),
    "ablations": LazyCommand(
        "pf_assets.cli.experiments",
        "Train and judge every recipe that is not finished, the most important first; a second call goes on.",
    ),
    "report": LazyCommand(
        "pf_assets.cli.experiments",
        "Write the page with every table, figure and verdict, from the finished runs.",
    ),
}

app = lazy_app(COMMANDS)


def main() -> None:
    """Entry point: prints a PipelineError as one sentence, without a traceback."""
    try:
        app()
    except PipelineError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
