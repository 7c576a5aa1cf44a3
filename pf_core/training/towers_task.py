"""Training of the towers: batches, loss, optimizer and validation (paper, sections 3.3 to 3.5)."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pf_core.config.training import OptimizerConfig, TrainConfig
from pf_core.model.checkpoint import TrainedOn, save_model
from pf_core.model.towers import PinnerFormer
from pf_core.training.batches import Batch, open_batches
from pf_core.training.loss import Pairs, RetrievalLoss
from pf_core.training.ranks import Rank
from pf_core.training.training_set import TrainingSet
from pf_core.training.validation import HeldOut, ModelEmbedder

SCALE_SAMPLE_PINS = 10_000
"""Number of candidates sampled to measure the scale of the content vectors."""


class TrainingStep(nn.Module):
    """Both towers and the loss as one module, so that all gradients are averaged over the ranks."""

    def __init__(self, model: PinnerFormer, loss: RetrievalLoss, precision: str) -> None:
        super().__init__()
        self.model, self.loss, self.precision = model, loss, precision

    def forward(self, batch: Batch) -> Tensor:
        device = batch.random_pin_N.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16"):
            user_QD = self.model.embed_positions(batch.sequences, batch.query_row_Q, batch.query_position_Q)
            pins_D = self.model.embed_pins(torch.cat([batch.pair_feature_PF, batch.random_feature_NF]))
        pairs = Pairs(
            query_P=batch.pair_query_P,
            user_P=batch.pair_user_P,
            weight_P=batch.pair_weight_P,
            pin_P=batch.pair_pin_P,
            is_candidate_P=batch.pair_is_candidate_P,
            num_users=batch.num_users,
        )
        positive_PD, random_ND = pins_D.split([len(batch.pair_pin_P), len(batch.random_pin_N)])
        loss: Tensor = self.loss(user_QD, pairs, positive_PD, random_ND, batch.random_pin_N)
        return loss


class TowersTask:
    """The part of a training run that belongs to the towers."""

    has_dropout: bool
    no_pairs = (
        "no user has a positive action that the objective can predict",
        "check source.positive in the site file and sampling.positive_types in training.changes",
    )

    def __init__(self, config: TrainConfig, data: TrainingSet, rank: Rank) -> None:
        self.config, self.data, self.rank = config, data, rank
        model = build_model(config, data)
        if config.compile:
            model.encode = torch.compile(model.encode, dynamic=True)  # type: ignore[method-assign]
        loss = RetrievalLoss(config.loss, num_candidates=len(data.content_candidates))
        self.module = TrainingStep(model, loss, config.precision).to(rank.device)
        self.optimizer = build_optimizer(self.module, config.optimizer)
        self.held_out = HeldOut.choose(data, config, rank)
        self.embedder = ModelEmbedder(model=model, data=data, device=rank.device)
        self.has_dropout = config.model.dropout > 0

    def batches(self, first_step: int, num_workers: int) -> Iterator[Batch]:
        return iter(
            open_batches(
                self.data.path,
                self.config,
                first_step=first_step,
                rank=self.rank.number,
                world_size=self.rank.world_size,
                num_workers=num_workers,
                pin_memory=self.rank.device.type == "cuda",
            )
        )

    def move(self, batch: Batch) -> Batch:
        return batch.to(self.rank.device)

    def count(self, batch: Batch) -> tuple[int, int]:
        return len(batch.sequences.length_R), len(batch.pair_pin_P)

    def after_step(self, step: int) -> None:
        self.module.loss.clamp_temperature()

    def measured(self) -> dict[str, float]:
        return {"temperature": self.module.loss.temperature.item()}

    def evaluate(self, step: int) -> tuple[dict[str, float], str]:
        self.module.eval()
        recall = self.held_out.recall(self.embedder, k=10)
        self.module.train()
        return {"recall_at_10": recall}, f"recall@10 {recall:.4f} on {self.held_out.num_users:,} held-out users"

    def save(self, folder: Path, trained_on: TrainedOn) -> dict[str, float]:
        save_model(folder, self.module.model, {**trained_on, "feature_scale": self.module.model.feature_scale})
        return {}


def build_model(config: TrainConfig, data: TrainingSet) -> PinnerFormer:
    """Return the towers for this data, with weights drawn from the seed."""
    torch.manual_seed(config.seed)
    return PinnerFormer(
        config.model,
        feature_dim=data.pin_feature.shape[1],
        num_action_types=len(data.action_types),
        num_surfaces=len(data.surfaces),
        time_origin_us=data.manifest["time_origin_us"],
        feature_scale=_feature_scale(data),
    )


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, not on biases, norms, phases and the temperature."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def _feature_scale(data: TrainingSet) -> float:
    """Return the factor that brings content vectors to unit variance, from a sample of the candidates."""
    rows = data.sample_candidates(SCALE_SAMPLE_PINS, np.random.default_rng(0), only_with_feature=True)
    mean_square = float(np.square(data.pin_feature[rows], dtype=np.float64).mean())
    return 1 / math.sqrt(mean_square) if mean_square > 0 else 1.0
