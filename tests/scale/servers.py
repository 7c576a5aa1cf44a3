"""Real servers on loopback, each in a folder of its own, ended when the test ends."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

POSTGRES_USER = "postgres"
"""Who owns the server's files if the tests run as root, which PostgreSQL refuses to."""
PATIENCE_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_ready():
        assert process.poll() is None, f"{what} ended with exit code {process.returncode}"
        assert time.monotonic() < deadline, f"{what} did not start within {PATIENCE_S} s"
        time.sleep(0.2)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server from Debian's packages; yields postgresql://user:password@host:port, without a database."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not binaries:
        pytest.fail("no PostgreSQL server in /usr/lib/postgresql: `make test-scale` installs it")
    user = POSTGRES_USER if os.getuid() == 0 else None
    folder, port, password = Path(tempfile.mkdtemp(prefix="pf-postgres-")), free_port(), secrets.token_hex(8)
    binary = binaries[-1].parent
    try:
        (folder / "password").write_text(password)
        if user is not None:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        login = ["-U", "pf", "--auth", "scram-sha-256", "--pwfile", str(folder / "password")]
        subprocess.run(
            [binary / "initdb", "-D", folder / "data", *login], user=user, cwd=folder, check=True, capture_output=True
        )
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [
                    *(binary / "postgres", "-D", folder / "data", "-k", folder, "-p", str(port)),
                    *("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
                ],
                user=user,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        try:
            address = ["-h", "127.0.0.1", "-p", str(port)]
            wait_until(
                lambda: subprocess.run([binary / "pg_isready", "-q", *address], check=False).returncode == 0,
                server,
                "PostgreSQL",
            )
            yield f"postgresql://pf:{password}@127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGINT)  # without waiting for those who are connected
            server.wait(timeout=PATIENCE_S)
    finally:
        shutil.rmtree(folder)


def create_database(server: str, name: str) -> str:
    import psycopg2

    connection = psycopg2.connect(f"{server}/postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{name}"')
    connection.close()
    return f"{server}/{name}"
