"""The daily path through real Dagster runs: logs to a release, day after day, and what happens when a day was bad."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pf_assets.cli import operations, releases, status
from pf_assets.cli.main import app
from pf_assets.definitions import build_definitions
from pf_assets.schedules import KEEP_MODEL, advise
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us
from pf_core.embeddings.tables import embedding_state, snapshot_state
from pf_core.errors import PipelineError
from pf_core.logs.partition import ingested_days
from pf_core.operations.repair import plan_repair
from pf_core.operations.status import asset_statuses
from pf_core.serving.client import Serving
from pf_core.serving.releases import list_releases, read_published
from pf_core.timelines.build import read_bucket, timeline_state
from tests.support.daily import (
    DailySites,
    check_results,
    day,
    make_daily_site,
    register_model,
    release_content,
    run,
    snapshot,
    write_logs,
    wrong_surface,
)
from tests.support.shared import SharedSites
from tests.support.sites import START

BLOCKING = (
    *("user_embeddings_are_unit_norm", "active_users_are_embedded", "no_user_is_lost", "snapshot_has_one_model"),
    *("candidates_are_embedded", "index_finds_the_nearest_pins", "store_holds_the_snapshot"),
)


@pytest.fixture
def instance(memory_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return memory_instance


@pytest.fixture
def site(daily_sites: DailySites) -> Site:
    return daily_sites.new()


class Morning:
    """What the daemon does: evaluate the daily schedule at 02:00, and run the job that it asks for."""

    def __init__(self, site: Site, instance: dg.DagsterInstance) -> None:
        definitions = build_definitions(site)
        self._instance = instance
        self._schedule = definitions.resolve_schedule_def("daily_release_schedule")
        self._job = definitions.resolve_job_def("daily_release")

    def tick(self, number: int) -> dg.ExecuteInProcessResult | str:
        """At 02:00 UTC of the site's day, counted from 0; a skip is its reason."""
        at = datetime.fromisoformat(START).replace(tzinfo=UTC) + timedelta(days=number, hours=2)
        context = dg.build_schedule_context(instance=self._instance, scheduled_execution_time=at)
        data = self._schedule.evaluate_tick(context)
        if data.skip_message is not None:
            return data.skip_message
        (request,) = data.run_requests or []
        return self._job.execute_in_process(
            instance=self._instance, tags=dict(request.tags), run_config=request.run_config, raise_on_error=False
        )


def test_schedule_ticks_release_the_day_before(site: Site, stored_instance: dg.DagsterInstance) -> None:
    instance = stored_instance
    morning = Morning(site, instance)
    assert morning.tick(0) == f"the site's first day is {START}, which is not over yet"
    assert run(site, instance, START, day(3)).success
    for number in (5, 6):
        result = morning.tick(number)
        assert not isinstance(result, str)
        assert result.success
        assert all(check_results(result)[name] for name in BLOCKING)
        ds = day(number - 1)
        assert str(read_published(site).current).startswith(ds)
        assert embedding_state(site).require(ds)["mode"] == "active"
        assert {event.partition for event in result.get_asset_materialization_events() if event.partition} == {
            day(number - 2),  # late rows of this day may have arrived
            ds,
        }
    for name in ("raw_actions", "user_embedding_snapshot", "pin_index", "release"):
        assert instance.get_materialized_partitions(dg.AssetKey(name)) == set(ds_range(START, day(5)))
    assert morning.tick(9) == f"the site's last day was {day(7)}; there is nothing to do for {day(8)}"


def test_the_morning_takes_late_rows_in(
    site: Site, instance: dg.DagsterInstance, daily_sites: DailySites, tmp_path: Path
) -> None:
    """Day by day with late rows arriving gives what one run over all days gives."""
    for ds in ds_range(day(1), day(7)):
        (Path(site.source.root) / "logs" / f"{ds}.parquet").rename(tmp_path / f"{ds}.parquet")
    morning = Morning(site, instance)
    for number in range(1, 5):
        result = morning.tick(number)
        assert not isinstance(result, str)
        assert result.success
        arriving = f"{day(number)}.parquet"
        (tmp_path / arriving).rename(Path(site.source.root) / "logs" / arriving)
    at_once = daily_sites.other_data(site, tmp_path / "at_once")
    (Path(site.source.root) / "logs" / f"{day(4)}.parquet").unlink()
    assert run(at_once, instance, START, day(3)).success
    for ds in ds_range(START, day(3)):
        assert snapshot(site, ds) == snapshot(at_once, ds)


def test_missed_mornings_are_made_up_for(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released(2)
    result = Morning(site, instance).tick(6)  # those of days 4 and 5 never came
    assert not isinstance(result, str)
    assert result.success
    assert embedding_state(site).days() == ds_range(START, day(5))
    at_once = daily_sites.released(6)
    assert snapshot(site, day(5)) == snapshot(at_once, day(5))


def test_a_silent_day_is_a_day(site: Site, instance: dg.DagsterInstance) -> None:
    log = Path(site.source.root) / "logs" / f"{day(2)}.parquet"
    pq.write_table(pq.read_table(log).slice(0, 0), log)
    log = log.with_name(f"{day(3)}.parquet")
    rows = pq.read_table(log)
    arrived = pc.greater_equal(rows["time_us"], ds_start_us(day(3)))  # nothing late of the silent day
    pq.write_table(rows.filter(arrived), log)
    assert run(site, instance, START, day(4)).success
    assert embedding_state(site).require(day(2))["counts"]["users"] == 0
    assert set(snapshot(site, day(1))) == set(snapshot(site, day(2))) <= set(snapshot(site, day(4)))


def test_a_new_beginning_is_remembered(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released(2)
    assert run(site, instance, day(3), day(4), assets=("raw_actions", "pin_features", "user_timelines")).success
    everyone = {"ops": {"user_embeddings": {"config": {"everyone": True}}}}
    assert run(site, instance, day(5), config=everyone).success
    assert run(site, instance, day(5), day(6), config=KEEP_MODEL).success
    assert [embedding_state(site).require(ds)["mode"] for ds in (day(5), day(6))] == ["everyone", "active"]


def test_days_before_that_changed_must_be_repaired_first(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released_twice()
    write_logs(Path(site.source.root), ds_range(START, day(7)), poison=(day(2), wrong_surface))
    assert run(site, instance, day(1), day(4), assets=("raw_actions", "pin_features", "user_timelines")).success
    result = run(site, instance, day(4), assets=("user_embeddings",))
    failure = result.failure_data_for_node("user_embeddings")
    assert failure is not None
    assert failure.error is not None
    assert f"pf repair --since {day(1)}" in failure.error.to_string()


def test_a_range_starts_with_everybody_and_goes_on_with_the_active(site: Site, instance: dg.DagsterInstance) -> None:
    result = run(site, instance, START, day(2), assets=("raw_actions", "pin_features", "user_timelines"))
    assert result.success
    serving = (
        *("user_embeddings", "user_embedding_snapshot", "pin_embeddings", "pin_index", "release"),
        *("raw_actions", "pin_features", "user_timelines"),
    )
    assert run(site, instance, day(2), day(4), assets=serving).success
    modes = [embedding_state(site).require(ds)["mode"] for ds in ds_range(day(2), day(4))]
    assert modes == ["everyone", "active", "active"]
    timelines = [read_bucket(timeline_state(site), day(4), bucket, ["ts"]) for bucket in range(2)]
    assert set(snapshot(site, day(4))) == {user for table in timelines for user in table["user_id"].to_pylist()}
    assert [manifest["ds"] for manifest in list_releases(site)] == [day(4)]


def test_metadata_shows_what_happened(site: Site, instance: dg.DagsterInstance) -> None:
    assert run(site, instance, START, day(2)).success

    def shown(name: str, ds: str) -> dict[str, Any]:
        wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey(name), asset_partitions=[ds])
        materialization = instance.fetch_materializations(wanted, limit=1).records[0].asset_materialization
        assert materialization is not None
        return dict(materialization.metadata)

    users = shown("user_embeddings", START)
    assert users["mode"].value == "everyone"
    assert "/runs/" in users["model_run"].value
    merged, counts = shown("user_embedding_snapshot", day(2)), snapshot_state(site).require(day(2))["counts"]
    assert [merged[name].value for name in ("new", "refreshed", "carried_over")] == [
        counts[name] for name in ("new", "refreshed", "carried_over")
    ]
    assert merged["embedding_age"].value.startswith("![")
    assert Path(merged["embedding_age_png"].value).read_bytes().startswith(b"\x89PNG")
    assert shown("pin_index", day(2))["recall_at_10"].value >= 0.95
    assert shown("release", day(2))["published"].value is True
    assert shown("release", START)["published"].value is False


def test_a_promotion_embeds_everybody_anew(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released(2)
    before = snapshot(site, day(2))
    second = register_model(site, seed=1)
    Tracking(site).promote(second.version, because="a test")
    assert run(site, instance, day(3)).success
    manifest = embedding_state(site).require(day(3))
    assert manifest["mode"] == "everyone"
    assert set(before) <= set(snapshot(site, day(3)))
    assert {row[1] for row in snapshot(site, day(3)).values()} == {second.served_version}
    assert {row[1] for row in snapshot(site, day(2)).values()} != {second.served_version}
    assert Serving(site).release().manifest["model_version"] == second.served_version


def test_a_day_embedded_again_keeps_its_model(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released(2)
    before = snapshot(site, day(2))
    Tracking(site).promote(register_model(site, seed=1).version, because="a test")
    assert run(site, instance, day(1), day(3), config=KEEP_MODEL).success
    assert snapshot(site, day(2)) == before
    assert [embedding_state(site).require(ds)["mode"] for ds in ds_range(day(1), day(3))] == [
        *("active", "active"),
        "everyone",
    ]


def test_without_a_champion_nothing_is_embedded(
    tmp_path: Path, instance: dg.DagsterInstance, shared_sites: SharedSites
) -> None:
    root = tmp_path / "untrained"
    root.mkdir()
    site = shared_sites.add_mlflow(make_daily_site(root, last=day(1)))
    result = run(site, instance, START)
    assert not result.success
    failure = result.failure_data_for_node("user_embeddings")
    assert failure is not None
    assert failure.error is not None
    assert "there is no champion to embed with" in failure.error.to_string()
    assert "--select training_set,pinnerformer_model,offline_evaluation" in failure.error.to_string()


def test_a_gap_names_the_command(instance: dg.DagsterInstance, daily_sites: DailySites) -> None:
    site = daily_sites.released(2)
    assert run(site, instance, day(3), assets=("raw_actions", "pin_features", "user_timelines")).success
    result = run(site, instance, day(4))
    assert not result.success
    failure = result.failure_data_for_node("user_embeddings")
    assert failure is not None
    assert failure.error is not None
    assert f"--partition-range {day(3)}...{day(4)}" in failure.error.to_string()
    assert str(read_published(site).current).startswith(day(2))


def use(site: Site, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pf` on this site, its Dagster runs in this process and on this instance."""

    def materialize(
        assets: str, days: list[str] | None = None, *, config: dict[str, Any] | None = None, **shown: Any
    ) -> None:
        assert days is not None
        assert run(site, instance, days[0], days[-1], assets=tuple(assets.split(",")), config=config).success

    monkeypatch.setattr(operations, "current_site", lambda: site)
    monkeypatch.setattr(releases, "current_site", lambda: site)
    monkeypatch.setattr(status, "current_site", lambda: site)
    monkeypatch.setattr(operations, "materialize", materialize)


def pf(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_repaired_world_equals_one_that_was_never_bad(
    site: Site, instance: dg.DagsterInstance, daily_sites: DailySites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong surfaces, through Dagster and `pf`; tests/operations/test_repaired_world.py has other kinds of bad logs."""
    good = daily_sites.released(6)
    bad_ds, logs = day(3), Path(site.source.root)
    write_logs(logs, ds_range(START, day(7)), poison=(bad_ds, wrong_surface))
    assert run(site, instance, START, day(6)).success  # three days on after the bad one
    assert snapshot(site, day(6)) != snapshot(good, day(6))
    write_logs(logs, ds_range(START, day(7)))  # corrected upstream

    use(site, instance, monkeypatch)
    announced = pf("repair", "--since", bad_ds, "--until", bad_ds, "--dry-run")
    plan = plan_repair(site, since=bad_ds, until=bad_ds)
    assert f"{plan.users:,} users" in announced
    assert plan.raw_days == [day(2), bad_ds]
    assert snapshot(site, day(6)) != snapshot(good, day(6))  # a dry run does nothing
    assert "repaired" in pf("repair", "--since", bad_ds, "--until", bad_ds)

    for ds in ds_range(START, day(6)):
        assert snapshot(site, ds) == snapshot(good, ds)
    counts = embedding_state(site).require(day(6))["counts"]
    assert counts["reused"] > 0  # who was not concerned was not embedded again
    assert release_content(site) == release_content(good)


def test_forgetting(daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    site = daily_sites.released_twice()
    user, stays = sorted(snapshot(site, day(3)))[:2]
    old = Serving(site).release()
    use(site, instance, monkeypatch)
    assert "1 added" in pf("forget", str(user))
    assert not old.embeddings([user])[1].any()  # at once, even in the release that was current
    release = Serving(site).release()
    assert release.embeddings([user, stays])[1].tolist() == [False, True]
    assert release.manifest["release"] != old.manifest["release"]
    assert user not in snapshot(site, day(3))
    timelines = [read_bucket(timeline_state(site), day(3), bucket, ["ts"]) for bucket in range(2)]
    assert all(user not in table["user_id"].to_pylist() for table in timelines)
    assert run(site, instance, day(2), day(5)).success
    assert user not in snapshot(site, day(5))
    assert "0 added" in pf("forget", str(user))


def test_forgetting_does_not_undo_a_rollback(
    daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = daily_sites.released_twice()
    use(site, instance, monkeypatch)
    pf("rollback")
    assert "nothing is released now" in pf("forget", str(min(snapshot(site, day(3)))))
    assert str(read_published(site).current).startswith(day(2))


def test_rollback_and_recommendations(
    daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = daily_sites.released_twice()
    use(site, instance, monkeypatch)
    user = next(iter(snapshot(site, day(2))))
    shown = pf("recommend", str(user), "-k", "3")
    assert f"release {day(3)}.1" in shown
    assert "newest actions" in shown
    assert len(shown.split("recommended pins:")[1].strip().splitlines()) == 3
    listed = pf("releases").splitlines()
    assert listed[0].startswith(f"→ {day(3)}.1")
    assert len(listed) == 2
    assert f"current is {day(2)}.1" in pf("rollback")
    assert f"release {day(2)}.1" in pf("recommend", str(user))
    assert len(pf("similar", "p5", "-k", "4").splitlines()) == 4
    with pytest.raises(PipelineError, match="not an integer user id"):
        pf("recommend", "somebody")
    assert run(site, instance, day(3), assets=("release",)).success
    assert f"→ {day(3)}." in pf("releases")


def test_export(
    daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = daily_sites.released(2)
    use(site, instance, monkeypatch)
    pf("export", "users", str(tmp_path / "users"))
    users = pq.read_table(tmp_path / "users")
    assert set(users["user_id"].to_pylist()) == set(snapshot(site, day(2)))
    assert {"memory_pin_id", "memory_increment", "seen_pin_id", "seen_is_complete"} < set(users.column_names)
    release = Serving(site).release()
    for user, seen in zip(users["user_id"].to_pylist(), users["seen_pin_id"].to_pylist(), strict=True):
        assert release.look_up([user]).lists(0).seen_pin_ids.to_pylist() == seen != []
    pf("export", "pins", str(tmp_path / "pins"), "--ds", START)
    assert pq.read_table(tmp_path / "pins").num_rows == 72


def test_status_names_what_is_missing_and_stale(
    daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = daily_sites.released_twice()
    assert not any(row.missing or row.stale for row in asset_statuses(site) if row.asset != "raw_actions")
    assert run(site, instance, day(4), assets=("raw_actions", "user_timelines")).success
    write_logs(Path(site.source.root), ds_range(START, day(7)), poison=(day(2), wrong_surface))
    assert run(site, instance, day(2), assets=("raw_actions",)).success
    by_asset = {row.asset: row for row in asset_statuses(site)}
    assert set(by_asset["user_timelines"].stale) == {day(2), day(3), day(4)}
    assert by_asset["release"].missing == [day(4)]
    assert run(site, instance, day(2), day(4), assets=("user_timelines",)).success
    by_asset = {row.asset: row for row in asset_statuses(site)}
    assert not by_asset["user_timelines"].stale
    assert set(by_asset["user_embeddings"].stale) == {day(2), day(3)}
    use(site, instance, monkeypatch)
    shown = pf("status")
    assert "user_timelines changed" in shown
    assert "champion                 model0000000-1" in shown


def test_advice_is_a_sentence() -> None:
    tags = {"dagster/asset_partition_range_start": day(1), "dagster/asset_partition_range_end": day(3)}
    advice = advise(asset="user_timelines", reason="the logs are gone", tags=tags)
    assert advice.startswith("user_timelines failed: the logs are gone. The previous release keeps serving.")
    assert f"pf repair --since {day(1)} --until {day(3)}" in advice
    assert "champion keeps serving" in advise(asset="pinnerformer_model", reason="no memory", tags={})
    assert "Re-execute it" in advise(asset=None, reason="", tags={})


def test_nothing_to_repair(site: Site, instance: dg.DagsterInstance) -> None:
    assert run(site, instance, START, day(1), assets=("raw_actions",)).success
    assert ingested_days(site) == [START, day(1)]
    assert plan_repair(site, since=START).partitions["raw_actions"] == [START, day(1)]
    with pytest.raises(PipelineError, match=f"raw_actions has {START} to {day(1)}"):
        plan_repair(site, since=day(5))
    with pytest.raises(PipelineError, match="is before --since"):
        plan_repair(site, since=day(5), until=day(4))


def test_a_repair_builds_what_is_missing(
    daily_sites: DailySites, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A morning failed after the timelines: the command that the sensor names ends with a release."""
    site = daily_sites.released(2)
    assert run(site, instance, day(2), day(3), assets=("raw_actions", "pin_features", "user_timelines")).success
    use(site, instance, monkeypatch)
    pf("repair", "--since", day(2), "--until", day(3))
    assert read_published(site).current == f"{day(3)}.1"
