"""Two processes on shares of a batch give the loss and the gradients that one gives on the whole (design, invariant 8).

This file is also what the two processes run: each takes every second user of the same batch, as training does, and
writes down what it got.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pf_core.config.training import LossConfig, tiny
from pf_core.errors import PipelineError
from pf_core.model.sequences import Sequences
from pf_core.model.towers import PinnerFormer
from pf_core.training.loss import Pairs, RetrievalLoss
from pf_core.training.ranks import gather_counts, gather_rows, join_ranks, sum_over_ranks

NUM_PINS, FEATURE_DIM, NUM_STEPS = 25, 6, 2
UNEVEN, LONELY, ALONE, SILENT = (1, 3, 0, 2, 5, 1, 2), (2, 0, 3, 0, 1), (4,), (0, 0, 0)
"""Pairs of each user: the ranks get 8 and 6; 6 and none; 4 and not even a sequence; none at all."""

SCENARIOS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mixed": (UNEVEN, {"negatives": "mixed", "log_q": "all"}),
    "mixed_negatives": (UNEVEN, {"negatives": "mixed", "log_q": "negatives"}),
    "in_batch": (UNEVEN, {"negatives": "in_batch", "log_q": "all"}),
    "in_batch_corrected": (UNEVEN, {"negatives": "in_batch", "log_q": "corrected"}),
    "random": (UNEVEN, {"negatives": "random", "log_q": "negatives"}),
    "no_correction": (UNEVEN, {"negatives": "mixed", "log_q": "none"}),
    # The cap must not keep rows by their place in the gathered order, which depends on the number of ranks.
    "capped": (UNEVEN, {"negatives": "mixed", "log_q": "all", "max_in_batch": 6}),
    "capped_in_batch": (UNEVEN, {"negatives": "in_batch", "log_q": "none", "max_in_batch": 9}),
    # A row's negative must not depend on the row's number within its rank: that can be its own positive.
    "bce_in_batch": (UNEVEN, {"kind": "bce", "negatives": "in_batch", "log_q": "none"}),
    "bce_mixed": (UNEVEN, {"kind": "bce", "negatives": "mixed", "log_q": "none"}),
    "lonely": (LONELY, {"negatives": "mixed", "log_q": "all"}),
    "lonely_in_batch": (LONELY, {"negatives": "in_batch", "log_q": "all"}),
    "lonely_random": (LONELY, {"negatives": "random", "log_q": "none"}),
    "alone": (ALONE, {"negatives": "mixed", "log_q": "all"}),
    "silent": (SILENT, {"negatives": "mixed", "log_q": "all"}),
}


class Share(NamedTuple):
    """One rank's part of a batch."""

    sequences: Sequences
    query_row_Q: Tensor
    query_position_Q: Tensor
    pairs: Pairs
    pair_feature_PF: Tensor
    random_feature_NF: Tensor
    random_pin_N: Tensor


def share_of(scenario: str, step: int, rank: int, world_size: int) -> Share:
    """Users rank, rank + world_size, … and a block of the random pins, as a batch is cut in training."""
    pair_counts, options = SCENARIOS[scenario]
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(NUM_PINS, FEATURE_DIM)).astype(np.float32))
    mine = range(rank, len(pair_counts), world_size)
    feature_RSF, duration_RS = torch.zeros(len(mine), 8, FEATURE_DIM), torch.zeros(len(mine), 8)
    kind_RS, place_RS, ts_RS = torch.zeros(3, len(mine), 8, dtype=torch.int64)
    lengths, queries, user, pins = [], [], [], []
    num_users = 0
    for row, number in enumerate(mine):
        rng = np.random.default_rng([1, step, number])
        length = int(rng.integers(1, 9))
        lengths.append(length)
        feature_RSF[row, :length] = table[rng.integers(0, NUM_PINS, length)]
        duration_RS[row, :length] = torch.from_numpy(rng.random(length))
        kind_RS[row, :length] = torch.from_numpy(rng.integers(0, 3, length))
        place_RS[row, :length] = torch.from_numpy(rng.integers(0, 2, length))
        ts_RS[row, :length] = torch.from_numpy(10**15 + rng.integers(1, 10**10, length).cumsum())
        for _ in range(pair_counts[number]):
            queries.append((row, int(rng.integers(0, length))))
            user.append(num_users)
            pins.append(int(rng.zipf(1.5)) % NUM_PINS)  # popular pins are liked by several users
        num_users += pair_counts[number] > 0
    longest = max(lengths, default=1)
    columns = [column[:, :longest] for column in (feature_RSF, kind_RS, place_RS, duration_RS, ts_RS)]
    num_random = 0 if options["negatives"] == "in_batch" else 9
    drawn = np.array_split(np.random.default_rng([2, step]).integers(0, NUM_PINS, num_random), world_size)[rank]
    user_P, pin_P, random_N, query_Q2 = (
        torch.tensor(rows, dtype=torch.int64) for rows in (user, pins, drawn.tolist(), queries)
    )
    row_Q, position_Q = query_Q2.reshape(-1, 2).T
    weight_P = 1 / torch.bincount(user_P, minlength=1)[user_P].float()
    return Share(
        Sequences(*columns, torch.tensor(lengths, dtype=torch.int64)),  # type: ignore[call-arg]
        row_Q,
        position_Q,
        Pairs(torch.arange(len(pins)), user_P, weight_P, pin_P, pin_P % 5 != 0, num_users),
        table[pin_P],
        table[random_N],
        random_N,
    )


class Step(nn.Module):
    """Both towers and the loss, as the training job puts them together."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = PinnerFormer(tiny().model, feature_dim=FEATURE_DIM, num_action_types=3, num_surfaces=2)
        self.loss = RetrievalLoss(LossConfig(sketch_width=1 << 10, chunk_rows=4, **options), num_candidates=NUM_PINS)

    def forward(self, share: Share) -> Tensor:
        user_QD = self.model.embed_positions(share.sequences, share.query_row_Q, share.query_position_Q)
        pins_D = self.model.embed_pins(torch.cat([share.pair_feature_PF, share.random_feature_NF]))
        num_pairs = len(share.pairs.pin_P)
        loss: Tensor = self.loss(user_QD, share.pairs, pins_D[:num_pairs], pins_D[num_pairs:], share.random_pin_N)
        return loss


def run_scenario(name: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """Loss and gradients of each step, and the sketch after the last; the weights stay as they are."""
    module = Step(SCENARIOS[name][1])
    replica = DistributedDataParallel(module, broadcast_buffers=False) if world_size > 1 else module
    found = {}
    for step in range(NUM_STEPS):
        module.zero_grad()
        loss = replica(share_of(name, step, rank, world_size))
        loss.backward()
        found[f"{step}/loss"] = loss.detach()
        for parameter_name, parameter in module.named_parameters():
            assert parameter.grad is not None, parameter_name
            found[f"{step}/{parameter_name}"] = parameter.grad.clone()
    return {**found, "sketch": module.loss.sketch.counts, "total": module.loss.sketch.total}


def run_gathering(rank: int) -> dict[str, Tensor]:
    """Rank 0 has two rows, rank 1 has three; each weighs the gathered rows in its own way."""
    mine = (torch.arange(4.0).reshape(2, 2) + 1, -torch.arange(6.0).reshape(3, 2))[rank].requires_grad_()
    gathered = gather_rows(mine, [2, 3])
    (gathered * torch.arange(1.0, 6)[:, None] * 10**rank).sum().backward()
    assert mine.grad is not None
    total = torch.tensor([1.0 + rank, 10.0])
    found = {"rows": gathered.detach(), "gradient": mine.grad, "sum": sum_over_ranks(total), "untouched": total}
    empty_here = torch.ones(rank, 3, requires_grad=True)  # rank 0 has none
    some = gather_rows(empty_here, [0, 1])
    (some.sum() * (rank + 2)).backward()
    assert empty_here.grad is not None
    found |= {"some": some.detach(), "some_gradient": empty_here.grad}
    found["int"] = gather_rows(torch.tensor([2**40 + rank] * (rank + 1)), [1, 2])
    found["bool"] = gather_rows(torch.tensor([True, False, rank == 0][: 2 + rank]), [2, 3])
    found["none"] = gather_rows(torch.zeros(0, 4), [0, 0])
    found["counts"] = torch.tensor(gather_counts(rank, 7 - rank, device=torch.device("cpu")))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    with join_ranks() as rank:
        assert rank.is_first == (rank.number == 0)
        found = {f"gathering:{name}": tensor for name, tensor in run_gathering(rank.number).items()}
        for scenario in SCENARIOS:
            for name, tensor in run_scenario(scenario, rank.number, rank.world_size).items():
                found[f"{scenario}:{name}"] = tensor
    save_file(found, folder / f"rank-{rank.number}.safetensors")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    meeting |= {"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}  # gloo, whatever the machine has
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_equal_one(ranks: list[dict[str, Tensor]], scenario: str) -> None:
    alone = run_scenario(scenario, 0, 1)
    for step in range(NUM_STEPS):
        mean_loss = torch.stack([found[f"{scenario}:{step}/loss"] for found in ranks]).mean()
        torch.testing.assert_close(mean_loss, alone[f"{step}/loss"], atol=1e-5, rtol=1e-5)
    for name, expected in alone.items():
        if not name.endswith("/loss"):
            for found in ranks:
                torch.testing.assert_close(
                    found[f"{scenario}:{name}"], expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: name + text
                )


def test_every_parameter_has_a_gradient_in_the_comparison() -> None:
    """Otherwise two ranks that compute nothing would agree with one."""
    for name, gradient in run_scenario("mixed", 0, 1).items():
        assert gradient.abs().max() > 0, name
    for name, gradient in run_scenario("silent", 0, 1).items():
        assert gradient.abs().max() == 0, name


def test_rows_are_gathered_in_rank_order(ranks: list[dict[str, Tensor]]) -> None:
    for found in ranks:
        assert found["gathering:rows"].tolist() == [[1, 2], [3, 4], [0, -1], [-2, -3], [-4, -5]]
        assert found["gathering:int"].tolist() == [2**40, 2**40 + 1, 2**40 + 1]
        assert found["gathering:bool"].tolist() == [True, False, True, False, False]
        assert found["gathering:some"].tolist() == [[1, 1, 1]]
        assert found["gathering:none"].shape == (0, 4)
        assert found["gathering:counts"].tolist() == [[0, 7], [1, 6]]
        assert found["gathering:sum"].tolist() == [1 + 2, 10 + 10]
    assert [found["gathering:untouched"].tolist() for found in ranks] == [[1, 10], [2, 10]]


def test_a_rows_gradient_comes_from_every_rank(ranks: list[dict[str, Tensor]]) -> None:
    weight = 1 + 10  # rank 0 weighs by 1, rank 1 by 10, and both by the row's number
    assert ranks[0]["gathering:gradient"].tolist() == [[1 * weight] * 2, [2 * weight] * 2]
    assert ranks[1]["gathering:gradient"].tolist() == [[3 * weight] * 2, [4 * weight] * 2, [5 * weight] * 2]
    assert ranks[0]["gathering:some_gradient"].shape == (0, 3)
    assert ranks[1]["gathering:some_gradient"].tolist() == [[2 + 3] * 3]


def test_one_process_gathers_nothing() -> None:
    rows = torch.randn(3, 2)
    assert gather_rows(rows, [3]) is rows
    assert gather_counts(3, 0, device=torch.device("cpu")) == [[3, 0]]
    assert sum_over_ranks(rows) is rows
    with join_ranks() as rank:
        assert (rank.number, rank.world_size, rank.is_first) == (0, 1, True)


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_fewer_gpus_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    """Otherwise every rank would train on the CPU, and nobody would notice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    expected = rf"4 training processes .* with {num_gpus} GPU.*processes_per_node .* to at most {num_gpus},"
    with pytest.raises(PipelineError, match=expected), join_ranks():
        pass
