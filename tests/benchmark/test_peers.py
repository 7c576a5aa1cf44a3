"""Tuning and running peers within a budget, and the environments that they run in."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pf_core.benchmark.files import read_lists, write_log
from pf_core.benchmark.log import Actions, BenchmarkLog
from pf_core.benchmark.peers import environments, run
from pf_core.benchmark.peers.environments import (
    READY,
    cache_folder,
    ensure_environment,
    environment_folder,
    requirements_of,
)
from pf_core.benchmark.peers.run import PeerResult, run_peer
from pf_core.benchmark.peers.tuning import BUDGETS, PEERS, Budget, Peer, peers_of
from pf_core.benchmark.scoring import score
from pf_core.errors import PipelineError

REPOSITORY = Path(__file__).parents[2]
NUM_PINS, NUM_GROUPS = 40, 4
BUDGET = Budget(num_settings=2, seconds=120, num_threads=1)


def make_log(*, name: str = "planted", num_train: int = 60, num_test: int = 12, seed: int = 0) -> BenchmarkLog:
    """Users act on the pins of their own group: the positives are others of these pins, and one that is not askable."""
    rng = np.random.default_rng(seed)
    per_group = NUM_PINS // NUM_GROUPS

    def actions(num_users: int) -> tuple[Actions, np.ndarray]:
        chosen = [rng.permutation(per_group) + per_group * (user % NUM_GROUPS) for user in range(num_users)]
        pin = np.concatenate([pins[:6] for pins in chosen]).astype(np.int32)
        user = np.repeat(np.arange(num_users), 6).astype(np.int32)
        day = np.tile(np.arange(-6, 0), num_users).astype(np.int32)
        later = np.sort(np.stack([pins[6:9] for pins in chosen]), axis=1)
        return Actions(user=user, pin=pin, day=day, is_positive=np.ones(len(pin), bool)), later

    train, _ = actions(num_train)
    past, later = actions(num_test)
    return BenchmarkLog(
        name=name,
        cut_ds="2026-01-31",
        num_days=14,
        pin_ids=pa.array([f"p{pin:02}" for pin in range(NUM_PINS)]),
        is_cold_pin=np.zeros(NUM_PINS, bool),
        train_user_ids=pa.array([f"r{user:03}" for user in range(num_train)]),
        train=train,
        test_user_ids=pa.array([f"t{user:03}" for user in range(num_test)]),
        past=past,
        positive_user_P=np.repeat(np.arange(num_test), 3).astype(np.int32),
        positive_pin_P=later.ravel().astype(np.int32),
        num_unaskable_U=np.ones(num_test, np.int64),
    )


def run_here(name: str, folder: Path, budget: Budget = BUDGET, **options: Any) -> PeerResult:
    """Run a peer with our own Python: item-kNN and EASE need numpy, scipy and pyarrow only."""
    messages: list[str] = []
    python = Path(sys.executable)
    log, tuning = make_log(), make_log(seed=1)
    return run_peer(name, log, tuning, budget=budget, folder=folder, progress=messages.append, python=python, **options)


@pytest.mark.parametrize("name", ["item_knn", "ease", "ease_own"])
def test_peers_find_planted_groups(name: str, tmp_path: Path) -> None:
    result = run_here(name, tmp_path)
    assert result.lists is not None, result.note
    assert result.note == ""
    # The four pins of the group that the user has not seen are first among the new ones; three of them are positives.
    discovery = score(make_log(), result.lists).discovery_at_10_U
    np.testing.assert_allclose(discovery, 3 / 4)
    assert [trial.settings for trial in result.tried] == list(PEERS[name].settings[:2])
    best = max(trial.recall_at_10 or 0.0 for trial in result.tried)
    assert result.settings == next(trial.settings for trial in result.tried if trial.recall_at_10 == best)
    assert result.versions["numpy"] == np.__version__
    assert 0 < result.final_seconds < result.seconds < BUDGET.seconds
    assert 0 < result.peak_gb < BUDGET.memory_gb


def fake_peer(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, settings: list[dict[str, Any]]) -> None:
    """Make `fake` a peer whose script is `code`; it has `a`, the parsed arguments."""
    scripts = folder / "scripts"
    scripts.mkdir()
    shutil.copy(run.SCRIPTS / "exchange.py", scripts)
    head = (
        "import os, sys, time, subprocess\nimport numpy as np\nfrom exchange import Lists, main\n"
        "def rank(task):\n    lists, log, settings = Lists(), task.log, task.settings\n"
    )
    (scripts / "fake.py").write_text(head + code + "\n    return lists, ''\nmain(rank)\n")
    monkeypatch.setattr(run, "SCRIPTS", scripts)
    peer = Peer(label="fake", script="fake.py", family="implicit", settings=tuple(settings))
    monkeypatch.setattr(run, "PEERS", {"fake": peer})


GOOD = """
    pins = np.arange(log.num_pins)
    for user in range(log.num_test_users):
        lists.add(user, pins, np.where(pins // 10 == user % 4, settings["sign"], 0.5 - pins / 100), 99)
"""


def test_the_better_setting_on_the_tuning_log_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_peer(monkeypatch, tmp_path, GOOD, [{"sign": -1.0}, {"sign": 1.0}, {"sign": 2.0}])
    result = run_here("fake", tmp_path / "run", replace(BUDGET, num_settings=3))
    # Ten pins of the group tie with the positives: none of the three, of four with the unaskable one, has 10 rivals.
    assert [trial.recall_at_10 for trial in result.tried] == pytest.approx([0.0, 3 / 4, 3 / 4])
    assert result.settings == {"sign": 1.0}
    np.testing.assert_allclose(score(make_log(), result.lists).recall_at_10_U, 3 / 4)
    # The positives of test users are in no file that a peer reads.
    assert {path.name for path in (tmp_path / "run" / "log").iterdir()} == {
        "meta.json",
        "past.parquet",
        "pins.parquet",
        "test_users.parquet",
        "train.parquet",
        "train_users.parquet",
    }
    assert not (tmp_path / "run" / "tuning_log" / "positives.parquet").exists()


SLOW = """
    if settings["slow"]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(task.out.with_name("child"), "w").write(str(child.pid))
        time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_peer_out_of_time_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_peer(monkeypatch, tmp_path, SLOW + GOOD, [{"slow": True, "sign": 1.0}])
    result = run_here("fake", tmp_path / "run", Budget(num_settings=1, seconds=8))
    assert result.lists is None
    assert result.note == "not run: ran out of its budget of 4 s (setting 1 of 1)"
    child = int((tmp_path / "run" / "fake" / "child").read_text())
    ends_at = time.monotonic() + 10
    while is_running(child) and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.slow
def test_the_best_so_far_is_used_when_a_setting_runs_out_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = [{"slow": False, "sign": 1.0}, {"slow": True, "sign": 1.0}]
    fake_peer(monkeypatch, tmp_path, SLOW + GOOD, settings)
    result = run_here("fake", tmp_path / "run", Budget(num_settings=2, seconds=20))
    assert result.lists is not None
    assert result.settings == settings[0]
    assert result.note == "1 of 2 settings finished"
    assert re.fullmatch(r"ran out of its budget of \d+ s \(setting 2 of 2\)", result.tried[1].note)


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("    raise ValueError('no such thing')", "not run: exit code 1: ValueError: no such thing"),
        ("    raise MemoryError('1.2 TB')", "not run: exit code 3: needs more than 8 GB of memory: 1.2 TB"),
        ("    lists.add(99, np.array([1]), np.array([1.0]), 5)", "not run: .*not a row of the 12 test users"),
        ("    lists.add(0, np.array([1]), np.array([np.nan]), 5)", "not run: .*the score is not finite"),
    ],
)
def test_a_failing_peer_becomes_a_note(code: str, note: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_peer(monkeypatch, tmp_path, code, [{}])
    result = run_here("fake", tmp_path / "run", Budget(num_settings=1, seconds=60))
    assert result.lists is None
    assert re.search(note, result.note), result.note


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_peer(monkeypatch, tmp_path, "    np.ones(int(4e8))", [{}])
    result = run_here("fake", tmp_path / "run", Budget(num_settings=1, seconds=60, memory_gb=2))
    assert result.note.startswith("not run: exit code 3: needs more than 2 GB of memory: Unable to allocate 2.98 GiB")


def test_a_peer_without_a_tuning_log_uses_its_first_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_peer(monkeypatch, tmp_path, GOOD, [{"sign": 1.0}, {"sign": 2.0}])
    python = Path(sys.executable)
    result = run_peer(
        "fake", make_log(), None, budget=BUDGET, folder=tmp_path / "run", progress=lambda _: None, python=python
    )
    assert result.lists is not None
    assert result.note == "not tuned: the training users cannot be divided"
    assert (result.settings, result.tried) == ({"sign": 1.0}, ())


def test_settings_that_are_the_same_on_a_log_are_tried_once() -> None:
    log = make_log()
    peer = Peer(label="x", script="x", family="x", settings=({"actions": "positive"}, {"actions": "all"}))
    assert run.distinct_settings(peer, log) == [{"actions": "positive"}]
    negative = replace(log.train, is_positive=np.arange(len(log.train.pin)) > 0)
    assert run.distinct_settings(peer, replace(log, train=negative)) == [{"actions": "positive"}, {"actions": "all"}]


def test_levels_and_budgets() -> None:
    assert peers_of("quick") == peers_of("default") == ["item_knn", "ease", "ease_own", "ials"]
    assert peers_of("full") == [*peers_of("quick"), "sasrec", "flat_sasrec"]
    assert peers_of("quick", ["flat_sasrec", "ease"]) == ["ease", "flat_sasrec"]
    with pytest.raises(PipelineError, match="no peer 'bert'; choose among item_knn, ease"):
        peers_of("quick", ["ease", "bert"])
    assert [BUDGETS[level].num_settings for level in ("quick", "default", "full")] == [3, 8, 12]
    assert all(budget.memory_gb <= 8 for budget in BUDGETS.values())


# Environments


def test_requirements_are_pinned_and_torch_is_ours() -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (torch,) = (line for line in constraints if line.startswith("torch=="))
    for family in {peer.family for peer in PEERS.values()}:
        requirements = requirements_of(family)
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in requirements)
        assert {line for line in requirements if line.startswith("torch==")} <= {torch}
    assert torch in requirements_of("rectools")


def test_requirements_are_in_the_wheel() -> None:
    assert '"pf_core.benchmark.peers" = ["requirements/*.txt"]' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_cache_folder_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PF_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path / "peers"
    monkeypatch.delenv("PF_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pinnerformer" / "peers"


def test_an_environment_is_made_once_and_a_broken_one_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def make(command: list[str]) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()

    monkeypatch.setattr(environments, "_failure", make)
    messages: list[str] = []
    given: dict[str, Any] = {"name": "six", "cache": tmp_path, "progress": messages.append}
    folder = environment_folder(["six==1.16.0"], cache=tmp_path)
    folder.mkdir()
    (folder / "half").touch()  # left by a process that was killed
    python = ensure_environment(["six==1.16.0"], **given)
    assert python == folder / "bin" / "python"
    assert [len(commands), len(messages)] == [2, 1]
    assert commands[1][-2:] == ["-r", str(folder.with_suffix(".txt"))]
    assert folder.with_suffix(".txt").read_text() == "six==1.16.0\n"
    assert not (folder / "half").exists()
    assert (folder / READY).exists()
    assert ensure_environment(["six==1.16.0"], **given) == python
    assert [len(commands), len(messages)] == [2, 1]
    assert environment_folder(["six==1.17.0"], cache=tmp_path) != folder


def test_a_peer_that_does_not_install_becomes_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PF_CACHE_DIR", str(tmp_path / "cache"))
    failing = [sys.executable, "-c", "print('noise'); print('ERROR: No matching distribution'); raise SystemExit(1)"]
    whole = environments._failure
    monkeypatch.setattr(environments, "_failure", lambda command: whole(failing) if "pip" in command else None)
    result = run_peer("ials", make_log(), make_log(), budget=BUDGET, folder=tmp_path, progress=lambda _: None)
    assert result.lists is None
    assert result.note == "not run: pip said: ERROR: No matching distribution"
    assert not list((tmp_path / "cache" / "peers").glob(f"*/{READY}"))


@pytest.mark.slow
def test_pip_without_an_index_is_a_clear_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PipelineError, match=r"pip said: ERROR: .*no-such-library"):
        ensure_environment(["no-such-library==1.0"], name="x", cache=tmp_path / "cache", progress=lambda _: None)


# Libraries of others: only where their environments exist, as the network makes them


def python_of(family: str) -> Path:
    folder = environment_folder(requirements_of(family), cache=cache_folder())
    if not (folder / READY).exists():
        pytest.skip(f"no environment for {family}: `pf benchmark` makes it, in {folder}")
    return folder / "bin" / "python"


def rank_with(family: str, script: str, log: BenchmarkLog, folder: Path, settings: dict[str, Any]) -> pa.Table:
    write_log(log, folder)
    out = folder / "lists.parquet"
    command = [str(python_of(family)), str(run.SCRIPTS / script), str(folder), "--settings", json.dumps(settings)]
    command += ["--budget-s", "100", "--out", str(out), "--keep-factors"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
    subprocess.run(command, check=True, env=environment)
    return pa.parquet.read_table(out)


IALS = {"actions": "all", "weights": "log_count", "alpha": 5.0, "factors": 6, "regularization": 0.7, "iterations": 4}


@pytest.mark.slow
def test_ials_folds_users_in_exactly(tmp_path: Path) -> None:
    log = make_log()
    found = rank_with("implicit", "ials.py", log, tmp_path, IALS).to_pandas()
    factors = np.load(tmp_path / "factors.npz")
    pins = factors["pin"].astype(float)
    for user in range(len(log.test_user_ids)):
        own, number = np.unique(log.past.pin[log.past.user == user], return_counts=True)
        confidence = np.ones(NUM_PINS)
        confidence[own] += 5.0 * np.log1p(number)
        liked = np.zeros(NUM_PINS)
        liked[own] = 1
        left = pins.T @ (confidence[:, None] * pins) + 0.7 * np.eye(6)
        solution = np.linalg.solve(left, pins.T @ (confidence * liked))
        np.testing.assert_allclose(factors["user"][user], solution, rtol=1e-3, atol=1e-5)
        mine = found[found.user == user]
        np.testing.assert_allclose(mine.score, pins[mine.pin] @ solution, atol=1e-4)
        everything = np.sort(pins @ solution)[::-1]
        np.testing.assert_allclose(mine.score, everything[: len(mine)], atol=1e-4)
        assert len(mine) == min(NUM_PINS, 51 + 6)


@pytest.mark.slow
def test_a_test_users_action_changes_no_factor_and_no_other_list_of_ials(tmp_path: Path) -> None:
    log = make_log()
    planted = Actions(
        user=np.insert(log.past.user, 6, 0),
        pin=np.insert(log.past.pin, 6, NUM_PINS - 1),
        day=np.insert(log.past.day, 6, -1),
        is_positive=np.insert(log.past.is_positive, 6, True),
    )
    before = rank_with("implicit", "ials.py", log, tmp_path / "a", IALS).to_pandas()
    after = rank_with("implicit", "ials.py", replace(log, past=planted), tmp_path / "b", IALS).to_pandas()
    old, new = (np.load(tmp_path / name / "factors.npz") for name in "ab")
    np.testing.assert_array_equal(old["pin"], new["pin"])
    np.testing.assert_array_equal(old["user"][1:], new["user"][1:])
    assert not np.array_equal(old["user"][0], new["user"][0])
    assert before[before.user > 0].reset_index(drop=True).equals(after[after.user > 0].reset_index(drop=True))


SASREC = {"actions": "all", "n_blocks": 1, "n_heads": 2, "n_factors": 32, "session_max_len": 8, "dropout": 0.1}
SASREC |= {"n_negatives": 16, "batch_size": 32, "lr": 1e-2, "epochs": 15}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ials", "sasrec", "flat_sasrec"])
def test_library_peers_find_planted_groups(name: str, tmp_path: Path) -> None:
    peer, log = PEERS[name], make_log(num_train=400)
    rank_with(peer.family, peer.script, log, tmp_path, IALS if name == "ials" else SASREC)
    discovery = score(log, read_lists(tmp_path / "lists.parquet", log)).discovery_at_10_U
    assert discovery.mean() > 0.6  # at random (34 new pins): 10 / 34 of 3 / 4 = 0.22
    report = json.loads((tmp_path / "lists.json").read_text())
    assert report["versions"].keys() > {"numpy", "scipy"}
