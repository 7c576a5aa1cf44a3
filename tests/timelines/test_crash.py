"""SIGKILL in the middle of writing a partition: the old state stays whole, and a re-run completes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pf_core.days import ds_range, shift_ds
from pf_core.logs.partition import partition_dir, read_manifest
from pf_core.timelines.build import timeline_state
from tests.support.scattered import ScatteredEngine
from tests.support.sites import START, SmallSite

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
DAYS = ds_range(START, shift_ds(START, 2))
OPTIONS: dict[str, Any] = {"timelines": {"num_buckets": 16}}
STEP = """
import sys
from pathlib import Path
from tests.support.scattered import ScatteredEngine
from tests.support.sites import SmallSite
site = SmallSite(Path(sys.argv[1]), {options})
if {is_shared}:
    site.engine = ScatteredEngine()
site.{verb}([sys.argv[2]])
"""


def kill_once(root: Path, verb: str, ds: str, is_half_done: Callable[[], bool], *, is_shared: bool = False) -> bool:
    """Run one step in a process of its own and kill it as soon as it is half done; False if it was faster."""
    code = STEP.format(options=repr(OPTIONS), verb=verb, is_shared=is_shared)
    process = subprocess.Popen([sys.executable, "-c", code, str(root), ds], cwd=REPOSITORY)
    while process.poll() is None:
        if is_half_done():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return process.returncode == -signal.SIGKILL
        time.sleep(0.0005)
    assert process.returncode == 0
    return False


@pytest.fixture
def site(tmp_path: Path) -> SmallSite:
    site = SmallSite(tmp_path, OPTIONS)
    for offset, ds in enumerate(DAYS):
        second = offset * 86_400
        site.write_log(ds, [(user, f"p{user % 7}", second + user * 0.5, "look") for user in range(20_000)])
    return site


def test_killed_while_writing_raw_actions(site: SmallSite) -> None:
    [before] = site.ingest(DAYS[:1])
    expected = site.actions(DAYS[0])
    folder = partition_dir(site.site.directory, DAYS[0])

    def is_half_done() -> bool:
        news = [path for path in folder.glob("build-*") if path.name > before["build"]]
        return any(len(list(path.glob("bucket-*.parquet"))) in range(2, 15) for path in news)

    num_kills = 0
    for _ in range(8):
        num_kills += kill_once(site.root, "ingest", DAYS[0], is_half_done)
        now = read_manifest(site.site, DAYS[0])
        assert now is not None
        assert now["files"] == before["files"]
        assert site.actions(DAYS[0]) == expected
        before = dict(now)
    assert num_kills >= 1
    [after] = site.ingest(DAYS[:1])
    assert after["files"] == before["files"]
    assert [path.name for path in folder.glob("build-*")] == [after["build"]]


@pytest.mark.parametrize("left", ["tmp/raw_actions-*/.0*", "tmp/raw_actions-*/0*", "raw_actions/*/build-*/.*"])
def test_killed_while_sharing_raw_actions(site: SmallSite, left: str) -> None:
    """The driver, while files are being routed, when one is done, and while buckets are being written."""
    [before] = site.ingest(DAYS[:1])
    expected, directory = site.actions(DAYS[0]), site.site.directory
    num_kills = sum(
        kill_once(site.root, "ingest", DAYS[0], lambda: any(directory.glob(left)), is_shared=True) for _ in range(3)
    )
    assert num_kills >= 1
    now = read_manifest(site.site, DAYS[0])
    assert now is not None
    assert now["files"] == before["files"]
    assert site.actions(DAYS[0]) == expected
    site.engine = ScatteredEngine()
    [after] = site.ingest(DAYS[:1])
    assert after["files"] == before["files"]
    assert [path.name for path in partition_dir(site.site.directory, DAYS[0]).glob("build-*")] == [after["build"]]
    assert list((directory / "tmp").iterdir()) == []


def test_killed_while_building_timelines(site: SmallSite) -> None:
    site.ingest(DAYS)
    site.build(DAYS[:2])
    state = timeline_state(site.site)
    old = {ds: site.timelines(ds) for ds in DAYS[:2]}
    manifests = {ds: state.require(ds) for ds in DAYS[:2]}

    def versions(bucket: int) -> int:
        return len(list((state.bucket_path(bucket) / "_versions").glob("*.manifest")))

    num_kills = 0
    for attempt in range(6):
        before = [versions(bucket) for bucket in range(16)]
        stop_at = 1 + attempt * 2  # a little later every time

        def is_half_done(before: list[int] = before, stop_at: int = stop_at) -> bool:
            return sum(versions(bucket) > before[bucket] for bucket in range(16)) >= stop_at

        num_kills += kill_once(site.root, "build", DAYS[2], is_half_done)
        state.manifest_path(DAYS[2]).unlink(missing_ok=True)  # should it have been faster than the kill
        assert {ds: state.require(ds) for ds in DAYS[:2]} == manifests
        assert {ds: site.timelines(ds) for ds in DAYS[:2]} == old
        assert state.days() == DAYS[:2]
    assert num_kills >= 2
    [manifest] = site.build(DAYS[2:])
    incremental = site.timelines(DAYS[2])
    assert manifest["counts"]["actions"] == sum(len(rows) for rows in incremental.values()) == 3 * 20_000
    site.build(DAYS[2:], rebuild=True)
    assert site.timelines(DAYS[2]) == incremental
    assert {ds: site.timelines(ds) for ds in DAYS[:2]} == old
