"""Training throughput against RecTools' SASRec: the same layers, sizes, heads, sequence length, batch and negatives.

RecTools lives in an environment of its own, made once under PF_BENCH_DIR (or the system's temporary directory) and
kept, with our version of torch; `rectools_sasrec.py` runs in it. Where it cannot be installed, a line says why, and
only our own figure is reported. Bar: at least as many sequences a second, in both settings.

Equal negatives: both sides weigh every target against `num_negatives` random pins, with a loss at each position.
RecTools draws new ones for each position and gathers a [batch, sequence, 1 + negatives, hidden] tensor; ours are one
pool that all rows share, so that the logits are one matrix product. That is a choice of algorithm, and the bar counts
it. The unjudged `shared_pool` figure takes it away: RecTools' full softmax over a catalogue as large as the pool.

Not equal, and against us: RecTools' feed-forward layer is as wide as the hidden size, ours four times that; its pins
are rows of an id table, ours go through a tower. Not equal, and against RecTools: a gradient and an Adam step for its
whole table of pins; 50,000 pins are as many as the demo world has. Neither side drops out (RecTools' default is 0.2).

Both run on the same cores, in turns, and the best run of each counts; RecTools has turns without and with a loader
process.
"""

import argparse
import json
import os
import statistics
import subprocess
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from bench_training import Printer, write_training_set
from measuring import ensure_environment, measure, report, working_directory

from pf_core.config.training import TrainConfig, choose
from pf_core.training.trainer import train

REQUIREMENTS = ("rectools[torch]==0.19.0", f"torch=={version('torch').partition('+')[0]}")
NUM_PINS = 50_000
NUM_THREADS = 2
WARMUP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    num_layers: int
    hidden_dim: int
    num_heads: int
    sequence_length: int
    batch_size: int
    num_negatives: int
    num_steps: int
    """Timed steps of a RecTools run."""


SMALL = Setting(
    name="small",
    num_layers=2,
    hidden_dim=64,
    num_heads=8,
    sequence_length=64,
    batch_size=128,
    num_negatives=256,
    num_steps=10,
)
MEDIUM = Setting(
    name="medium",
    num_layers=2,
    hidden_dim=256,
    num_heads=8,
    sequence_length=128,
    batch_size=64,
    num_negatives=256,
    num_steps=3,
)
QUICK = Setting(
    name="quick",
    num_layers=1,
    hidden_dim=16,
    num_heads=2,
    sequence_length=8,
    batch_size=16,
    num_negatives=4,
    num_steps=3,
)


def train_rectools(
    python: Path,
    setting: Setting,
    *,
    num_pins: int,
    num_workers: int,
    loss: Literal["sampled_softmax", "softmax"] = "sampled_softmax",
) -> dict[str, Any]:
    """What `rectools_sasrec.py` prints."""
    values = {
        "num-layers": setting.num_layers,
        "hidden-dim": setting.hidden_dim,
        "num-heads": setting.num_heads,
        "sequence-length": setting.sequence_length,
        "batch-size": setting.batch_size,
        "num-negatives": setting.num_negatives,
        "num-steps": setting.num_steps,
        "num-items": num_pins,
        "num-threads": NUM_THREADS,
        "num-workers": num_workers,
        "dropout": 0.0,
        "loss": loss,
    }
    script = Path(__file__).with_name("rectools_sasrec.py")
    options = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = str(NUM_THREADS)
    process = subprocess.run(
        [str(python), str(script), *options], capture_output=True, text=True, env=environment, check=False
    )
    if process.returncode != 0:
        raise RuntimeError(f"{script.name} failed with exit code {process.returncode}:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def our_config(setting: Setting) -> TrainConfig:
    """Our model with the same shape: each position's next action, against one pool of random pins."""
    return choose(
        "demo",
        {
            "model": {
                "num_layers": setting.num_layers,
                "hidden_dim": setting.hidden_dim,
                "num_heads": setting.num_heads,
                "sequence_length": setting.sequence_length,
                "embedding_dim": setting.hidden_dim,
            },
            "sampling": {
                "objective": "sasrec",
                "equal_e1_weight": False,
                "max_sequences_per_user": 1,
                "max_positives_per_sequence": setting.sequence_length,
            },
            "loss": {"kind": "softmax", "negatives": "random", "num_random": setting.num_negatives},
            "batch_users": setting.batch_size,
            "optimizer": {"num_steps": 4 * setting.num_steps + WARMUP_STEPS},
            "log_every": WARMUP_STEPS,
            "evaluate_every": 10_000,
            "checkpoint_every": 10_000,
            "evaluate_users": 1,
            "evaluate_pins": 100,
        },
    )


def train_ours(setting: Setting, folder: Path, num_workers: int) -> float:
    """Sequences a second of the real trainer, after its first steps, in one process."""
    torch.set_num_threads(NUM_THREADS)
    config = our_config(setting)
    train(
        config,
        training_set=folder / "set",
        run_dir=folder / f"run-{num_workers}",
        num_workers=num_workers,
        observer=Printer(),
    )
    lines = [json.loads(line) for line in (folder / f"run-{num_workers}" / "history.jsonl").read_text().splitlines()]
    return statistics.median([line["examples_per_s"] for line in lines if "loss" in line][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    arguments = parser.parse_args()
    python = ensure_environment("rectools", REQUIREMENTS)
    for setting in [QUICK] if arguments.quick else [SMALL, MEDIUM]:
        with working_directory(None) as folder:
            compare(python, setting, folder, num_pins=200 if arguments.quick else NUM_PINS)


def compare(python: Path | None, setting: Setting, folder: Path, *, num_pins: int) -> None:
    # Timelines are so long that nearly every sequence is full.
    write_training_set(
        folder / "set",
        num_users=8 * setting.batch_size,
        num_actions=20 * setting.sequence_length,
        num_pins=num_pins,
        feature_dim=setting.hidden_dim,
        positive_share=1.0,
    )
    ours, theirs, shared = [], [], []
    for num_workers in (0, 1):
        ours.append(measure(train_ours, setting, folder, num_workers).outcome)
        if python is not None:
            run = train_rectools(python, setting, num_pins=num_pins, num_workers=num_workers)
            theirs.append(setting.batch_size / run["median_step_s"])
            few = replace(setting, num_steps=4 * setting.num_steps)
            pool = setting.num_negatives + 1
            run = train_rectools(python, few, num_pins=pool, num_workers=num_workers, loss="softmax")
            shared.append(setting.batch_size / run["median_step_s"])
    report(f"sasrec.{setting.name}.ours", max(ours), "sequences/s")
    if python is not None:
        report(f"sasrec.{setting.name}.rectools", max(theirs), "sequences/s")
        report(f"sasrec.{setting.name}.ours_over_rectools", max(ours) / max(theirs), "x", bar=">= 1")
        report(f"sasrec.{setting.name}.ours_over_rectools_shared_pool", max(ours) / max(shared), "x")


if __name__ == "__main__":
    main()
