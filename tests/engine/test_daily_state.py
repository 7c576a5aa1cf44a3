"""Daily state: one Lance version of each bucket for every day, and manifests that are read once."""

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pf_core.engine import daily_state
from pf_core.engine.daily_state import DailyState, StateManifest, create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.layouts import LAYOUTS
from pf_core.storage.files import find_json

DAYS = ["2026-01-01", "2026-01-02"]


class CountedManifest(StateManifest):
    counts: dict[str, int]


@pytest.fixture
def state(tmp_path: Path) -> DailyState[CountedManifest]:
    """Three buckets, of which bucket b holds the rows 10 * b + 1 on the first day and 10 * b + 2 on the second."""
    state: DailyState[CountedManifest] = DailyState(root=tmp_path / "asset", asset="pin_embeddings", num_buckets=3)
    for number, ds in enumerate(DAYS, 1):
        rows = [pa.table({"row": [10 * bucket + number]}) for bucket in range(3)]
        versions = [create_bucket(state.bucket_path(bucket), rows[bucket]).version for bucket in range(3)]
        state.publish(ds, versions, {"counts": {"rows": 3}})
    return state


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every JSON file that is read from now on."""
    paths: list[Path] = []

    def counted(path: Path) -> Any:
        paths.append(path)
        return find_json(path)

    monkeypatch.setattr(daily_state, "find_json", counted)
    return paths


def test_the_manifest_of_a_day_is_read_once_for_all_buckets(
    state: DailyState[CountedManifest], reads: list[Path]
) -> None:
    for number, ds in enumerate(DAYS, 1):
        day = state.open_day(ds)
        found = [dataset.to_table()["row"].to_pylist() for dataset in day.buckets()]
        assert found == [[10 * bucket + number] for bucket in range(3)]
        assert day.open_bucket(2).to_table()["row"].to_pylist() == [20 + number]
        assert day.manifest["counts"] == {"rows": 3}
    assert reads == [state.manifest_path(ds) for ds in DAYS]


def test_a_day_in_a_task_reads_no_manifest(state: DailyState[CountedManifest], reads: list[Path]) -> None:
    day = pickle.loads(pickle.dumps(state.open_day(DAYS[0])))
    assert day.open_bucket(1).to_table()["row"].to_pylist() == [11]
    assert len(reads) == 1


def test_a_manifest_has_what_every_state_asset_has(state: DailyState[CountedManifest]) -> None:
    manifest = state.require(DAYS[1])
    assert {"ds", "num_buckets", "versions"} == StateManifest.__required_keys__ <= manifest.keys()
    layout = LAYOUTS["pin_embeddings"]
    assert manifest == {
        "ds": DAYS[1],
        "num_buckets": 3,
        "versions": [2, 2, 2],
        "counts": {"rows": 3},
        "layout": layout,
    }
    assert state.days() == DAYS
    assert state.manifest("2026-01-03") is None


def test_a_day_that_cannot_be_opened_is_refused(state: DailyState[CountedManifest]) -> None:
    with pytest.raises(PipelineError, match="pin_embeddings has no partition 2026-01-03; make it with: dagster asset"):
        state.open_day("2026-01-03")
    other: DailyState[CountedManifest] = DailyState(root=state.root, asset="pin_embeddings", num_buckets=4)
    with pytest.raises(
        PipelineError, match="pin_embeddings 2026-01-01 has 3 buckets, the site file says 4; change it back, or"
    ):
        other.open_bucket(DAYS[0], 0)


def test_retention_keeps_the_newest_days(state: DailyState[CountedManifest], tmp_path: Path) -> None:
    messages: list[str] = []
    with LocalEngine(num_workers=1, memory_mb=64, temp_dir=tmp_path / "tmp") as engine:
        state.retain(1, engine, messages.append)
    assert state.days() == DAYS[1:]
    assert [dataset.to_table()["row"].to_pylist() for dataset in state.open_day(DAYS[1]).buckets()] == [[2], [12], [22]]
    assert messages[0].startswith("pin_embeddings: 1 days kept, ")
    with pytest.raises(PipelineError, match="pin_embeddings 2026-01-01 is older than the 1 days that are kept"):
        state.refuse_if_dropped(DAYS[:1], 1)


def test_a_held_day_stays_readable_although_it_was_replaced(state: DailyState[CountedManifest], tmp_path: Path) -> None:
    messages: list[str] = []
    with LocalEngine(num_workers=1, memory_mb=64, temp_dir=tmp_path / "tmp") as engine:
        state.retain(2, engine, messages.append)
        with state.held(DAYS[1]) as day:
            versions = [
                create_bucket(state.bucket_path(bucket), pa.table({"row": [-bucket]})).version for bucket in range(3)
            ]
            state.publish(DAYS[1], versions, {"counts": {"rows": 3}})
            state.retain(1, engine, messages.append)
            assert [dataset.to_table()["row"].to_pylist() for dataset in day.buckets()] == [[2], [12], [22]]
            assert state.days() == DAYS
        state.retain(1, engine, messages.append)
    assert messages[1] == "pin_embeddings: another run is reading it, so older versions are removed by the next run"
    assert state.days() == DAYS[1:]
    assert [dataset.to_table()["row"].to_pylist() for dataset in state.open_day(DAYS[1]).buckets()] == [[0], [-1], [-2]]
    with pytest.raises(PipelineError, match=r"bucket-00000.lance has no version 2, which its manifest names; re-run"):
        day.open_bucket(0)
