"""A training step at the paper's shape on CPU: how much of the machine's matrix multiplication it turns into learning.

The real trainer runs the `paper` preset (6 layers, H = 768, M = 256, D = 256, 8192 random negatives) on a synthetic
training set, with few users a step, whose timelines are so long that nearly all sequences are full. Model FLOPs are
those of its matrix products, forward and twice that backward, attention counted causally (half), nothing recomputed.
They are compared with a large `torch.matmul` on the same threads, timed before and after.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measuring import report, say, working_directory

from pf_core.config.training import TrainConfig, choose
from pf_core.layouts import marked
from pf_core.model.towers import ActionEncoder
from pf_core.training.trainer import train

START_US = 1_767_225_600_000_000
DAY_US = 86_400_000_000
NUM_DAYS = 120
SEQUENCES_PER_TIMELINE = 40


class Printer:
    def say(self, message: str) -> None:
        say(message)

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def write_training_set(
    path: Path, *, num_users: int, num_actions: int, num_pins: int, feature_dim: int, positive_share: float = 0.3
) -> None:
    """Users of equal length and random pins: the shape is what matters here."""
    rng = np.random.default_rng(0)
    (path / "pins").mkdir(parents=True)
    np.save(path / "pins" / "feature.npy", rng.normal(size=(num_pins, feature_dim)).astype(np.float32))
    np.save(path / "pins" / "candidates.npy", np.arange(num_pins))
    for split, users in (("train", num_users), ("held_out", 10)):
        (path / split).mkdir()
        total = users * num_actions
        columns = {
            "offsets": np.arange(users + 1) * num_actions,
            "pin": rng.integers(num_pins, size=total).astype(np.int32),
            "ts": START_US + np.sort(rng.integers(NUM_DAYS * DAY_US, size=(users, num_actions))).ravel(),
            "action_type": rng.integers(7, size=total).astype(np.int16),
            "surface": rng.integers(3, size=total).astype(np.int16),
            "duration": rng.exponential(20, total).astype(np.float32),
            "is_positive": rng.random(total) < positive_share,
        }
        for name, values in columns.items():
            np.save(path / split / f"{name}.npy", values)
    manifest = {
        "cut_ds": "2026-05-01",
        "cut_us": START_US + NUM_DAYS * DAY_US,
        "time_origin_us": START_US,
        "vocabularies": {"action_type": [f"type {n}" for n in range(7)], "surface": ["home", "search", "related"]},
        "fingerprint": "synthetic",
        **marked("training_set"),
    }
    (path / "training_set.json").write_text(json.dumps(manifest))


def model_flops(config: TrainConfig, *, feature_dim: int, sequences: float, pairs: float) -> float:
    """FLOPs of one training step: a multiply-add counts two, the backward pass twice the forward pass."""
    model = config.model
    encoder = ActionEncoder(model, feature_dim=feature_dim, num_action_types=7, num_surfaces=3, time_origin_us=0)
    missing = (model.sequence_length - 1) / (2 * SEQUENCES_PER_TIMELINE)  # actions, where a timeline begins
    hidden, tokens = model.hidden_dim, sequences * (model.sequence_length - missing)
    project = 2 * tokens * encoder.output_dim * hidden
    block = 2 * tokens * 12 * hidden**2 + 2 * tokens * model.sequence_length * hidden  # causal: half of 4 T S H
    head = 2 * pairs * (4 * hidden**2 + 4 * hidden * model.embedding_dim)
    pool = min(pairs, config.loss.max_in_batch) + config.loss.num_random
    pin_tower = 2 * (pairs + config.loss.num_random) * model.pin_hidden_dim * (feature_dim + model.embedding_dim)
    softmax = 2 * pairs * pool * model.embedding_dim
    return 3 * (project + model.num_layers * block + head + pin_tower + softmax)


def matmul_flops_per_s(size: int) -> float:
    matrix = torch.randn(size, size)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    size = {"num_layers": 1, "hidden_dim": 64, "sequence_length": 32} if quick else {}
    num_steps, feature_dim = (6, 256) if quick else (16, 256)
    config = choose(
        "paper",
        {
            "model": size,
            "loss": {"num_random": 256} if quick else {},
            "precision": "float32",
            "compile": False,
            "batch_users": 8,
            "shuffle_batches": 4,
            "log_every": num_steps // 4 + 1,
            "evaluate_every": 10_000,
            "evaluate_users": 1,
            "evaluate_pins": 100,
            "checkpoint_every": 10_000,
            "optimizer": {"num_steps": num_steps},
        },
    )
    with working_directory(None) as folder:
        write_training_set(
            folder / "set",
            num_users=64,
            num_actions=SEQUENCES_PER_TIMELINE * config.model.sequence_length,
            num_pins=2000 if quick else 50_000,
            feature_dim=feature_dim,
        )
        before = matmul_flops_per_s(512 if quick else 4096)
        train(config, training_set=folder / "set", run_dir=folder / "run", num_workers=1, observer=Printer())
        after = matmul_flops_per_s(512 if quick else 4096)
        lines = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
    steady = [line for line in lines if "loss" in line][1:]  # the first interval starts the worker
    sequences_per_s = statistics.median(line["examples_per_s"] for line in steady)
    pairs_per_s = statistics.median(line["pairs_per_s"] for line in steady)
    steps_per_s = sequences_per_s / config.batch_users
    flops = model_flops(config, feature_dim=feature_dim, sequences=config.batch_users, pairs=pairs_per_s / steps_per_s)
    peak = statistics.mean([before, after])
    say(f"{flops / 1e9:.0f} GFLOP a step; matmul {before / 1e9:.0f} and {after / 1e9:.0f} GFLOP/s")
    report("training.model_flops_over_matmul", flops * steps_per_s / peak, "x", bar=">= 0.5")
    report("training.data_wait_share", max(line["data_wait_share"] for line in steady), "share", bar="< 0.05")
    report("training.sequences_per_s", sequences_per_s, "sequences/s")
    report("training.pairs_per_s", pairs_per_s, "pairs/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
