"""The asset graph, through real Dagster runs on a tiny world."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_assets.definitions import build_definitions
from pf_assets.metadata.check_results import asset_check_result
from pf_assets.metadata.logs import describe_raw_actions
from pf_assets.settings import DEMO_SITE
from pf_core.check_result import CheckResult
from pf_core.config.site import Site, load_site
from pf_core.days import ds_range, shift_ds
from pf_core.experiments.recipes import experiments
from pf_core.logs.partition import partition_dir, read_manifest
from pf_core.timelines.build import read_bucket, timeline_state
from pf_core.world.behaviour import ACTION_TYPES
from pf_core.world.config import tiny
from pf_core.world.logs import write_logs
from pf_core.world.world import World
from tests.support.shared import SharedSites
from tests.support.sites import SmallSite

START, END = "2026-01-01", "2026-01-06"
DAYS = ds_range(START, END)
ASSETS = ("raw_actions", "pin_features", "user_timelines")


def make_demo_site(root: Path) -> Site:
    """The demo's own site file, on a tiny world."""
    write_logs(tiny(num_users=300, num_days=8), root / "demo_site", file_format="csv.gz")
    demo = load_site(DEMO_SITE, environment={"PF_DATA_DIR": str(root)})
    timelines = demo.timelines.model_copy(update={"num_buckets": 2})
    engine = demo.engine.model_copy(update={"num_workers": 1})
    return demo.model_copy(update={"end_ds": END, "timelines": timelines, "engine": engine})


def make_three_days(root: Path, shared: SharedSites) -> Site:
    site = shared.copy("demo", make_demo_site, root)
    with dg.DagsterInstance.ephemeral() as instance:
        assert run(site, instance, START, DAYS[2]).success
    return site


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    return shared_sites.copy("demo", make_demo_site, tmp_path)


@pytest.fixture
def three_days(shared_sites: SharedSites, tmp_path: Path) -> Site:
    """A copy after a run over the first three days."""
    return shared_sites.copy("demo-3", lambda root: make_three_days(root, shared_sites), tmp_path)


@pytest.fixture
def instance(memory_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    return memory_instance


def run(
    site: Site,
    instance: dg.DagsterInstance,
    first: str,
    last: str | None = None,
    *,
    assets: tuple[str, ...] = ASSETS,
    config: dict[str, object] | None = None,
) -> dg.ExecuteInProcessResult:
    """One Dagster run of the assets and their checks: of a day, or of a range."""
    definitions = build_definitions(site)
    ranged = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last or first}
    return dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.assets(*assets),
        instance=instance,
        partition_key=first if last is None else None,
        tags=None if last is None else ranged,
        run_config=config,
        raise_on_error=False,
    )


def check_results(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in result.get_asset_check_evaluations()}


def all_timelines(site: Site, ds: str) -> list[dict[str, object]]:
    tables = [read_bucket(timeline_state(site), ds, bucket) for bucket in range(site.timelines.num_buckets)]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: row["user_id"])


def test_a_range_and_its_days_give_the_same(site: Site, stored_instance: dg.DagsterInstance, tmp_path: Path) -> None:
    instance = stored_instance
    result = run(site, instance, START, END)
    assert result.success
    assert check_results(result) == dict.fromkeys(
        [
            *("quarantined_share_is_normal", "volume_is_normal", "late_rows_are_received"),
            *("actions_have_pin_features", "timelines_are_sound"),
        ],
        True,
    )
    for name in ASSETS:
        assert instance.get_materialized_partitions(dg.AssetKey(name)) == set(DAYS)
    singly = site.model_copy(update={"data_dir": str(tmp_path / "singly")})
    for ds in DAYS:
        assert run(singly, instance, ds).success
    for ds in DAYS:
        assert all_timelines(singly, ds) == all_timelines(site, ds)
    assert len(all_timelines(site, END)) > 100


def test_ingestion_undoes_the_defects_of_the_logs(site: Site, instance: dg.DagsterInstance) -> None:
    """The world knows what truly happened: duplicates, late, unknown and malformed rows must not change it."""
    assert run(site, instance, START, END, assets=("raw_actions",)).success
    world = World(tiny(num_users=300, num_days=8))
    true = [world.actions(day, chunk) for day in range(8) for chunk in range(world.config.num_chunks)]
    day_of = np.concatenate([actions.ts_s for actions in true]) - world.config.start_s
    day_of = (day_of // 86_400).astype(int)  # of the action; it may have arrived later
    user, action = (np.concatenate([getattr(actions, name) for actions in true]) for name in ("user", "action"))
    for day, ds in enumerate(DAYS):
        manifest = read_manifest(site, ds)
        assert manifest is not None
        assert manifest["counts"]["kept"] == (day_of == day).sum()
        assert manifest["counts"]["users"] == len(np.unique(user[day_of == day]))
        by_type = np.bincount(action[day_of == day], minlength=len(ACTION_TYPES))
        assert manifest["by_type"] == {name: n for name, n in zip(ACTION_TYPES, by_type, strict=True) if n}
        assert manifest["counts"]["quarantined"] > 0 or manifest["counts"]["duplicates"] > 0


def test_metadata_shows_what_happened(site: Site, instance: dg.DagsterInstance) -> None:
    assert run(site, instance, START, END).success
    shown = {}
    for name in ASSETS:
        records = instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey(name), asset_partitions=[END]), limit=1
        ).records
        materialization = records[0].asset_materialization
        assert materialization is not None
        shown[name] = materialization.metadata
    raw, timelines = shown["raw_actions"], shown["user_timelines"]
    assert {"actions_by_type", "actions_by_surface", "quarantine", "accounting", "bytes", "seconds"} <= raw.keys()
    balance = [int(record.data["count"]) for record in raw["accounting"].value.records]
    assert balance[0] + balance[1] - sum(balance[2:7]) == balance[7] == raw["actions"].value
    assert timelines["timeline_lengths"].value.startswith("![")
    assert Path(timelines["timeline_lengths_png"].value).read_bytes().startswith(b"\x89PNG")
    assert timelines["users"].value == timeline_state(site).require(END)["counts"]["users"]
    plots = sorted((timeline_state(site).root / "plots").iterdir())
    assert [path.stem for path in plots] == [END], "90 plots of a backfill took as long as building its days"


def test_a_mostly_broken_day_stops_the_run_before_the_timelines(three_days: Site, instance: dg.DagsterInstance) -> None:
    site = three_days
    log = next((site.log_root / "actions" / DAYS[3]).glob("*.csv.gz"))
    lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    broken = [line if number % 2 else line.replace("home", "moon") for number, line in enumerate(lines)]
    log.write_bytes(gzip.compress("\n".join(broken).encode()))
    result = run(site, instance, DAYS[3])
    assert not result.success
    assert check_results(result)["quarantined_share_is_normal"] is False
    assert timeline_state(site).manifest(DAYS[3]) is None
    assert read_manifest(site, DAYS[3]) is not None  # to look at: nothing is lost


def test_the_quarantine_sample_is_cut_and_shows_what_the_log_holds(site: Site, instance: dg.DagsterInstance) -> None:
    log = next((site.log_root / "actions" / START).glob("*.csv.gz"))
    texts = ["\x1b[31mred", "[red]red[/red]", "<script>alert(1)</script> | `x`", "y" * 3_000_000]
    header, *lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    log.write_bytes(gzip.compress("\n".join([header, *texts, *lines]).encode()))
    result = run(site, instance, START, assets=("raw_actions",))
    [materialization] = result.asset_materializations_for_node("raw_actions")
    sample = materialization.metadata["quarantine_sample"]
    assert isinstance(sample, dg.TableMetadataValue)  # its cells are shown as text, unlike Markdown
    shown = [str(record.data["raw"]) for record in sample.records]
    assert shown[:4] == [r"\x1b[31mred", *texts[1:3], "y" * 199 + "…"]
    assert all(len(str(cell)) <= 200 for record in sample.records for cell in record.data.values())


def test_the_quarantine_sample_does_not_say_whose_rows_they_are(small_site: Callable[..., SmallSite]) -> None:
    """Dagster keeps the page, and nobody can delete a user from it."""
    small = small_site()
    small.write_log(START, [(1, "p", 1.0, "look"), (8972, "p", 2.0, "dance")])
    [manifest] = small.ingest([START])
    page = describe_raw_actions(small.site, manifest)
    [row] = page["quarantine_sample"].records
    assert "dance" in str(row.data["raw"])
    assert "8972" not in str(page)
    (small.root / "forget.txt").write_text("5\n")
    small.write_log(START, [(1, "p", 1.0, "look"), (None, "p", 2.0, "dance")])
    [manifest] = small.ingest([START])
    assert describe_raw_actions(small.site, manifest)["quarantined_without_content"] == 1


def cut_log(site: Site, ds: str) -> None:
    """Leave a quarter of the day's log."""
    log = next((site.log_root / "actions" / ds).glob("*.csv.gz"))
    lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    log.write_bytes(gzip.compress("\n".join(lines[: len(lines) // 4]).encode()))


def test_half_a_day_stops_the_run_of_the_newest_day(three_days: Site, instance: dg.DagsterInstance) -> None:
    site = three_days
    for ds in ds_range(DAYS[5], "2026-01-08"):  # the morning of DAYS[4], whose log is in the making
        shutil.rmtree(site.log_root / "actions" / ds)
    cut_log(site, DAYS[3])
    result = run(site, instance, DAYS[3])
    assert not result.success
    assert check_results(result)["volume_is_normal"] is False
    assert timeline_state(site).manifest(DAYS[3]) is None


@pytest.mark.parametrize("last", [None, DAYS[4]])
def test_half_a_day_is_a_warning_in_a_backfill(
    three_days: Site, instance: dg.DagsterInstance, last: str | None
) -> None:
    """A day with later logs, built alone or in a range."""
    site = three_days
    cut_log(site, DAYS[3])
    result = run(site, instance, DAYS[3], last)
    assert result.success
    evaluations = {evaluation.check_name: evaluation for evaluation in result.get_asset_check_evaluations()}
    volume = evaluations["volume_is_normal"]
    assert (volume.passed, volume.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert volume.description is not None
    assert volume.description.startswith(f"{DAYS[3]}: ")
    assert timeline_state(site).manifest(last or DAYS[3]) is not None


def test_doctored_timelines_fail_their_check(three_days: Site, instance: dg.DagsterInstance) -> None:
    site = three_days
    path = timeline_state(site).manifest_path(DAYS[2])
    manifest = json.loads(path.read_text())
    manifest["counts"]["active_users"] -= 1
    path.write_text(json.dumps(manifest))
    definitions = build_definitions(site)
    result = dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.checks_for_assets("user_timelines"),
        instance=instance,
        raise_on_error=False,
    )
    assert check_results(result) == {"timelines_are_sound": False}


def test_pins_without_features_are_a_warning(site: Site, instance: dg.DagsterInstance) -> None:
    catalogue = site.log_root / "pins" / f"{START}.parquet"
    pins = pq.read_table(catalogue)
    pq.write_table(pins.slice(0, pins.num_rows // 2), catalogue)
    result = run(site, instance, START)
    assert result.success  # it warns, and blocks nothing
    assert check_results(result)["actions_have_pin_features"] is False


def test_a_range_longer_than_the_retention(site: Site, instance: dg.DagsterInstance) -> None:
    short = site.model_copy(update={"timelines": site.timelines.model_copy(update={"retention_days": 2})})
    result = run(short, instance, START, END)
    assert result.success
    assert all(check_results(result).values())
    assert timeline_state(short).days() == DAYS[-2:]


def test_late_rows_that_wait_are_a_warning(site: Site, instance: dg.DagsterInstance) -> None:
    later = [site.log_root / "actions" / ds for ds in ds_range(DAYS[3], "2026-01-08")]
    for folder in later:  # the morning of DAYS[3]: these logs do not exist yet
        folder.rename(folder.with_name(f"later-{folder.name}"))
    assert check_results(run(site, instance, START, DAYS[2]))["late_rows_are_received"]
    for folder in later:
        folder.with_name(f"later-{folder.name}").rename(folder)
    result = run(site, instance, DAYS[3])
    assert result.success
    assert check_results(result)["late_rows_are_received"] is False
    assert check_results(run(site, instance, DAYS[1], DAYS[3]))["late_rows_are_received"]


def test_rebuild_is_a_run_configuration(site: Site, instance: dg.DagsterInstance) -> None:
    assert run(site, instance, START, END, assets=("raw_actions",)).success
    failed = run(site, instance, END, assets=("user_timelines",))
    assert not failed.success
    config = {"ops": {"user_timelines": {"config": {"rebuild": True}}}}
    assert run(site, instance, END, assets=("user_timelines",), config=config).success
    rebuilt = all_timelines(site, END)
    assert run(site, instance, START, END, assets=("user_timelines",)).success
    assert all_timelines(site, END) == rebuilt


def test_the_asset_graph(site: Site) -> None:
    graph = build_definitions(site).resolve_asset_graph()
    snapshot = {
        node.key.to_user_string(): (node.group_name, sorted(parent.to_user_string() for parent in node.parent_keys))
        for node in graph.asset_nodes
    }
    assert snapshot == {
        "raw_actions": ("logs", []),
        "pin_features": ("logs", ["pin_features", "raw_actions"]),
        "user_timelines": ("timelines", ["raw_actions", "user_timelines"]),
        "training_set": ("model", ["pin_features", "user_timelines"]),
        "pinnerformer_model": ("model", ["training_set"]),
        "offline_evaluation": ("model", ["pinnerformer_model", "raw_actions", "training_set"]),
        "refitted_model": ("model", ["offline_evaluation", "pin_features", "pinnerformer_model", "user_timelines"]),
        "ablation_runs": ("experiments", ["raw_actions", "training_set"]),
        "paper_report": ("experiments", ["ablation_runs"]),
        "user_embeddings": (
            "serving",
            ["pin_features", "raw_actions", "refitted_model", "user_embeddings", "user_timelines"],
        ),
        "user_embedding_snapshot": ("serving", ["user_embedding_snapshot", "user_embeddings"]),
        "pin_embeddings": ("serving", ["pin_features", "user_embeddings"]),
        "pin_index": ("serving", ["pin_embeddings", "user_embedding_snapshot"]),
        "release": ("serving", ["pin_index", "user_embedding_snapshot"]),
    }
    assert {key.to_user_string() for key in graph.asset_check_keys} == {
        "raw_actions:quarantined_share_is_normal",
        "raw_actions:volume_is_normal",
        "raw_actions:late_rows_are_received",
        "pin_features:actions_have_pin_features",
        "user_timelines:timelines_are_sound",
        "training_set:held_out_users_are_disjoint",
        "training_set:nothing_is_later_than_the_cut",
        "pinnerformer_model:loss_fell_and_is_finite",
        "offline_evaluation:candidate_was_promoted",
        "offline_evaluation:model_beats_baselines",
        "refitted_model:refit_loss_fell_and_is_finite",
        "user_embeddings:user_embeddings_are_unit_norm",
        "user_embeddings:active_users_are_embedded",
        "user_embedding_snapshot:no_user_is_lost",
        "user_embedding_snapshot:snapshot_has_one_model",
        "user_embedding_snapshot:drift_is_normal",
        "pin_embeddings:candidates_are_embedded",
        "pin_index:index_finds_the_nearest_pins",
        "release:store_holds_the_snapshot",
    }
    unpartitioned = {node.key.to_user_string() for node in graph.asset_nodes if node.partitions_def is None}
    weekly = {"training_set", "pinnerformer_model", "offline_evaluation", "refitted_model"}
    assert unpartitioned == weekly | {"paper_report"}
    recipes = graph.get(dg.AssetKey("ablation_runs")).partitions_def
    assert recipes is not None
    assert recipes.get_partition_keys() == list(experiments(site))
    (daily,) = {node.partitions_def for node in graph.asset_nodes} - {None, recipes}
    keys = daily.get_partition_keys()
    assert (keys[0], keys[-1]) == (START, END)
    assert all(node.description for node in graph.asset_nodes)


def test_without_refit_the_graph_has_none(site: Site) -> None:
    judged_serves = site.model_copy(update={"training": site.training.model_copy(update={"refit": False})})
    for each, expected in ((site, "refitted_model"), (judged_serves, "offline_evaluation")):
        definitions = build_definitions(each)
        graph = definitions.resolve_asset_graph()
        parents = {key.to_user_string() for key in graph.get(dg.AssetKey("user_embeddings")).parent_keys}
        assert parents & {"refitted_model", "offline_evaluation"} == {expected}
        assert (dg.AssetKey("refitted_model") in graph.get_all_asset_keys()) == each.training.refit
        weekly = definitions.resolve_job_def("weekly_training").asset_layer.selected_asset_keys
        names = {"training_set", "pinnerformer_model", "offline_evaluation", expected}
        assert {key.to_user_string() for key in weekly} == names


def test_raw_actions_are_where_the_page_says(site: Site, instance: dg.DagsterInstance) -> None:
    assert run(site, instance, START, assets=("raw_actions",)).success
    manifest = read_manifest(site, START)
    assert manifest is not None
    folder = partition_dir(site.directory, START) / manifest["build"]
    assert sum(pq.read_metadata(path).num_rows for path in folder.glob("bucket-*")) == manifest["counts"]["kept"]


@pytest.mark.parametrize(("num_days", "end"), [(5, "2026-01-05: empty"), (24, "2026-01-05: empty; and 19 more days")])
def test_a_check_of_many_days_counts_those_it_does_not_describe(num_days: int, end: str) -> None:
    days = ds_range("2026-01-01", shift_ds("2026-01-01", num_days - 1))
    context = dg.build_op_context()
    result = asset_check_result(context, [CheckResult(ds, False, "empty") for ds in days])  # type: ignore[arg-type]
    assert result.description is not None
    assert result.description.endswith(end)
