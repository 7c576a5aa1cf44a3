"""Which model: its name, which follows from what decides it, and where it lies.

The configuration, the training set and the code decide a model; how many processes train it does not. Materializing
what is there already reuses it, and materializing what was interrupted continues it, because the folder is the same.
"""

import ast
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pf_core
from pf_core.atomic import MANIFEST, read_json
from pf_core.hyperparameters import Preset, TrainConfig, choose
from pf_core.site import Site
from pf_core.training_set import DESCRIPTION, latest_training_set

Measurement = dict[str, float]

DECISIVE_MODULES = (
    *("hyperparameters", "objectives", "batches", "model", "ranks", "sketch", "loss", "checkpoint", "trainer"),
)
"""Of pf_core: with one of these changed, the same data and configuration may give other weights."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What decides a model, its name, and where it lies."""

    config: TrainConfig
    training_set: Path
    manifest: dict[str, Any]
    code: str
    model_version: str
    run_dir: Path

    @property
    def is_trained(self) -> bool:
        return (self.run_dir / "result.json").exists()

    @property
    def history(self) -> list[Measurement]:
        return read_history(self.run_dir)


def plan_model(site: Site, preset: Preset | None = None, changes: dict[str, Any] | None = None) -> PlannedModel:
    """The model that the site file, or a run's configuration, asks for, on the training set that is there."""
    preset = site.training.preset if preset is None else preset
    changes = site.training.changes if changes is None else changes
    path = latest_training_set(site)
    manifest = read_json(path / DESCRIPTION)
    return plan_config(choose(preset, changes), path, manifest, models_dir(site), code=code_fingerprint())


def plan_config(
    config: TrainConfig, training_set: Path, manifest: dict[str, Any], folder: Path, *, code: str
) -> PlannedModel:
    """The model of this configuration and code on a training set, in a folder of models."""
    decisive = f"{config.fingerprint()} {manifest['fingerprint']} {code}"
    model_version = hashlib.sha256(decisive.encode()).hexdigest()[:12]
    return PlannedModel(
        config=config,
        training_set=training_set,
        manifest=manifest,
        code=code,
        model_version=model_version,
        run_dir=folder / model_version,
    )


def models_dir(site: Site) -> Path:
    """A folder for each model, and the manifest of the one that was materialized last."""
    return site.directory / "pinnerformer_model"


def current_model(site: Site) -> dict[str, Any] | None:
    path = models_dir(site) / MANIFEST
    return read_json(path) if path.exists() else None


def read_history(run_dir: Path) -> list[Measurement]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def code_fingerprint(modules: Sequence[str] | None = None) -> str:
    """Of modules of pf_core, by default those that decide a model; comments and layout do not count."""
    folder = Path(pf_core.__path__[0])
    sources = [(folder / f"{name}.py").read_text() for name in modules or DECISIVE_MODULES]
    return hashlib.sha256("\n".join(ast.dump(ast.parse(source)) for source in sources).encode()).hexdigest()[:16]


def find_fault(history: Sequence[Measurement]) -> str | None:
    """What is wrong with a finished training, as a sentence; None if its loss is finite and fell."""
    losses = [measurement["loss"] for measurement in history if "loss" in measurement]
    if not losses:
        return "its history is empty"
    if not all(math.isfinite(loss) for loss in losses):
        return "its loss is not finite"
    last = losses[-max(1, len(losses) // 10) :]
    mean = sum(last) / len(last)
    if len(losses) > 1 and mean >= losses[0]:
        return f"its loss did not fall: {losses[0]:.4f} at the beginning, {mean:.4f} at the end"
    return None
