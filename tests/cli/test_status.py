"""`pf status` of a site of which nothing is materialized."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app

SITE = """
name: shop
start_ds: 2026-01-01
end_ds: 2026-01-02
source:
  root: logs
  actions:
    path: actions.csv
    user_id: user
    pin_id: pin
    ts: {column: at, unit: iso}
    action_type: {constant: buy}
"""


def test_the_status_of_an_empty_site_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "site.yaml").write_text(SITE)
    (folder / "dagster.yaml").touch()
    monkeypatch.setenv("PF_SITE", str(folder / "site.yaml"))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    before = sorted(tmp_path.rglob("*"))
    assert CliRunner().invoke(app, ["promote"]).exit_code == 1  # no model to show
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.rglob("*")) == before
    shown = result.output.splitlines()
    assert "release                  nothing yet" in shown
    assert shown[-2:] == ["champion                 none yet", "candidate                none yet"]
