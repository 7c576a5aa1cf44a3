"""The other side of `bench_sasrec.py`: how many sequences a second RecTools' SASRec trains on.

Runs inside an environment of its own, in which RecTools is installed and our packages are not; prints one line of
JSON. The model is RecTools' own with its defaults (Adam, pins as an id table, a feed-forward layer as wide as the
hidden size), except for what the arguments say. Pins and users are random: the content of a sequence changes no cost.
What is in its favour:

- every sequence is full, so it pads nothing, and all steps lie in one epoch, so that its loader starts once;
- grouping the log into sequences happens before the first step, and neither that nor the warm-up is timed;
- Lightning writes no checkpoint, no log and no progress bar.

Waiting for data is timed: the clock runs from the end of the last warm-up step to the end of the last step. Some
steps are left in the epoch after that one, so that loading ahead is not cheaper at the end than in the middle.

`sampled_softmax` draws `num_negatives` for every position of every sequence. `softmax` takes the whole catalogue as
the pool and ignores the number: with as many pins as negatives, it is RecTools' cheapest pool that positions share.
"""

import argparse
import json
import logging
import resource
import statistics
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

WARMUP_STEPS = 2
STEPS_LEFT = 4


class StepClock(Callback):
    """When each step ended, and how much processor time it had taken by then."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []
        self.cpu_s: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.ended_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        self.losses.append(outputs["loss"].item())


def random_interactions(*, num_users: int, per_user: int, num_items: int) -> pd.DataFrame:
    """Every user has as many rows, and every item occurs."""
    num_rows = num_users * per_user
    if num_rows < num_items:
        raise ValueError(f"{num_rows} interactions cannot show {num_items} items: ask for more steps")
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            Columns.User: np.repeat(np.arange(num_users), per_user),
            Columns.Item: rng.permutation(np.arange(num_rows) % num_items),
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(num_rows), unit="s"),
        }
    )


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    num_steps = WARMUP_STEPS + arguments.num_steps
    num_users = (num_steps + STEPS_LEFT) * arguments.batch_size
    interactions = random_interactions(
        num_users=num_users, per_user=arguments.sequence_length + 1, num_items=arguments.num_items
    )
    model = SASRecModel(
        n_blocks=arguments.num_layers,
        n_factors=arguments.hidden_dim,
        n_heads=arguments.num_heads,
        session_max_len=arguments.sequence_length,
        batch_size=arguments.batch_size,
        dropout_rate=arguments.dropout,
        loss=arguments.loss,
        n_negatives=arguments.num_negatives,
        dataloader_num_workers=arguments.num_workers,
    )
    model._trainer = Trainer(  # RecTools' own way to change the trainer, see its documentation
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        callbacks=[StepClock()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model.fit(Dataset.construct(interactions))
    assert model.fit_trainer is not None
    (clock,) = (callback for callback in model.fit_trainer.callbacks if isinstance(callback, StepClock))  # a copy
    assert len(clock.ended_s) == num_steps
    seconds = clock.ended_s[-1] - clock.ended_s[WARMUP_STEPS - 1]
    return {
        "sequences_per_s": arguments.num_steps * arguments.batch_size / seconds,
        "median_step_s": statistics.median(np.diff(clock.ended_s[WARMUP_STEPS - 1 :])),
        "median_step_cpu_s": statistics.median(np.diff(clock.cpu_s[WARMUP_STEPS - 1 :])),
        "steps": arguments.num_steps,
        "first_loss": clock.losses[0],
        "last_loss": clock.losses[-1],
        "num_parameters": sum(parameter.numel() for parameter in model.torch_model.parameters()),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "threads": torch.get_num_threads(),
        "num_workers": arguments.num_workers,
        "dropout": arguments.dropout,
        "loss": arguments.loss,
        "rectools": version("rectools"),
        "torch": torch.__version__,
        "lightning": version("pytorch-lightning"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in (
        "num-layers",
        "hidden-dim",
        "num-heads",
        "sequence-length",
        "batch-size",
        "num-negatives",
        "num-steps",
        "num-items",
        "num-threads",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data ahead of the step")
    parser.add_argument("--dropout", type=float, default=0.2, help="RecTools' default is 0.2")
    parser.add_argument("--loss", choices=("sampled_softmax", "softmax"), default="sampled_softmax")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # that the loader has few workers, that nothing is logged
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.num_threads)
    seed_everything(0)
    print(json.dumps(train(arguments)), flush=True)


if __name__ == "__main__":
    main()
