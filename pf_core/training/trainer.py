"""The training job that every rank runs (paper, sections 3.3 to 3.5; the optimizer is ours, the paper names none).

The result is a function of the training set and the configuration, bit for bit on CPUs; the number of ranks changes
only rounding and the random numbers of dropout. The global batch of a step does not depend on ranks or workers, weights
start from the seed, and the learning rate, the sampler's stream and dropout are functions of the step. Therefore a
checkpoint holds the weights, the optimizer's moments and the sketch, and a resumed run gives the same result as an
uninterrupted one. A single process runs the same code with a world of one.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pf_core.config.training import OptimizerConfig, TrainConfig
from pf_core.errors import PipelineError
from pf_core.model.checkpoint import TrainedOn, load_newest, save_checkpoint, save_model
from pf_core.model.towers import PinnerFormer
from pf_core.storage.files import append_text, read_json, write_json, write_text
from pf_core.training.batches import Batch, open_batches
from pf_core.training.loss import Pairs, RetrievalLoss
from pf_core.training.ranks import Rank, gather_counts, join_ranks, sum_over_ranks
from pf_core.training.run_folder import HISTORY, RESULT, TrainingResult
from pf_core.training.training_set import TrainingSet, open_training_set
from pf_core.training.validation import HeldOut, ModelEmbedder

DIVERGED = 2.0
"""Training has diverged when the loss exceeds the first loss by more than this many times the first loss."""

SCALE_SAMPLE_PINS = 10_000
"""Number of candidates sampled to measure the scale of the content vectors."""


class Observer(Protocol):
    """Receives a run's progress; called on the first rank only."""

    def say(self, message: str) -> None:
        """Receive a line for a person to read."""
        ...

    def measure(self, step: int, values: dict[str, float]) -> None:
        """Receive the quantities measured after `step` steps, by name."""
        ...


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


def train(
    config: TrainConfig, *, training_set: Path, run_dir: Path, num_workers: int, observer: Observer
) -> TrainingResult:
    """Train, or continue the run in `run_dir`; return its result, which is also written there.

    `run_dir` gets `history.jsonl` (a line for each measurement), `checkpoints/`, and at the end `model/` and
    `result.json`. A run that has a result is not repeated.
    """
    if (run_dir / RESULT).is_file():
        result: TrainingResult = read_json(run_dir / RESULT)
        return result
    with join_ranks() as rank:
        return _Run(config, open_training_set(training_set), run_dir, rank, observer).finish(num_workers)


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


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then decay to zero after the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    share = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    match config.decay:
        case "none":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - share)
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


@dataclass
class _Interval:
    """Sums since the last measurement, on this rank."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    loss: Tensor | float = 0.0
    waited_s: float = 0.0
    """Time that the loop waited for batches."""
    sequences: int = 0
    pairs: int = 0


class _Run:
    """One rank's part of a training run."""

    def __init__(self, config: TrainConfig, data: TrainingSet, run_dir: Path, rank: Rank, observer: Observer) -> None:
        self.config, self.data, self.run_dir, self.rank, self.observer = config, data, run_dir, rank, observer
        model = build_model(config, data)
        if config.compile:
            model.encode = torch.compile(model.encode, dynamic=True)  # type: ignore[method-assign]
        loss = RetrievalLoss(config.loss, num_candidates=len(data.content_candidates))
        self.module = TrainingStep(model, loss, config.precision).to(rank.device)
        self.optimizer = build_optimizer(self.module, config.optimizer)
        self.held_out = HeldOut.choose(data, config, rank)
        self.embedder = ModelEmbedder(model=model, data=data, device=rank.device)
        self.first_loss: float | None = None
        self.started, self.seconds_before = time.perf_counter(), 0.0
        self.metrics: dict[str, float] = {}

    def finish(self, num_workers: int) -> TrainingResult:
        """Resume at the newest checkpoint and train to the last step."""
        first_step = self._resume()
        if len({row[0] for row in gather_counts(first_step, device=self.rank.device)}) > 1:
            raise PipelineError(
                "the training processes read different checkpoints",
                "give every node the same data_dir (a shared folder)",
            )
        replica: nn.Module = self.module
        if self.rank.world_size > 1:
            replica = DistributedDataParallel(self.module, forward_sync_buffers=False, gradient_as_bucket_view=True)
        loader = open_batches(
            self.data.path,
            self.config,
            first_step=first_step,
            rank=self.rank.number,
            world_size=self.rank.world_size,
            num_workers=num_workers,
            pin_memory=self.rank.device.type == "cuda",
        )
        self._say(
            f"{sum(p.numel() for p in self.module.parameters()):,} parameters, {self.data.train.num_users:,} users, "
            f"{self.rank.world_size} process(es) on {self.rank.device.type}, step {first_step} of {self._num_steps}"
        )
        interval = _Interval()
        batches: Iterator[Batch] = iter(loader)
        for step in range(first_step, self._num_steps):
            waiting_since = time.perf_counter()
            batch = next(batches).to(self.rank.device)
            interval.waited_s += time.perf_counter() - waiting_since
            loss, gradient_norm = self._step(replica, batch, step)
            interval.steps += 1
            interval.loss = interval.loss + loss  # stays on the device: a conversion would wait for it
            interval.sequences += len(batch.sequences.length_R)
            interval.pairs += len(batch.pair_pin_P)
            done = step + 1
            is_last = done == self._num_steps
            if is_last or any(done % every == 0 for every in self._intervals):
                self._measure(done, interval, float(gradient_norm))
                interval = _Interval()
            if done % self.config.evaluate_every == 0 or is_last:
                self._evaluate(done)
                interval = _Interval()
            if done % self.config.checkpoint_every == 0 or is_last:
                self._save(done)
                interval = _Interval()
        return self._publish()

    @property
    def _intervals(self) -> tuple[int, ...]:
        return self.config.log_every, self.config.evaluate_every, self.config.checkpoint_every

    @property
    def _num_steps(self) -> int:
        return self.config.optimizer.num_steps

    @property
    def _seconds(self) -> float:
        """Duration of the whole training, with evaluation and with the time before an interruption."""
        return self.seconds_before + time.perf_counter() - self.started

    def _step(self, replica: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        if self.config.model.dropout:
            torch.manual_seed(
                int(np.random.SeedSequence([self.config.seed, step, self.rank.number]).generate_state(1)[0])
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = replica(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.optimizer.max_gradient_norm)
        self.optimizer.step()
        self.module.loss.clamp_temperature()
        return loss.detach(), norm

    def _measure(self, step: int, interval: _Interval, gradient_norm: float) -> None:
        """Record the interval over all ranks; raise if training went wrong, before a checkpoint is saved."""
        seconds = time.perf_counter() - interval.started
        ours = [float(interval.loss), interval.waited_s, float(interval.sequences), float(interval.pairs)]
        total = sum_over_ranks(torch.tensor(ours, dtype=torch.float64, device=self.rank.device)).tolist()
        world_size = self.rank.world_size
        loss = total[0] / (interval.steps * world_size)
        if total[3] == 0:
            raise PipelineError(
                f"not a single pair in the {interval.steps} steps up to {step}: no user has a positive action that the "
                "objective can predict",
                "check source.positive in the site file and sampling.positive_types in training.changes",
            )
        if self.first_loss is None:
            self.first_loss = loss
        if (
            not math.isfinite(loss)
            or not math.isfinite(gradient_norm)
            or loss > self.first_loss + DIVERGED * max(abs(self.first_loss), 1.0)
        ):
            raise PipelineError(
                f"training diverged by step {step}: loss {loss:.4g}, gradient norm {gradient_norm:.4g} (the loss began "
                f"at {self.first_loss:.4g}), the last good checkpoint is kept",
                "lower optimizer.learning_rate or raise optimizer.warmup_steps",
            )
        values = {
            "loss": loss,
            "temperature": self.module.loss.temperature.item(),
            "learning_rate": learning_rate(self.config.optimizer, step - 1),
            "gradient_norm": gradient_norm,
            "examples_per_s": total[2] / seconds,
            "pairs_per_s": total[3] / seconds,
            "data_wait_share": total[1] / (seconds * world_size),
        }
        left_s = (self._num_steps - step) * seconds / interval.steps
        self._record(step, values)
        self._say(
            f"step {step}/{self._num_steps}: loss {loss:.4f}, temperature {values['temperature']:.4f}, "
            f"{values['examples_per_s']:,.0f} examples/s, {values['data_wait_share']:.1%} waiting for data, "
            f"{left_s / 60:.1f} min left"
        )

    def _evaluate(self, step: int) -> None:
        self.module.eval()
        recall = self.held_out.recall(self.embedder, k=10)
        self.module.train()
        self._record(step, {"recall_at_10": recall})
        self._say(
            f"step {step}/{self._num_steps}: recall@10 {recall:.4f} on {self.held_out.num_users:,} held-out users"
        )

    def _record(self, step: int, values: dict[str, float]) -> None:
        self.metrics |= values
        if self.rank.is_first:
            append_text(self.run_dir / HISTORY, json.dumps({"step": step, **values}) + "\n")
            self.observer.measure(step, values)

    def _say(self, message: str) -> None:
        if self.rank.is_first:
            self.observer.say(message)

    def _save(self, step: int) -> None:
        if self.rank.is_first:
            state = {"first_loss": self.first_loss, "seconds": self._seconds, "metrics": self.metrics}
            save_checkpoint(self.run_dir / "checkpoints", step, self.module, self.optimizer, state)

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps that are done."""
        state = load_newest(self.run_dir / "checkpoints", self.module, self.optimizer)
        step = 0 if state is None else int(state["step"])
        if state is not None:
            self.first_loss, self.metrics = state["first_loss"], state["metrics"]
            self.seconds_before = state["seconds"]
            self._say(f"resuming after step {step}")
        if self.rank.is_first:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            _drop_history_after(self.run_dir / HISTORY, step)
        return step

    def _publish(self) -> TrainingResult:
        """Save the model, then the result, which marks the run as finished."""
        result: TrainingResult = {
            "num_steps": self._num_steps,
            "num_processes": self.rank.world_size,
            "num_parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "seconds": self._seconds,
            "metrics": self.metrics,
        }
        if self.rank.is_first:
            description: TrainedOn = {
                "feature_dim": self.data.pin_feature.shape[1],
                "feature_scale": self.module.model.feature_scale,
                "action_types": self.data.action_types,
                "surfaces": self.data.surfaces,
                "time_origin_us": self.data.manifest["time_origin_us"],
                "cut_ds": self.data.manifest["cut_ds"],
                "training_set": self.data.fingerprint,
                "config": self.config.model_dump(mode="json"),
            }
            save_model(self.run_dir / "model", self.module.model, description)
            write_json(self.run_dir / RESULT, result)
        return result


def _feature_scale(data: TrainingSet) -> float:
    """Return the factor that brings content vectors to unit variance, from a sample of the candidates."""
    rows = data.sample_candidates(SCALE_SAMPLE_PINS, np.random.default_rng(0), only_with_feature=True)
    mean_square = float(np.square(data.pin_feature[rows], dtype=np.float64).mean())
    return 1 / math.sqrt(mean_square) if mean_square > 0 else 1.0


def _drop_history_after(history: Path, step: int) -> None:
    """Drop what an interrupted run measured after the checkpoint: the resumed run measures it again."""
    lines = history.read_text().splitlines(keepends=True) if history.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(history, "".join(kept))
