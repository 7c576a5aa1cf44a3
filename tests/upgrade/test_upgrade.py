"""A site that an earlier version stored: this version goes on with it, and refuses what it cannot read.

`site-before-layouts.tar.xz` was written by `make_site.py` with the last version whose manifests did not all have a
layout.
"""

import base64
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from pf_assets.assets.evaluation import evaluation_dir, read_evaluation
from pf_core.config.site import Site
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.engine.daily_state import DailyState
from pf_core.errors import PipelineError
from pf_core.evaluation.verdict import judge_baselines
from pf_core.layouts import LAYOUTS, Kind
from pf_core.logs.log_day import open_log_day
from pf_core.logs.partition import bucket_files, partition_dir, read_quarantine
from pf_core.model.checkpoint import load_parts
from pf_core.operations.inspect import newest_actions
from pf_core.operations.status import asset_statuses
from pf_core.pins.counts import day_counts
from pf_core.pins.features import pin_state
from pf_core.serving.client import Serving
from pf_core.serving.index import index_dir, require_index
from pf_core.serving.releases import current_file, fault_of, list_releases, read_published, release_root
from pf_core.serving.rollback import forget_users, rollback
from pf_core.timelines.build import read_bucket, timeline_state
from pf_core.training.plan import current_model, models_dir
from pf_core.training.refit import current_refit, refits_dir
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.support.daily import day, snapshot
from tests.support.releases import redis_server
from tests.support.stages import DAILY, STAGES, run_stage, run_stages, served_model

ARCHIVE = Path(__file__).parent / "site-before-layouts.tar.xz"

NEWEST, NEXT = day(3), day(4)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "site"
    return Site.model_validate_json((root / "site.json").read_text().replace("ROOT", str(root)))


def tell_layout(path: Path, number: int) -> None:
    """Make a manifest say that what it describes is of another layout."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": number}))


def test_what_was_stored_is_read(site: Site) -> None:
    release = Serving(site).release()
    users = sorted(snapshot(site, NEWEST))
    assert release.manifest["release"] == f"{NEWEST}.1"
    assert release.embeddings(users)[1].all()
    assert 7 not in users
    hits = release.recommend(users[0], k=5)
    assert len(hits) == 5
    assert release.similar(hits[0].pin_id, k=3)
    assert release.popular(3)
    assert newest_actions(site, NEWEST, users[0], 2)
    assert [each["release"] for each in list_releases(site)] == [f"{NEWEST}.1", f"{day(2)}.1"]
    assert read_quarantine(site, day(1))["reason"].to_pylist() == ["action_type: unknown value (column event)"]
    assert len(day_counts(site, open_log_day(site, NEWEST))) > 0
    data = open_training_set(latest_training_set(site))
    assert data.train.num_users > 10
    _, table, _ = load_parts(served_model(site).path)
    assert len(table.trust) == 40
    assert current_model(site) is not None
    evaluation = read_evaluation(site)
    assert evaluation is not None
    assert judge_baselines(evaluation).reason


def test_nothing_is_stale_and_the_next_day_goes_on(site: Site) -> None:
    for status in asset_statuses(site):
        # the archive's logs are other files than those that were ingested: late rows wait in them
        stale = {ds: reason for ds, reason in status.stale.items() if status.asset != "raw_actions"}
        assert stale == {}, status.asset
    before = snapshot(site, NEWEST)
    run_stages(site, DAILY, [NEXT])
    release = Serving(site).release()
    assert release.manifest["ds"] == NEXT
    users = snapshot(site, NEXT)
    carried = [user for user, row in users.items() if row == before.get(user)]
    assert set(before) <= set(users)
    assert carried, "users who were idle keep the record that the earlier version stored"
    assert release.embeddings(carried)[1].all()
    assert release.manifest["model_version"] == served_model(site).model_version
    assert rollback(site)["release"] == f"{NEWEST}.1"
    assert set(forget_users(site, release.index.pin_ids[:0].cast("int64").combine_chunks(), str)) == {
        *(f"{ds}.1" for ds in (day(2), NEWEST, NEXT))
    }


def test_days_can_be_built_again(site: Site) -> None:
    """What is derived from the same logs is what the earlier version had."""
    before, names = snapshot(site, NEWEST), [name for name in DAILY if name != "release"]
    timelines = [read_bucket(timeline_state(site), NEWEST, bucket).to_pylist() for bucket in range(2)]
    for ds in (day(2), NEWEST):
        run_stages(site, names, [ds])
    assert [read_bucket(timeline_state(site), NEWEST, bucket).to_pylist() for bucket in range(2)] == timelines
    assert snapshot(site, NEWEST).keys() == before.keys()
    run_stages(site, ["training_set", "pinnerformer_model"])


# Other layouts

STATE: dict[str, Callable[[Site], DailyState[Any]]] = {
    "pin_features": pin_state,
    "user_timelines": timeline_state,
    "user_embeddings": embedding_state,
    "user_embedding_snapshot": snapshot_state,
    "pin_embeddings": pin_embedding_state,
}

EVERYONE = r"--select user_embeddings,user_embedding_snapshot --partition 2026-01-04 .*everyone"

REFUSED: dict[Kind, tuple[Callable[[Site], Path], Callable[[Site], Any], str]] = {
    "raw_actions": (
        lambda site: partition_dir(site.directory, NEWEST) / "manifest.json",
        lambda site: bucket_files(site, NEWEST),
        "--select raw_actions --partition 2026-01-04",
    ),
    **{  # type: ignore[dict-item]
        name: (
            lambda site, name=name: STATE[name](site).manifest_path(NEWEST),
            lambda site, name=name: STATE[name](site).open_bucket(NEWEST, 0),
            command,
        )
        for name, command in {
            "pin_features": "--select pin_features --partition 2026-01-04 -m",
            "user_timelines": "--select user_timelines --partition 2026-01-04 .*rebuild",
            "user_embeddings": EVERYONE,
            "user_embedding_snapshot": EVERYONE,
            "pin_embeddings": "--select pin_embeddings --partition 2026-01-04 -m",
        }.items()
    },
    "training_set": (
        lambda site: latest_training_set(site) / "training_set.json",
        lambda site: open_training_set(latest_training_set(site)),
        "--select training_set -m",
    ),
    "model": (
        lambda site: served_model(site).path / "model.json",
        lambda site: load_parts(served_model(site).path),
        "--select pinnerformer_model,offline_evaluation -m",
    ),
    "pinnerformer_model": (
        lambda site: models_dir(site) / "manifest.json",
        current_model,
        "--select pinnerformer_model -m",
    ),
    "refitted_model": (lambda site: refits_dir(site) / "manifest.json", current_refit, "--select refitted_model "),
    "offline_evaluation": (
        lambda site: evaluation_dir(site) / "manifest.json",
        read_evaluation,
        "--select offline_evaluation -m",
    ),
    "pin_index": (
        lambda site: index_dir(site, NEWEST) / "manifest.json",
        lambda site: require_index(site, NEWEST),
        "--select pin_index --partition 2026-01-04 -m",
    ),
    "release": (
        lambda site: release_root(site) / f"{NEWEST}.1" / "release.json",
        lambda site: Serving(site).release(),
        "--select release --partition 2026-01-04 -m",
    ),
    "current_release": (current_file, read_published, "--select release --partition DAY"),
}
"""By kind: where its manifest is, what opens it, and the command that the error names."""


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("is_newer", [False, True], ids=["older", "newer"])
def test_another_layout_is_refused_with_the_command_that_rebuilds_it(site: Site, kind: Kind, is_newer: bool) -> None:
    path_of_manifest, read, command = REFUSED[kind]
    path = path_of_manifest(site)
    if kind == "refitted_model":
        path.parent.mkdir()
        path.write_text("{}")
    read(site)
    other = LAYOUTS[kind] + 1 if is_newer else 0
    tell_layout(path, other)
    with pytest.raises(PipelineError) as refused:
        read(site)
    sentence = str(refused.value)
    assert f"was stored in layout {other}, and this version of the code reads layout {LAYOUTS[kind]}; " in sentence
    assert ("use a newer version, or rebuild it with: " in sentence) == is_newer
    with pytest.raises(PipelineError, match=f"rebuild it with: dagster asset materialize .*{command}"):
        read(site)


def test_every_kind_is_refused_or_made_again() -> None:
    """The last two are caches; the layout of a store is in its values (tests/serving/test_stores.py)."""
    assert {*REFUSED, "store", "pin_counts", "packed_pins"} == LAYOUTS.keys()


def test_every_manifest_tells_its_layout(site: Site) -> None:
    """After a day by this version: manifests of all kinds but those of assets that the day does not make."""
    run_stages(site, tuple(STAGES), [NEXT])
    told = {}
    for path in site.directory.rglob("*.json"):
        if "_refs" in path.parts or path.name in ("result.json", "state.json"):  # Lance's own, and a training's
            continue
        content = json.loads(path.read_text())
        if "layout" in content:
            told[path.relative_to(site.directory).parts[0]] = path
        else:
            assert NEXT not in str(path), path
    assert told.keys() >= {*STAGES, "pin_counts"}


def test_caches_of_another_layout_are_made_again(site: Site) -> None:
    folder, packed = site.directory / "pin_counts", pin_state(site).root / "packed"
    counts = day_counts(site, open_log_day(site, NEWEST)).to_pylist()
    tell_layout(folder / f"{NEWEST}.json", 0)
    (folder / f"{NEWEST}.arrow").write_bytes(b"something else")
    assert day_counts(site, open_log_day(site, NEWEST)).to_pylist() == counts
    version = pin_state(site).require(NEWEST)["versions"][0]
    used = packed / f"v{version}.json"
    tell_layout(used, 0)
    (used.with_suffix("") / "feature.npy").write_bytes(b"something else")
    run_stage(site, "user_embeddings", [NEWEST])
    assert json.loads(used.read_text())["layout"] == LAYOUTS["packed_pins"]


def test_the_status_names_days_of_another_layout(site: Site) -> None:
    for name in STATE:
        tell_layout(STATE[name](site).manifest_path(day(2)), 0)
    tell_layout(index_dir(site, NEWEST) / "manifest.json", 0)
    stale = {status.asset: status.stale for status in asset_statuses(site)}
    for name in STATE:
        assert stale[name][day(2)].startswith("it was stored in layout 0, ")
        assert STATE[name](site).rebuild_command(day(2)) in stale[name][day(2)]
    assert "--select pin_index" in stale["pin_index"][NEWEST]


def test_new_days_do_not_need_days_of_another_layout(site: Site) -> None:
    """Pins and index look for a day to share files with; a day that cannot be read is none."""
    tell_layout(pin_embedding_state(site).manifest_path(NEWEST), 0)
    tell_layout(index_dir(site, NEWEST) / "manifest.json", 0)
    run_stages(site, DAILY, [NEXT])
    assert Serving(site).release().manifest["ds"] == NEXT
    tell_layout(release_root(site) / f"{NEWEST}.1" / "release.json", 0)
    assert "was stored in layout 0" in str(fault_of(site, f"{NEWEST}.1"))


# Redis


@pytest.fixture
def in_redis(site: Site) -> Any:
    """The release that was published in Redis, in a server with what the earlier version wrote there."""
    root = Path(site.source.root)
    with redis_server() as url:
        with redis.Redis.from_url(url) as client:
            for key, content in json.loads((root / "redis.json").read_text()).items():
                if isinstance(content, str):
                    client.set(key, content)
                else:
                    client.hset(key, mapping={name: base64.b64decode(value) for name, value in content.items()})
        store = site.serving.store.model_copy(update={"kind": "redis", "url": url})
        serving = site.serving.model_copy(update={"store": store})
        yield site.model_copy(update={"serving": serving, "data_dir": str(root / "redis_data")}), url


@pytest.mark.service
def test_users_in_redis_are_read(site: Site, in_redis: tuple[Site, str]) -> None:
    served, _ = in_redis
    release, local = Serving(served).release(), Serving(site).release()
    users = sorted(snapshot(site, NEWEST))
    assert (release.embeddings(users)[0] == local.embeddings(users)[0]).all()
    assert release.recommend(users[0], k=5) == local.recommend(users[0], k=5)
    assert fault_of(served, release.manifest["release"]) is None


@pytest.mark.service
def test_values_of_another_layout_in_redis_are_refused(site: Site, in_redis: tuple[Site, str]) -> None:
    served, url = in_redis
    with redis.Redis.from_url(url) as client:
        for key in client.keys("pinnerformer:small:*:*"):
            for name, value in client.hgetall(key).items():
                client.hset(key, name, b"\x01" + value[1:])
    with pytest.raises(PipelineError, match=r"users was stored in layout 1, .* rebuild it with: dagster"):
        Serving(served).release().recommend(sorted(snapshot(site, NEWEST))[0])
