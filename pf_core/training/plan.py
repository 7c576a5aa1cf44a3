"""Which model: its name, which follows from what decides it, and where it lies.

The configuration, the training set and the code decide a model; how many processes train it does not. Materializing
what is there already reuses it, and materializing what was interrupted continues it, because the folder is the same.
"""

import ast
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pf_core
from pf_core.config.site import Site
from pf_core.config.training import Preset, TrainConfig, choose
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.training.training_set import DESCRIPTION, latest_training_set

Measurement = dict[str, float]

MODEL_CODE = ("hashing.py", "config/training.py", "timelines/arrays.py", "model", "training")
"""Files and folders of pf_core that decide a model: with a statement in one of them changed, the same data and
configuration may give other weights."""


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


def code_fingerprint(paths: Sequence[str] = MODEL_CODE, *, package: Path | None = None) -> str:
    """Hash the statements of some files and folders of pf_core, by default those that decide a model.

    Imports, docstrings, comments, layout and the place of a statement do not count: moving a function to another
    file leaves the fingerprint as it is, and changing one of its statements does not.
    """
    package = package or Path(pf_core.__path__[0])
    statements: list[str] = []
    for name in paths:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            statements += _statements_of(file.read_text())
    return hashlib.sha256("\n".join(sorted(statements)).encode()).hexdigest()[:16]


@functools.cache
def _statements_of(source: str) -> tuple[str, ...]:
    """Cached: two assets of every graph have this fingerprint as their code version."""
    tree = _WithoutRemarks().visit(ast.parse(source))
    return tuple(ast.dump(statement) for statement in tree.body)


class _WithoutRemarks(ast.NodeTransformer):
    """Drop what a program does not compute with: imports and strings that stand alone (docstrings)."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_remark = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_remark else node


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
