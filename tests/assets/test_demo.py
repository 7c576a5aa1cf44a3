"""`pf demo` on a tiny world: the command line, the site file and every asset, as `make demo` runs them."""

import re
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_assets.cli.stages import LOGS
from pf_core.embeddings.tables import snapshot_state
from pf_core.logs.partition import ingested_days
from pf_core.serving.client import Serving
from pf_core.world.config import tiny
from tests.support.demo_site import Runs, write_site_file
from tests.support.shared import SharedSites
from tests.support.training_here import RUN_RANKS, run_rank_here

WORLD = tiny(num_users=200, num_days=18)
LAST = WORLD.dates[-1]


def test_the_demo_runs_the_whole_graph_once(
    tmp_path: Path, memory_instance: dg.DagsterInstance, shared_sites: SharedSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "dagster.yaml").touch()
    site = shared_sites.add_mlflow(write_site_file(tmp_path / "demo.yaml", WORLD))
    runs = Runs(site, memory_instance)
    monkeypatch.delenv("PF_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    for module in ("pf_assets.demo_site", "pf_assets.settings"):
        monkeypatch.setattr(f"{module}.demo_site_path", lambda: tmp_path / "demo.yaml")
    monkeypatch.setattr("pf_assets.cli.run.materialize", runs.materialize)
    monkeypatch.setattr("pf_core.world.config.demo", lambda: WORLD)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(RUN_RANKS, run_rank_here)

    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert ingested_days(site) == WORLD.dates
    assert snapshot_state(site).days() == WORLD.dates[-4:]
    release = Serving(site).release()
    assert release.manifest["ds"] == LAST
    users = snapshot_state(site).require(LAST)["counts"]["users"]
    assert f"{LAST}.1: {users:,} users" in result.output
    assert ", 4 steps\n" in result.output
    assert len(re.findall(r"^logs +\d+ s  18 days written$", result.output, re.MULTILINE)) == 1
    assert "rows (" not in result.output, "a line for each day is in the log file"
    assert any("(18 of 18 days)" in log.read_text() for log in (tmp_path / LOGS).glob("pf-*.log"))
    assert f"trained until {LAST} instead of {WORLD.dates[-3]}" in result.output
    comparison = result.output.split("\nHow good is it?\n")[1].split("\nOne user\n")[0]
    assert re.search(r"all positives +new pins only\n", comparison), comparison
    assert re.search(r"the model, as served +0\.\d{4} +0\.\d{4}\n", comparison), comparison
    assert "oracle" in comparison
    recommended, after = result.output.split("recommended pins:\n")[1].split("\nNext\n")
    assert len(re.findall(r"^    -?\d\.\d{3}  p", recommended, re.MULTILINE)) == 10
    assert "export PF_SITE" not in recommended + after, "these commands are about the demo as they are"
    everything = "raw_actions,pin_features,user_timelines"
    serving = "user_embeddings,user_embedding_snapshot,pin_embeddings,pin_index,release"
    assert runs.done == [
        (everything, WORLD.dates),
        ("training_set,pinnerformer_model,offline_evaluation,refitted_model", None),
        (serving, WORLD.dates[-4:]),
    ]

    again = CliRunner().invoke(app, ["demo"])
    assert again.exit_code == 0, (again.output, again.exception)
    assert len(runs.done) == 3, "what is there is left as it is"
    assert again.output.split("recommended pins:")[1] == result.output.split("recommended pins:")[1]
    monkeypatch.setenv("PF_SITE", "other.yaml")
    elsewhere = CliRunner().invoke(app, ["demo"])
    assert f"unset DAGSTER_HOME; export PF_SITE={tmp_path / 'demo.yaml'}\n" in elsewhere.output
