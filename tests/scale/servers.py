"""Real servers on loopback, each in a folder of its own, ended when the test ends."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.support.releases import REDIS_SERVER

NUM_SLOTS = 16_384
"""Hash slots of a Redis Cluster."""
POSTGRES_USER = "postgres"
"""Who owns the server's files if the tests run as root, which PostgreSQL refuses to."""
PATIENCE_S = 60


Process = subprocess.Popen[bytes] | subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_ready: Callable[[], bool], process: Process, what: str) -> None:
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


@contextlib.contextmanager
def object_storage() -> Iterator[dict[str, str]]:
    """A server that speaks S3; yields the environment variables by which its clients find it."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_listening(port), server, "the S3 server")
        yield {
            "AWS_ACCESS_KEY_ID": "pinnerformer-key",
            "AWS_SECRET_ACCESS_KEY": "pinnerformer-secret",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait(timeout=PATIENCE_S)


def new_bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """s3://…, with the clients' settings in the environment, and a cache of this test's own.

    s3fs and MLflow keep their clients, and neither has AWS_ENDPOINT_URL in the key: without clearing both, a test that
    follows one with another server would call the server that has ended.
    """
    from mlflow.store.artifact import s3_artifact_repo
    from s3fs import S3FileSystem

    from pf_core.storage.files import path_of

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PF_LOCAL_DIR", str(tmp_path / "this-machine"))
    S3FileSystem.clear_instance_cache()
    s3_artifact_repo._cached_get_s3_client.cache_clear()
    bucket = f"s3://pf-{secrets.token_hex(6)}"
    path_of(bucket).mkdir()
    return bucket


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class RedisNodes:
    """A Redis Cluster of three masters without replicas; a node that restarts has its data again."""

    def __init__(self, folder: Path, *, password: str) -> None:
        self._folder, self._password = folder, password
        self.ports = [_port_with_bus() for _ in range(3)]
        self._processes = [self._start(port) for port in self.ports]
        self.url = f"redis://:{password}@127.0.0.1:{self.ports[0]}"

    def form(self) -> None:
        """Share the slots out, and make the nodes known to each other."""
        bounds = [NUM_SLOTS * number // 3 for number in range(4)]
        for port, first, end in zip(self.ports, bounds, bounds[1:], strict=False):
            wait_until(lambda port=port: is_listening(port), self.process(port), "Redis")
            with self.node(port) as node:
                node.execute_command("CLUSTER ADDSLOTS", *range(first, end))
        with self.node(self.ports[0]) as node:
            for port in self.ports[1:]:
                node.execute_command("CLUSTER MEET", "127.0.0.1", port)
        self.wait()

    def node(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=self._password)

    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster.from_url(self.url)

    def process(self, port: int) -> subprocess.Popen[bytes]:
        return self._processes[self.ports.index(port)]

    def kill(self, port: int) -> None:
        self.process(port).kill()
        self.process(port).wait()

    def start_again(self, port: int) -> None:
        self._processes[self.ports.index(port)] = self._start(port)
        self.wait()

    def wait(self) -> None:
        """Until every node says that the cluster is whole."""
        for port in self.ports:
            wait_until(lambda port=port: self.is_whole(port), self.process(port), "the Redis Cluster")

    def is_whole(self, port: int) -> bool:
        if not is_listening(port):
            return False
        with self.node(port) as node:
            try:
                return bool(node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            except redis.BusyLoadingError:
                return False

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        options = {"port": str(port), "bind": "127.0.0.1", "dir": str(folder), "requirepass": self._password}
        options |= {"save": "", "appendonly": "yes", "cluster-enabled": "yes", "cluster-node-timeout": "1000"}
        command = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        return subprocess.Popen([str(REDIS_SERVER), *command], stdout=subprocess.DEVNULL)


def _port_with_bus() -> int:
    """A free one, whose port + 10,000 is free too: nodes talk to each other there."""
    while (port := free_port()) + 10_000 >= 1 << 16 or is_listening(port + 10_000):
        pass
    return port


class SparkCluster:
    """A standalone master and its workers, each a process of its own."""

    def __init__(self, folder: Path, *, num_workers: int) -> None:
        import pyspark

        self._home, self._folder = Path(pyspark.__file__).parent, folder
        self._port, self._page = free_port(), free_port()
        self.master = f"spark://127.0.0.1:{self._port}"
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--webui-port", str(self._page))
        self._processes = [self._start("master", "org.apache.spark.deploy.master.Master", *address)]
        self.workers = [self.start_worker() for _ in range(num_workers)]

    def wait(self) -> None:
        wait_until(lambda: self.num_alive() == len(self.workers), self._processes[0], "the Spark cluster")

    def start_worker(self) -> subprocess.Popen[bytes]:
        number = len(self._processes)
        place = ("--host", "127.0.0.1", "--webui-port", "0", "--work-dir", str(self._folder / f"work-{number}"))
        size = ("--cores", "1", "--memory", "1g")
        name = "org.apache.spark.deploy.worker.Worker"
        self._processes.append(self._start(f"worker-{number}", name, *place, *size, self.master))
        return self._processes[-1]

    def num_alive(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/", timeout=5) as page:
                return int(json.load(page)["aliveworkers"])
        except (OSError, ValueError):  # the page is not there yet, or not yet what it will be
            return 0

    def stop(self) -> None:
        """Kill it: a master that gets SIGTERM may take minutes to end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=PATIENCE_S)

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [str(self._home / "bin" / "spark-class"), *command],
                cwd=self._folder,
                env={**os.environ, "SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": "127.0.0.1"},
                stdout=log,
                stderr=log,
            )
