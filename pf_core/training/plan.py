"""The plan of a model: its configuration, its training set, its name and its folder.

The name is a hash of everything that decides a model: the configuration, the training set and the code. The number of
processes that train it does not count. The same plan has the same folder: a model that is trained already is reused,
and a training that was interrupted continues.
"""

import ast
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pf_core
from pf_core.config.site import Site
from pf_core.config.training import TrainConfig, choose
from pf_core.config.training_section import Preset
from pf_core.errors import materialize_command
from pf_core.layouts import LAYOUTS, refuse_other_layout
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, write_json
from pf_core.training.auto import Choice, resolve_auto
from pf_core.training.run_folder import HISTORY, RESULT, TrainingResult
from pf_core.training.training_set import (
    TrainingSetManifest,
    latest_training_set,
    open_training_set,
    read_training_set_manifest,
    refuse_without_content,
)

Measurement = dict[str, float]
"""A line of history.jsonl: `step`, and each measured value by its name."""

MODEL_CODE = ("hashing.py", "config/parts.py", "config/training.py", "timelines/arrays.py", "model", "training")
"""Files and folders of pf_core that decide a model: after a change of a statement in one of them, the same data and
configuration may give different weights."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """Everything that decides a model, its name and its folder."""

    config: TrainConfig
    chosen: list[Choice] = field(default_factory=list)
    """Settings that preset auto chose, with reasons; empty for the other presets."""
    training_set: Path
    """Folder of the training set."""
    manifest: TrainingSetManifest
    """Manifest of the training set."""
    code: str
    """Fingerprint of the code that decides a model."""
    model_version: str
    """Name of the model, derived from all of the above."""
    run_dir: Path
    """Folder of the training run and, once it is trained, of the model."""

    @property
    def is_trained(self) -> bool:
        return (self.run_dir / RESULT).exists()

    @property
    def history(self) -> list[Measurement]:
        return read_history(self.run_dir)


class ModelManifest(TypedDict):
    """Manifest of the asset pinnerformer_model: the model that was materialized last."""

    layout: NotRequired[int]
    """Absent in the manifests of older versions, which are of layout 1."""
    model_version: str
    cut_ds: str
    """Last day of the training set."""
    training_set: str
    """Fingerprint of the training set."""
    config: dict[str, Any]
    """TrainConfig as JSON."""
    chosen: NotRequired[list[Choice]]
    """Settings that preset auto chose, with reasons; absent in the manifests of older versions."""
    result: TrainingResult
    mlflow: dict[str, Any]
    """The MLflow run, and its version in the registry (None if the model was not registered)."""


def plan_model(site: Site, preset: Preset | None = None, changes: dict[str, Any] | None = None) -> PlannedModel:
    """Plan a model on the site's training set; preset and changes are the site file's unless they are given."""
    preset = site.training.preset if preset is None else preset
    changes = site.training.changes if changes is None else changes
    path = latest_training_set(site)
    config, chosen = resolve_config(path, preset, changes)
    manifest = read_training_set_manifest(path)
    refuse_without_content(manifest, config, preset)
    return plan_config(config, path, manifest, models_dir(site), code=code_fingerprint(), chosen=chosen)


def resolve_config(training_set: Path, preset: Preset, changes: dict[str, Any]) -> tuple[TrainConfig, list[Choice]]:
    """Return the configuration of a preset with changes, and what preset auto chose from the training set."""
    if preset == "auto":
        return resolve_auto(open_training_set(training_set), changes)
    return choose(preset, changes), []


def plan_config(
    config: TrainConfig,
    training_set: Path,
    manifest: TrainingSetManifest,
    folder: Path,
    *,
    code: str,
    chosen: Sequence[Choice] = (),
) -> PlannedModel:
    """Plan the model of this configuration and code on a training set; its own folder is below `folder`."""
    decisive = f"{config.fingerprint()} {manifest['fingerprint']} {code}"
    model_version = hashlib.sha256(decisive.encode()).hexdigest()[:12]
    return PlannedModel(
        config=config,
        chosen=list(chosen),
        training_set=training_set,
        manifest=manifest,
        code=code,
        model_version=model_version,
        run_dir=folder / model_version,
    )


def models_dir(site: Site) -> Path:
    """Folder that holds a folder for each model, and the manifest of the model that was materialized last."""
    return site.directory / "pinnerformer_model"


def current_model(site: Site) -> ModelManifest | None:
    """Return the manifest of the model that was materialized last."""
    path = models_dir(site) / MANIFEST
    if not path.exists():
        return None
    manifest: ModelManifest = read_json(path)
    command = materialize_command("pinnerformer_model")
    refuse_other_layout("pinnerformer_model", manifest, what="pinnerformer_model", command=command)
    return manifest


def write_current_model(site: Site, plan: PlannedModel, *, mlflow: dict[str, Any]) -> ModelManifest:
    """Make a trained model the current one and return its manifest; `mlflow` names its run and registry version."""
    manifest: ModelManifest = {**describe_model(plan, mlflow=mlflow), "layout": LAYOUTS["pinnerformer_model"]}
    write_json(models_dir(site) / MANIFEST, manifest)
    return manifest


def describe_model(plan: PlannedModel, *, mlflow: dict[str, Any]) -> ModelManifest:
    """Return the manifest of a trained model without its layout; `mlflow` names its run and registry version."""
    return {
        "model_version": plan.model_version,
        "cut_ds": plan.manifest["cut_ds"],
        "training_set": plan.manifest["fingerprint"],
        "config": plan.config.model_dump(mode="json"),
        "chosen": plan.chosen,
        "result": read_json(plan.run_dir / RESULT),
        "mlflow": mlflow,
    }


def read_history(run_dir: Path) -> list[Measurement]:
    """Return all measurements of a training run, in the order of the steps."""
    return [json.loads(line) for line in (run_dir / HISTORY).read_text().splitlines()]


def code_fingerprint(paths: Sequence[str] = MODEL_CODE, *, package: Path | None = None) -> str:
    """Hash the statements of some files and folders of pf_core, by default those that decide a model.

    Imports, docstrings, comments, layout and the place of a statement do not count: moving a function to another
    file keeps the fingerprint, changing one of its statements changes it.
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
    """Removes imports and strings that stand alone (docstrings), which do not change what a program computes."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_remark = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_remark else node


def training_fault(history: Sequence[Measurement]) -> str | None:
    """Return the fault of a finished training as part of a sentence; None if its loss is finite and fell."""
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
