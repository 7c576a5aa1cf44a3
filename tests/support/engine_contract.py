"""What every engine must give: the whole daily path, run on it, and all that it leaves behind as plain values."""

from pathlib import Path
from typing import Any

import dagster as dg

from pf_core.config.site import EngineConfig, Site
from pf_core.days import ds_range
from pf_core.embeddings.tables import pin_embedding_state
from pf_core.embeddings.vectors import matrix_of
from pf_core.logs.partition import bucket_files
from pf_core.serving.index import index_manifest
from pf_core.serving.releases import list_releases
from pf_core.storage.files import path_of, read_parquet, upload
from pf_core.timelines.build import read_bucket, timeline_state
from tests.support.daily import day, make_daily_site, register_model, run, snapshot
from tests.support.shared import SharedSites
from tests.support.sites import START

LAST = day(5)
NUM_BUCKETS = 5


def run_daily_path(
    root: Path, engine: EngineConfig, *, bucket: str | None = None, shared: SharedSites | None = None
) -> dict[str, Any]:
    """A range of days from nothing, a rebuild of one, then a morning; and what came of it."""
    site = contract_site(root, engine, bucket=bucket, shared=shared)
    materialize_days(site, root)
    return values_of(site)


def contract_site(
    root: Path, engine: EngineConfig, *, bucket: str | None = None, shared: SharedSites | None = None
) -> Site:
    """A site with logs and a model; with a bucket (s3://…), everything is there."""
    root.mkdir()
    site = make_daily_site(
        root,
        last=LAST,
        timelines={"num_buckets": NUM_BUCKETS},
        serving={"index": {"sample_users": 20, "num_shards": 3}},
    )
    site = site.model_copy(update={"engine": engine})
    if bucket is not None:
        site = moved_to(site, root, bucket)
    if shared is not None:
        shared.add_mlflow(site)
    register_model(site)
    return site


def moved_to(site: Site, root: Path, bucket: str) -> Site:
    """The site with its logs, its deletion list and all that it will write in object storage."""
    for name in ("logs", "pins", "forget.txt"):
        upload(root / name, path_of(f"{bucket}/source/{name}"))
    return site.model_copy(
        update={
            "data_dir": f"{bucket}/data",
            "deletion_list": f"{bucket}/source/forget.txt",
            "source": site.source.model_copy(update={"root": f"{bucket}/source"}),
        }
    )


def materialize_days(site: Site, root: Path) -> None:
    rebuild = {"ops": {"user_timelines": {"config": {"rebuild": True}}}}
    timelines = ("raw_actions", "pin_features", "user_timelines")
    (root / "dagster").mkdir()
    with dg.instance_for_test(temp_dir=str(root / "dagster")) as instance:
        for result in (
            run(site, instance, START, day(4)),
            run(site, instance, day(4), assets=timelines, config=rebuild),
            run(site, instance, LAST),
        ):
            assert result.success, [event.step_failure_data.error for event in result.get_step_failure_events()]


def values_of(site: Site) -> dict[str, Any]:
    """By asset, everything that does not say when or where it was made."""
    days = ds_range(START, LAST)
    pins = pin_embedding_state(site).open_bucket(LAST, 0).to_table()
    index = index_manifest(site, LAST)
    assert index is not None
    return {
        "raw_actions": {
            (ds, bucket): read_parquet(path).to_pylist()
            for ds in days
            for bucket, path in bucket_files(site, ds).items()
        },
        "user_timelines": {
            (ds, bucket): read_bucket(timeline_state(site), ds, bucket).to_pylist()
            for ds in days
            for bucket in range(NUM_BUCKETS)
        },
        "user_embedding_snapshot": {ds: snapshot(site, ds) for ds in days},
        "pin_embeddings": (pins.drop_columns(["embedding"]).to_pylist(), matrix_of(pins["embedding"]).tolist()),
        "pin_index": (index["pins_of_shard"], index["recall_at_10"]),
        "release": [(release["ds"], release["counts"], release["is_current"]) for release in list_releases(site)],
    }
