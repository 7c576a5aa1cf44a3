"""training_set and pinnerformer_model through real Dagster runs: real processes, real checkpoints, a real MLflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast, get_args

import dagster as dg
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_assets.assets.model import PresetName
from pf_assets.cli.pipeline import missing_model
from pf_assets.definitions import build_definitions
from pf_assets.launch import train_job
from pf_assets.launch.processes import _raise_if_failed, command_for
from pf_assets.settings import DEMO_SITE, REPOSITORY
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.config.training import tiny
from pf_core.config.training_section import LaunchConfig, Preset, TrainingConfig
from pf_core.days import ds_range, shift_ds
from pf_core.pins.features import build_pin_features
from pf_core.training.plan import current_model, models_dir, plan_model, read_history, training_fault
from pf_core.training.training_set import latest_training_set
from tests.support.shared import SharedSites
from tests.support.sites import START, SmallSite
from tests.support.training_here import RUN_RANKS, run_rank_here

NUM_DAYS = 16  # two more than the held-out users' recall looks back
LAST = shift_ds(START, NUM_DAYS - 1)
NUM_USERS, NUM_PINS, NUM_INTERESTS = 120, 80, 4
ASSETS = ("training_set", "pinnerformer_model")


def make_timelines(root: Path) -> Site:
    """Every user looks at pins of one interest; timelines and pins are there, nothing is trained."""
    small = SmallSite(root)
    rng = np.random.default_rng(0)
    for ds in ds_range(START, LAST):
        day = ds_range(START, LAST).index(ds)
        users = np.repeat(np.arange(NUM_USERS), 2)
        pins = rng.integers(NUM_PINS // NUM_INTERESTS, size=len(users)) * NUM_INTERESTS + users % NUM_INTERESTS
        seconds = day * 86_400 + rng.integers(86_400, size=len(users))
        small.write_log(ds, [(int(u), f"p{p}", float(s), "look") for u, p, s in zip(users, pins, seconds, strict=True)])
    vectors = np.eye(NUM_INTERESTS)[np.arange(NUM_PINS) % NUM_INTERESTS] + rng.normal(0, 0.3, (NUM_PINS, NUM_INTERESTS))
    catalogue = {"pin": [f"p{pin}" for pin in range(NUM_PINS)], "vector": pa.array(vectors.tolist())}
    pq.write_table(pa.table(catalogue), root / "pins.parquet")
    source = small.site.source
    pins_source = source.pins.model_copy(
        update={"catalogue": source.pins.catalogue.model_copy(update={"path": "pins.parquet"})}
    )
    training = TrainingConfig(evaluation_days=0, preset="tiny", launch=LaunchConfig(num_workers=0))
    small.site = small.site.model_copy(
        update={"source": source.model_copy(update={"pins": pins_source}), "training": training, "end_ds": LAST}
    )
    small.ingest(ds_range(START, LAST))
    small.build([LAST], rebuild=True)
    list(build_pin_features(small.site, [LAST], engine=small.engine, progress=print))
    small.engine.__exit__(None, None, None)
    return small.site


def relaunched(site: Site, **launch: int) -> Site:
    """The same model, trained by other processes."""
    return site.model_copy(update={"training": site.training.model_copy(update={"launch": LaunchConfig(**launch)})})


def make_trained(root: Path, shared: SharedSites) -> Site:
    """The same after a run in this process, for the tests that need a model and not its training."""
    site = shared.add_mlflow(make_timelines(root))
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(RUN_RANKS, run_rank_here)
        assert run(site, instance, assets=ASSETS).success
    return site


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    """A copy of a site with a model."""
    return shared_sites.copy("trained", lambda root: make_trained(root, shared_sites), tmp_path / "site")


@pytest.fixture
def instance(memory_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return memory_instance


def run(
    site: Site,
    instance: dg.DagsterInstance,
    *,
    assets: tuple[str, ...] = ("pinnerformer_model",),
    only_checks: bool = False,
    **model: Any,
) -> dg.ExecuteInProcessResult:
    definitions = build_definitions(site)
    selection = dg.AssetSelection.checks_for_assets(*assets) if only_checks else dg.AssetSelection.assets(*assets)
    return dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=selection,
        instance=instance,
        run_config={"ops": {"pinnerformer_model": {"config": model}}} if model else None,
        raise_on_error=False,
    )


def check_results(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in result.get_asset_check_evaluations()}


def log_of(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> list[str]:
    return [entry.user_message for entry in instance.all_logs(result.run_id)]


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    data = result.failure_data_for_node("pinnerformer_model")
    assert data is not None
    assert data.error is not None
    return data.error.to_string()


def wait_for(condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_model_is_trained(tmp_path: Path, shared_sites: SharedSites) -> None:
    """By a process of torch.distributed.run, on an instance in SQLite files; Dagster's page and MLflow show it."""
    (tmp_path / "dagster").mkdir()
    (tmp_path / "site").mkdir()
    site = shared_sites.add_mlflow(make_timelines(tmp_path / "site"))
    with dg.instance_for_test(temp_dir=str(tmp_path / "dagster")) as instance:
        trained = run(site, instance, assets=ASSETS)
        assert trained.success
        assert_files_are_complete(site, trained)
        assert_the_page_shows_the_training(site, instance, trained)
        assert_mlflow_has_the_run(site, trained)


def assert_files_are_complete(site: Site, trained: dg.ExecuteInProcessResult) -> None:
    assert check_results(trained) == {
        "held_out_users_are_disjoint": True,
        "nothing_is_later_than_the_cut": True,
        "loss_fell_and_is_finite": True,
    }
    manifest = current_model(site)
    assert manifest is not None
    assert manifest["cut_ds"] == LAST
    folder = models_dir(site) / manifest["model_version"] / "model"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "model.json"}


def assert_the_page_shows_the_training(
    site: Site, instance: dg.DagsterInstance, trained: dg.ExecuteInProcessResult
) -> None:
    shown = trained.asset_materializations_for_node("pinnerformer_model")[0].metadata
    assert {"loss", "temperature", "recall_at_10", "examples_per_s", "data_wait_share", "parameters"} <= shown.keys()
    assert shown["steps"].value == 20
    assert 10 / NUM_PINS < shown["recall_at_10"].value <= 1
    assert [record.data["step"] for record in shown["measurements"].value.records] == [5, 10, 15, 20]
    assert shown["training"].value.startswith("![")
    assert Path(shown["training_png"].value).read_bytes().startswith(b"\x89PNG")
    manifest = current_model(site)
    assert manifest is not None
    assert f"/runs/{manifest['mlflow']['run_id']}" in shown["mlflow_run"].value
    numbers = trained.asset_materializations_for_node("training_set")[0].metadata
    assert numbers["train_users"].value + numbers["held_out_users"].value == NUM_USERS
    assert numbers["evaluation_days"].value == "0 (training.evaluation_days in the site file)"
    observed = [event.asset_observation_data.asset_observation for event in trained.get_asset_observation_events()]
    assert [observation.metadata["step"].value for observation in observed] == [
        f"{step} of 20" for step in (5, 10, 15, 20)
    ]
    assert {"loss", "temperature", "examples_per_s"} <= observed[0].metadata.keys()
    stored = instance.fetch_observations(dg.AssetKey("pinnerformer_model"), limit=100).records
    assert len(stored) == len(observed)
    assert any("recall@10" in line for line in log_of(instance, trained))


def assert_mlflow_has_the_run(site: Site, trained: dg.ExecuteInProcessResult) -> None:
    tracking, manifest = Tracking(site), current_model(site)
    assert manifest is not None
    found = tracking._client.get_run(manifest["mlflow"]["run_id"])
    assert found.info.status == "FINISHED"
    assert found.data.params["model.num_layers"] == "1"
    expected = {
        "model_version": manifest["model_version"],
        "training_set": manifest["training_set"],
        "cut_ds": LAST,
        "site": "small",
        "dagster_run_id": trained.run_id,
    }
    assert expected.items() <= found.data.tags.items()
    losses = tracking._client.get_metric_history(manifest["mlflow"]["run_id"], "loss")
    run_dir = models_dir(site) / manifest["model_version"]
    measured = [(point["step"], point["loss"]) for point in read_history(run_dir) if "loss" in point]
    assert [(metric.step, metric.value) for metric in losses] == measured
    kept = {file.path for file in tracking._client.list_artifacts(manifest["mlflow"]["run_id"])}
    assert {"model", "training.png", "training_set.json", "history.jsonl", "result.json"} <= kept
    assert tracking.champion() is None, "the evaluation decides"
    candidate = tracking.candidate()
    assert candidate is not None
    assert candidate.model_version == manifest["model_version"]
    assert (candidate.path / "model.safetensors").read_bytes() == (run_dir / "model/model.safetensors").read_bytes()


def test_what_is_trained_is_reused(site: Site, instance: dg.DagsterInstance) -> None:
    before = current_model(site)
    again = run(site, instance)
    assert again.success
    assert any("is trained already" in line for line in log_of(instance, again))
    assert not any("starting" in line for line in log_of(instance, again))
    assert current_model(site) == before
    assert len(Tracking(site)._versions()) == 1


def test_retrain_keeps_what_was_there(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = current_model(site)
    assert before is not None
    run_dir = models_dir(site) / before["model_version"]
    aside = run_dir.with_name(f"{run_dir.name}.before-retrain")

    def train_as_before(*_: Any, **__: Any) -> None:
        assert not (run_dir / "result.json").exists()
        for name in ("history.jsonl", "result.json"):
            shutil.copy(aside / name, run_dir)
        shutil.copytree(aside / "model", run_dir / "model")

    monkeypatch.setattr(RUN_RANKS, train_as_before)
    assert run(site, instance, retrain=True).success
    after = current_model(site)
    assert after is not None
    assert after["mlflow"]["run_id"] != before["mlflow"]["run_id"]
    assert after["mlflow"]["version"] == before["mlflow"]["version"] + 1  # the new run's weights, not the old ones'
    candidate = Tracking(site).candidate()
    assert candidate is not None
    assert candidate.run_id == after["mlflow"]["run_id"]


def test_the_demo_makes_what_is_missing(site: Site, tmp_path: Path) -> None:
    assert missing_model(SmallSite(tmp_path).site) == ["training_set", "pinnerformer_model"]
    assert missing_model(site) == []
    other = site.model_copy(update={"training": site.training.model_copy(update={"changes": {"seed": 5}})})
    assert missing_model(other) == ["pinnerformer_model"]


def start_training(site: Site, folder: Path, changes: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Start a Dagster run that trains with two ranks, each with a process that samples."""
    sampling = relaunched(site, processes_per_node=2, num_workers=1)
    (folder / "site.yaml").write_text(sampling.model_dump_json())
    (folder / "dagster.yaml").touch()
    config = {"ops": {"pinnerformer_model": {"config": {"changes": changes}}}}
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", "pinnerformer_model"]
    return subprocess.Popen(
        [*command, "-m", "pf_assets.definitions", "--config-json", json.dumps(config)],
        env={**os.environ, "PF_SITE": str(folder / "site.yaml"), "DAGSTER_HOME": str(folder)},
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_run_that_is_killed_alone_leaves_no_training_behind(site: Site, tmp_path: Path) -> None:
    changes = {"optimizer": {"num_steps": 100_000}, "log_every": 10, "evaluate_every": 100_000, "checkpoint_every": 20}
    run_dir = plan_model(site, changes=changes).run_dir
    process = start_training(site, tmp_path, changes)
    wait_for(lambda: any(run_dir.glob("checkpoints/step-*")) or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 5  # torch.distributed.run, two ranks, and a process of each that samples
    process.kill()
    process.wait()
    assert psutil.wait_procs(started, timeout=30)[1] == []


@pytest.mark.slow
def test_two_processes_cancelled_killed_and_still_trained(
    site: Site, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """SIGTERM to the Dagster run ends every rank, SIGKILL of one rank restarts all: each time, training goes on."""
    changes = {"optimizer": {"num_steps": 300}, "log_every": 10, "evaluate_every": 300, "checkpoint_every": 20}
    run_dir = plan_model(site, changes=changes).run_dir

    def num_steps_saved() -> int:
        return max((int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*")), default=0)

    process = start_training(site, tmp_path, changes)
    try:
        wait_for(lambda: num_steps_saved() > 0 or process.poll() is not None)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 5  # torch.distributed.run, two ranks, and a worker of each that samples
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
    assert psutil.wait_procs(started, timeout=10)[1] == []
    saved = num_steps_saved()
    assert 0 < saved < 300
    tracking = Tracking(site)
    cancelled = tracking.find(run_dir)
    assert cancelled is not None
    assert tracking._client.get_run(cancelled.run_id).info.status == "KILLED"

    def kill_a_rank() -> None:
        wait_for(lambda: num_steps_saved() > saved)
        launcher = next(child for child in psutil.Process().children() if "torch.distributed.run" in child.cmdline())
        launcher.children()[0].kill()

    killer = threading.Thread(target=kill_a_rank)
    killer.start()
    result = run(relaunched(site, processes_per_node=2, num_workers=0), instance, changes=changes)
    killer.join()
    assert result.success
    manifest = current_model(site)
    assert manifest is not None
    assert manifest["result"]["num_processes"] == 2
    resumed = [line for line in log_of(instance, result) if "resum" in line]
    assert len(resumed) == 2, log_of(instance, result)
    losses = [point["step"] for point in read_history(run_dir) if "loss" in point]
    assert losses == list(range(10, 301, 10))
    finished = tracking.find(run_dir)
    assert finished is not None
    assert finished.run_id == cancelled.run_id
    assert {metric.step for metric in tracking._client.get_metric_history(finished.run_id, "loss")} == set(losses)


def test_a_divergence_is_reported_in_a_sentence(
    site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUN_RANKS, run_rank_here)
    changes = {"optimizer": {"learning_rate": 1e5, "warmup_steps": 0}, "log_every": 1}
    result = run(site, instance, changes=changes)
    assert not result.success
    assert "training diverged" in failure_of(result)
    run_dir = plan_model(site, changes=changes).run_dir
    assert not list(run_dir.glob("crash-*"))
    tracked = Tracking(site).find(run_dir)
    assert tracked is not None
    assert tracked.version is None
    assert Tracking(site)._client.get_run(tracked.run_id).info.status == "FAILED"


def test_without_a_training_set(tmp_path: Path, instance: dg.DagsterInstance, shared_sites: SharedSites) -> None:
    site = shared_sites.add_mlflow(SmallSite(tmp_path).site)
    result = run(site, instance)
    assert not result.success
    assert "dagster asset materialize --select training_set" in failure_of(result)


def test_doctored_sets_and_models_fail_their_checks(site: Site, instance: dg.DagsterInstance) -> None:
    everything = {"assets": ASSETS, "only_checks": True}
    assert all(check_results(run(site, instance, **everything)).values())
    data = latest_training_set(site)
    shutil.copy(data / "held_out" / "user_id.arrow", data / "train" / "user_id.arrow")
    ts = np.load(data / "train" / "ts.npy")
    ts[-1] += 86_400_000_000
    np.save(data / "train" / "ts.npy", ts)
    manifest = current_model(site)
    assert manifest is not None
    history = models_dir(site) / manifest["model_version"] / "history.jsonl"
    history.write_text("".join(reversed(history.read_text().splitlines(keepends=True))))
    assert check_results(run(site, instance, **everything)) == {
        "held_out_users_are_disjoint": False,
        "nothing_is_later_than_the_cut": False,
        "loss_fell_and_is_finite": False,
    }


def test_a_run_can_choose_every_preset() -> None:
    assert [preset.value for preset in PresetName] == list(get_args(Preset))


def test_faults_of_a_training() -> None:
    fell = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "recall_at_10": 0.1}]
    assert training_fault(fell) is None
    assert training_fault([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.5}]) is not None
    assert training_fault([{"step": 1, "loss": 3.0}, {"step": 2, "loss": float("nan")}]) == "its loss is not finite"


def test_a_model_is_named_by_what_decides_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plan_model(site).model_version
    launch = LaunchConfig(processes_per_node=7)
    more = site.model_copy(update={"training": site.training.model_copy(update={"launch": launch})})
    assert plan_model(more).model_version == name
    others = {plan_model(site, changes={"seed": 1}).model_version, plan_model(site, "demo").model_version}
    monkeypatch.setattr("pf_core.training.plan.code_fingerprint", lambda: "other code")
    others.add(plan_model(site).model_version)
    assert len({name, *others}) == 4


def test_commands_for_one_node_and_for_many() -> None:
    job = Path("/data/job.json")
    one = command_for(LaunchConfig(processes_per_node=2), job)
    assert " ".join(one[1:]) == (
        "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 "
        "-m pf_assets.launch.train_job /data/job.json"
    )
    many = LaunchConfig(processes_per_node=8, num_nodes=4, rendezvous_endpoint="node0:29500")
    assert " ".join(command_for(many, job)[3:12]) == (
        "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id pinnerformer --nproc-per-node"
    )


def test_a_rank_ends_with_the_process_that_launched_it() -> None:
    code = "from pf_assets.launch.train_job import _end_with_launcher; _end_with_launcher()"
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert rank.stdin is not None
    rank.stdin.close()
    assert rank.wait(timeout=30) == -signal.SIGKILL


def test_a_restarted_rank_respects_a_deliberate_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = train_job.TrainJob(config=tiny(), training_set="gone", run_dir=str(tmp_path), num_workers=0)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    (tmp_path / train_job.STOPPED).write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(train_job, "_train", lambda *_: pytest.fail("it trained"))
    train_job.main([str(tmp_path / "job.json")])


def test_a_crash_is_told_with_its_first_error(tmp_path: Path) -> None:
    for rank, error in ((1, RuntimeError("out of memory")), (0, RuntimeError("connection closed by peer"))):
        train_job._note_crash(tmp_path, rank, 2, error)
    with pytest.raises(dg.Failure, match="exit code 1; rank 1: RuntimeError: out of memory"):
        _raise_if_failed(tmp_path, 1)
    with pytest.raises(dg.Failure, match="one of them was killed"):
        _raise_if_failed(tmp_path / "elsewhere", 1)
    _raise_if_failed(tmp_path, 0)


def test_lines_of_each_kind_are_seconds_apart() -> None:
    class Pipes:
        lines: ClassVar[list[str]] = []
        messages: ClassVar[list[Any]] = []
        log = SimpleNamespace(info=lines.append)
        report_custom_message = messages.append

    observer = train_job.PipesObserver(cast(Any, Pipes))
    observer.say("resuming after step 10")
    for step in (20, 40):
        observer.measure(step, {"loss": 3.0})
        observer.say(f"step {step}: loss")
        observer.measure(step, {"recall_at_10": 0.1})
        observer.say(f"step {step}: recall")
    observer.say("a warning")
    assert Pipes.lines == ["resuming after step 10", "step 20: loss", "step 20: recall", "a warning"]
    assert [message["step"] for message in Pipes.messages] == [20, 20, 40, 40]


def test_the_graph_is_drawn_without_torch_and_mlflow() -> None:
    code = (
        "import sys, pf_assets.definitions as d; from pf_assets.settings import current_site;"
        "d.build_definitions(current_site()).resolve_asset_graph();"
        "print([name for name in ('torch', 'mlflow') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PF_SITE": str(DEMO_SITE)},
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=True,
    )
    assert result.stdout.strip() == "[]"
