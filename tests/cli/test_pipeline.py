"""What `pf run` decides to start: days that are missing, the newest day, and in which order."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pf_assets.cli.pipeline import DagsterRun, missing_runs, newest_day, planned_assets, stage_names
from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.errors import PipelineError
from tests.support.shop import DAYS, write_shop

TRAINING = ("training_set", "pinnerformer_model", "offline_evaluation", "refitted_model")

SERVING = ("user_embeddings", "user_embedding_snapshot", "pin_embeddings", "pin_index", "release")


def test_a_new_site_misses_everything_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    site = write_shop(tmp_path)
    runs = list(missing_runs(site, DAYS[-1]))
    assert runs == [
        DagsterRun.of("raw_actions,pin_features,user_timelines", DAYS),
        DagsterRun(assets=TRAINING),
        DagsterRun(assets=SERVING, days=DAYS[-1:]),
    ]
    assert [asset for each in runs for asset in each.assets] == stage_names(site)
    assert planned_assets(site, DAYS[-1]) == set(stage_names(site))
    assert not (tmp_path / "data").exists(), "to plan writes nothing"


def test_a_demo_serves_several_days(tmp_path: Path) -> None:
    runs = [each for each in missing_runs(write_shop(tmp_path), DAYS[-1], served_days=3) if "release" in each.assets]
    days = [each.days for each in runs if each.days is not None]
    assert len(days) == len(runs)
    assert (days[0][0], days[-1][-1]) == (DAYS[-3], DAYS[-1])


def test_a_site_without_a_refit_has_no_stage_of_it(tmp_path: Path) -> None:
    site = write_shop(tmp_path)
    site = site.model_copy(update={"training": site.training.model_copy(update={"refit": False})})
    assert "refitted_model" not in stage_names(site)
    assert "refitted_model" not in planned_assets(site, DAYS[-1])


# The newest day


def dated_site(root: Path, **changes: Any) -> Site:
    source = write_shop(root).source.model_dump(mode="json")
    source["actions"]["path"] = "{ds}.csv"
    return write_shop(root, source=source, **changes)


def test_the_newest_day_is_the_last_of_the_site(tmp_path: Path) -> None:
    assert newest_day(write_shop(tmp_path)) == DAYS[-1]


def test_the_newest_day_of_a_site_without_an_end_is_the_last_complete_one_with_a_log(tmp_path: Path) -> None:
    today = datetime.now(UTC).date().isoformat()
    site = dated_site(tmp_path, end_ds=None, start_ds=shift_ds(today, -30))
    for ds in [*ds_range(shift_ds(today, -30), shift_ds(today, -3)), today]:
        (tmp_path / f"{ds}.csv").touch()
    assert newest_day(site) == shift_ds(today, -3)
    assert newest_day(write_shop(tmp_path, end_ds=None)) == shift_ds(today, -1), "one file has every day"


def test_a_site_whose_logs_have_stopped_has_no_newest_day(tmp_path: Path) -> None:
    today = datetime.now(UTC).date().isoformat()
    site = dated_site(tmp_path, end_ds=None, start_ds=shift_ds(today, -30))
    with pytest.raises(PipelineError, match=r"no log of a day from .* set end_ds to the last day of the logs"):
        newest_day(site)
    with pytest.raises(PipelineError, match="which is not over yet; set an earlier start_ds"):
        newest_day(write_shop(tmp_path, end_ds=None, start_ds=today))
