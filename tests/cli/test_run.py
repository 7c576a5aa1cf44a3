"""`pf run` for real: a small shop from its CSV to a release, also after it was ended at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from pf_assets.cli.pipeline import stage_names
from pf_assets.cli.run import show_next
from pf_assets.cli.stages import LOGS
from pf_core.config.site import load_site
from pf_core.serving.client import Serving
from pf_core.serving.releases import list_releases
from tests.support.shop import DAYS, shop_file, write_shop

REPOSITORY = Path(__file__).parents[2]

STEPS = {"optimizer": {"num_steps": 24}, "log_every": 4, "evaluate_every": 12, "checkpoint_every": 12}

PATIENCE_S = 400.0
"""Bound of what a test waits for, so that it ends on a machine with other work, too."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    write_shop(folder)
    content = shop_file(folder)
    content["training"] |= {"changes": STEPS}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\nnux: {enabled: false}\n")
    return folder


def start(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PF_", "DAGSTER_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pf_assets.cli.main", "run", *arguments],
        cwd=home,
        env=clean | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def pf_run(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of `pf run`."""
    process = start(home, *arguments)
    out, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, errors


def stopped(home: Path, send: int, when: Callable[[str], bool]) -> tuple[int, str, str, list[psutil.Process]]:
    """Start `pf run`, send it a signal once its log is so far, and return how it ended, and what it left running."""
    process = start(home)
    deadline = time.monotonic() + PATIENCE_S
    known = {process.pid: psutil.Process(process.pid)}
    while process.poll() is None and not when(newest_log(home, process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if process.poll() is None:
        known |= {child.pid: child for child in known[process.pid].children(recursive=True)}
        process.send_signal(send)
    out, errors = process.communicate(timeout=PATIENCE_S)
    children = [child for pid, child in known.items() if pid != process.pid]
    return process.returncode, out, errors, psutil.wait_procs(children, timeout=60)[1]


def newest_log(home: Path, pid: int | str = "*") -> str:
    logs = sorted((home / LOGS).glob(f"pf-*-{pid}.log"))
    return logs[-1].read_text() if logs else ""


def is_released(home: Path) -> bool:
    site = load_site(home / "site.yaml", environment={})
    release = Serving(site).release()
    return bool(release.recommend(1, k=5)) and [each["ds"] for each in list_releases(site)] == [DAYS[-1]]


def test_a_run_that_fails_ends_with_its_lines_the_reason_and_the_command(home: Path) -> None:
    (home / "actions.csv").write_text("user,pin,at\n1,p01,never\n")
    code, out, errors = pf_run(home)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("full log: ")
    assert lines[1].split()[0] == "raw_actions"
    assert lines[1].endswith("failed")
    *_, sentence, again = errors.strip().splitlines()
    assert sentence.startswith("error: raw_actions failed: ") or sentence.startswith("error: raw_actions: the check ")
    assert "ts: " in errors
    assert again == "to run it again: pf run"
    for noise in ("Traceback", "SupersessionWarning", "nanobind"):
        assert noise not in out + errors


def test_what_to_do_next_names_the_site_where_the_commands_would_mean_another(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "site.yaml"
    site = load_site(path, environment={})
    monkeypatch.delenv("PF_SITE", raising=False)
    for folder, is_named in ((home, False), (home.parent, True)):
        monkeypatch.chdir(folder)
        show_next(site, path)
        assert (f"export PF_SITE={path}" in capsys.readouterr().out) == is_named


@pytest.mark.slow
def test_everything_until_the_release_and_then_nothing(home: Path) -> None:
    code, out, errors = pf_run(home)
    assert code == 0, errors
    assert errors == ""
    site = load_site(home / "site.yaml", environment={})
    lines = out.splitlines()
    shown = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert sorted(shown) == sorted(stage_names(site)), "each stage is one line"
    assert "OMP_NUM_THREADS=1 " in newest_log(home), "the caller decides about threads"
    assert "first model: champion" in out
    assert "the model, as served" in out
    assert "recommended pins:" in out
    assert "\nNext\n" in out
    for noise in ("SupersessionWarning", "nanobind", "Traceback"):
        assert noise not in out
    assert is_released(home)

    code, out, errors = pf_run(home, "--json")
    assert code == 0, errors
    assert errors == f"{DAYS[-1]} is released, and nothing is missing\n"
    summary = json.loads(out)
    assert summary["ds"] == DAYS[-1]
    assert set(summary["results"]) == set(stage_names(site))
    assert summary["evaluation"]["is_champion"]
    assert isinstance(summary["evaluation"]["figures"][summary["evaluation"]["candidate"]]["recall_at_10"], float)


@pytest.mark.slow
@pytest.mark.parametrize("asset", ["raw_actions", "pinnerformer_model", "user_embeddings"])
def test_ctrl_c_ends_everything_in_a_sentence_and_the_next_call_goes_on(home: Path, asset: str) -> None:
    if asset == "user_embeddings":  # the others are the beginning of a site
        stopped(home, signal.SIGINT, lambda log: f"{asset} - STEP_START" in log)
    code, out, errors, left = stopped(home, signal.SIGINT, lambda log: f"{asset} - STEP_START" in log)
    assert code == 130, errors
    assert left == []
    assert "interrupted; what is complete stays, and the same command goes on" in errors
    assert "Traceback" not in out + errors
    assert f"{asset} " in out
    code, out, errors = pf_run(home)
    assert code == 0, errors
    assert is_released(home)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_completes_after_kills_at_random_stages(home: Path, seed: int) -> None:
    rng = random.Random(seed)
    stages = stage_names(load_site(home / "site.yaml", environment={}))
    for number in sorted(rng.sample(range(len(stages)), 3)):
        send = rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        event = rng.choice(["STEP_START", "ASSET_MATERIALIZATION", "STEP_SUCCESS"])
        place = f"{stages[number]} - {event}"
        *_, left = stopped(home, send, lambda log, place=place: place in log)
        assert left == [], place
    code, _, errors = pf_run(home)
    assert code == 0, errors
    assert is_released(home)
