"""Every check of the serving path passes on good data and fails on doctored data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import numpy as np
import pyarrow as pa
import pytest

from pf_assets.definitions import build_definitions
from pf_core.config.site import Site
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.embeddings.vectors import column_of
from pf_core.serving.index import index_dir
from pf_core.serving.releases import opened_store, read_published, release_root
from tests.support.daily import check_results, day, make_daily_site, register_model, run
from tests.support.shared import SharedSites
from tests.support.sites import START

LAST = day(2)
CHECKS = {
    "user_embeddings": ("user_embeddings_are_unit_norm", "active_users_are_embedded"),
    "user_embedding_snapshot": ("no_user_is_lost", "snapshot_has_one_model", "drift_is_normal"),
    "pin_embeddings": ("candidates_are_embedded",),
    "pin_index": ("index_finds_the_nearest_pins",),
    "release": ("store_holds_the_snapshot",),
}


def make_good_site(root: Path, shared: SharedSites) -> Site:
    quality = {"max_mean_drift": 2.0, "max_change_ratio": 100.0}  # a few random users: any day drifts
    site = shared.add_mlflow(make_daily_site(root, last=day(7), serving={"quality": quality}))
    register_model(site)
    with dg.DagsterInstance.ephemeral() as instance:
        result = run(site, instance, START, LAST)
    assert result.success
    names = [name for checks in CHECKS.values() for name in checks]
    assert {name: check_results(result)[name] for name in names} == dict.fromkeys(names, True)
    return site


@pytest.fixture
def site(shared_sites: SharedSites, tmp_path: Path) -> Site:
    """A copy to doctor, of a site whose checks all passed."""
    return shared_sites.copy("checked", lambda root: make_good_site(root, shared_sites), tmp_path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replace_rows(site: Site, state: Any, change: Callable[[pa.Table], pa.Table]) -> None:
    """Another content of the first bucket, which the manifest names as if nothing had happened."""
    rows = change(state.open_bucket(LAST, 0).to_table())
    version = lance.write_dataset(rows, state.bucket_path(0), mode="overwrite").version
    rewrite(state.manifest_path(LAST), lambda manifest: manifest["versions"].__setitem__(0, version))


def with_nan(rows: pa.Table) -> pa.Table:
    vectors = np.array(rows["embedding"].to_pylist(), np.float16)
    vectors[0, 0] = np.nan
    return rows.set_column(rows.schema.get_field_index("embedding"), "embedding", column_of(vectors))


def with_another_model(rows: pa.Table) -> pa.Table:
    versions = ["another", *rows["model_version"].to_pylist()[1:]]
    return rows.set_column(rows.schema.get_field_index("model_version"), "model_version", pa.array(versions))


def set_count(name: str, value: int) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["counts"].__setitem__(name, value)


def drop_a_stored_user(site: Site) -> None:
    users = snapshot_state(site).open_bucket(LAST, 0).to_table(columns=["user_id"])["user_id"]
    with opened_store(site, release_root(site) / str(read_published(site).current)) as store:
        assert store.delete(users.combine_chunks()[:1]) == 1


DOCTORED: dict[str, tuple[str, Callable[[Site], None]]] = {
    "a NaN among the users": (
        "user_embeddings_are_unit_norm",
        lambda site: replace_rows(site, embedding_state(site), with_nan),
    ),
    "a user of another model": (
        "user_embeddings_are_unit_norm",
        lambda site: replace_rows(site, embedding_state(site), with_another_model),
    ),
    "few active users": (
        "active_users_are_embedded",
        lambda site: rewrite(embedding_state(site).manifest_path(LAST), set_count("active_users", 10_000)),
    ),
    "a lost user": (
        "no_user_is_lost",
        lambda site: replace_rows(site, snapshot_state(site), lambda rows: rows.slice(1)),
    ),
    "a manifest that hides a lost user": (
        "no_user_is_lost",
        lambda site: rewrite(snapshot_state(site).manifest_path(LAST), set_count("previous_users", 10_000)),
    ),
    "two models": (
        "snapshot_has_one_model",
        lambda site: replace_rows(site, snapshot_state(site), with_another_model),
    ),
    "drift": (
        "drift_is_normal",
        lambda site: rewrite(
            embedding_state(site).manifest_path(LAST),
            lambda manifest: manifest.__setitem__("mean_vector", [9.0] * manifest["embedding_dim"]),
        ),
    ),
    "a missing pin": (
        "candidates_are_embedded",
        lambda site: replace_rows(site, pin_embedding_state(site), lambda rows: rows.slice(1)),
    ),
    "a pin with a NaN": (
        "candidates_are_embedded",
        lambda site: replace_rows(site, pin_embedding_state(site), with_nan),
    ),
    "an index that misses pins": (
        "index_finds_the_nearest_pins",
        lambda site: rewrite(
            index_dir(site, LAST) / "manifest.json", lambda manifest: manifest.__setitem__("recall_at_10", 0.5)
        ),
    ),
    "an index of other pins": (
        "index_finds_the_nearest_pins",
        lambda site: rewrite(
            pin_embedding_state(site).manifest_path(LAST), lambda manifest: manifest.__setitem__("digest", "other")
        ),
    ),
    "a user missing from the store": ("store_holds_the_snapshot", drop_a_stored_user),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_a_check_fails_on_doctored_data(what: str, site: Site, memory_instance: dg.DagsterInstance) -> None:
    check, doctor = DOCTORED[what]
    doctor(site)
    asset = next(asset for asset, names in CHECKS.items() if check in names)
    definitions = build_definitions(site)
    result = dg.materialize(
        [*(definitions.assets or []), *(definitions.asset_checks or [])],
        selection=dg.AssetSelection.checks(dg.AssetCheckKey(dg.AssetKey(asset), check)),
        instance=memory_instance,
        raise_on_error=False,
    )
    assert check_results(result) == {check: False}
