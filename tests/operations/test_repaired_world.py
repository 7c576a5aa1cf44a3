"""Bad logs, repaired without an orchestrator: the functions of the daily path in the order of a repair's plan."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.tables import embedding_state
from pf_core.embeddings.users import embed_days
from pf_core.engine.local import LocalEngine
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.operations.repair import RepairPlan, plan_repair
from pf_core.pins.features import build_pin_features
from pf_core.serving.build_index import build_index_days
from pf_core.serving.publish import publish_release
from pf_core.timelines.build import build_timelines
from tests.support.daily import (
    Rows,
    day,
    duplicated,
    make_daily_site,
    release_content,
    shifted_clock,
    snapshot,
    write_logs,
    write_model,
)
from tests.support.shared import SharedSites
from tests.support.sites import START

DAYS = ds_range(START, day(6))
EVERYTHING = RepairPlan(
    raw_days=DAYS,
    pin_days=DAYS,
    timeline_days=DAYS,
    rebuild_timelines=False,
    embedding_days=DAYS,
    users=0,
    embeddings=0,
)


def build(site: Site, plan: RepairPlan) -> None:
    """Build what the plan names, as `pf repair` does; the newest day is released."""
    model = ServedModel(model_version="model-1", path=write_model(site) / "model")
    forgotten, newest = read_deletion_list(site), plan.embedding_days[-1]

    def silent(message: str) -> None:
        pass

    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        list(ingest_days(site, plan.raw_days, engine=engine, forgotten=forgotten, progress=silent))
        list(build_pin_features(site, plan.pin_days, engine=engine, progress=silent))
        list(
            build_timelines(
                site,
                plan.timeline_days,
                engine=engine,
                rebuild=plan.rebuild_timelines,
                progress=silent,
            )
        )
        list(
            embed_days(
                site,
                plan.embedding_days,
                model_for=lambda ds: model,
                everyone=False,
                engine=engine,
                progress=silent,
            )
        )
        list(merge_days(site, plan.embedding_days, engine=engine, progress=silent))
        list(embed_pin_days(site, [newest], model_for=lambda ds: model, engine=engine, progress=silent))
        list(build_index_days(site, [newest], engine=engine, progress=silent))
        publish_release(site, newest, engine=engine, progress=silent)


def make_good(root: Path) -> Site:
    site = make_daily_site(root, last=day(7))
    build(site, EVERYTHING)
    return site


@pytest.mark.parametrize("poison", [duplicated, shifted_clock])
def test_a_repaired_world_equals_one_that_was_never_bad(
    poison: Callable[[Rows], Rows], shared_sites: SharedSites, tmp_path: Path
) -> None:
    good = shared_sites.get("repair-good", make_good)
    site, bad_ds = make_daily_site(tmp_path, last=day(7)), day(3)
    write_logs(tmp_path, ds_range(START, day(7)), poison=(bad_ds, poison))
    build(site, EVERYTHING)  # three days on after the bad one
    assert snapshot(site, day(6)) != snapshot(good, day(6))
    write_logs(tmp_path, ds_range(START, day(7)))  # corrected upstream

    plan = plan_repair(site, since=bad_ds, until=bad_ds)
    assert plan.raw_days == [day(2), bad_ds]
    assert plan.embedding_days == ds_range(day(2), day(6))
    build(site, plan)

    for ds in DAYS:
        assert snapshot(site, ds) == snapshot(good, ds)
    counts = embedding_state(site).require(day(6))["counts"]
    assert counts["reused"] > 0  # users whose input did not change were not embedded again
    assert release_content(site) == release_content(good)
