"""Where the model computes: the device of a process, and the number of threads of its operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from pf_core.errors import PipelineError


def choose_device(name: Literal["auto", "cpu", "cuda"], *, process: int = 0, num_processes: int = 1) -> torch.device:
    """Return the device that `name` means on this machine; "auto" is a GPU if there is one, else the CPU.

    Where several processes of one machine compute together, each gets the GPU with its own number. Processes without a
    GPU of their own are refused: on the CPU they would delay all others, and nothing would show it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if num_processes == 1:
        return torch.device("cuda")
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_processes:
        raise PipelineError(
            f"{num_processes} training processes were started on a machine with {num_gpus} GPU(s), and each needs one",
            f"set training.launch.processes_per_node in the site file to at most {num_gpus}, or add GPUs; "
            "CUDA_VISIBLE_DEVICES='' trains on the CPU",
        )
    return torch.device("cuda", process)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Within this context, an operation of torch uses one thread: for callers that start threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
