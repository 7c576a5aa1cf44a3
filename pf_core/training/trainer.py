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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pf_core.config.training import TrainConfig
from pf_core.errors import PipelineError
from pf_core.model.checkpoint import TrainedOn, load_newest, save_checkpoint
from pf_core.storage.disk import disk_errors
from pf_core.storage.files import append_text, read_json, write_json, write_text
from pf_core.storage.privacy import private
from pf_core.training.optimizer import learning_rate
from pf_core.training.parts.prepared import remove_prepared
from pf_core.training.parts.task import PartsTask
from pf_core.training.ranks import Rank, gather_counts, join_ranks, sum_over_ranks
from pf_core.training.run_folder import HISTORY, PREPARED, RESULT, TrainingResult
from pf_core.training.towers_task import TowersTask
from pf_core.training.training_set import TrainingSet, open_training_set

DIVERGED = 2.0
"""Training has diverged when the loss exceeds the first loss by more than this many times the first loss."""


class Observer(Protocol):
    """Receives a run's progress; called on the first rank only."""

    def say(self, message: str) -> None:
        """Receive a line for a person to read."""
        ...

    def measure(self, step: int, values: dict[str, float]) -> None:
        """Receive the quantities measured after `step` steps, by name."""
        ...


class Task(Protocol):
    """What the families of models differ in."""

    @property
    def module(self) -> nn.Module:
        """Returns the loss of this rank's part of a batch."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def has_dropout(self) -> bool:
        """Whether random numbers of torch are drawn in a step: they are seeded by it."""
        ...

    @property
    def no_pairs(self) -> tuple[str, str]:
        """Return why there may be nothing to learn from, and the remedy."""
        ...

    def batches(self, first_step: int, num_workers: int) -> Iterator[Any]:
        """Return this rank's batches of the steps from `first_step` on."""
        ...

    def move(self, batch: Any) -> Any:
        """Return the batch on the device."""
        ...

    def count(self, batch: Any) -> tuple[int, int]:
        """Return the numbers of examples and of pairs of example and target."""
        ...

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step."""
        ...

    def measured(self) -> dict[str, float]:
        """Return quantities of the family that are recorded with the loss."""
        ...

    def evaluate(self, step: int) -> tuple[dict[str, float], str]:
        """Return what is measured on users who do not train, and as part of a sentence; called on all ranks."""
        ...

    def save(self, folder: Path, trained_on: TrainedOn) -> dict[str, float]:
        """Save the model; return quantities for the result."""
        ...


def train(
    config: TrainConfig,
    *,
    training_set: Path,
    run_dir: Path,
    num_workers: int,
    observer: Observer,
    prepared: Path | None = None,
) -> TrainingResult:
    """Train, or continue the run in `run_dir`; return its result, which is also written there.

    `run_dir` gets `history.jsonl` (a line for each measurement), `checkpoints/`, and at the end `model/` and
    `result.json`. A run that has a result is not repeated. `prepared` is a folder that several runs of the same model
    of parts share, and that stays; without it, a run has its own, and removes it when the model is saved.
    """
    if (run_dir / RESULT).is_file():
        result: TrainingResult = read_json(run_dir / RESULT)
        return result
    with disk_errors(run_dir, "the training"), private(run_dir), join_ranks() as rank:
        return _Run(config, open_training_set(training_set), run_dir, rank, observer, prepared).finish(num_workers)


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

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingSet,
        run_dir: Path,
        rank: Rank,
        observer: Observer,
        prepared: Path | None,
    ) -> None:
        self.config, self.data, self.run_dir, self.rank, self.observer = config, data, run_dir, rank, observer
        self.keeps_prepared = prepared is not None
        self.task: Task = (
            TowersTask(config, data, rank)
            if config.parts is None
            else PartsTask(config, data, rank, folder=prepared or run_dir / PREPARED, progress=self._say)
        )
        self.module, self.optimizer = self.task.module, self.task.optimizer
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
        self._say(
            f"{sum(p.numel() for p in self.module.parameters()):,} parameters, {self.data.train.num_users:,} users, "
            f"{self.rank.world_size} process(es) on {self.rank.device.type}, step {first_step} of {self._num_steps}"
        )
        interval = _Interval()
        batches = self.task.batches(first_step, num_workers)
        for step in range(first_step, self._num_steps):
            waiting_since = time.perf_counter()
            batch = self.task.move(next(batches))
            interval.waited_s += time.perf_counter() - waiting_since
            loss, gradient_norm = self._step(replica, batch, step)
            interval.steps += 1
            interval.loss = interval.loss + loss  # stays on the device: a conversion would wait for it
            num_examples, num_pairs = self.task.count(batch)
            interval.sequences += num_examples
            interval.pairs += num_pairs
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

    def _step(self, replica: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        if self.task.has_dropout:
            torch.manual_seed(
                int(np.random.SeedSequence([self.config.seed, step, self.rank.number]).generate_state(1)[0])
            )
        rate = learning_rate(self.config.optimizer, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("rate_factor", 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = replica(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.optimizer.max_gradient_norm)
        self.optimizer.step()
        self.task.after_step(step)
        return loss.detach(), norm

    def _measure(self, step: int, interval: _Interval, gradient_norm: float) -> None:
        """Record the interval over all ranks; raise if training went wrong, before a checkpoint is saved."""
        seconds = time.perf_counter() - interval.started
        ours = [float(interval.loss), interval.waited_s, float(interval.sequences), float(interval.pairs)]
        total = sum_over_ranks(torch.tensor(ours, dtype=torch.float64, device=self.rank.device)).tolist()
        world_size = self.rank.world_size
        loss = total[0] / (interval.steps * world_size)
        if total[3] == 0:
            reason, remedy = self.task.no_pairs
            raise PipelineError(f"not a single pair in the {interval.steps} steps up to {step}: {reason}", remedy)
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
            **self.task.measured(),
            "learning_rate": learning_rate(self.config.optimizer, step - 1),
            "gradient_norm": gradient_norm,
            "examples_per_s": total[2] / seconds,
            "pairs_per_s": total[3] / seconds,
            "data_wait_share": total[1] / (seconds * world_size),
        }
        left_s = (self._num_steps - step) * seconds / interval.steps
        self._record(step, values)
        own = "".join(f"{name} {value:.4f}, " for name, value in self.task.measured().items())
        self._say(
            f"step {step}/{self._num_steps}: loss {loss:.4f}, {own}"
            f"{values['examples_per_s']:,.0f} examples/s, {values['data_wait_share']:.1%} waiting for data, "
            f"{left_s / 60:.1f} min left"
        )

    def _evaluate(self, step: int) -> None:
        values, sentence = self.task.evaluate(step)
        self._record(step, values)
        self._say(f"step {step}/{self._num_steps}: {sentence}")

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
            trained_on: TrainedOn = {
                "feature_dim": self.data.pin_feature.shape[1],
                "action_types": self.data.action_types,
                "surfaces": self.data.surfaces,
                "time_origin_us": self.data.manifest["time_origin_us"],
                "cut_ds": self.data.manifest["cut_ds"],
                "training_set": self.data.fingerprint,
                "config": self.config.model_dump(mode="json"),
            }
            saved = self.task.save(self.run_dir / "model", trained_on)
            result["metrics"] |= saved
            if "chosen_steps" in saved:
                result["chosen_steps"] = int(saved["chosen_steps"])
            if not self.keeps_prepared:
                remove_prepared(self.run_dir / PREPARED)
            write_json(self.run_dir / RESULT, result)
        return result


def _drop_history_after(history: Path, step: int) -> None:
    """Drop what an interrupted run measured after the checkpoint: the resumed run measures it again."""
    lines = history.read_text().splitlines(keepends=True) if history.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(history, "".join(kept))
