"""Start the training processes, receive their measurements, and end them when the run is cancelled.

Dagster's PipesSubprocessClient would be enough for a single process. `run_ranks` differs in two ways. It passes
measurements on during the run (the client keeps them until the end). And it leaves no process running, also if the run
itself is killed: torch.distributed.run starts each rank in a session of its own, which signals to a process group do
not reach, and would start killed ranks again.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.launch.train_job import STOPPED
from pf_core.config.training_section import LaunchConfig
from pf_core.parent_process import tied
from pf_core.storage.files import read_json
from pf_core.training.plan import Measurement

POLL_S = 0.5

PATIENCE_S = 75
"""Time to end after SIGTERM: torch.distributed.run gives its ranks 30 s before it kills them."""


def command_for(launch: LaunchConfig, job_file: Path) -> list[str]:
    """Return the command that starts the ranks of a node; it is the same on every node."""
    if launch.num_nodes == 1 and launch.rendezvous_endpoint is None:
        rendezvous = ["--standalone"]
    else:
        rendezvous = [
            *("--nnodes", str(launch.num_nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", str(launch.rendezvous_endpoint), "--rdzv-id", launch.rendezvous_id),
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous),
        *("--nproc-per-node", str(launch.processes_per_node), "--max-restarts", str(launch.max_restarts)),
        *("-m", "pf_assets.launch.train_job", str(job_file)),
    ]


def settings_for(launch: LaunchConfig) -> dict[str, str]:
    """Return the environment variables of the command; they are the same on every node."""
    return {
        "OMP_NUM_THREADS": str(_threads(launch)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted node does not find the shared store (torch 2.13)
    }


def run_ranks(
    context: dg.AssetExecutionContext,
    launch: LaunchConfig,
    job_file: Path,
    *,
    receive: Callable[[Sequence[Measurement]], None],
) -> None:
    """Run a job to its end, and pass its measurements to `receive` during the run.

    Raises dg.Failure with the reason if the job fails. Every rank has ended when this function returns or raises.
    """
    run_dir = job_file.parent
    for old in (run_dir / STOPPED, *run_dir.glob("crash-*.json")):
        old.unlink(missing_ok=True)
    command = command_for(launch, job_file)
    settings = settings_for(launch)
    on_others = f" (start it on the other {launch.num_nodes - 1} nodes, too)" if launch.num_nodes > 1 else ""
    shown = " ".join([*(f"{name}={value}" for name, value in settings.items()), *command])
    context.log.info(f"starting{on_others}: {shown}")
    num_received = 0

    def pass_on(session: dg.PipesSession) -> None:
        nonlocal num_received
        messages: Sequence[Any] = session.get_custom_messages()[num_received:]
        num_received += len(messages)
        if messages:
            receive(messages)

    with dg.open_pipes_session(context, dg.PipesTempFileContextInjector(), dg.PipesTempFileMessageReader()) as session:
        process = subprocess.Popen(
            tied([*command, "--attached"]),
            stdin=subprocess.PIPE,
            env={**os.environ, **settings, **session.get_bootstrap_env_vars()},
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which ends the others
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                pass_on(session)
        finally:
            _end(process)
    pass_on(session)
    _raise_if_failed(run_dir, process.returncode)


def _threads(launch: LaunchConfig) -> int:
    """Number of threads of each process: the site file's, the caller's OMP_NUM_THREADS, or a share of the cores."""
    callers = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // launch.processes_per_node)
    return launch.threads_per_process or (int(callers) if callers.isdecimal() and int(callers) else share)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes with SIGTERM, and after PATIENCE_S with SIGKILL.

    Closing the pipe to their standard input ends every rank that is still running (see train_job).
    """
    assert process.stdin is not None
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PATIENCE_S)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def _raise_if_failed(run_dir: Path, exit_code: int) -> None:
    """Raise dg.Failure with the reason of a deliberate stop, or with the first error of the last attempt."""
    if (run_dir / STOPPED).exists():
        raise dg.Failure(read_json(run_dir / STOPPED)["reason"], allow_retries=False)
    if exit_code:
        crashes = sorted(run_dir.glob("crash-*.json"))
        last = read_json(crashes[-1]) if crashes else None
        error = "one of them was killed" if last is None else f"rank {last['rank']}: {last['error']}"
        raise dg.Failure(
            f"the training processes ended with exit code {exit_code}; {error}. Their output is in the run's stderr. "
            "Re-execute the run: it continues from the last checkpoint",
            allow_retries=False,
        )
