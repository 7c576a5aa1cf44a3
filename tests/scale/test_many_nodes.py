"""Two nodes: two agents of torch.distributed.run on loopback, each with a rank, started as the asset's log says."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pf_assets.launch.processes import command_for, settings_for
from pf_assets.launch.train_job import TrainJob
from pf_core.config.training import TrainConfig, choose
from pf_core.config.training_section import LaunchConfig
from tests.scale.servers import free_port, wait_until
from tests.support.planted import write_planted_set

pytestmark = pytest.mark.scale

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 240


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planted_set(tmp_path_factory.mktemp("planted") / "set")


def start_node(launch: LaunchConfig, planted: Path, run_dir: Path, config: TrainConfig) -> subprocess.Popen[str]:
    run_dir.mkdir(parents=True, exist_ok=True)
    job = TrainJob(config=config, training_set=str(planted), run_dir=str(run_dir), num_workers=0)
    (run_dir / "job.json").write_text(job.model_dump_json())
    return subprocess.Popen(
        command_for(launch, run_dir / "job.json"),
        cwd=REPOSITORY,
        env={**os.environ, **settings_for(launch), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*nodes: subprocess.Popen[str]) -> str:
    outputs = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n\n".join(outputs)
    return "\n".join(outputs)


def kill_node(node: subprocess.Popen[str]) -> None:
    """As if the machine had lost power: the agent and its ranks, which lead sessions of their own."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for pid in (node.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    node.communicate()


def two_nodes() -> LaunchConfig:
    return LaunchConfig(
        num_nodes=2, processes_per_node=1, rendezvous_endpoint=f"127.0.0.1:{free_port()}", threads_per_process=1
    )


def is_listening(launch: LaunchConfig) -> bool:
    assert launch.rendezvous_endpoint is not None
    host, port = launch.rendezvous_endpoint.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


def test_two_nodes_have_the_loss_of_one(planted: Path, tmp_path: Path) -> None:
    config, launch = choose("tiny", {}), two_nodes()
    finish(*(start_node(launch, planted, tmp_path / "two", config) for _ in range(2)))
    finish(start_node(LaunchConfig(processes_per_node=2), planted, tmp_path / "one", config))
    finish(start_node(LaunchConfig(processes_per_node=1), planted, tmp_path / "single", config))
    for name, tensor in weights(tmp_path / "one").items():
        assert torch.equal(tensor, weights(tmp_path / "two")[name]), name
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "single"), rel=1e-4)


def test_a_node_that_dies_and_comes_back_goes_on(planted: Path, tmp_path: Path) -> None:
    config = choose("tiny", {"optimizer": {"num_steps": 300}, "checkpoint_every": 10, "evaluate_every": 300})
    launch, run_dir = two_nodes(), tmp_path / "killed"
    host = start_node(launch, planted, run_dir, config)
    wait_until(
        lambda: is_listening(launch), host, "the rendezvous"
    )  # on loopback, the first agent that listens hosts it
    other = start_node(launch, planted, run_dir, config)
    deadline = time.monotonic() + PATIENCE_S
    while not list((run_dir / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        assert host.poll() is None
        time.sleep(0.05)
    kill_node(other)
    again = start_node(launch, planted, run_dir, config)
    assert "resuming after step" in finish(host, again)
    whole = tmp_path / "whole"
    finish(start_node(LaunchConfig(processes_per_node=2), planted, whole, config))
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(run_dir)[name]), name
    assert losses(run_dir) == losses(whole)
