"""`pf demo` on a tiny world: the command line, the site file and every asset, as `make demo` runs them."""

from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_core.days import ds_range
from pf_core.embeddings.tables import snapshot_state
from pf_core.logs.partition import ingested_days
from pf_core.serving.client import Serving
from pf_core.world.config import tiny
from tests.support.demo_site import Runs, write_site_file
from tests.support.shared import SharedSites
from tests.support.training_here import RUN_RANKS, run_rank_here

DEMO = "pf_assets.cli.demo"
"""The module of the command."""

WORLD = tiny(num_users=200, num_days=18)
LAST = WORLD.dates[-1]


def test_the_demo_runs_the_whole_graph_once(
    tmp_path: Path, memory_instance: dg.DagsterInstance, shared_sites: SharedSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PF_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "dagster.yaml").touch()
    site = shared_sites.add_mlflow(write_site_file(tmp_path / "demo.yaml", WORLD))
    runs = Runs(site, memory_instance)
    monkeypatch.setattr(f"{DEMO}.DEMO_SITE", tmp_path / "demo.yaml")
    monkeypatch.setattr(f"{DEMO}.materialize", runs.materialize)
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
    assert "after 4 steps" in result.output
    assert f"trained until {LAST} instead of {WORLD.dates[-3]}" in result.output
    shown = result.output.split("recommended pins:")[1].strip().splitlines()
    assert len(shown) == 10 + 1  # the pins, and what to do next
    everything = "raw_actions,pin_features,user_timelines"
    serving = "user_embeddings,user_embedding_snapshot,pin_embeddings,pin_index,release"
    assert runs.done == [
        (everything, WORLD.dates),
        ("training_set,pinnerformer_model", None),
        ("offline_evaluation", None),
        ("refitted_model", None),
        (serving, WORLD.dates[-4:-1]),
        (f"{everything},{serving}", ds_range(WORLD.dates[-3], LAST)),  # rows may be two days late
    ]

    again = CliRunner().invoke(app, ["demo"])
    assert again.exit_code == 0, (again.output, again.exception)
    assert len(runs.done) == 6, "what is there is left as it is"
    assert again.output.split("recommended pins:")[1] == result.output.split("recommended pins:")[1]
