"""`pf forget --verify`: what is left of a user, place by place, and until when."""

import dataclasses
import json
from pathlib import Path

import typer

from pf_assets.cli.output import show
from pf_assets.metadata.remains import search_pages, search_run_logs
from pf_assets.tracking.experiment_store import ExperimentStore
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.operations.remains import Place, Remains, TrainedModel, find_remains
from pf_core.printable import printable
from pf_core.serving.releases import current_manifest

MAX_ID_CHARS = 100

COLORS = {"gone": None, "left": "yellow", "overdue": "red"}


def artifact_folders(site: Site) -> list[Path]:
    """Return the folders in which MLflow keeps the files of the site's runs."""
    return [Tracking(site).artifact_folder, ExperimentStore(site).artifact_folder]


def show_remains(site: Site, user_id: int | str, *, as_json: bool) -> None:
    """Print what is left of a user. Exit code 1: not on the list, or something is left that should be gone."""
    in_mlflow, artifacts, models = [], [], []
    try:
        artifacts, models = artifact_folders(site), _registered_models(site)
    except Exception as error:  # of its database or server: then nobody knows what MLflow keeps
        in_mlflow = [Place(name="MLflow", searched="none", found=(f"it cannot be searched: {error}",), is_overdue=True)]
    remains = find_remains(site, user_id, artifacts=artifacts, models=models)
    in_dagster = [search_pages(site, user_id), search_run_logs(user_id)]
    remains = dataclasses.replace(remains, places=[*remains.places, *in_mlflow, *in_dagster])
    if as_json:
        show(json.dumps(remains.as_json(), indent=1), keep="\n")
    else:
        _print(remains)
    if not remains.is_forgotten:
        raise typer.Exit(1)


def _registered_models(site: Site) -> list[TrainedModel]:
    tracking = Tracking(site)
    if not tracking.exists:
        return []
    served, release = tracking.served(), current_manifest(site)
    released = None if release is None else release["model_version"]
    return [
        TrainedModel(
            name=f"{tracking.name} version {model.version} ({model.served_version})",
            data_read_at=tracking.data_read_at(model),
            serves=model == served or model.served_version == released,
        )
        for model in tracking.versions()
    ]


def _print(remains: Remains) -> None:
    entry = remains.entry
    listed = "not on the deletion list" if entry is None else "on the deletion list"
    if entry is not None and entry["since"] is not None:
        listed += f" since {printable(entry['since'], max_chars=MAX_ID_CHARS)}"
    show(f"user {printable(str(remains.user_id), max_chars=MAX_ID_CHARS)}: {listed}", bold=True)
    for place in remains.places:
        _print_place(place)
    overdue = [place.name for place in remains.places if place.state == "overdue"]
    if entry is None:
        show("nothing is deleted of a user who is not on the list; to forget the user: pf forget USER", fg="red")
    elif overdue:
        show(f"left, although it should be gone: {', '.join(overdue)}; to finish, run: pf forget", fg="red")
    else:
        show("nothing is left that should be gone by now")


def _print_place(place: Place) -> None:
    show(f"  {place.state:<8} {place.name:<24} {printable(place.searched)}", fg=COLORS[place.state])
    for where in place.found:
        show(f"{'':<36}{where}")
    if place.until is not None:
        show(f"{'':<36}until: {place.until}")
