"""`pf export`, `forget` and `repair`, for the person who runs a site.

Commands that change data start Dagster runs, so that Dagster's lineage and history stay complete.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import confirm, show
from pf_assets.cli.pipeline import DagsterRun
from pf_assets.cli.remains import artifact_folders, show_remains
from pf_assets.cli.runs import RunFailedError, materialize
from pf_assets.cli.stages import StagesView
from pf_assets.schedules import KEEP_MODEL
from pf_assets.settings import current_site, dagster_home
from pf_core.config.site import Site
from pf_core.days import days_text, parse_ds
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import add_to_deletion_list, parse_user_id, read_deletion_list
from pf_core.logs.partition import raw_digest, read_manifest
from pf_core.operations.forgetting import Rebuild, delete_users, one_at_a_time, plan_rebuild
from pf_core.operations.repair import RepairPlan, plan_repair
from pf_core.serving.export import export_embeddings


def export(
    what: Annotated[str, typer.Argument(help="users or pins")],
    out: Annotated[Path, typer.Argument(help="folder to create")],
    ds: Annotated[str | None, typer.Option(help="day to export; by default the newest")] = None,
) -> None:
    """Write a day's user or pin embeddings as Parquet, for tools that do not read Lance."""
    if what not in ("users", "pins"):
        raise PipelineError(f"cannot export {what!r}", "choose users or pins")
    if ds is not None:
        parse_ds(ds)
    rows = export_embeddings(current_site(), "users" if what == "users" else "pins", out, ds=ds, progress=show)
    show(f"{rows:,} rows in {out}")


def forget(
    users: Annotated[list[str] | None, typer.Argument(help="user ids, as in the logs; none: the whole list")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="show what is left of a user, and delete nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --verify: print JSON")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask on a terminal")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
) -> None:
    """Put users on the deletion list and delete them wherever they are stored; --verify shows what is left."""
    site = current_site()
    user_ids = [parse_user_id(user, site.source.actions.user_id.type) for user in users or []]
    if verify or as_json:
        if not verify or len(user_ids) != 1:
            raise PipelineError("--verify takes one user, and --json goes with it", "pf forget --verify USER --json")
        show_remains(site, user_ids[0], as_json=as_json)
        return
    _ask(site, user_ids, yes=yes)
    num_added = add_to_deletion_list(site, user_ids)
    typer.echo(f"{num_added:,} added to {site.deletion_list} ({len(set(user_ids)) - num_added:,} were on it)")
    typer.echo("now the users on the list are deleted everywhere; if that is interrupted, run: pf forget")
    try:
        with one_at_a_time(site, typer.echo):
            delete_users(site, read_deletion_list(site), artifacts=artifact_folders(site), progress=show)
            _build_again(plan_rebuild(site), verbose=verbose)
    except Exception as error:
        reason = error if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        if isinstance(error, RunFailedError):
            error.show_lines()
            reason = error.sentence
        raise PipelineError(
            "the users are on the deletion list, so they stay out of what is built from now on, but they are not yet "
            f"deleted everywhere: {reason}",
            "to finish, run: pf forget",
        ) from error
    typer.echo("what keeps a user for some time yet, such as earlier days and models: pf forget --verify USER")


def _ask(site: Site, user_ids: list[int | str], *, yes: bool) -> None:
    count = len(set(user_ids))
    whom = "the users on the deletion list" if not count else "1 user" if count == 1 else f"{count:,} users"
    confirm(f"{whom} of {site.name} will be deleted wherever they are stored; that cannot be undone", yes=yes)


def _build_again(plan: Rebuild, *, verbose: bool) -> None:
    timelines = {"user_timelines": {"config": {"rebuild": plan.from_logs}}}
    records, release = "user_embeddings,user_embedding_snapshot", "pin_embeddings,pin_index,release"
    runs: list[DagsterRun] = []
    if plan.timeline_days and plan.timeline_days == plan.embedding_days:  # as a rule: then one run does both
        config = {"ops": {**timelines, **KEEP_MODEL["ops"]}}
        runs.append(DagsterRun.of(f"user_timelines,{records}", plan.timeline_days, config))
    else:
        if plan.timeline_days:
            runs.append(DagsterRun.of("user_timelines", plan.timeline_days, {"ops": timelines}))
        if plan.embedding_days:
            runs.append(DagsterRun.of(records, plan.embedding_days, KEEP_MODEL))
    if plan.release_days:
        runs.append(DagsterRun.of(release, plan.release_days))
    if runs:
        with _view(runs, verbose=verbose) as view:
            for each in runs:
                _start(each, view, again="pf forget")
    if plan.embedding_days and not plan.release_days:
        show(f"{plan.embedding_days[0]} is not the day of the current release, so nothing is released now")


def _view(runs: Sequence[DagsterRun], *, verbose: bool) -> StagesView:
    names = [asset for each in runs for asset in each.assets]
    return StagesView(names, home=Path(dagster_home()), verbose=verbose)


def _start(run: DagsterRun, view: StagesView, *, again: str) -> None:
    materialize(",".join(run.assets), run.days, config=run.config, view=view, again=again)


def repair(
    since: Annotated[str, typer.Option(help="first day whose logs were bad, YYYY-MM-DD")],
    until: Annotated[
        str | None, typer.Option(help="last day whose logs were bad; by default the newest that was ingested")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be rebuilt, and stop")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the log of the runs")] = False,
) -> None:
    """Rebuild everything that depends on bad logs, after they were fixed upstream (paper, section 3.6)."""
    for day in (since, until):
        if day is not None:
            parse_ds(day)
    site = current_site()
    plan = plan_repair(site, since=since, until=until)
    _show(plan)
    if dry_run:
        return
    again = f"pf repair --since {since}" + ("" if until is None else f" --until {until}")
    runs = repair_runs(plan)
    before = {ds: raw_digest(site, ds) for ds in plan.raw_days if read_manifest(site, ds) is not None}
    with _view(runs, verbose=verbose) as view:
        for number, each in enumerate(runs):
            _start(each, view, again=again)
            if number == 0:
                changed = [ds for ds in plan.raw_days if raw_digest(site, ds) != before.get(ds)]
                view.say(f"raw_actions changed on {days_text(changed) if changed else 'no day'}")
    show("repaired", bold=True)


def repair_runs(plan: RepairPlan) -> list[DagsterRun]:
    """Return the runs of a repair in their order; the first one is that of raw_actions."""
    runs = [DagsterRun.of("raw_actions", plan.raw_days)]
    if plan.pin_days:
        runs.append(DagsterRun.of("pin_features", plan.pin_days))
    if plan.timeline_days:
        config = {"ops": {"user_timelines": {"config": {"rebuild": plan.rebuild_timelines}}}}
        runs.append(DagsterRun.of("user_timelines", plan.timeline_days, config))
    if plan.embedding_days:
        runs.append(DagsterRun.of("user_embeddings,user_embedding_snapshot", plan.embedding_days, KEEP_MODEL))
        runs.append(DagsterRun.of("pin_embeddings,pin_index,release", plan.embedding_days[-1:]))
    return runs


def _show(plan: RepairPlan) -> None:
    show(
        f"{plan.users:,} users have actions on the affected days; "
        f"{plan.embeddings:,} of their daily embeddings may change",
        bold=True,
    )
    for asset, days in plan.partitions.items():
        if days:
            partitions = "1 partition: " if len(days) == 1 else f"{len(days)} partitions: "
            show(f"  {asset:<24} {partitions:>15}{days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    for note in plan.notes:
        show(f"  note: {note}", fg="yellow")
