"""training_set: the cut. Everything that training may see, packed so that a user's timeline is a slice (section 3.5).

One row a user, and examples are sampled on the fly: so what lies here are whole timelines, as flat arrays with
offsets, and the pins' features. All are memory-mapped: processes share them, and the corpus needs no RAM.

The set is a function of user_timelines[cut_ds], pin_features[cut_ds], the deletion list and the site file; nothing
in it is later than the cut. Users are held out by hash: they judge a model and never train it, not even by a word
in the vocabularies. (Pin vectors learned from co-engagement, where a site has none of its own, are made of everybody's
actions before their `until`.) The fingerprint is that of the content: the same data has the same one.

Publication removes the set before it. A job that has that one open reads on (Linux keeps the files that a process
has mapped), but nobody can open it again.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pf_core.config.site import Site
from pf_core.days import ds_start_us, parse_ds, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import Manifest
from pf_core.errors import PipelineError, materialize_command
from pf_core.pins.features import pin_state
from pf_core.pins.packed import write_pins
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.cache import fetched
from pf_core.storage.files import is_remote, read_json, remove_tree, upload, write_json
from pf_core.storage.locks import exclusive
from pf_core.timelines.arrays import Timelines
from pf_core.timelines.build import timeline_state
from pf_core.training.packing import join_buckets, pack_buckets

DESCRIPTION = "training_set.json"

ARRAYS = ("offsets", "pin", "ts", "action_type", "surface", "duration", "is_positive")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """Pickled, it is its path: another process maps the files anew."""

    path: Path
    manifest: Manifest
    train: Timelines
    held_out: Timelines
    pin_feature: np.ndarray
    candidates: np.ndarray
    """Rows of the pins that may be shown on Homefeed, ascending."""
    action_types: list[str]
    surfaces: list[str]
    fingerprint: str
    cut_us: int
    """The first microsecond after the training period."""

    def sample_candidates(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Rows of that many distinct candidates, ascending; all of them if there are no more."""
        return np.asarray(self.candidates[sample_below(len(self.candidates), size, rng)])

    def interests(self) -> np.ndarray:
        """By pin row, the number of its interest."""
        path = self.path / "pins" / "interest.npy"
        if not path.exists():
            raise PipelineError(
                f"{self.path} was built before interests were kept; re-run: {materialize_command('training_set')}"
            )
        return np.asarray(np.load(path, mmap_mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_training_set, (self.path,)


def sample_below(num: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` distinct numbers below `num`, ascending, in memory of the order of `size`."""
    if num <= 4 * size:
        return np.sort(rng.permutation(num)[:size])
    drawn = np.unique(rng.integers(num, size=2 * size))  # repeats are few: at most one in four is taken
    return np.sort(rng.permutation(drawn)[:size])


def open_training_set(path: Path) -> TrainingSet:
    """The set in a build folder."""
    if not (path / DESCRIPTION).is_file():
        raise PipelineError(
            f"no training set in {path}: it was never built, or a newer one has replaced it. "
            f"Make one with: {materialize_command('training_set')}"
        )
    path = fetched(path)
    manifest = read_json(path / DESCRIPTION)
    return TrainingSet(
        path=path,
        manifest=manifest,
        train=_open_split(path / "train"),
        held_out=_open_split(path / "held_out"),
        pin_feature=np.load(path / "pins" / "feature.npy", mmap_mode="r"),
        candidates=np.load(path / "pins" / "candidates.npy", mmap_mode="r"),
        action_types=manifest["vocabularies"]["action_type"],
        surfaces=manifest["vocabularies"]["surface"],
        fingerprint=manifest["fingerprint"],
        cut_us=manifest["cut_us"],
    )


def _open_split(folder: Path) -> Timelines:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return Timelines(path=folder, **arrays)


def latest_training_set(site: Site) -> Path:
    """The build folder of the site's published set."""
    folder = _partition_dir(site)
    if not (folder / MANIFEST).exists():
        raise PipelineError(f"no training set in {folder}; make one with: {materialize_command('training_set')}")
    return folder / str(read_json(folder / MANIFEST)["build"])


def _partition_dir(site: Site) -> Path:
    return site.directory / "training_set"


def cut_of(site: Site) -> str:
    """The last day of training: what follows it, up to the newest timelines, is kept for evaluation."""
    newest_ds, num_days = _newest_timelines(site), site.training.evaluation_days
    cut_ds = shift_ds(newest_ds, -num_days)
    if cut_ds < site.start_ds:
        most = (parse_ds(newest_ds) - parse_ds(site.start_ds)).days
        raise PipelineError(
            f"the newest timelines are of {newest_ds}, and training ends {num_days} days before, on {cut_ds}, when the "
            f"site has not started ({site.start_ds}): set training.evaluation_days in the site file to at most {most}, "
            "or build later days of raw_actions, pin_features and user_timelines"
        )
    return cut_ds


def _newest_timelines(site: Site) -> str:
    days = timeline_state(site).days()
    if not days:
        raise PipelineError(
            "there are no user_timelines yet. Make them, and pin_features, for all days from the site's start: dagster "
            f"asset materialize --select raw_actions,pin_features,user_timelines --partition-range {site.start_ds}..."
            f"{site.end_ds or 'LAST_DAY'} -m pf_assets.definitions"
        )
    return days[-1]


def build_training_set(site: Site, *, cut_ds: str | None, engine: Engine, progress: Callable[[str], None]) -> Manifest:
    """Pack and publish the set that ends with `cut_ds` (None: as `cut_of` says); returns its manifest."""
    _newest_timelines(site)
    cut_ds = cut_of(site) if cut_ds is None else cut_ds
    parse_ds(cut_ds)
    if cut_ds < site.start_ds:
        raise PipelineError(f"the cut {cut_ds} is before the site's start {site.start_ds}: choose a later cut_ds")
    folder = _partition_dir(site)
    with exclusive(folder, "training_set"):
        with building(folder) as build:
            manifest = _fill(build, site, cut_ds, engine, progress) | {"build": build.name}
            write_json(build / DESCRIPTION, manifest)
        publish_build(build, manifest)
    train, held_out = manifest["counts"]["train"], manifest["counts"]["held_out"]
    progress(
        f"training_set {manifest['fingerprint']}, cut {cut_ds}: {train['users']:,} users to train on with "
        f"{train['actions']:,} actions, {train['positives']:,} of them positive; {held_out['users']:,} users held out"
    )
    return manifest


def _fill(build: Path, site: Site, cut_ds: str, engine: Engine, progress: Callable[[str], None]) -> Manifest:
    """Write the files of a build; returns what is to be said of them. What is appended to is on this machine."""
    timelines, pins = timeline_state(site).require(cut_ds), pin_state(site).require(cut_ds)
    target = site.workspace / "training_set" / build.name
    num_pins = write_pins(site, pins, target / "pins")
    if is_remote(build):
        upload(target / "pins" / "pin_id.arrow", build / "pins" / "pin_id.arrow")  # for all who pack
    if num_pins["candidates"] == 0:
        raise PipelineError(
            f"none of the {num_pins['pins']:,} pins of pin_features {cut_ds} is a candidate. Mend "
            f"source.pins.is_candidate in the site file, then: {materialize_command('pin_features', cut_ds)}"
        )
    progress(f"training_set: {num_pins['pins']:,} pins, {num_pins['candidates']:,} of them candidates")
    packed, vocabularies = pack_buckets(build, site, cut_ds, engine=engine, progress=progress)
    if timeline_state(site).require(cut_ds) != timelines:
        raise PipelineError(
            f"user_timelines {cut_ds} was built anew meanwhile; re-run: {materialize_command('training_set')}"
        )
    joined, time_origin_us = join_buckets(build, target, site, num_pins=num_pins["pins"], vocabularies=vocabularies)
    remove_tree(build / "parts")
    counts: dict[str, Any] = joined | num_pins
    counts["dropped"]["no_feature"] = packed["no_feature"]
    counts["users_left_out"] = packed["users"] - counts["train"]["users"] - counts["held_out"]["users"]
    counts["users_forgotten"] = packed["users_forgotten"]
    _refuse_if_useless(site, cut_ds, counts, vocabularies)
    cut_us, files = ds_start_us(shift_ds(cut_ds, 1)), _digests(target)
    if is_remote(build):
        upload(target, build)
        remove_tree(target)
    content = json.dumps([files, vocabularies, cut_us], sort_keys=True)
    return {
        "cut_ds": cut_ds,
        "cut_us": cut_us,
        "time_origin_us": time_origin_us,
        "counts": counts,
        "feature_dim": pins["dim"],
        "vocabularies": vocabularies,
        "held_out_share": site.training.held_out_share,
        "inputs": {
            "site": site.fingerprint(),
            "positive": site.source.positive.model_dump(mode="json"),
            "user_timelines": {name: timelines[name] for name in ("versions", "raw_digests", "settings")},
            "pin_features": {"version": pins["versions"][0]},
        },
        "files": files,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
    }


def _refuse_if_useless(site: Site, cut_ds: str, counts: dict[str, Any], vocabularies: dict[str, list[str]]) -> None:
    train = counts["train"]
    if train["users"] == 0:
        raise PipelineError(
            f"no user is left to train on as of {cut_ds}: {counts['held_out']['users']:,} are held out, and "
            f"{counts['users_left_out']:,} have no usable action ({counts['dropped']['no_feature']:,} actions are on "
            "pins without a feature). Lower training.held_out_share in the site file, or mend source.pins in it and "
            f"then: {materialize_command('pin_features', cut_ds)}"
        )
    if train["positives"] == 0:
        raise PipelineError(
            f"none of the {train['actions']:,} actions to train on is positive: source.positive in the site file asks "
            f"for {site.source.positive.model_dump(mode='json')}, the actions have {vocabularies}. Mend it, then: "
            f"{materialize_command('training_set')}"
        )


def _digests(build: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(path for path in build.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digests[path.relative_to(build).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
