"""Training without its processes: to start torch.distributed.run and a rank takes longer than a tiny model's steps."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

from pf_assets.launch import train_job
from pf_assets.launch.processes import _raise_if_failed
from pf_core.config.training_section import LaunchConfig
from pf_core.training.plan import Measurement, read_history

RUN_RANKS = "pf_assets.launch.training.run_ranks"
"""The name to replace."""


def run_rank_here(
    context: dg.AssetExecutionContext,
    launch: LaunchConfig,
    job_file: Path,
    *,
    receive: Callable[[Sequence[Measurement]], None],
) -> None:
    """`run_ranks` with one rank, in this process: it reads the job file and leaves the same files behind."""
    run_dir = job_file.parent
    (run_dir / train_job.STOPPED).unlink(missing_ok=True)
    context.log.info(f"starting in this process: {job_file}")
    train_job.main([str(job_file)])
    _raise_if_failed(run_dir, 0)
    receive(read_history(run_dir))
