"""Checkpoints and models on disk: safetensors and JSON, published by a rename.

A checkpoint is a folder `step-00000500` with the weights, the optimizer's moments and the loss's state; it exists
completely or not at all. The rest of a run's state (the sampler's stream, the learning rate) is a function of the step.
A model is a folder with `model.safetensors` and `model.json`, which together rebuild the towers or the model of parts;
the latter also has its pin table.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pf_core.config.parts import PartsConfig
from pf_core.config.training import ModelConfig
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import marked, refuse_other_layout
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.table import PIN_TABLE, PinTable
from pf_core.model.towers import PinnerFormer
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_json, write_folder, write_json
from pf_core.storage.retention import keep_newest

STATE = "state.json"
"""File of a checkpoint that is written last."""

KEPT = 2
"""Number of checkpoints that a run keeps; older ones are removed."""


class TrainedOn(TypedDict):
    """Facts about the training set that the towers are built from, and where the model comes from."""

    feature_dim: int
    """Length of the content vectors; 0 without any."""
    action_types: list[str]
    """Vocabulary: the position of an action type is its code."""
    surfaces: list[str]
    """Vocabulary: the position of a surface is its code."""
    time_origin_us: int
    """Time of the first action of the training set."""
    cut_ds: str
    """Last day of the training set."""
    training_set: str
    """Fingerprint of the training set."""
    config: dict[str, Any]
    """TrainConfig as JSON."""


Family = Literal["towers", "parts"]


class ModelDescription(TrainedOn):
    """model.json."""

    layout: NotRequired[int]
    """Absent in models of older versions, which are of layout 1."""
    family: NotRequired[Family]
    """Absent in models of older versions, which are towers."""
    model: dict[str, Any]
    """ModelConfig or PartsConfig as JSON."""
    slices: NotRequired[dict[str, list[int]]]
    """First and last coordinate (exclusive) of each part of a stored vector; absent in models of older versions."""
    feature_scale: NotRequired[float]
    """Factor that brings content vectors to unit variance; only towers have it."""
    positive: NotRequired[dict[str, Any]]
    """`source.positive` as JSON, as it was when the model was trained; only models of parts have it."""


def save_checkpoint(
    folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Save a checkpoint of this step below `folder`, then remove all but the newest two."""
    with write_folder(folder / f"step-{step:08d}") as partial:
        _save(module.state_dict(), partial / "weights.safetensors")
        _save(_moments(module, optimizer), partial / "optimizer.safetensors")
        write_json(partial / STATE, {"step": step, **state})
    keep_newest(_checkpoints(folder), KEPT, description=STATE)


def load_newest(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the newest checkpoint into the module and the optimizer; return its state, None without a checkpoint."""
    found = _checkpoints(folder)
    if not found:
        return None
    newest = fetched(found[-1])
    state: dict[str, Any] = read_json(newest / STATE)
    module.load_state_dict(load_file(newest / "weights.safetensors"))
    moments = load_file(newest / "optimizer.safetensors")
    for name, parameter in module.named_parameters():
        known = {key.removeprefix(f"{name}/"): value for key, value in moments.items() if key.startswith(f"{name}/")}
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in known.items()}
    return state


def save_model(
    folder: Path, model: PinnerFormer | PartsModel, description: Mapping[str, object], table: PinTable | None = None
) -> None:
    """Save the weights, the description (`TrainedOn`) completed by the model's configuration, and the pin table."""
    family: Family = "parts" if isinstance(model, PartsModel) else "towers"
    own = {"family": family, "slices": model.slices, "model": model.config.model_dump(mode="json")}
    with write_folder(folder) as partial:
        if table is not None:
            table.write(partial / PIN_TABLE)
        _save(model.state_dict(), partial / "model.safetensors")
        write_json(partial / "model.json", {**description, **own, **marked("model")})


def read_description(folder: Path) -> ModelDescription:
    """Read the description of the model in `folder`; one of another layout is a PipelineError."""
    if not (folder / "model.json").is_file():
        raise PipelineError(f"no model in {folder}", f"train one with: {materialize_command('pinnerformer_model')}")
    description: ModelDescription = read_json(folder / "model.json")
    command = materialize_command("pinnerformer_model,offline_evaluation")
    refuse_other_layout("model", description, what=f"the model in {folder}", command=command)
    return description


def reads_vectors_of(description: ModelDescription, dim: int) -> bool:
    """Return whether the model can read content vectors of this length: a model of parts without content reads none."""
    if description.get("family", "towers") == "parts" and not description["model"]["content"]:
        return True
    return description["feature_dim"] in (0, dim)


def load_model(folder: Path) -> tuple[PinnerFormer, ModelDescription]:
    """Return the towers in evaluation mode, and the model's description."""
    description = read_description(folder)
    if description.get("family", "towers") != "towers":
        raise PipelineError(f"the model in {folder} is of the family {description['family']}, not of the towers")
    model = PinnerFormer(
        ModelConfig.model_validate(description["model"]),
        feature_dim=description["feature_dim"],
        num_action_types=len(description["action_types"]),
        num_surfaces=len(description["surfaces"]),
        time_origin_us=description["time_origin_us"],
        feature_scale=description["feature_scale"],
    )
    model.load_state_dict(load_file(fetched(folder) / "model.safetensors"))
    return model.eval(), description


def load_parts(folder: Path) -> tuple[PartsModel, PinTable, ModelDescription]:
    """Return the model of parts in evaluation mode, its pin table, memory-mapped, and its description."""
    description = read_description(folder)
    if description.get("family", "towers") != "parts":
        raise PipelineError(f"the model in {folder} is not a model of parts")
    local = fetched(folder)
    model = PartsModel(
        PartsConfig.model_validate(description["model"]),
        content_dim=description["feature_dim"],
        num_action_types=len(description["action_types"]),
    )
    model.load_state_dict(load_file(local / "model.safetensors"))
    return model.eval(), PinTable.open(local / PIN_TABLE), description


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE}"))


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
