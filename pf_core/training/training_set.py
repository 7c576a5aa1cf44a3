"""A training set: everything that training may see, packed so that a user's timeline is a slice (section 3.5).

Examples are sampled on the fly, so the set holds whole timelines, as flat arrays with offsets, and the pins' features.
All arrays are memory-mapped: processes share them, and the corpus needs no RAM. `build_set.py` writes it.

All pins of pin_features are kept, with a content vector or without (`has_feature`). A model that reads content vectors
reads zeros for a pin without one, and never predicts, draws or ranks such a pin. `uses` counts the pins on each day.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.days import DAY_US
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import refuse_other_layout
from pf_core.logs.training_users import Selection
from pf_core.storage.builds import MANIFEST
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_json
from pf_core.timelines.arrays import Timelines
from pf_core.training.cut import EvaluationDays
from pf_core.training.packing import SelectionCounts, SplitCounts, Vocabularies
from pf_core.training.parts.counts import UseLog

DESCRIPTION = "training_set.json"

USES = "uses"
"""Folder of the user-days of pins."""

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
    selection: NotRequired[SelectionCounts]
    """What `training.users` makes of the users; absent without it."""
    users_left_out: int
    """Users without an action that is left, of those who are selected or held out."""
    users_forgotten: int
    """Users on the deletion list."""
    pins: int
    candidates: int
    with_feature: NotRequired[int]
    """Pins with a content vector; not in sets of older versions."""


class TrainingSetManifest(TypedDict):
    """training_set.json, and the manifest of the asset training_set."""

    layout: NotRequired[int]
    """Not in manifests of earlier versions."""
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
    users: NotRequired[Selection]
    """Who may be learned from; absent if the site file has no `training.users`."""
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

    @cached_property
    def uses(self) -> UseLog:
        """User-days of the pins, which count how often a pin was used before a day."""
        if not (self.path / USES).is_dir():
            raise PipelineError(
                f"{self.path} was built by an older version, without the counts of pins",
                f"rebuild it with: {materialize_command('training_set')}",
            )
        origin_day = self.manifest["time_origin_us"] // DAY_US
        return UseLog.open(self.path / USES, num_pins=self.num_pins, origin_day=origin_day)

    def sample_candidates(self, size: int, rng: np.random.Generator, *, only_with_feature: bool = False) -> np.ndarray:
        """Return the rows of `size` distinct candidates, ascending; all candidates if there are no more."""
        candidates = self.content_candidates if only_with_feature else self.candidates
        return np.asarray(candidates[sample_below(len(candidates), size, rng)])

    def interests(self) -> np.ndarray:
        """Return the code of each pin row's interest."""
        return np.asarray(np.load(self.path / "pins" / "interest.npy", mmap_mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_training_set, (self.path,)


def refuse_without_content(manifest: TrainingSetManifest, config: TrainConfig, preset: str) -> None:
    """Refuse to train a model that reads nothing but content vectors, as the towers do, on a set without any."""
    if manifest["feature_dim"] > 0:
        return
    if config.parts is None:
        raise PipelineError(
            f"preset {preset} reads content vectors, and the site has none", "set training.preset to auto"
        )
    if not (config.parts.factor_dim or config.parts.trend_dim):
        raise PipelineError(
            "training.changes leave the content part alone on, and the site has no content vectors",
            "delete parts.trend_dim or parts.factor_dim from training.changes in the site file",
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
    """Read the manifest of the training set in a build folder; one of another layout is a PipelineError."""
    manifest: TrainingSetManifest = read_json(path / DESCRIPTION)
    command = materialize_command("training_set")
    refuse_other_layout("training_set", manifest, what=f"the training set in {path}", command=command)
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
