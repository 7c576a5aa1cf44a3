"""`pf` for the person who runs the site: look at releases, roll back, forget, repair, see what is missing.

What changes data goes through Dagster runs, so that lineage and history stay true; rollback moves a pointer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pf_assets.schedules import KEEP_MODEL
from pf_assets.settings import REPOSITORY, current_site, dagster_home
from pf_core.config.site import Site
from pf_core.embeddings.tables import snapshot_state
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import parse_user_id, read_deletion_list
from pf_core.logs.partition import raw_digest, read_manifest
from pf_core.operations.inspect import newest_actions
from pf_core.operations.repair import RepairPlan, plan_repair
from pf_core.storage.files import path_of, write_text

QUIET = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}

NUM_RECENT = 10


def fail(message: str) -> NoReturn:
    typer.secho(f"error: {message}", fg="red", err=True)
    raise SystemExit(1)


def materialize(
    assets: str,
    days: list[str] | None = None,
    *,
    partition: str | None = None,
    config: dict[str, Any] | None = None,
    site_file: Path | None = None,
) -> None:
    """One Dagster run, as a person would start it; of the site of PF_SITE, or of another site file."""
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", assets]
    command += [] if days is None else ["--partition-range", f"{days[0]}...{days[-1]}"]
    command += [] if partition is None else ["--partition", partition]
    command += ["-m", "pf_assets.definitions"]
    what = assets if partition is None else f"{assets} {partition}"
    typer.echo(what if days is None else f"{what}: {days[0]} to {days[-1]}")
    environment = {**os.environ, "DAGSTER_HOME": dagster_home(site_file)}
    environment |= {} if site_file is None else {"PF_SITE": str(site_file)}
    process = subprocess.Popen(
        [*command, "--config-json", json.dumps(QUIET | (config or {}))], cwd=REPOSITORY, env=environment
    )
    try:
        exit_code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C has reached the run, too: it ends what it started
        raise
    if exit_code:
        raise PipelineError(
            f"the run failed; its log is above, and in the UI (make dev). The command was: {' '.join(command)}"
        )


def prepare_instance(site_file: Path) -> None:
    """Make Dagster's databases, before several runs would do so at once: SQLite's then have two histories of schema."""
    import dagster as dg

    with dg.DagsterInstance.from_config(dagster_home(site_file)) as instance:
        instance.get_runs_count()
        instance.all_asset_keys()
        instance.all_instigator_state()


# Reading


def recommend(
    user: Annotated[str, typer.Argument(help="a user id, as the logs have it")],
    k: Annotated[int, typer.Option("-k", min=1, help="how many pins")] = 10,
    recent: Annotated[int, typer.Option(help="how many of the user's newest actions to show beside them")] = NUM_RECENT,
) -> None:
    """The nearest pins of a user in the current release, and the user's newest actions beside them."""
    show_recommendations(current_site(), user, k=k, recent=recent)


def show_recommendations(site: Site, user: str, *, k: int, recent: int) -> None:
    from pf_core.serving.client import Serving

    release = Serving(site).release()
    user_id = parse_user_id(user, site.source.actions.user_id.type)
    hits = release.recommend(user_id, k=k)
    manifest = release.manifest
    typer.secho(f"user {user} in release {manifest['release']} (model {manifest['model_version']})", bold=True)
    rows = newest_actions(site, manifest["ds"], user_id, recent)
    if rows:
        typer.echo(f"  newest actions until {manifest['ds']}:")
        for row in rows:
            typer.echo(
                f"    {row['ts']:%Y-%m-%d %H:%M}  {row['action_type']:<12} {row['pin_id']!s:<16} {row['interest']}"
            )
    typer.echo("  recommended pins:")
    for hit in hits:
        typer.echo(f"    {hit.score:.3f}  {hit.pin_id!s:<16} {hit.interest}")


def similar(
    pin: Annotated[str, typer.Argument(help="a pin id, as the logs have it")],
    k: Annotated[int, typer.Option("-k", min=1, help="how many pins")] = 10,
) -> None:
    """The nearest pins of a pin in the current release."""
    from pf_core.serving.client import Serving

    site = current_site()
    release = Serving(site).release()
    pin_id: int | str = pin
    if site.source.pins.pin_id.type == "int":
        if not pin.lstrip("-").isdigit():
            raise PipelineError(f"{pin!r} is not a pin id: this site's are integers")
        pin_id = int(pin)
    for hit in release.similar(pin_id, k=k):
        typer.echo(f"{hit.score:.3f}  {hit.pin_id!s:<16} {hit.interest}")


def releases() -> None:
    """The releases that are there, newest first; the current one is marked."""
    from pf_core.serving.publish import list_releases

    found = list_releases(current_site())
    if not found:
        typer.echo("no release yet: materialize the assets of the group serving")
    for manifest in found:
        mark = "→" if manifest["is_current"] else " "
        counts = manifest["counts"]
        typer.echo(
            f"{mark} {manifest['release']:<14} {counts['users']:>9,} users  {counts['pins']:>9,} pins  "
            f"model {manifest['model_version']}  built {manifest['created_at']}"
        )


def status() -> None:
    """What is materialized, what is missing, what no longer follows from its inputs, and which models there are."""
    from pf_assets.tracking.tracking import Tracking
    from pf_core.operations.status import asset_statuses

    site = current_site()
    for row in asset_statuses(site):
        days = f"{row.days[0]} to {row.days[-1]}" if row.days else "nothing yet"
        typer.echo(
            f"{row.asset:<24} {days:<26} {_count(row.missing, 'missing')}{_count(list(row.stale), 'stale')}".rstrip()
        )
        for ds, reason in list(row.stale.items())[:3]:
            typer.secho(f"{'':<24} {ds}: {reason}", fg="yellow")
    tracking = Tracking(site)
    for alias, model in (("champion", tracking.champion()), ("candidate", tracking.candidate())):
        typer.echo(f"{alias:<24} {'none yet' if model is None else model.served_version}")


def _count(days: list[str], what: str) -> str:
    if not days:
        return ""
    shown = days[0] if len(days) == 1 else f"{days[0]} … {days[-1]}"
    return f"{len(days)} {what} ({shown})  "


def export(
    what: Annotated[str, typer.Argument(help="users or pins")],
    out: Annotated[Path, typer.Argument(help="a folder, which must not exist yet")],
    ds: Annotated[str | None, typer.Option(help="the day; the newest by default")] = None,
) -> None:
    """Write a day's user or pin embeddings as Parquet, for whoever does not read Lance."""
    from pf_core.serving.export import export_embeddings

    if what not in ("users", "pins"):
        raise PipelineError(f"cannot export {what!r}: choose users or pins")
    rows = export_embeddings(current_site(), "users" if what == "users" else "pins", out, ds=ds, progress=typer.echo)
    typer.echo(f"{rows:,} rows in {out}")


# Changing


def rollback(
    to: Annotated[str | None, typer.Option(help="a release of `pf releases`; the one before by default")] = None,
) -> None:
    """Make an earlier release the current one, at once. The release that is left is withdrawn."""
    from pf_core.serving.publish import rollback as roll_back

    manifest = roll_back(current_site(), to=to)
    typer.echo(
        f"current is {manifest['release']}: {manifest['counts']['users']:,} users, model {manifest['model_version']}"
    )


def forget(users: Annotated[list[str], typer.Argument(help="user ids, as the logs have them")]) -> None:
    """Add users to the deletion list: they leave every release at once, and all state by the next run."""
    from pf_core.serving.publish import forget_users, list_releases

    site = current_site()
    if site.deletion_list is None:
        raise PipelineError("the site file names no deletion_list: add `deletion_list: forget.txt` to it")
    ids = [parse_user_id(user, site.source.actions.user_id.type) for user in users]
    known = set(read_deletion_list(site).to_pylist())
    added = [user_id for user_id in dict.fromkeys(ids) if user_id not in known]
    _append_lines(path_of(site.deletion_list), [str(user_id) for user_id in added])
    typer.echo(f"{len(added)} added to {site.deletion_list} ({len(ids) - len(added)} were there)")
    for release, count in forget_users(site, read_deletion_list(site)).items():
        typer.echo(f"release {release}: {count} removed from the store")
    newest = snapshot_state(site).days()[-1:]
    if newest:
        current = [release["ds"] for release in list_releases(site) if release["is_current"]]
        materialize("user_timelines,user_embeddings,user_embedding_snapshot", newest, config=KEEP_MODEL)
        if current == newest:
            materialize("pin_embeddings,pin_index,release", newest)
        else:
            typer.echo(f"{newest[0]} is not the day of the current release, so nothing is released now")


def _append_lines(path: Path, lines: list[str]) -> None:
    """A list that grew by whole lines, or did not change."""
    before = path.read_text() if path.exists() else ""
    text = (
        before
        + ("" if before in ("", "\n") or before.endswith("\n") else "\n")
        + "".join(f"{line}\n" for line in lines)
    )
    write_text(path, text)


def repair(
    since: Annotated[str, typer.Option(help="the first day whose logs were bad, YYYY-MM-DD")],
    until: Annotated[str | None, typer.Option(help="the last one; by default the newest that was ingested")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be done")] = False,
) -> None:
    """Build anew what followed from bad logs, after they were mended upstream (paper, section 3.6)."""
    site = current_site()
    plan = plan_repair(site, since=since, until=until)
    _show(plan)
    if dry_run:
        return
    before = {ds: raw_digest(site, ds) for ds in plan.raw_days if read_manifest(site, ds) is not None}
    materialize("raw_actions", plan.raw_days)
    changed = [ds for ds in plan.raw_days if raw_digest(site, ds) != before.get(ds)]
    typer.echo(f"raw_actions changed on {', '.join(changed) if changed else 'no day'}")
    if plan.pin_days:
        materialize("pin_features", plan.pin_days)
    if plan.timeline_days:
        config = {"ops": {"user_timelines": {"config": {"rebuild": plan.rebuild_timelines}}}}
        materialize("user_timelines", plan.timeline_days, config=config)
    if plan.embedding_days:
        materialize("user_embeddings,user_embedding_snapshot", plan.embedding_days, config=KEEP_MODEL)
        materialize("pin_embeddings,pin_index,release", plan.embedding_days[-1:])
    typer.secho("repaired", bold=True)


def _show(plan: RepairPlan) -> None:
    typer.secho(
        f"{plan.users:,} users have actions on the days concerned; "
        f"{plan.embeddings:,} of their daily embeddings may change",
        bold=True,
    )
    for asset, days in plan.partitions.items():
        if days:
            partitions = "1 partition: " if len(days) == 1 else f"{len(days)} partitions: "
            typer.echo(f"  {asset:<24} {partitions:>15}{days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    for note in plan.notes:
        typer.secho(f"  note: {note}", fg="yellow")
