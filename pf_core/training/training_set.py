"""training_set: the cut. Everything that training may see, packed so that a user's timeline is a slice (section 3.5).

Examples are sampled on the fly, so the set holds whole timelines, as flat arrays with offsets, and the pins' features.
All arrays are memory-mapped: processes share them, and the corpus needs no RAM.

The set is a function of user_timelines[cut_ds], pin_features[cut_ds], the deletion list and the site file; nothing in
it is later than the cut. Users are held out by hash: they evaluate a model and never train it. Their words do not enter
the vocabularies. The fingerprint depends only on the content: the same data has the same fingerprint.

All pins of pin_features are kept, with a content vector or without (`has_feature`). A model that reads content vectors
reads zeros for a pin without one, and never predicts, draws or ranks such a pin.

Publishing a set removes the previous one. A job that has the previous set open continues to read it (Linux keeps the
files that a process has mapped), but it cannot be opened again.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.days import ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.errors import PipelineError, materialize_command
from pf_core.pins.features import pin_state
from pf_core.pins.packed import write_pins
from pf_core.progress import Progress
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.cache import fetched
from pf_core.storage.files import is_remote, read_json, remove_tree, upload, write_json
from pf_core.storage.locks import exclusive
from pf_core.timelines.arrays import Timelines
from pf_core.timelines.build import timeline_state
from pf_core.training.cut import EvaluationDays, choose_cut
from pf_core.training.packing import SplitCounts, Vocabularies, join_buckets, pack_buckets

DESCRIPTION = "training_set.json"

ARRAYS = ("offsets", "pin", "ts", "action_type", "surface", "duration", "is_positive")


class DroppedCounts(TypedDict):
    """Actions that are in the timelines and not in the set, by reason; an action counts once."""

    no_feature: int
    """Actions on pins that pin_features does not have."""
    unknown_action_type: int
    """Actions of held-out users with an action type that no training user has."""
    unknown_surface: int


class TrainingSetCounts(TypedDict):
    train: SplitCounts
    held_out: SplitCounts
    dropped: DroppedCounts
    held_out_no_feature: NotRequired[int]
    """How many of `dropped.no_feature` are actions of held-out users; not in sets of older versions."""
    users_left_out: int
    """Users without an action that is left."""
    users_forgotten: int
    """Users on the deletion list."""
    pins: int
    candidates: int
    with_feature: NotRequired[int]
    """Pins with a content vector; not in sets of older versions."""


class TrainingSetManifest(TypedDict):
    """training_set.json, and the manifest of the asset training_set."""

    cut_ds: str
    """Last day of the training period."""
    evaluation_days: NotRequired[EvaluationDays]
    """Days between the cut and the newest timelines; absent in the sets of older versions."""
    cut_us: int
    """The first microsecond after the training period."""
    time_origin_us: int
    """Time of the first action in train."""
    counts: TrainingSetCounts
    feature_dim: int
    vocabularies: Vocabularies
    held_out_share: float
    inputs: dict[str, Any]
    """Versions of the partitions and settings that the set was built from."""
    files: dict[str, str]
    """SHA-256 of each file."""
    fingerprint: str
    build: NotRequired[str]
    """Folder of the build below that of the asset."""
    content_noise: NotRequired[float]
    """Noise added to the content vectors, in the sets of experiments/content_noise.py."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """An opened training set. Only its path is pickled: another process maps the files itself."""

    path: Path
    manifest: TrainingSetManifest
    train: Timelines
    held_out: Timelines
    pin_feature: np.ndarray
    """Content vectors by pin row, feature_NF; zeros where a pin has none. F is 0 if the site has no vectors."""
    has_feature: np.ndarray
    """Whether each pin row has a content vector."""
    candidates: np.ndarray
    """Rows of the pins that may be shown on Homefeed, ascending."""
    action_types: list[str]
    surfaces: list[str]
    fingerprint: str
    cut_us: int
    """The first microsecond after the training period."""

    @property
    def num_pins(self) -> int:
        return len(self.pin_feature)

    @cached_property
    def all_have_feature(self) -> bool:
        """Whether every pin has a content vector."""
        return bool(np.all(self.has_feature))

    @property
    def is_content_known(self) -> bool:
        """Whether any pin has a content vector."""
        return self.pin_feature.shape[1] > 0

    @cached_property
    def content_candidates(self) -> np.ndarray:
        """Rows of the candidates that have a content vector, ascending: what the towers can draw and rank."""
        if self.all_have_feature:
            return self.candidates
        return np.asarray(self.candidates[self.has_feature[self.candidates]])

    def sample_candidates(self, size: int, rng: np.random.Generator, *, only_with_feature: bool = False) -> np.ndarray:
        """Return the rows of `size` distinct candidates, ascending; all candidates if there are no more."""
        candidates = self.content_candidates if only_with_feature else self.candidates
        return np.asarray(candidates[sample_below(len(candidates), size, rng)])

    def interests(self) -> np.ndarray:
        """Return the code of each pin row's interest."""
        path = self.path / "pins" / "interest.npy"
        if not path.exists():
            raise PipelineError(
                f"{self.path} was built by an older version, without interests",
                f"rebuild it with: {materialize_command('training_set')}",
            )
        return np.asarray(np.load(path, mmap_mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_training_set, (self.path,)


def refuse_without_content(manifest: TrainingSetManifest, config: TrainConfig, preset: str) -> None:
    """Refuse to train the towers, which read content vectors, on a set without any."""
    if config.parts is None and manifest["feature_dim"] == 0:
        raise PipelineError(
            f"preset {preset} reads content vectors, and the site has none", "set training.preset to auto"
        )


def sample_below(num: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `size` distinct numbers below `num`, ascending; the memory grows with `size` only."""
    if num <= 4 * size:
        return np.sort(rng.permutation(num)[:size])
    drawn = np.unique(rng.integers(num, size=2 * size))  # size < num / 4: enough of them are distinct
    return np.sort(rng.permutation(drawn)[:size])


def open_training_set(path: Path) -> TrainingSet:
    """Open the training set in a build folder."""
    if not (path / DESCRIPTION).is_file():
        raise PipelineError(
            f"no training set in {path}: it was never built, or a newer one has replaced it",
            f"build one with: {materialize_command('training_set')}",
        )
    path = fetched(path)
    if not (path / "pins" / "has_feature.npy").is_file():
        raise PipelineError(
            f"{path} was built by an older version, without the pins that have no content vector",
            f"rebuild it with: {materialize_command('training_set')}",
        )
    manifest = read_training_set_manifest(path)
    return TrainingSet(
        path=path,
        manifest=manifest,
        train=_open_split(path / "train"),
        held_out=_open_split(path / "held_out"),
        pin_feature=np.load(path / "pins" / "feature.npy", mmap_mode="r"),
        has_feature=np.load(path / "pins" / "has_feature.npy", mmap_mode="r"),
        candidates=np.load(path / "pins" / "candidates.npy", mmap_mode="r"),
        action_types=manifest["vocabularies"]["action_type"],
        surfaces=manifest["vocabularies"]["surface"],
        fingerprint=manifest["fingerprint"],
        cut_us=manifest["cut_us"],
    )


def read_training_set_manifest(path: Path) -> TrainingSetManifest:
    """Read the manifest of the training set in a build folder."""
    manifest: TrainingSetManifest = read_json(path / DESCRIPTION)
    return manifest


def _open_split(folder: Path) -> Timelines:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return Timelines(path=folder, **arrays)


def latest_training_set(site: Site) -> Path:
    """Return the build folder of the site's published set."""
    folder = training_sets_dir(site)
    if not (folder / MANIFEST).exists():
        raise PipelineError(f"no training set in {folder}", f"build one with: {materialize_command('training_set')}")
    return folder / str(read_json(folder / MANIFEST)["build"])


def training_sets_dir(site: Site) -> Path:
    """Folder of the asset training_set."""
    return site.directory / "training_set"


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
    timelines, pins = timeline_state(site).require(cut_ds), pin_state(site).require(cut_ds)
    target = site.workspace / "training_set" / build.name if is_remote(build) else build
    num_pins = write_pins(site, pins, target / "pins")
    if is_remote(build):
        upload(target / "pins" / "pin_id.arrow", build / "pins" / "pin_id.arrow")  # for the workers
    if num_pins["candidates"] == 0:
        raise PipelineError(
            f"none of the {num_pins['pins']:,} pins of pin_features {cut_ds} is a candidate",
            f"fix source.pins.is_candidate in the site file, then: {materialize_command('pin_features', cut_ds)}",
        )
    progress(f"training_set: {num_pins['pins']:,} pins, {num_pins['candidates']:,} of them candidates")
    packed = pack_buckets(build, site, cut_ds, engine=engine, progress=progress)
    vocabularies = packed["vocabularies"]
    if timeline_state(site).require(cut_ds) != timelines:
        raise PipelineError(
            f"user_timelines {cut_ds} was rebuilt while it was read",
            f"run again: {materialize_command('training_set')}",
        )
    joined = join_buckets(build, target, site, num_pins=num_pins["pins"], vocabularies=vocabularies)
    remove_tree(build / "parts")
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
    _refuse_if_useless(site, cut_ds, counts, vocabularies)
    assert joined["first_us"] is not None, "there are users to train on, and each has an action"
    cut_us, files = ds_start_us(shift_ds(cut_ds, 1)), _digests(target)
    if is_remote(build):
        upload(target, build)
        remove_tree(target)
    content = json.dumps([files, vocabularies, cut_us], sort_keys=True)
    return {
        "cut_ds": cut_ds,
        "cut_us": cut_us,
        "time_origin_us": joined["first_us"],
        "counts": counts,
        "feature_dim": pins["dim"],
        "vocabularies": vocabularies,
        "held_out_share": site.training.held_out_share,
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
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "build": build.name,
    }


def _refuse_if_useless(site: Site, cut_ds: str, counts: TrainingSetCounts, vocabularies: Vocabularies) -> None:
    """Refuse a set that has no user or no positive action to train on."""
    train = counts["train"]
    if train["users"] == 0:
        raise PipelineError(
            f"no user is left to train on as of {cut_ds}: {counts['held_out']['users']:,} are held out, and "
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
