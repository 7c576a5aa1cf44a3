"""From the log to a release: the smallest and the largest 64-bit integers are ids like any other, and a content vector
that no model can read costs its pin alone."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.site import Site
from pf_core.embeddings.checks import judge_users_kept
from pf_core.operations.inspect import newest_actions
from pf_core.pins.features import pin_state
from pf_core.serving.client import Serving
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import write_json
from pf_core.training.plan import models_dir
from tests.support.daily import snapshot, write_model
from tests.support.stages import BUILT, DAILY, make_staged_site, run_stages

EXTREMES = {0: -(2**63), 1: 2**63 - 1, 2: -1, 3: 0, 4: -(2**63) + 1}


def extreme(number: int) -> int:
    return EXTREMES.get(number, number)


def with_extreme_ids(tmp_path: Path) -> Site:
    """The small site with integer ids, of which the first few are extreme."""
    site = make_staged_site(tmp_path)
    for path in tmp_path.glob("logs/*.parquet"):
        rows = pq.read_table(path).to_pydict()
        rows["user"] = [extreme(user) for user in rows["user"]]
        rows["pin"] = [extreme(int(pin.removeprefix("p"))) for pin in rows["pin"]]
        pq.write_table(pa.table(rows), path)
    for path in tmp_path.glob("pins/*.parquet"):
        rows = pq.read_table(path)
        pins = pa.array([extreme(int(pin.removeprefix("p"))) for pin in rows["pin"].to_pylist()], pa.int64())
        pq.write_table(rows.set_column(0, "pin", pins), path)
    actions, pins = site.source.actions, site.source.pins
    pin_id = actions.pin_id.model_copy(update={"type": "int"})
    source = site.source.model_copy(
        update={
            "actions": actions.model_copy(update={"pin_id": pin_id}),
            "pins": pins.model_copy(update={"pin_id": pin_id}),
        }
    )
    return site.model_copy(update={"source": source})


def test_extreme_ids_reach_the_release(tmp_path: Path) -> None:
    site = run_stages(with_extreme_ids(tmp_path))
    ds, release = BUILT[-1], Serving(site).release()
    users = [user for user in EXTREMES.values() if user in snapshot(site, ds)]
    assert -(2**63) in users
    assert release.embeddings(users)[1].all()
    pins = set(release.index.pin_ids.to_pylist())
    assert set(EXTREMES.values()) <= pins
    for user in users:
        assert release.recommend(user, k=5)
        assert newest_actions(site, ds, user, 3)
    for pin in EXTREMES.values():
        assert release.similar(pin, k=3)
    assert judge_users_kept(site, ds).passed


@pytest.mark.parametrize("family", ["parts", "towers"])
def test_an_unreadable_vector_costs_its_pin_alone(tmp_path: Path, family: str) -> None:
    site = make_staged_site(tmp_path)
    first = tmp_path / "pins" / f"{BUILT[0]}.parquet"
    rows = pq.read_table(first).to_pydict()
    for row, value in ((0, 1e30), (1, 3e19), (2, 0.0)):
        rows["vector"][row] = [value] * len(rows["vector"][row])
    lost = rows["pin"][:3]
    rows["pin"] += ["never-seen"]
    rows["vector"] += [[1e30] * len(rows["vector"][0])]
    pq.write_table(pa.table(rows), first)
    if family == "parts":
        run_stages(site)
    else:
        run_stages(site, ["raw_actions", "pin_features", "user_timelines"])
        run_dir = write_model(site)  # the tiny preset with random weights
        write_json(models_dir(site) / MANIFEST, {"model_version": run_dir.name})
        run_stages(site, [name for name in DAILY if name not in ("raw_actions", "pin_features", "user_timelines")])
    manifest = pin_state(site).require(BUILT[0])
    assert manifest["counts"]["quarantined"] == 4
    assert manifest["quarantined_by_reason"] == {
        "feature: its norm is above 65,504": 3,
        "feature: all zeros, or too small to have a direction": 1,
    }
    pins = set(Serving(site).release().index.pin_ids.to_pylist())
    assert "never-seen" not in pins
    assert (pins >= set(lost)) == (family == "parts"), "pins of the log need no vector in a model of parts"
    assert len(pins) > 60
