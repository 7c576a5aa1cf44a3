"""training_set: the cut. Builds the set that ends with a day, and publishes it.

The set is a function of user_timelines[cut_ds], pin_features[cut_ds], raw_actions of the timelines' window, the
deletion list, the site file and the file of `training.users`; nothing in it is later than the cut. Users are held out
by hash: they evaluate a model and never train it. Users whom `training.users` does not select do not train either;
nothing that a model learns from depends on what either of them did, not even their words. The fingerprint depends only
on the content and the choice of users: the same data has the same fingerprint. The counts of pins on each day come from
raw_actions, as in serving, because timelines keep no more than `timelines.max_actions` of a user.

Publishing a set removes the previous one. A job that has the previous set open continues to read it (Linux keeps the
files that a process has mapped), but it cannot be opened again.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pf_core.config.site import Site
from pf_core.days import DAY_US, ds_range, ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import StateDay
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import combined
from pf_core.layouts import LAYOUTS
from pf_core.logs.log_day import LogDay, open_log_day, refuse_if_changed
from pf_core.logs.training_users import Selection, TrainingUsers, read_training_users
from pf_core.pins.counts import counts_of_days
from pf_core.pins.features import PinManifest, pin_state
from pf_core.pins.lookup import find_pins
from pf_core.pins.packed import write_pins
from pf_core.progress import Progress
from pf_core.storage.builds import building, publish_build
from pf_core.storage.files import is_remote, remove_tree, upload, write_json
from pf_core.storage.locks import exclusive
from pf_core.timelines.bucket import window_start
from pf_core.timelines.build import TimelineManifest, timeline_state
from pf_core.training.cut import EvaluationDays, choose_cut
from pf_core.training.log_pins import pins_of_training_users
from pf_core.training.packing import SelectionCounts, Vocabularies, join_buckets, pack_buckets
from pf_core.training.parts.counts import write_use_log
from pf_core.training.training_set import (
    DESCRIPTION,
    USES,
    TrainingSetCounts,
    TrainingSetManifest,
    training_sets_dir,
)


def build_training_set(site: Site, *, cut_ds: str | None, engine: Engine, progress: Progress) -> TrainingSetManifest:
    """Build and publish the set that ends with `cut_ds`, by default with `cut_of`; return its manifest."""
    cut_ds, evaluation_days = choose_cut(site, cut_ds)
    if cut_ds < site.start_ds:
        raise PipelineError(f"the cut {cut_ds} is before the site's start {site.start_ds}", "choose a later cut_ds")
    progress(
        f"training_set: training ends with {cut_ds}, {_days(evaluation_days['num_days'])} before the newest timelines "
        f"({evaluation_days['reason']}): the days after it evaluate the model"
    )
    return publish_training_set(
        site, training_sets_dir(site), cut_ds, evaluation_days=evaluation_days, engine=engine, progress=progress
    )


def publish_training_set(
    site: Site, folder: Path, cut_ds: str, *, evaluation_days: EvaluationDays, engine: Engine, progress: Progress
) -> TrainingSetManifest:
    """Build the set that ends with `cut_ds` below `folder`, and publish it there; return its manifest."""
    with exclusive(folder, "training_set"):
        with building(folder) as build:
            manifest = _fill(build, site, cut_ds, engine, progress)
            manifest["evaluation_days"] = evaluation_days
            write_json(build / DESCRIPTION, manifest)
            publish_build(build, manifest)
    train, held_out = manifest["counts"]["train"], manifest["counts"]["held_out"]
    progress(
        f"training_set {manifest['fingerprint']}, cut {cut_ds}: {train['users']:,} training users with "
        f"{train['actions']:,} actions, {train['positives']:,} of them positive; {held_out['users']:,} users held out"
    )
    return manifest


def _days(num_days: int) -> str:
    return "1 day" if num_days == 1 else f"{num_days} days"


def _fill(build: Path, site: Site, cut_ds: str, engine: Engine, progress: Progress) -> TrainingSetManifest:
    """Write the files of a build; return its manifest.

    Files that grow by appending are written on this machine, and uploaded if the build is in an object store.
    """
    with timeline_state(site).held(cut_ds) as timelines, pin_state(site).held(cut_ds) as pins:
        return _fill_from(build, site, timelines, pins.manifest, engine, progress)


def _fill_from(
    build: Path,
    site: Site,
    opened: StateDay[TimelineManifest],
    pins: PinManifest,
    engine: Engine,
    progress: Progress,
) -> TrainingSetManifest:
    timelines, cut_ds = opened.manifest, opened.manifest["ds"]
    first_ds = max(site.start_ds, window_start(cut_ds, site.timelines.window_days))
    log_days = [open_log_day(site, ds) for ds in ds_range(first_ds, cut_ds)]
    target = site.workspace / "training_set" / build.name if is_remote(build) else build
    users = read_training_users(site, as_of=cut_ds)
    log_pins = pins_of_training_users(site, opened, users, engine=engine, progress=progress)
    num_pins = write_pins(site, pins, target / "pins", log_pins=log_pins)
    if is_remote(build):
        upload(target / "pins" / "pin_id.arrow", build / "pins" / "pin_id.arrow")  # for the workers
    if num_pins["candidates"] == 0:
        raise PipelineError(
            f"none of the {num_pins['pins']:,} pins of pin_features {cut_ds} is a candidate",
            f"fix source.pins.is_candidate in the site file, then: {materialize_command('pin_features', cut_ds)}",
        )
    progress(f"training_set: {num_pins['pins']:,} pins, {num_pins['candidates']:,} of them candidates")
    packed = pack_buckets(build, site, opened, users=users, engine=engine, progress=progress)
    if users.selection is not None:
        progress(f"training_set: {_describe_selection(users.selection, packed['selection'])}")
    vocabularies = packed["vocabularies"]
    if timeline_state(site).require(cut_ds) != timelines:
        raise PipelineError(
            f"user_timelines {cut_ds} was rebuilt while it was read",
            f"run again: {materialize_command('training_set')}",
        )
    joined = join_buckets(build, target, site, num_pins=num_pins["pins"], vocabularies=vocabularies)
    remove_tree(build / "parts")
    progress(f"training_set: user-days of the pins from {first_ds} to {cut_ds}")
    write_use_log(
        _pins_of_days(site, log_days, users, target / "pins" / "pin_id.arrow"),
        target / USES,
        num_pins=num_pins["pins"],
        first_day=ds_start_us(first_ds) // DAY_US,
    )
    refuse_if_changed(site, log_days, what="training_set", command=materialize_command("training_set"))
    counts: TrainingSetCounts = {
        "train": joined["train"],
        "held_out": joined["held_out"],
        "dropped": {
            "no_feature": packed["no_feature"],
            "unknown_action_type": joined["unknown_action_type"],
            "unknown_surface": joined["unknown_surface"],
        },
        "held_out_no_feature": packed["held_out_no_feature"],
        "users_left_out": packed["users"] - joined["train"]["users"] - joined["held_out"]["users"],
        "users_forgotten": packed["users_forgotten"],
        "pins": num_pins["pins"],
        "candidates": num_pins["candidates"],
        "with_feature": num_pins["with_feature"],
    }
    if users.selection is not None:
        counts["selection"] = packed["selection"]
    _refuse_if_useless(site, cut_ds, counts, vocabularies)
    assert joined["first_us"] is not None, "there are users to train on, and each has an action"
    cut_us, files = ds_start_us(shift_ds(cut_ds, 1)), _digests(target)
    if is_remote(build):
        upload(target, build)
        remove_tree(target)
    content = [files, vocabularies, cut_us, *([] if users.selection is None else [users.selection])]
    manifest: TrainingSetManifest = {
        "layout": LAYOUTS["training_set"],
        "cut_ds": cut_ds,
        "cut_us": cut_us,
        "time_origin_us": joined["first_us"],
        "counts": counts,
        "feature_dim": pins["dim"],
        "vocabularies": vocabularies,
        "held_out_share": users.held_out_share,
        "inputs": {
            "site": site.fingerprint(),
            "positive": site.source.positive.model_dump(mode="json"),
            "user_timelines": {
                "versions": timelines["versions"],
                "raw_digests": timelines["raw_digests"],
                "settings": timelines["settings"],
            },
            "pin_features": {"version": pins["versions"][0]},
        },
        "files": files,
        "fingerprint": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        "build": build.name,
    }
    if users.selection is not None:
        manifest["users"] = users.selection
    return manifest


def _describe_selection(selection: Selection, counts: SelectionCounts) -> str:
    """Return what `training.users` makes of the users with a timeline."""
    selected, others = counts["selected"], counts["others"]
    unknown = 0 if "column" in selection else selection.get("listed", selected) - selected
    return (
        f"training.users selects {selected:,} of {selected + others:,} users; of the others, "
        f"{counts['held_out_others']:,} are held out, and judge models like other held-out users"
        + (f"; {unknown:,} ids of the file have no timeline" if unknown else "")
    )


def _pins_of_days(
    site: Site, days: Sequence[LogDay], users: TrainingUsers, pin_ids: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows of pins and their user-days on each of the days; pins that the set does not have are left out."""
    for counts in counts_of_days(site, days, users):
        row = find_pins(pin_ids, combined(counts["pin_id"]))
        yield row[row >= 0], counts["user_days"].to_numpy()[row >= 0]


def _refuse_if_useless(site: Site, cut_ds: str, counts: TrainingSetCounts, vocabularies: Vocabularies) -> None:
    """Refuse a set that has no user or no positive action to train on."""
    train, not_selected = counts["train"], counts["selection"]["others"] if "selection" in counts else 0
    if train["users"] == 0:
        raise PipelineError(
            f"no user is left to train on as of {cut_ds}: "
            + (f"{not_selected:,} are not selected by training.users, " if not_selected else "")
            + f"{counts['held_out']['users']:,} are held out, and "
            f"{counts['users_left_out']:,} have no usable action ({counts['dropped']['no_feature']:,} actions are on "
            "pins that pin_features does not have)",
            "lower training.held_out_share in the site file, or rebuild the pins: "
            + materialize_command("pin_features", cut_ds),
        )
    if train["positives"] == 0:
        raise PipelineError(
            f"none of the {train['actions']:,} actions to train on is positive: source.positive in the site file is "
            f"{site.source.positive.model_dump(mode='json')}, the actions have {vocabularies}",
            f"fix source.positive, then: {materialize_command('training_set')}",
        )


def _digests(build: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its relative path."""
    digests = {}
    for path in sorted(path for path in build.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digests[path.relative_to(build).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
