import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pf_core.config.training import LossConfig, tiny
from pf_core.errors import PipelineError
from pf_core.layouts import marked
from pf_core.model.checkpoint import load_model, load_newest, save_checkpoint, save_model
from pf_core.model.sequences import Sequences
from pf_core.model.towers import PinnerFormer
from pf_core.training.loss import RetrievalLoss


class Module(nn.Module):
    """What a run saves: the towers and the loss with its sketch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = tiny().model.model_copy(update={"near_identity_init": False})
        self.model = PinnerFormer(
            config, feature_dim=6, num_action_types=3, num_surfaces=2, time_origin_us=10**15, feature_scale=1 / 3
        )
        self.loss = RetrievalLoss(LossConfig(sketch_width=64), num_candidates=10)


def optimizer_of(module: nn.Module) -> torch.optim.AdamW:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=1e-2, fused=True)


def some_actions() -> Sequences:
    random = torch.Generator().manual_seed(0)
    ts = 10**15 + torch.randint(1, 10**12, (3, 5), generator=random).cumsum(1)
    feature = torch.randn(3, 5, 6, generator=random)
    kind, place = torch.randint(0, 3, (3, 5), generator=random), torch.randint(0, 2, (3, 5), generator=random)
    return Sequences(feature, kind, place, torch.rand(3, 5, generator=random), ts, torch.tensor([5, 5, 5]))


def step(module: Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Any step that moves every parameter and the sketch."""
    optimizer.zero_grad()
    target = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
    users, pins = module.model.embed_users(some_actions()), module.model.embed_pins(some_actions().feature_RSF[:, 0])
    module.loss.sketch.add(torch.tensor([number, number + 1]))
    ((users + pins) * target / module.loss.temperature).sum().backward()
    optimizer.step()


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = value.clone()
    return tensors


def trained(num_steps: int) -> tuple[Module, torch.optim.AdamW]:
    module = Module(seed=1)
    optimizer = optimizer_of(module)
    for number in range(num_steps):
        step(module, optimizer, number)
    return module, optimizer


def test_a_checkpoint_continues_exactly(tmp_path: Path) -> None:
    module, optimizer = trained(3)
    save_checkpoint(tmp_path, 3, module, optimizer, {"first_loss": 0.1, "metrics": {"recall_at_10": 1 / 3}})
    saved = state_of(module, optimizer)
    other = Module(seed=2)
    other_optimizer = optimizer_of(other)
    state = load_newest(tmp_path, other, other_optimizer)
    assert state == {"step": 3, "first_loss": 0.1, "metrics": {"recall_at_10": 1 / 3}}
    loaded = state_of(other, other_optimizer)
    assert loaded.keys() == saved.keys()
    assert any(name.endswith("/exp_avg_sq") for name in saved)
    for name, tensor in saved.items():
        assert tensor.dtype == loaded[name].dtype, name
        assert torch.equal(tensor, loaded[name]), name
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, other_optimizer, number)
    for name, tensor in state_of(module, optimizer).items():
        assert torch.equal(tensor, state_of(other, other_optimizer)[name]), name


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    save_checkpoint(tmp_path, 0, module, optimizer, {})
    other = Module(seed=2)
    other_optimizer = optimizer_of(other)
    assert load_newest(tmp_path, other, other_optimizer) == {"step": 0}
    step(module, optimizer, 0)
    step(other, other_optimizer, 0)
    assert torch.equal(module.model.project.weight, other.model.project.weight)


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    module, optimizer = trained(1)
    for number in (5, 900, 1000, 20_000):
        with torch.no_grad():
            module.loss.temperature.fill_(number)
        save_checkpoint(tmp_path, number, module, optimizer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00001000", "step-00020000"]
    state = load_newest(tmp_path, module, optimizer)
    assert state == {"step": 20_000}
    assert float(module.loss.temperature.detach()) == 20_000


def test_nothing_half_written_is_read(tmp_path: Path) -> None:
    module, optimizer = trained(1)
    assert load_newest(tmp_path / "checkpoints", module, optimizer) is None
    partial = tmp_path / ".step-00000008.tmp"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path, module, optimizer) is None
    save_checkpoint(tmp_path, 4, module, optimizer, {})
    assert load_newest(tmp_path, module, optimizer) == {"step": 4}
    save_checkpoint(tmp_path, 8, module, optimizer, {})
    assert not partial.exists()
    assert load_newest(tmp_path, module, optimizer) == {"step": 8}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    module, optimizer = trained(1)
    save_checkpoint(tmp_path, 4, module, optimizer, {"run": 1})
    save_checkpoint(tmp_path, 4, module, optimizer, {"run": 2})
    assert load_newest(tmp_path, module, optimizer) == {"step": 4, "run": 2}


DESCRIPTION = {
    "feature_dim": 6,
    "action_types": ["a", "b", "c"],
    "surfaces": ["x", "y"],
    "time_origin_us": 10**15,
    "feature_scale": 1 / 3,
    "cut_ds": "2026-01-01",
}

FAMILY = {"family": "towers", "slices": {"embedding": [0, tiny().model.embedding_dim]}}


def test_a_model_comes_back_bit_equal(tmp_path: Path) -> None:
    model = trained(2)[0].model.eval()
    save_model(tmp_path / "model", model, DESCRIPTION)
    again, description = load_model(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.safetensors", "model.json"}
    own = {**FAMILY, "model": model.config.model_dump(mode="json"), **marked("model")}
    assert description == {**DESCRIPTION, **own}
    assert not again.training
    assert again.config == model.config
    actions = some_actions()
    with torch.no_grad():
        assert torch.equal(model.embed_users(actions), again.embed_users(actions))
        assert torch.equal(model.embed_pins(actions.feature_RSF[0]), again.embed_pins(actions.feature_RSF[0]))


def test_a_model_replaces_the_one_before(tmp_path: Path) -> None:
    first, second = trained(1)[0].model, trained(2)[0].model
    save_model(tmp_path / "model", first, DESCRIPTION)
    save_model(tmp_path / "model", second, DESCRIPTION)
    assert torch.equal(load_model(tmp_path / "model")[0].project.weight, second.project.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no model in .*pinnerformer_model"):
        load_model(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.json").write_text(json.dumps(DESCRIPTION)[:20])
    with pytest.raises(PipelineError, match="damaged"):
        load_model(tmp_path / "model")
