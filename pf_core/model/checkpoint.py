"""Checkpoints and models on disk: safetensors and JSON, published by a rename.

A checkpoint is a folder `step-00000500` with the weights, the optimizer's moments and the loss's state; it exists
whole or not at all. What else a run needs to continue (the sampler's stream, the learning rate) is a function of the
step. A model is a folder with `model.safetensors` and `model.json`, which together rebuild the towers.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pf_core.config.training import ModelConfig
from pf_core.errors import PipelineError
from pf_core.model.towers import PinnerFormer
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_json, write_folder, write_json
from pf_core.storage.retention import keep_newest

STATE = "state.json"
"""Of a checkpoint's files, the last to appear."""

KEPT = 2
"""Checkpoints of a run; older ones are removed."""


def save_checkpoint(
    folder: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    with write_folder(folder / f"step-{step:08d}") as partial:
        _save(module.state_dict(), partial / "weights.safetensors")
        _save(_moments(module, optimizer), partial / "optimizer.safetensors")
        write_json(partial / STATE, {"step": step, **state})
    keep_newest(_checkpoints(folder), KEPT, description=STATE)


def load_newest(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the newest checkpoint into the module and the optimizer; its state, or None if there is none."""
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


def save_model(folder: Path, model: PinnerFormer, description: Mapping[str, Any]) -> None:
    with write_folder(folder) as partial:
        _save(model.state_dict(), partial / "model.safetensors")
        write_json(partial / "model.json", {**description, "model": model.config.model_dump(mode="json")})


def load_model(folder: Path) -> tuple[PinnerFormer, dict[str, Any]]:
    """The towers, ready to embed, and the model's description."""
    if not (folder / "model.json").is_file():
        raise PipelineError(f"no model in {folder}: materialize pinnerformer_model first")
    description: dict[str, Any] = read_json(folder / "model.json")
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
