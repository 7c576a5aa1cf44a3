"""Start the training processes and stand by them: progress in, cancellation out.

Dagster's PipesSubprocessClient would do for a single process. This one also hands on measurements while the run lasts
(the client keeps them for the end), and leaves no process behind: torch.distributed.run starts each rank in a session
of its own, where no signal to a process group reaches it.
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
from pf_core.config.training import LaunchConfig
from pf_core.storage.files import read_json
from pf_core.training.plan import Measurement

POLL_S = 0.5

PATIENCE_S = 75
"""After SIGTERM, torch.distributed.run gives its ranks 30 s before it kills them."""


def command_for(launch: LaunchConfig, job_file: Path) -> list[str]:
    """The same on every node."""
    if launch.num_nodes == 1 and launch.rendezvous_endpoint is None:
        meeting = ["--standalone"]
    else:
        meeting = [
            *("--nnodes", str(launch.num_nodes), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", str(launch.rendezvous_endpoint), "--rdzv-id", launch.rendezvous_id),
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *meeting),
        *("--nproc-per-node", str(launch.processes_per_node), "--max-restarts", str(launch.max_restarts)),
        *("-m", "pf_assets.launch.train_job", str(job_file)),
    ]


def settings_for(launch: LaunchConfig) -> dict[str, str]:
    """Environment variables, the same on every node."""
    return {
        "OMP_NUM_THREADS": str(_threads(launch)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a node that comes back does not find the shared one (torch 2.13)
    }


def run_ranks(
    context: dg.AssetExecutionContext,
    launch: LaunchConfig,
    job_file: Path,
    *,
    receive: Callable[[Sequence[Measurement]], None],
) -> None:
    """Run a job to its end. A failure says why; leaving this function in any way ends every rank."""
    run_dir = job_file.parent
    for old in (run_dir / STOPPED, *run_dir.glob("crash-*.json")):
        old.unlink(missing_ok=True)
    command = command_for(launch, job_file)
    settings = settings_for(launch)
    on_others = f" (start the same on the other {launch.num_nodes - 1} nodes)" if launch.num_nodes > 1 else ""
    shown = " ".join([*(f"{name}={value}" for name, value in settings.items()), *command])
    context.log.info(f"starting{on_others}: {shown}")
    num_received = 0

    def hand_on(session: dg.PipesSession) -> None:
        nonlocal num_received
        messages: Sequence[Any] = session.get_custom_messages()[num_received:]
        num_received += len(messages)
        if messages:
            receive(messages)

    with dg.open_pipes_session(context, dg.PipesTempFileContextInjector(), dg.PipesTempFileMessageReader()) as session:
        process = subprocess.Popen(
            [*command, "--attached"],
            stdin=subprocess.PIPE,
            env={**os.environ, **settings, **session.get_bootstrap_env_vars()},
            start_new_session=True,  # Ctrl-C in a terminal reaches this process, which ends the others in order
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                hand_on(session)
        finally:
            _end(process)
    hand_on(session)
    _raise_if_failed(run_dir, process.returncode)


def _threads(launch: LaunchConfig) -> int:
    return launch.threads_per_process or max(1, len(os.sched_getaffinity(0)) // launch.processes_per_node)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, then made to. Closing the pipe ends every rank that is still there."""
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
    if (run_dir / STOPPED).exists():
        raise dg.Failure(read_json(run_dir / STOPPED)["reason"], allow_retries=False)
    if exit_code:
        crashes = sorted(run_dir.glob("crash-*.json"))
        last = read_json(crashes[-1]) if crashes else None
        error = "one was killed" if last is None else f"rank {last['rank']}: {last['error']}"
        raise dg.Failure(
            f"the training processes ended with exit code {exit_code}; {error}. "
            "Their output is in the run's stderr; materializing again continues from the last checkpoint",
            allow_retries=False,
        )
