"""The processes of one training run. A single process is the same code with a world of one."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True, kw_only=True)
class Rank:
    number: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.number == 0


@contextlib.contextmanager
def join_ranks() -> Iterator[Rank]:
    """Meet the processes that torch.distributed.run started: NCCL between GPUs, gloo between CPUs."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):  # a GPU for each rank, or none
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Rank(number=0, world_size=1, device=device)
        return
    store, number, world_size = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It outlives a restart, with the addresses of the processes that died: each attempt has its own part of it.
        # Nodes that have not restarted as often as each other never meet there; `launch` has a store for each attempt.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=world_size)
    try:
        yield Rank(number=number, world_size=world_size, device=device)
    finally:
        dist.destroy_process_group()


def gather_counts(*counts: int, device: torch.device) -> list[list[int]]:
    """Every rank's counts, in rank order."""
    if not dist.is_initialized():
        return [list(counts)]
    ours = torch.tensor(counts, device=device)
    everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    return torch.stack(everyone).tolist()


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """The rows of all ranks, `sizes` of them, in rank order; with gradient."""
    if not dist.is_initialized():
        return rows
    gathered: Tensor = _GatherRows.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """What a rank's rows contribute to all ranks' losses flows back to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.contiguous().clone()
        dist.all_reduce(total)
        return total.split(ctx.sizes)[dist.get_rank()], None


def sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values
