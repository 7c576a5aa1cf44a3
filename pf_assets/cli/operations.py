"""`pf status`, `export`, `forget` and `repair`, for the person who runs a site.

Commands that change data start Dagster runs, so that Dagster's lineage and history stay complete.
"""

from pathlib import Path
from typing import Annotated

import typer

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli.output import show
from pf_assets.cli.remains import artifact_folders, show_remains
from pf_assets.cli.runs import materialize
from pf_assets.metadata.evaluation import describe_without_vector
from pf_assets.schedules import KEEP_MODEL
from pf_assets.settings import current_site
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.evaluation.verdict import judge_baselines
from pf_core.logs.deletion_list import add_to_deletion_list, parse_user_id, read_deletion_list
from pf_core.logs.partition import raw_digest, read_manifest
from pf_core.operations.forgetting import Rebuild, delete_users, one_at_a_time, plan_rebuild
from pf_core.operations.repair import RepairPlan, plan_repair
from pf_core.operations.status import asset_statuses
from pf_core.serving.export import export_embeddings


def status() -> None:
    """Show existing, missing and stale days, and the models. Exit code 1: the newest model loses to a baseline."""
    site = current_site()
    for row in asset_statuses(site):
        days = f"{row.days[0]} to {row.days[-1]}" if row.days else "nothing yet"
        show(f"{row.asset:<24} {days:<26} {_count(row.missing, 'missing')}{_count(list(row.stale), 'stale')}".rstrip())
        for ds, reason in list(row.stale.items())[:3]:
            show(f"{'':<24} {ds}: {reason}", fg="yellow")
    tracking = Tracking(site)
    champion, candidate = tracking.champion(), tracking.candidate()
    for alias, model in (("champion", champion), ("candidate", candidate)):
        refit = None if model is None else tracking.refit_of(model)
        serves = "" if refit is None else f", refitted as {refit.served_version} until {refit.tags['cut_ds']}"
        show(f"{alias:<24} {'none yet' if model is None else model.served_version}{serves}")
    if not _show_verdict(site, candidate):
        raise typer.Exit(1)


def _show_verdict(site: Site, candidate: RegisteredModel | None) -> bool:
    """Show how the newest evaluated model does against the baselines; return False if the check failed."""
    manifest = read_evaluation(site)
    is_evaluated = candidate is None or (manifest is not None and manifest["candidate"] == candidate.served_version)
    if not is_evaluated:
        show(f"{'':<24} the candidate was not evaluated yet: {materialize_command('offline_evaluation')}", fg="yellow")
    if manifest is None:
        return True
    verdict = judge_baselines(manifest)
    show(
        f"{'model_beats_baselines':<24} {'passed' if verdict.passed else 'failed'}: "
        + verdict.reason.replace("; ", f"\n{'':<25}"),
        keep="\n",
        fg=None if verdict.passed else "red",
    )
    if "without_vector" in manifest:
        show(f"{'':<24} {describe_without_vector(manifest['without_vector'])}")
    return verdict.passed


def _count(days: list[str], what: str) -> str:
    if not days:
        return ""
    shown = days[0] if len(days) == 1 else f"{days[0]} … {days[-1]}"
    return f"{len(days)} {what} ({shown})  "


def export(
    what: Annotated[str, typer.Argument(help="users or pins")],
    out: Annotated[Path, typer.Argument(help="folder to create")],
    ds: Annotated[str | None, typer.Option(help="day to export; by default the newest")] = None,
) -> None:
    """Write a day's user or pin embeddings as Parquet, for tools that do not read Lance."""
    if what not in ("users", "pins"):
        raise PipelineError(f"cannot export {what!r}", "choose users or pins")
    rows = export_embeddings(current_site(), "users" if what == "users" else "pins", out, ds=ds, progress=show)
    show(f"{rows:,} rows in {out}")


def forget(
    users: Annotated[list[str] | None, typer.Argument(help="user ids, as in the logs; none: the whole list")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="show what is left of a user, and delete nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --verify: print JSON")] = False,
) -> None:
    """Put users on the deletion list and delete them wherever they are stored; --verify shows what is left."""
    site = current_site()
    user_ids = [parse_user_id(user, site.source.actions.user_id.type) for user in users or []]
    if verify or as_json:
        if not verify or len(user_ids) != 1:
            raise PipelineError("--verify takes one user, and --json goes with it", "pf forget --verify USER --json")
        show_remains(site, user_ids[0], as_json=as_json)
        return
    num_added = add_to_deletion_list(site, user_ids)
    typer.echo(f"{num_added:,} added to {site.deletion_list} ({len(set(user_ids)) - num_added:,} were on it)")
    typer.echo("now the users on the list are deleted everywhere; if that is interrupted, run: pf forget")
    try:
        with one_at_a_time(site, typer.echo):
            delete_users(site, read_deletion_list(site), artifacts=artifact_folders(site), progress=show)
            _build_again(plan_rebuild(site))
    except Exception as error:
        reason = error if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        raise PipelineError(
            "the users are on the deletion list, so they stay out of what is built from now on, but they are not yet "
            f"deleted everywhere: {reason}",
            "to finish, run: pf forget",
        ) from error
    typer.echo("what keeps a user for some time yet, such as earlier days and models: pf forget --verify USER")


def _build_again(plan: Rebuild) -> None:
    timelines = {"user_timelines": {"config": {"rebuild": plan.from_logs}}}
    records = "user_embeddings,user_embedding_snapshot"
    if plan.timeline_days and plan.timeline_days == plan.embedding_days:  # as a rule: then one run does both
        config = {"ops": {**timelines, **KEEP_MODEL["ops"]}}
        materialize(f"user_timelines,{records}", plan.timeline_days, config=config)
    else:
        if plan.timeline_days:
            materialize("user_timelines", plan.timeline_days, config={"ops": timelines})
        if plan.embedding_days:
            materialize(records, plan.embedding_days, config=KEEP_MODEL)
    if plan.release_days:
        materialize("pin_embeddings,pin_index,release", plan.release_days)
    elif plan.embedding_days:
        show(f"{plan.embedding_days[0]} is not the day of the current release, so nothing is released now")


def repair(
    since: Annotated[str, typer.Option(help="first day whose logs were bad, YYYY-MM-DD")],
    until: Annotated[
        str | None, typer.Option(help="last day whose logs were bad; by default the newest that was ingested")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be rebuilt, and stop")] = False,
) -> None:
    """Rebuild everything that depends on bad logs, after they were fixed upstream (paper, section 3.6)."""
    site = current_site()
    plan = plan_repair(site, since=since, until=until)
    _show(plan)
    if dry_run:
        return
    before = {ds: raw_digest(site, ds) for ds in plan.raw_days if read_manifest(site, ds) is not None}
    materialize("raw_actions", plan.raw_days)
    changed = [ds for ds in plan.raw_days if raw_digest(site, ds) != before.get(ds)]
    show(f"raw_actions changed on {', '.join(changed) if changed else 'no day'}")
    if plan.pin_days:
        materialize("pin_features", plan.pin_days)
    if plan.timeline_days:
        config = {"ops": {"user_timelines": {"config": {"rebuild": plan.rebuild_timelines}}}}
        materialize("user_timelines", plan.timeline_days, config=config)
    if plan.embedding_days:
        materialize("user_embeddings,user_embedding_snapshot", plan.embedding_days, config=KEEP_MODEL)
        materialize("pin_embeddings,pin_index,release", plan.embedding_days[-1:])
    show("repaired", bold=True)


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
