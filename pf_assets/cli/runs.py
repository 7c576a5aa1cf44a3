"""Dagster runs that `pf` starts, each as a process of its own, and the days that are missing."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.cli.output import cut, show
from pf_assets.cli.run_log import read_line
from pf_assets.cli.stages import StagesView, showing
from pf_assets.failures import why_failed
from pf_assets.settings import REPOSITORY, dagster_home, environment_of_runs, site_path
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.logs.partition import read_manifest
from pf_core.parent_process import tied
from pf_core.pins.features import pin_state
from pf_core.storage.disk import REMEDIES, disk_errors, problem_in
from pf_core.storage.privacy import private, umask_for
from pf_core.timelines.build import timeline_state

SPOKEN = {"loggers": {"console": {"config": {"log_level": "DEBUG"}}}}
"""Run configuration: the console tells the beginning and the end of each step, which the view needs."""

DATABASES = "Dagster's databases"

PREPARING = ".preparing"
"""File of a Dagster home that is locked while its databases are created."""


def materialize(
    assets: str,
    days: list[str] | None = None,
    *,
    partition: str | None = None,
    config: dict[str, Any] | None = None,
    site_file: Path | None = None,
    view: StagesView | None = None,
    row: str | None = None,
    again: str | None = None,
) -> None:
    """Run `dagster asset materialize` for the site of PF_SITE, or for another site file.

    What it does is shown in `view`, or in a view of its own; `row` names the view's stage that the run is as a whole.
    If the run fails, the error names the command `again`, or else the run's own.
    """
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", assets]
    command += [] if days is None else ["--partition-range", f"{days[0]}...{days[-1]}"]
    command += [] if partition is None else ["--partition", partition]
    command += ["-m", "pf_assets.definitions"]
    home = dagster_home(site_file)
    environment = environment_of_runs(home, site_file or site_path(os.environ))
    names = assets.split(",")
    prepare_instance(Path(home))
    with showing(view, names, home=Path(home)) as shown:
        shown.start(names, row=row)
        started = tied([*command, "-d", str(REPOSITORY), "--config-json", json.dumps(SPOKEN | (config or {}))])
        run = _follow(started, environment, shown, days or [], row)
        shown.finish(is_good=run.exit_code == 0, row=row)
    if run.exit_code:
        raise RunFailedError(
            _sentence(run, shown, home),
            lines=tuple(shown.last_lines(row)),
            log=shown.log,
            again=again or shlex.join(["dagster", *command[3:]]),
        )


class RunFailedError(PipelineError):
    """A Dagster run that failed: the last lines of its stage's log, why it failed, and the command to run it again."""

    def __init__(self, what: str, *, lines: tuple[str, ...], log: Path, again: str) -> None:
        super().__init__(f"{what}\nto run it again: {again}")
        self.sentence, self.lines, self.log = what, lines, log

    def show_lines(self) -> None:
        """Print the lines, which come before the sentence: what is printed last is what is read."""
        if self.lines:
            show(f"the last lines of its log ({self.log} has all):", err=True)
        for line in self.lines:
            show(f"  {cut(line)}", err=True)


@dataclass
class _Run:
    """A Dagster run in a process of its own."""

    run_id: str = ""
    exit_code: int = 0
    disk_problem: int | None = None
    """Number of a problem of the disk that Dagster itself met: it cannot store then why the run failed."""


_at_work: set["subprocess.Popen[str]"] = set()
"""The processes of runs; several threads may have one each."""


def _follow(
    command: list[str], environment: dict[str, str], view: StagesView, days: list[str], row: str | None
) -> _Run:
    """Start the process, and show its lines until it ends. Ctrl-C ends the run, and then this function.

    The process has a group of its own, so that Ctrl-C in a terminal reaches it, and not the workers that it will end
    itself, and so that a signal to `pf` alone does the same.
    """
    process = subprocess.Popen(
        command,
        cwd=environment["DAGSTER_HOME"],
        env=environment,
        umask=umask_for(Path(environment["DAGSTER_HOME"])),  # Dagster's databases and logs quote the site's logs
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    run = _Run()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = read_line(line.rstrip("\n"))
            run.run_id = run.run_id or said.run_id
            if not said.run_id:
                run.disk_problem = problem_in(said.text) or run.disk_problem
            view.receive(line.rstrip("\n"), said, days=days, row=row)
        run.exit_code = process.wait()

    _at_work.add(process)
    try:
        read()
    except KeyboardInterrupt:
        view.interrupt()
        view.say("interrupted: the run is ending (Ctrl-C again kills it)")
        interrupt_runs()
        try:
            read()
        except KeyboardInterrupt:
            process.kill()  # its own processes end with it
            process.wait()
        raise
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        _at_work.discard(process)
        assert process.stdout is not None
        process.stdout.close()
    return run


def interrupt_runs() -> None:
    """Ask every run that this process has started to end, as Ctrl-C does."""
    for process in list(_at_work):
        process.send_signal(signal.SIGINT)


def _sentence(run: _Run, view: StagesView, home: str) -> str:
    with disk_errors(Path(home), DATABASES):
        what = why_failed(home, run.run_id) if run.run_id else None
    if run.disk_problem is not None and (what is None or "sqlite3." in what):  # of Dagster: MLflow's is a sentence
        return f"Dagster's run: {os.strerror(run.disk_problem)}: {home}; {REMEDIES[run.disk_problem]}, then re-run"
    if what is None and run.exit_code == -signal.SIGKILL:
        return f"the run was killed, as the kernel does when memory is short; its log is {view.log}"
    return what or f"the run ended with exit code {run.exit_code} before an asset did; its log is {view.log}"


def prepare_instance(home: Path) -> None:
    """Create Dagster's databases before a run does it: two processes that create one at once damage it for good."""
    with disk_errors(home, DATABASES), private(home):
        home.mkdir(parents=True, exist_ok=True)
    with disk_errors(home, DATABASES), private(home), (home / PREPARING).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()


def missing_days(site: Site, until: str) -> dict[str, list[str]]:
    """Return the runs that build what is missing of the assets made from logs: selection of assets to days."""
    days = ds_range(site.start_ds, until)
    built = {
        "raw_actions": {ds for ds in days if read_manifest(site, ds) is not None},
        "pin_features": set(pin_state(site).days()),
        "user_timelines": set(timeline_state(site).days()),
    }
    runs: dict[tuple[str, ...], list[str]] = {}
    for asset, present in built.items():
        absent = tuple(ds for ds in days if ds not in present)
        if absent:
            runs.setdefault(absent, []).append(asset)
    return {",".join(assets): list(absent) for absent, assets in runs.items()}
