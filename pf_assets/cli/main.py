"""`pf`: the demo, the development servers, and a look at how a site file reads your logs.

The commands of whoever runs a site are in `operations` and `promotion_cli`, those of the experiments in
`experiments_cli`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pf_assets.cli.experiments import ablations, report
from pf_assets.cli.operations import (
    export,
    fail,
    forget,
    materialize,
    recommend,
    releases,
    repair,
    rollback,
    show_recommendations,
    similar,
    status,
)
from pf_assets.cli.preparation import missing_days, write_world
from pf_assets.cli.promotion import promote
from pf_assets.schedules import DAILY_ASSETS, KEEP_MODEL, morning_days
from pf_assets.settings import DEMO_SITE, REPOSITORY, current_site, dagster_home, mlflow_server
from pf_assets.tracking.runs import TrackedRun, run_url
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site, load_site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.snapshot import read_snapshot
from pf_core.embeddings.tables import snapshot_state
from pf_core.errors import PipelineError
from pf_core.logs.mapping import ActionMapper
from pf_core.logs.partition import read_manifest
from pf_core.logs.readers import find_files, read_file
from pf_core.pins.features import pin_state
from pf_core.serving.publish import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.timelines.build import timeline_state
from pf_core.training.plan import current_model, plan_model
from pf_core.world import config as world_config
from pf_core.world.logs import FileFormat

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CHECKED_ROWS = 100_000

SERVED_DAYS = 4
"""Of the demo: so many days are embedded and released."""


def main() -> None:
    """Entry point: a mistake of the user's ends in one sentence, not in a traceback."""
    try:
        app()
    except PipelineError as error:
        fail(str(error))


for command in (recommend, similar, status, releases, rollback, forget, repair, export, promote, ablations, report):
    app.command()(command)


@app.command()
def demo() -> None:
    """Write the demo site's logs and materialize every asset on them. What is there already is left as it is."""
    started = time.monotonic()
    site = load_site(DEMO_SITE, environment=os.environ)
    typer.secho("1. The demo site's logs", bold=True)
    write_world(world_config.demo(), site.log_root, "csv.gz")
    typer.secho("2. The asset graph", bold=True)
    for assets, days in missing_days(site).items():
        materialize(assets, days)
    missing = _missing_model(site)
    if missing:
        materialize(",".join(missing))
    if missing or not (site.directory / "offline_evaluation" / MANIFEST).exists():
        materialize("offline_evaluation")
    _serve(site)
    _summarize(site, time.monotonic() - started)
    show_recommendations(site, _an_active_user(site), k=10, recent=10)
    typer.echo(
        "Next: `make dev` shows all of it on http://localhost:3000; `pf recommend USER`, `pf releases`, `pf status`"
    )


def _serve(site: Site) -> None:
    """Embed and release the newest days: first a range, then the newest day as the schedule's morning run does."""
    assert site.end_ds is not None
    if any(manifest["ds"] == site.end_ds for manifest in list_releases(site)):
        return
    serving = ",".join(DAILY_ASSETS[DAILY_ASSETS.index("user_embeddings") :])
    materialize(serving, ds_range(shift_ds(site.end_ds, 1 - SERVED_DAYS), shift_ds(site.end_ds, -1)))
    materialize(",".join(DAILY_ASSETS), morning_days(site, site.end_ds), config=KEEP_MODEL)


def _missing_model(site: Site) -> list[str]:
    """The training set if there is none, and the model if another one than the site file's, or none, is there."""
    if not (site.directory / "training_set" / MANIFEST).exists():
        return ["training_set", "pinnerformer_model"]
    made = current_model(site)
    is_registered = made is not None and made["mlflow"]["version"] is not None
    is_wanted = made is not None and made["model_version"] == plan_model(site).model_version
    return [] if is_registered and is_wanted else ["pinnerformer_model"]


def _summarize(site: Site, seconds: float) -> None:
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
    manifests = [manifest for ds in days if (manifest := read_manifest(site, ds)) is not None]
    totals = {name: sum(m["counts"][name] for m in manifests) for name in ("read", "kept", "duplicates", "quarantined")}
    pins = pin_state(site).require(site.end_ds)["counts"]
    timelines = timeline_state(site).require(site.end_ds)["counts"]
    training, model = read_json(site.directory / "training_set" / MANIFEST), current_model(site)
    assert model is not None
    result, snapshot = model["result"], snapshot_state(site).require(site.end_ds)["counts"]
    release = next(manifest for manifest in list_releases(site) if manifest["is_current"])
    typer.secho(f"\nDone in {seconds:.0f} s. As of {site.end_ds}:", bold=True)
    typer.echo(
        f"  raw_actions         {totals['kept']:,} actions in {len(manifests)} days "
        f"({totals['read']:,} rows read, {totals['duplicates']:,} duplicates, {totals['quarantined']:,} quarantined)\n"
        f"  pin_features        {pins['pins']:,} pins, {pins['candidates']:,} of them candidates\n"
        f"  user_timelines      {timelines['users']:,} users, {timelines['actions']:,} actions\n"
        f"  training_set        {training['counts']['train']['users']:,} users until {training['cut_ds']}, "
        f"{training['counts']['held_out']['users']:,} held out\n"
        f"  pinnerformer_model  {model['model_version']}: recall@10 {result['metrics']['recall_at_10']:.3f} on "
        f"held-out users after {result['num_steps']:,} steps in {result['seconds'] / 60:.1f} min\n"
        f"                      {run_url(TrackedRun(**model['mlflow']), mlflow_server())}\n"
        f"  offline_evaluation  {read_json(site.directory / 'offline_evaluation' / MANIFEST)['decision']['reason']}\n"
        f"  snapshot            {snapshot['users']:,} users: {snapshot['refreshed']:,} refreshed, "
        f"{snapshot['new']:,} new, {snapshot['carried_over']:,} carried over\n"
        f"  release             {release['release']}: {release['counts']['users']:,} users, "
        f"{release['counts']['pins']:,} pins, model {release['model_version']}\n"
        f"  in                  {site.directory}\n"
    )


def _an_active_user(site: Site) -> str:
    """One of the users embedded last, with a timeline long enough to look at."""
    assert site.end_ds is not None
    rows = read_snapshot(site, site.end_ds, 0, ["user_id", "computed_ds", "num_actions"]).to_pylist()
    rows = [row for row in rows if row["computed_ds"].isoformat() == site.end_ds]
    return str(max(rows, key=lambda row: (min(row["num_actions"], 40), row["user_id"]))["user_id"])


@app.command()
def dev(dagster_port: int = 3000, mlflow_port: int = 5000) -> None:
    """Serve the Dagster UI and the MLflow UI until Ctrl-C."""
    site = current_site()
    tracking = Tracking(site)
    tracking.root.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "DAGSTER_HOME": dagster_home(),
        "PF_MLFLOW_SERVER": os.environ.get("PF_MLFLOW_SERVER") or f"http://localhost:{mlflow_port}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_BACKEND_STORE_URI": tracking.uri,  # not an argument, which everybody on the machine can read
    }
    typer.echo(f"Dagster: http://localhost:{dagster_port}   MLflow: http://localhost:{mlflow_port}   Ctrl-C ends both")
    commands = [
        ["dagster", "dev", "-w", "workspace.yaml", "-p", str(dagster_port)],
        [
            *("mlflow", "server", "--port", str(mlflow_port), "--workers", "1"),
            *("--artifacts-destination", str(tracking.artifacts)),
        ],
    ]
    servers = [
        subprocess.Popen([sys.executable, "-m", *command], cwd=REPOSITORY, env=environment, start_new_session=True)
        for command in commands
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while all(server.poll() is None for server in servers):
            time.sleep(1)
    except KeyboardInterrupt:
        typer.echo("stopping")
    finally:
        for server in servers:
            _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started: asked first, then made to."""
    for wish, patience_s in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(server.pid, wish)
            server.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


@app.command()
def world(
    out: Annotated[Path, typer.Argument(help="where the site's logs go")],
    preset: str = "demo",
    file_format: FileFormat = "csv.gz",
    num_users: int = 100_000,
    num_days: int = 30,
    seed: Annotated[int | None, typer.Option(help="another world of the same kind")] = None,
) -> None:
    """Write the logs of a synthetic site: tiny, demo, experiments, or large (with --num-users and --num-days)."""
    chosen = {} if seed is None else {"seed": seed}
    match preset:
        case "tiny":
            config = world_config.tiny(**chosen)
        case "demo":
            config = world_config.demo(**chosen)
        case "experiments":
            config = world_config.experiments(**chosen)
        case "large":
            config = world_config.large(num_users=num_users, num_days=num_days, **chosen)
        case _:
            fail(f"no preset {preset!r}: choose tiny, demo, experiments or large")
    write_world(config, out, file_format)


@app.command()
def check(
    site_file: Annotated[Path, typer.Argument(help="the YAML file that describes your site")],
    ds: Annotated[str | None, typer.Option(help="the day to look at; the site's first by default")] = None,
    rows: Annotated[int, typer.Option(help="how many mapped rows to print")] = 5,
) -> None:
    """Validate a site file and show how it reads the first file of your logs, without writing anything."""
    site = load_site(site_file, environment=os.environ)
    source = site.source.actions
    files = find_files(source, site.log_root, (ds or site.start_ds) if source.is_dated else None)
    if not files:
        fail(f"no file matches {site.log_root / source.path} for {ds or site.start_ds}")
    mapper = ActionMapper(source)
    num_read = num_kept = num_skipped = 0
    reasons: dict[str, list[int]] = {}
    sample: list[dict[str, Any]] = []
    for batch in read_file(files[0], source, source.columns):
        mapped = mapper.map(batch.rows)
        num_read += len(batch.row_number) + len(batch.malformed)
        num_kept += mapped.actions.num_rows
        num_skipped += len(mapped.skipped)
        sample += mapped.actions.slice(0, rows - len(sample)).to_pylist()
        for number, reason, _ in batch.malformed:
            reasons.setdefault(reason, []).append(number)
        for number, reason in zip(batch.row_number[mapped.rejected].tolist(), mapped.reasons, strict=True):
            reasons.setdefault(reason, []).append(number)
        if num_read > CHECKED_ROWS:
            break
    typer.echo(f"{files[0]} (1 of {len(files)} files), first {num_read:,} rows:")
    typer.echo(f"  {num_kept:,} kept, {num_skipped:,} skipped by a rule")
    for reason, numbers in reasons.items():
        typer.echo(f"  {len(numbers):,} quarantined: {reason}; first in row {min(numbers)}")
    for row in sample:
        typer.echo("  " + "  ".join(f"{name}={_short(value)}" for name, value in row.items()))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
