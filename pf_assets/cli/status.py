"""`pf status`: what of a site is there, what is missing or stale, and how good the newest model is."""

from typing import Annotated, Any

import typer

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli.output import NAME_CHARS, show, show_json
from pf_assets.cli.summary import evaluation_json
from pf_assets.metadata.evaluation import describe_without_vector
from pf_assets.settings import current_site
from pf_assets.tracking.tracking import RegisteredModel, Tracking
from pf_core.config.site import Site
from pf_core.days import day_ranges, days_text
from pf_core.errors import materialize_command
from pf_core.evaluation.verdict import judge_baselines
from pf_core.operations.status import AssetStatus, asset_statuses
from pf_core.serving.releases import current_manifest

MAX_REASONS = 3

EMBEDDING_ASSETS = ("user_embeddings", "user_embedding_snapshot", "pin_embeddings", "pin_index", "release")
"""What makes a release of a model, for a day whose timelines and pins are there."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON; days are ranges, first and last")] = False,
) -> None:
    """Show existing, missing and stale days, and the models. Exit code 1: the newest model loses to a baseline."""
    site = current_site()
    rows, tracking = asset_statuses(site), Tracking(site)
    models = {"champion": tracking.champion(), "candidate": tracking.candidate()}
    if as_json:
        is_good = _show_json(site, rows, tracking, models)
    else:
        show(f"{site.name}, in {site.directory}", bold=True)
        for row in rows:
            _show_asset(row)
        for alias, model in models.items():
            refit = None if model is None else tracking.refit_of(model)
            serves = "" if refit is None else f", refitted as {refit.served_version} until {refit.tags['cut_ds']}"
            show(f"{alias:<{NAME_CHARS}} {'none yet' if model is None else model.served_version}{serves}")
        if pending := pending_model(site, tracking):
            show(f"{'':<{NAME_CHARS}} {pending}", fg="yellow")
        is_good = _show_verdict(site, models["candidate"])
    if not is_good:
        raise typer.Exit(1)


def pending_model(site: Site, tracking: Tracking) -> str | None:
    """Return that the current release has another model than new days will have, and what changes it; None if not."""
    served, manifest = tracking.served(), current_manifest(site)
    if served is None or manifest is None or manifest["model_version"] == served.served_version:
        return None
    command = materialize_command(",".join(EMBEDDING_ASSETS), manifest["ds"])
    return (
        f"release {manifest['release']} is of model {manifest['model_version']}; {served.served_version} embeds "
        f"everybody on the next new day, or now with: {command}"
    )


def _show_asset(row: AssetStatus) -> None:
    days = days_text(row.days) if row.days else "nothing yet"
    counts = [f"{len(row.missing)} missing"] if row.missing else []
    counts += [f"{len(row.stale)} stale"] if row.stale else []
    show(f"{row.asset:<{NAME_CHARS}} {days:<26} {', '.join(counts)}".rstrip())
    if row.missing:
        show(f"{'':<{NAME_CHARS}} missing: {days_text(row.missing)}", fg="yellow")
    by_reason: dict[str, list[str]] = {}
    for ds, reason in row.stale.items():
        by_reason.setdefault(reason, []).append(ds)
    for reason, stale in list(by_reason.items())[:MAX_REASONS]:
        show(f"{'':<{NAME_CHARS}} stale: {days_text(stale)}: {reason}", fg="yellow")
    if len(by_reason) > MAX_REASONS:
        others = [ds for stale in list(by_reason.values())[MAX_REASONS:] for ds in stale]
        show(f"{'':<{NAME_CHARS}} stale: {days_text(others)}: for other reasons; --json has all", fg="yellow")


def _show_verdict(site: Site, candidate: RegisteredModel | None) -> bool:
    """Show how the newest evaluated model does against the baselines; return False if the check failed."""
    manifest = read_evaluation(site)
    is_evaluated = candidate is None or (manifest is not None and manifest["candidate"] == candidate.served_version)
    if not is_evaluated:
        command = materialize_command("offline_evaluation")
        show(f"{'':<{NAME_CHARS}} the candidate was not evaluated yet: {command}", fg="yellow")
    if manifest is None:
        return True
    verdict = judge_baselines(manifest)
    show(
        f"{'model_beats_baselines':<{NAME_CHARS}} {'passed' if verdict.passed else 'failed'}: "
        + verdict.reason.replace("; ", f"\n{'':<{NAME_CHARS + 1}}"),
        keep="\n",
        fg=None if verdict.passed else "red",
    )
    if "without_vector" in manifest:
        show(f"{'':<{NAME_CHARS}} {describe_without_vector(manifest['without_vector'])}")
    return verdict.passed


def _show_json(
    site: Site, rows: list[AssetStatus], tracking: Tracking, models: dict[str, RegisteredModel | None]
) -> bool:
    """Print the same for a program; return False if the newest evaluated model loses."""
    manifest = read_evaluation(site)
    show_json(
        {
            "site": site.name,
            "assets": {
                row.asset: {
                    "days": day_ranges(row.days),
                    "missing": day_ranges(row.missing),
                    "stale": row.stale,
                }
                for row in rows
            },
            **{alias: _model_json(tracking, model) for alias, model in models.items()},
            "pending_model": pending_model(site, tracking),
            "evaluation": None if manifest is None else evaluation_json(manifest),
        }
    )
    return manifest is None or judge_baselines(manifest).passed


def _model_json(tracking: Tracking, model: RegisteredModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    refit = tracking.refit_of(model)
    return {
        "version": model.version,
        "model": model.served_version,
        "refit": None if refit is None else {"model": refit.served_version, "cut_ds": refit.tags["cut_ds"]},
    }
