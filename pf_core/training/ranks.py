"""The processes (ranks) of one training run, and the collective operations between them.

Every function also works in a single process without a process group: it is then a world of one, and no code path of
its own. `gather_rows` has a gradient, because the pool of negatives is gathered from all ranks (paper, section 3.3.1).
"""

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

from pf_core.model.device import choose_device


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among those of the run."""

    number: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.number == 0


@contextlib.contextmanager
def join_ranks() -> Iterator[Rank]:
    """Join the process group that torch.distributed.run started: NCCL between GPUs, gloo between CPUs.

    All processes compute on GPUs, or all on CPUs; a machine with fewer GPUs than processes is refused.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(
        "auto",
        process=int(os.environ.get("LOCAL_RANK", "0")),
        num_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if device.index is not None:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Rank(number=0, world_size=1, device=device)
        return
    store, number, world_size = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's store survives a restart and keeps the addresses of the dead processes: each attempt uses a prefix
        # of its own. Nodes with different numbers of restarts never meet under one prefix; `pf_assets.launch` therefore
        # makes the agent create a store for each attempt (TORCH_DISABLE_SHARE_RDZV_TCP_STORE).
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=world_size)
    try:
        yield Rank(number=number, world_size=world_size, device=device)
    finally:
        dist.destroy_process_group()


def gather_counts(*counts: int, device: torch.device) -> list[list[int]]:
    """Return the counts of every rank, in rank order."""
    if not dist.is_initialized():
        return [list(counts)]
    ours = torch.tensor(counts, device=device)
    everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    return torch.stack(everyone).tolist()


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Concatenate the rows of all ranks, in rank order; rank r has sizes[r] of them. Gradients flow back."""
    if not dist.is_initialized():
        return rows
    gathered: Tensor = _GatherRows.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """The gradient of a rank's rows is the sum of their gradients on all ranks."""

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
    """Return the elementwise sum of the tensors of all ranks; the argument is left unchanged."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values
