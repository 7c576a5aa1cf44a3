"""`pf`: the list of its commands. Each command is a function in the module that the list names."""

import os
import sys
from pathlib import Path

from pf_assets.cli.lazy import LazyCommand, lazy_app
from pf_assets.cli.output import CarriesLines, show, show_error
from pf_core.errors import PipelineError

COMMANDS = {
    "demo": LazyCommand(
        "pf_assets.cli.demo",
        "Write the demo site's logs and materialize every asset on them; keep what exists already.",
        goes_on=True,
    ),
    "dev": LazyCommand("pf_assets.cli.dev", "Serve the Dagster UI and the MLflow UI until Ctrl-C."),
    "world": LazyCommand(
        "pf_assets.cli.world",
        "Write the logs of a synthetic site: tiny, demo, experiments, or large (with --num-users and --num-days).",
        needs_pipeline=False,
        goes_on=True,
    ),
    "init": LazyCommand(
        "pf_assets.cli.init",
        "Look at logs, and write ./site.yaml and ./dagster.yaml for them; nothing that exists is overwritten.",
    ),
    "check": LazyCommand(
        "pf_assets.cli.check",
        "Show what a site file makes of your logs, without writing anything; an error if a run would fail on them.",
    ),
    "run": LazyCommand(
        "pf_assets.cli.run",
        "Build everything that is missing until the newest day is released: logs, model, embeddings, index, release.",
        goes_on=True,
    ),
    "status": LazyCommand(
        "pf_assets.cli.status",
        "Show existing, missing and stale days, and the models. Exit code 1: the newest model loses to a baseline.",
    ),
    "repair": LazyCommand(
        "pf_assets.cli.operations",
        "Rebuild everything that depends on bad logs, after they were fixed upstream (paper, section 3.6).",
        goes_on=True,
    ),
    "forget": LazyCommand(
        "pf_assets.cli.operations",
        "Put users on the deletion list and delete them wherever they are stored; --verify shows what is left.",
        takes_ids=True,
        goes_on=True,
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
        takes_ids=True,
    ),
    "similar": LazyCommand(
        "pf_assets.cli.releases",
        "Show the pins nearest to a pin in the current release.",
        needs_pipeline=False,
        takes_ids=True,
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
        goes_on=True,
    ),
    "ablations": LazyCommand(
        "pf_assets.cli.experiments",
        "Train and judge every recipe that is not finished, the most important first; a second call goes on.",
        goes_on=True,
    ),
    "report": LazyCommand(
        "pf_assets.cli.experiments",
        "Write the page with every table, figure and verdict, from the finished runs.",
    ),
}

EXIT_CODES = (
    "Exit codes: 0 good; 1 an error, or (pf status) the newest model loses to a baseline; 2 wrong usage; "
    "130 interrupted."
)

app = lazy_app(COMMANDS, package="pinnerformer", epilog=EXIT_CODES)


def main() -> None:
    """Entry point: prints a PipelineError, and a problem of the disk, as one sentence without a traceback."""
    sys.exit(_exit_code())


def _note_other_site(chosen: Path) -> None:
    """Say that ./site.yaml is not the site that is worked on, where PF_SITE names another one."""
    own = Path("site.yaml")
    if own.is_file() and chosen.is_file() and not own.samefile(chosen):
        show(f"note: PF_SITE is {chosen}; ./{own} is another site, and is read only if you name it", err=True)


def _exit_code() -> int | str | None:
    """Run the command. An error is gone when this returns, and with it what it refers to: DuckDB's library complains at
    the end of the process about what is left."""
    try:
        if os.environ.get("PF_SITE"):
            _note_other_site(Path(os.environ["PF_SITE"]))
        app()
    except SystemExit as ended:
        return ended.code
    except PipelineError as error:
        if isinstance(error, CarriesLines):
            error.show_lines()
        show_error(str(error))
    except Exception as error:
        from pf_core.storage.disk import disk_problem, disk_sentence  # as the commands, imported when it is needed

        if disk_problem(error) is None and isinstance(error, OSError) and error.filename is not None:
            show_error(f"{error.strerror}: {error.filename}")
        else:
            show_error(disk_sentence(error))
    return 1


if __name__ == "__main__":
    main()
