"""`pf status` of a site of which nothing is materialized."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_assets.cli.status import pending_model
from pf_assets.tracking.tracking import Tracking
from pf_core.serving.releases import list_releases, release_root
from tests.support.daily import DailySites, register_model
from tests.support.shared import SharedSites

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
    assert shown[0].startswith("shop, in ")
    assert "release                  nothing yet" in shown
    assert shown[-2:] == ["champion                 none yet", "candidate                none yet"]


def test_a_promoted_model_that_is_not_released_yet_is_told(shared_sites: SharedSites, tmp_path: Path) -> None:
    site = DailySites(shared_sites, tmp_path).released(2)
    tracking = Tracking(site)
    assert pending_model(site, tracking) is None
    [model] = {release["model_version"] for release in list_releases(site)}
    new = register_model(site, seed=1)
    tracking.promote(new.version, because="a test says so")
    pending = pending_model(site, tracking)
    assert pending is not None
    assert pending.startswith(
        f"release 2026-01-03.1 is of model {model}; {new.served_version} embeds everybody on the next "
    )
    (release_root(site) / "2026-01-03.1" / "release.json").rename(tmp_path / "gone")
    assert pending_model(site, tracking) is None, "a damaged release is told by the commands that read it"
    assert pending.endswith("pin_index,release --partition 2026-01-03 -m pf_assets.definitions")
