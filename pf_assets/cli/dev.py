"""`pf dev`: the Dagster UI and the MLflow UI on this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pf_assets.cli.output import show
from pf_assets.settings import REPOSITORY, current_site, dagster_home
from pf_assets.tracking.tracking import Tracking
from pf_core.storage.privacy import umask_for


def dev(dagster_port: int = 3000, mlflow_port: int = 5000) -> None:
    """Serve the Dagster UI and the MLflow UI until Ctrl-C."""
    site = current_site()
    tracking = Tracking(site)
    tracking.prepare()
    environment = {
        **os.environ,
        "DAGSTER_HOME": dagster_home(),
        "PF_MLFLOW_SERVER": os.environ.get("PF_MLFLOW_SERVER") or f"http://localhost:{mlflow_port}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_BACKEND_STORE_URI": tracking.uri,  # not an argument: every user of the machine can read those
    }
    show(f"Dagster: http://localhost:{dagster_port}   MLflow: http://localhost:{mlflow_port}   Ctrl-C ends both")
    commands = [
        ["dagster", "dev", "-w", "workspace.yaml", "-p", str(dagster_port)],
        [
            *("mlflow", "server", "--port", str(mlflow_port), "--workers", "1"),
            *("--artifacts-destination", str(tracking.artifacts)),
        ],
    ]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
            umask=umask_for(Path(environment["DAGSTER_HOME"])),
        )
        for command in commands
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while all(server.poll() is None for server in servers):
            time.sleep(1)
    except KeyboardInterrupt:
        show("stopping")
    finally:
        for server in servers:
            _stop(server)


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
