"""Loss, optimizer and averaged weights of the model of parts, and the choice of the number of steps.

The loss of a row is the cross entropy of its targets in a softmax over the pins of its day, sampled where they are
many. The weights that serve are an exponential average; of the averages at every evaluation, those that predict the
validation users best are kept: the number of steps is chosen on users who do not train.

The gradient of N ranks is that of one: a day's rows are divided among the ranks, and its loss is a sum over rows over
their number on all ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pf_core.config.training import TrainConfig
from pf_core.model.checkpoint import TrainedOn, save_model
from pf_core.model.parts.model import PartsModel
from pf_core.model.parts.table import PinTable
from pf_core.progress import Progress
from pf_core.training.optimizer import learning_rate
from pf_core.training.parts.likelihoods import log_likelihoods, own_log_likelihoods, with_memory, without_own
from pf_core.training.parts.prepared import open_prepared, prepare
from pf_core.training.parts.rows import MIN_ROWS, DayRows, RowSampler, Step
from pf_core.training.parts.steps import open_steps
from pf_core.training.parts.validation import validate
from pf_core.training.ranks import Rank
from pf_core.training.training_set import TrainingSet

FAST_FACTOR = 8.0
"""Learning rate of single numbers such as the weight of the trend, as a multiple of that of the other weights."""

MEMORY_FACTOR = 2.0
"""Learning rate of memory, as a multiple of that of the other weights."""

PINS_AT_ONCE = 8192

LENGTH_MARGIN = 1.05
"""`pin_length` over the length of the longest pin at the end of training: later pins may be longer."""


class PartsStep(nn.Module):
    """The model and its loss as one module, and the averaged and best weights, which checkpoints keep."""

    best_value: Tensor
    best_step: Tensor

    def __init__(self, model: PartsModel, *, world_size: int) -> None:
        super().__init__()
        self.model, self.world_size = model, world_size
        self.start = [weight.detach().clone() for weight in model.matrices()]
        """The matrices before the first step; the same in a run that is resumed."""
        self.register_buffer("best_value", torch.tensor(float("inf")))
        self.register_buffer("best_step", torch.tensor(0))
        for kind in ("average", "best"):
            for name, weight in model.named_parameters():
                self.register_buffer(_buffer(kind, name), weight.detach().clone())

    def forward(self, step: Step) -> Tensor:
        losses = [self._day_loss(rows) for rows in step]
        if not losses:
            return torch.stack([weight.sum() * 0.0 for weight in self.model.parameters()]).sum()
        return torch.stack(losses).sum() / len(losses)

    def _day_loss(self, rows: DayRows) -> Tensor:
        """Return the loss as served; with memory, also those of the vector alone, and of memory among own pins.

        What memory adds does not move the vector, so that the vector stays as good alone.
        """
        users = self.model.embed_users(rows.own, rows.own_inputs, rows.newest, keep_P=rows.keep_P)
        pool_MV = self.model.embed_pins(rows.pool_inputs, rows.rates_MW, rows.mean_rate_W)
        vector_BM, parts = users.vector_BV @ pool_MV.T, self.model.config
        new_BM, is_new_T = without_own(vector_BM, rows)
        if self.model.memory is None:
            return self._weighted(log_likelihoods(new_BM, rows), rows)
        loss = self._weighted(log_likelihoods(with_memory(vector_BM.detach(), rows, users.strength_P), rows), rows)
        loss = loss + parts.vector_weight * self._weighted(log_likelihoods(vector_BM, rows), rows)
        loss = loss + parts.own_weight * self._weighted(own_log_likelihoods(users.strength_P, rows), rows)
        if parts.discovery_weight > 0:
            loss = loss + parts.discovery_weight * self._weighted(log_likelihoods(new_BM, rows) * is_new_T, rows)
        return loss

    def _weighted(self, log_p_T: Tensor, rows: DayRows) -> Tensor:
        return -(log_p_T * rows.weight_T).sum() * self.world_size / rows.num_rows

    @torch.no_grad()
    def pull(self, share: float) -> None:
        """Move the matrices by this share of the way to where they started."""
        for weight, start in zip(self.model.matrices(), self.start, strict=True) if share > 0 else ():
            weight.lerp_(start.to(weight.device), min(1.0, share))

    # Averaged and best weights

    @torch.no_grad()
    def update_average(self, step: int, decay: float) -> None:
        """Move the averages towards the weights after step `step`, counted from 0; early ones follow faster."""
        for name, weight in self.model.named_parameters():
            self.get_buffer(_buffer("average", name)).lerp_(weight, max(1 - decay, 1 / (step + 2)))

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Copy weights; each is "average", "best" or "model"."""
        for name, weight in self.model.named_parameters():
            values = {kind: self.get_buffer(_buffer(kind, name)) for kind in ("average", "best")} | {"model": weight}
            values[target].copy_(values[source])


def _buffer(kind: str, name: str) -> str:
    return f"{kind}_{name.replace('.', '__')}"


def build_parts_optimizer(model: PartsModel, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, and faster rates for single numbers and for memory."""
    optimizer = config.optimizer
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        factor = (MEMORY_FACTOR if name.startswith("memory.") else 1.0) * (FAST_FACTOR if weight.ndim == 0 else 1.0)
        groups.setdefault((weight.ndim >= 2, factor), []).append(weight)
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": optimizer.weight_decay * is_matrix, "rate_factor": factor}
            for (is_matrix, factor), weights in groups.items()
        ],
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
    )


class PartsTask:
    """The part of a training run that belongs to the model of parts."""

    def __init__(self, config: TrainConfig, data: TrainingSet, rank: Rank, *, folder: Path, progress: Progress) -> None:
        assert config.parts is not None
        self.config, self.parts, self.data, self.rank, self.folder = config, config.parts, data, rank, folder
        self.has_dropout = self.parts.transformer_layers > 0
        if rank.is_first:
            prepare(data, self.parts, folder, progress)
        if rank.world_size > 1:
            dist.barrier()
        self.prepared = open_prepared(data, folder)
        sampler = RowSampler(data, config, self.prepared)
        validation = sampler.validation_rows()
        self.validation = None if validation is None else validation[0].to(rank.device)
        torch.manual_seed(config.seed)
        model = PartsModel(
            self.parts, content_dim=data.pin_feature.shape[1], num_action_types=max(1, len(data.action_types))
        )
        _standardize(model, sampler, self.prepared.scale_F)
        _center(model, sampler)
        self.module = PartsStep(model, world_size=rank.world_size).to(rank.device)
        self.optimizer = build_parts_optimizer(model, config)

    @property
    def no_pairs(self) -> tuple[str, str]:
        return (
            f"no day has {MIN_ROWS} training users with an action before it and a positive one on a pin to predict in "
            f"the {self.parts.window_days} days after it",
            "add days or users to the log, or check source.positive in the site file",
        )

    def batches(self, first_step: int, num_workers: int) -> Iterator[Step]:
        return open_steps(
            self.data.path,
            self.config,
            self.folder,
            first_step=first_step,
            rank=self.rank.number,
            world_size=self.rank.world_size,
            num_workers=num_workers,
        )

    def move(self, batch: Step) -> Step:
        return [rows.to(self.rank.device) for rows in batch]

    def count(self, batch: Step) -> tuple[int, int]:
        return sum(rows.own.num_users for rows in batch), sum(len(rows.target_row_T) for rows in batch)

    def after_step(self, step: int) -> None:
        self.module.pull(self.parts.matrix_pull * learning_rate(self.config.optimizer, step))
        self.module.update_average(step, self.parts.average)

    def measured(self) -> dict[str, float]:
        return {}

    def evaluate(self, step: int) -> tuple[dict[str, float], str]:
        """Measure the averaged weights on the validation users; keep the best."""
        if self.validation is None:
            self.module.copy("average", "best")
            self.module.best_step.fill_(step)
            return {}, "no validation users: the last weights are kept"
        self.module.eval()
        current = {name: weight.detach().clone() for name, weight in self.module.model.named_parameters()}
        self.module.copy("average", "model")
        values = validate(self.module.model, self.validation)
        if values["validation_loss"] < float(self.module.best_value):
            self.module.copy("average", "best")
            self.module.best_value.fill_(values["validation_loss"])
            self.module.best_step.fill_(step)
        with torch.no_grad():
            for name, weight in self.module.model.named_parameters():
                weight.copy_(current[name])
        self.module.train()
        values["best_step"] = float(self.module.best_step)
        return values, (
            f"recall@10 {values['recall_at_10']:.4f} as served, {values['vector_recall_at_10']:.4f} of the vector "
            f"alone on {self.validation.own.num_users:,} validation users; best: step {int(self.module.best_step)}"
        )

    def save(self, folder: Path, trained_on: TrainedOn) -> dict[str, float]:
        """Save the best weights with the factors and statistics of the end of training."""
        self.module.copy("best", "model")
        model = self.module.model.cpu().eval()
        table = finish_table(model, self.data, RowSampler(self.data, self.config, self.prepared))
        save_model(folder, model, {**trained_on, "positive": self.data.manifest["inputs"]["positive"]}, table)
        kept = {} if self.validation is None else validate(model, self.validation.to(torch.device("cpu")))
        return {**kept, "chosen_steps": float(self.module.best_step)}


@torch.no_grad()
def _standardize(model: PartsModel, sampler: RowSampler, scale_F: np.ndarray) -> None:
    """Set the scales of the inputs from the validation day's rows, or from a step's if there are none."""
    found = sampler.validation_rows()
    rows = [found[0]] if found is not None else sampler.plan(0)
    features = torch.cat([each.own.features_PX for each in rows]) if rows else torch.zeros(0, len(model.own_mean_X))
    if len(features) > 1:
        model.own_mean_X.copy_(features.mean(0))
        model.own_scale_X.copy_(features.std(0).clamp(min=0.1))
    model.statistics_scale_F.copy_(torch.from_numpy(scale_F))


@torch.no_grad()
def _center(model: PartsModel, sampler: RowSampler) -> None:
    """Set the constants that the first logits depend on, from the rates of the last training day."""
    day = int(sampler.days.day[-1])
    pins, competes_N = sampler.pins_at(day), sampler.competing(day)
    log_share_M = torch.zeros(0)
    if model.trend is not None:
        rates_MW, mean_rate_W = torch.from_numpy(pins.rates_NW[competes_N]), torch.from_numpy(pins.mean_rate_W)
        log_share_M = model.trend.log_share(rates_MW, mean_rate_W)
    model.start(log_share_M, sampler.data.num_pins)


@torch.no_grad()
def finish_table(model: PartsModel, data: TrainingSet, sampler: RowSampler) -> PinTable:
    """Set the constants that bring pins to unit norm, and return the model's pin table, as of the end of training."""
    day, point = sampler.days.end_day, sampler.prepared.points[-1]
    model.unknown_statistics_F.copy_(torch.from_numpy(sampler.prepared.unknown_statistics()))
    longest = 0.0
    for vector_MV in _pin_vectors(model, sampler, day):
        longest = max(longest, float(vector_MV.norm(dim=1).max()))
    model.pin_length.fill_(longest * LENGTH_MARGIN or 1.0)
    vector = np.empty((data.num_pins, model.embedding_dim), np.float16)
    start = 0
    for vector_MV in _pin_vectors(model, sampler, day):
        vector[start : start + len(vector_MV)] = model.unit_pins(vector_MV)[0].half().numpy()
        start += len(vector_MV)
    return PinTable(
        ids=data.path / "pins" / "pin_id.arrow",
        factor=point.factors.factor_ND,
        trust=point.factors.trust_N,
        statistics=point.statistics_NF,
        log_repeat=point.factors.log_repeat_N,
        vector=vector,
    )


def _pin_vectors(model: PartsModel, sampler: RowSampler, day: int) -> Iterator[Tensor]:
    """Yield the vectors of all pins as of a day, before scaling."""
    for start in range(0, sampler.data.num_pins, PINS_AT_ONCE):
        pin_M = np.arange(start, min(start + PINS_AT_ONCE, sampler.data.num_pins))
        inputs, rates_MW, mean_rate_W = sampler.pin_side(day, pin_M)
        yield model.embed_pins(inputs, rates_MW, mean_rate_W)
