"""`pf dev`: the Dagster UI and the MLflow UI on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pf_assets.cli.output import show
from pf_assets.cli.runs import prepare_instance
from pf_assets.settings import WORKSPACE, current_site, dagster_home, environment_of_runs, site_path
from pf_assets.tracking.tracking import Tracking
from pf_core.errors import PipelineError
from pf_core.parent_process import tied_group
from pf_core.storage.privacy import umask_for

Port = Annotated[int, typer.Option(min=1, max=65535)]


def dev(dagster_port: Port = 3000, mlflow_port: Port = 5000) -> None:
    """Serve the Dagster UI and the MLflow UI until Ctrl-C."""
    site, home = current_site(), dagster_home()
    if dagster_port == mlflow_port:
        raise PipelineError(f"port {dagster_port} is given twice", "give --dagster-port and --mlflow-port two ports")
    refuse_busy(dagster_port, "--dagster-port")
    refuse_busy(mlflow_port, "--mlflow-port")
    prepare_instance(Path(home))
    tracking = Tracking(site)
    tracking.prepare()
    environment = {
        **environment_of_runs(home, site_path(os.environ)),
        "PF_MLFLOW_SERVER": os.environ.get("PF_MLFLOW_SERVER") or f"http://localhost:{mlflow_port}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_BACKEND_STORE_URI": tracking.uri,  # not an argument: every user of the machine can read those
    }
    show(f"Dagster: http://localhost:{dagster_port}   MLflow: http://localhost:{mlflow_port}   Ctrl-C ends both")
    commands = {
        "Dagster": ["dagster", "dev", "-w", str(WORKSPACE), "-p", str(dagster_port)],
        "MLflow": [
            *("mlflow", "server", "--port", str(mlflow_port), "--workers", "1"),
            *("--artifacts-destination", str(tracking.artifacts)),
        ],
    }
    servers: dict[str, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name, command in commands.items():
            servers[name] = subprocess.Popen(
                tied_group([sys.executable, "-m", *command]),
                cwd=home,
                env=environment,
                start_new_session=True,
                umask=umask_for(Path(home)),
            )
        ended = _first_ended(servers)
    except KeyboardInterrupt:
        show("stopping")
        return
    finally:
        for server in servers.values():
            _stop(server)
    raise PipelineError(
        f"{ended}'s server ended with exit code {servers[ended].returncode}, and pf dev has stopped the other one",
        "its last lines above say why",
    )


def refuse_busy(port: int, option: str) -> None:
    """Refuse a port that another program listens on, or that this user may not open."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers: not refused after a restart
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise PipelineError(
                f"port {port} of this machine cannot be opened: {error.strerror}",
                f"end the program that uses it, or choose another port with {option}",
            ) from error


def _first_ended(servers: dict[str, subprocess.Popen[bytes]]) -> str:
    """Wait until a server has ended, and return its name."""
    while True:
        for name, server in servers.items():
            if server.poll() is not None:
                return name
        time.sleep(1)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and its child processes: SIGINT first, SIGKILL if that does not end them."""
    for signal_number, timeout_s in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(server.pid, signal_number)
            server.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return
