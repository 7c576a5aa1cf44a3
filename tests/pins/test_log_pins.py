"""Pins of the log in pin_features: a log alone, with a catalogue, day by day, and from all days at once."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pf_core.config.source import PinsSource
from pf_core.engine.daily_state import Manifest, StateDay, create_bucket
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.pins import features
from pf_core.pins.checks import judge_coverage
from pf_core.pins.features import build_pin_features, content_name, feature_coverage, pin_state
from pf_core.pins.inputs import read_log_pins
from tests.pins.test_catalogue import (
    DAYS,
    INCREMENTAL,
    build,
    ingest,
    lines,
    matrix_source,
    parquet,
    pins_of,
    pins_source,
    saved_matrix,
    site_with,
)

NOTHING = PinsSource()


def write_log(root: Path, *pins_by_day: Sequence[int]) -> None:
    """A log in which user 1 acts on these pins on each day."""
    root.mkdir(parents=True, exist_ok=True)
    rows = [
        f"1,{pin},{ds}T10:00:{second:02d}Z\n"
        for ds, pins in zip(DAYS, pins_by_day, strict=False)
        for second, pin in enumerate(pins)
    ]
    lines(root / "actions.csv", "user,pin,at\n", *rows)


def totals(manifest: Manifest) -> tuple[int, int, int]:
    counts = manifest["counts"]
    return counts["pins"], counts["new"], counts["new_in_log"]


def test_a_log_alone_is_enough(tmp_path: Path) -> None:
    write_log(tmp_path, [7, 3, 3], [], [3, 5])
    site = site_with(tmp_path, NOTHING)
    manifests = build(site, *DAYS[:3])
    assert [set(pins_of(site, ds)) for ds in DAYS[:3]] == [{3, 7}, {3, 7}, {3, 5, 7}]  # nothing later than the day
    assert pins_of(site, DAYS[2])[5] == {"interest": "unknown", "is_candidate": True}
    assert [manifest["dim"] for manifest in manifests] == [0, 0, 0]
    assert [totals(manifest) for manifest in manifests] == [(2, 2, 2), (2, 0, 0), (3, 1, 1)]
    assert "feature" not in pin_state(site).open_bucket(DAYS[2], 0).schema.names
    assert manifests[1]["versions"] == manifests[0]["versions"] != manifests[2]["versions"]
    assert content_name(manifests[1]) == content_name(manifests[0]) != content_name(manifests[2])


def test_a_log_alone_with_an_empty_first_day(tmp_path: Path) -> None:
    write_log(tmp_path, [], [4])
    site = site_with(tmp_path, NOTHING)
    first, second = build(site, *DAYS[:2])
    assert (first["counts"]["pins"], second["counts"]["pins"]) == (0, 1)


@pytest.mark.parametrize("is_candidate", [None, "shown"])
def test_the_catalogue_wins_where_it_describes_a_pin(tmp_path: Path, is_candidate: str | None) -> None:
    write_log(tmp_path, [1, 2, 9])
    parquet(
        tmp_path / "pins.parquet",
        id=[1, 2, 3],
        vector=[[1.0, 0.0], None, [0.0, 1.0]],
        topic=["art", "food", "art"],
        shown=[False, True, True],
    )
    site = site_with(tmp_path, pins_source(interest="topic", is_candidate=is_candidate))
    (manifest,) = build(site, DAYS[0])
    marked = is_candidate is not None
    assert pins_of(site, DAYS[0]) == {
        1: {"feature": [1.0, 0.0], "interest": "art", "is_candidate": not marked},
        2: {"feature": None, "interest": "food", "is_candidate": True},
        3: {"feature": [0.0, 1.0], "interest": "art", "is_candidate": True},
        9: {"feature": None, "interest": "unknown", "is_candidate": not marked},
    }
    assert manifest["counts"]["with_feature"] == 2
    assert manifest["dim"] == 2


def test_a_dated_catalogue_describes_a_pin_of_the_log_later(tmp_path: Path) -> None:
    write_log(tmp_path, [1, 8], [8, 9], [9])
    for ds, ids in zip(DAYS[:3], ([1], [8], []), strict=True):
        lines(tmp_path / f"{ds}.jsonl", *({"id": pin, "vector": [float(pin)], "topic": "art"} for pin in ids))
    site = site_with(tmp_path, pins_source(catalogue={"path": "{ds}.jsonl"}, interest="topic"))
    manifests = build(site, *DAYS[:3])
    described, unknown = (
        {"feature": [8.0], "interest": "art", "is_candidate": True},
        {"feature": None, "interest": "unknown", "is_candidate": True},
    )
    assert pins_of(site, DAYS[0])[8] == unknown
    assert pins_of(site, DAYS[1])[8] == pins_of(site, DAYS[2])[8] == described
    assert pins_of(site, DAYS[1])[9] == unknown
    assert [totals(manifest) for manifest in manifests] == [(2, 2, 1), (3, 1, 1), (3, 0, 0)]
    assert manifests[1]["counts"]["updated"] == 1
    assert manifests[2]["versions"] == manifests[1]["versions"]


def test_the_first_vectors_may_come_after_the_first_day(tmp_path: Path) -> None:
    write_log(tmp_path, [1, 2], [3])
    lines(tmp_path / f"{DAYS[0]}.jsonl", {"id": 1, "vector": None})
    lines(tmp_path / f"{DAYS[1]}.jsonl", {"id": 2, "vector": [1.0, 2.0]}, {"id": 4, "vector": [3.0, 4.0]})
    lines(tmp_path / f"{DAYS[2]}.jsonl", {"id": 1, "vector": [5.0, 6.0]}, {"id": 5, "vector": [1.0]})
    site = site_with(tmp_path, pins_source(catalogue={"path": "{ds}.jsonl"}))
    manifests = build(site, *DAYS[:3])
    assert [manifest["dim"] for manifest in manifests] == [0, 2, 2]
    assert {pin: row["feature"] for pin, row in pins_of(site, DAYS[1]).items()} == {
        1: None,
        2: [1.0, 2.0],
        3: None,
        4: [3.0, 4.0],
    }
    assert pins_of(site, DAYS[2])[1]["feature"] == [5.0, 6.0]
    assert set(pins_of(site, DAYS[0])) == {1, 2}


def sources(root: Path) -> dict[str, PinsSource]:
    saved_matrix(root, [[1.0], [2.0]], [1, 50])
    lines(root / "pins.csv", "pin,topic\n", "1,art\n", "60,food\n")
    for number, ds in enumerate(DAYS[:4]):
        parquet(root / "pins" / f"{ds}.parquet", id=[number, 70 + number], vector=[[float(number)], None])
    described = {"pin_id": "pin", "catalogue": {"path": "pins.csv"}, "interest": "topic"}
    return {
        "log": NOTHING,
        "matrix": matrix_source(),
        "catalogue": pins_source(**described, vectors=None),
        "described matrix": pins_source(**described, vectors={"npy": "vectors.npy", "ids": "ids.npy"}),
        "dated": pins_source(**INCREMENTAL),
    }


@pytest.mark.parametrize("kind", ["log", "matrix", "catalogue", "described matrix", "dated"])
def test_days_one_by_one_equal_a_rebuild(tmp_path: Path, kind: str) -> None:
    by_day = ([1, 2, 3], [3, 4], [], [71, 5, 1])
    sites = []
    for name in ("single", "rebuilt"):
        write_log(tmp_path / name, *by_day)
        sites.append(site_with(tmp_path / name, sources(tmp_path / name)[kind]))
    single, rebuilt = sites
    for ds in DAYS[:4]:
        build(single, ds)
    if kind == "dated":
        build(rebuilt, *DAYS[:4])
    else:
        build(rebuilt, DAYS[3])  # from all files and logs: no day before it exists
    assert pins_of(rebuilt, DAYS[3]) == pins_of(single, DAYS[3])
    assert set(pins_of(single, DAYS[3])) >= {1, 2, 3, 4, 5, 71}
    assert set(pins_of(single, DAYS[0])).isdisjoint({4, 5})


def test_a_day_reads_the_log_of_its_day_alone(tmp_path: Path) -> None:
    write_log(tmp_path, [1], [2], [3])
    site = site_with(tmp_path, NOTHING)
    build(site, *DAYS[:2])
    for path in (site.directory / "raw_actions" / DAYS[0]).glob("build-*/*"):
        path.unlink()
    build(site, DAYS[2])
    assert set(pins_of(site, DAYS[2])) == {1, 2, 3}


def test_changed_actions_change_the_inputs_of_the_day(tmp_path: Path) -> None:
    write_log(tmp_path, [1], [2])
    site = site_with(tmp_path, NOTHING)
    first, second = build(site, *DAYS[:2])
    assert build(site, *DAYS[:2]) == [first, second]
    write_log(tmp_path, [1], [2, 1])  # one more action, and no new pin
    ingest(site, DAYS[1])
    (again,) = build(site, DAYS[1])
    assert again["inputs"] != second["inputs"]
    assert content_name(again) == content_name(second)
    write_log(tmp_path, [1], [2, 6])
    ingest(site, DAYS[1])
    (changed,) = build(site, DAYS[1])
    assert changed["inputs"] not in (again["inputs"], second["inputs"])
    assert content_name(changed) != content_name(second)
    assert set(pins_of(site, DAYS[1])) == {1, 2, 6}
    write_log(tmp_path, [1], [])
    ingest(site, DAYS[1])
    build(site, DAYS[1])
    assert set(pins_of(site, DAYS[1])) == {1}  # what a day added goes with its actions


def test_pins_of_an_earlier_day_that_was_ingested_again(tmp_path: Path) -> None:
    """A run that skips the changed day still finds its pins: no action is on an unknown pin."""
    write_log(tmp_path, [1], [2], [3])
    site = site_with(tmp_path, NOTHING)
    build(site, *DAYS[:2])
    write_log(tmp_path, [1, 8], [2], [3])
    ingest(site, DAYS[0])
    build(site, DAYS[2])
    assert set(pins_of(site, DAYS[2])) == {1, 2, 3, 8}
    assert set(pins_of(site, DAYS[1])) == {1, 2}


def test_an_undated_catalogue_that_changed_is_read_with_all_logs(tmp_path: Path) -> None:
    write_log(tmp_path, [1], [2], [3])
    lines(tmp_path / "pins.csv", "pin,topic\n", "1,art\n", "40,food\n")
    source = pins_source(pin_id="pin", catalogue={"path": "pins.csv"}, vectors=None, interest="topic")
    site = site_with(tmp_path, source)
    build(site, *DAYS[:2])
    lines(tmp_path / "pins.csv", "pin,topic\n", "1,food\n")
    build(site, DAYS[2])
    assert {pin: row["interest"] for pin, row in pins_of(site, DAYS[2]).items()} == {
        1: "food",
        2: "unknown",
        3: "unknown",
    }
    assert set(pins_of(site, DAYS[1])) == {1, 2, 40}


def test_the_day_needs_its_raw_actions(tmp_path: Path) -> None:
    write_log(tmp_path, [1], [2])
    site = site_with(tmp_path, NOTHING)
    build(site, *DAYS[:2])
    for ds, built in ((DAYS[1], DAYS[1]), (DAYS[0], DAYS[1])):
        shutil.move(site.directory / "raw_actions" / ds, tmp_path / "moved")
        if ds == DAYS[0]:  # built from all logs
            shutil.rmtree(pin_state(site).root)
        engine = LocalEngine(num_workers=1, memory_mb=64, temp_dir=site.directory / "temp")
        manifests = build_pin_features(site, [built], engine=engine, progress=lambda message: None)
        with pytest.raises(PipelineError, match=rf"raw_actions has no partition {ds}; .*--partition {ds} "):
            list(manifests)
        shutil.move(tmp_path / "moved", site.directory / "raw_actions" / ds)


def test_a_site_without_vectors_has_no_coverage_to_check(tmp_path: Path) -> None:
    write_log(tmp_path, [1])
    site = site_with(tmp_path, NOTHING)
    build(site, DAYS[0])
    assert feature_coverage(site, DAYS[0]) != feature_coverage(site, DAYS[0])  # NaN
    result = judge_coverage(site, DAYS[0])
    assert (result.passed, result.reason) == (True, "the site has no content vectors")


def older(site: Any, ds: str) -> None:
    """Make a partition what layout 1 wrote: a manifest without the new keys, a dataset without `has_feature`."""
    state = pin_state(site)
    table = state.open_bucket(ds, 0).to_table().drop_columns(["has_feature"])
    manifest = json.loads(state.manifest_path(ds).read_text())
    for key in ("layout", "source", "raw_digests", "added", "content"):
        del manifest[key]
    manifest["versions"] = [create_bucket(state.bucket_path(0), table).version]
    state.manifest_path(ds).write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", ["matrix", "dated"])
def test_a_day_of_the_older_layout_is_refused_by_readers_and_built_upon(tmp_path: Path, kind: str) -> None:
    site = site_with(tmp_path, sources(tmp_path)[kind])
    build(site, DAYS[0])
    older(site, DAYS[0])
    with pytest.raises(PipelineError, match=rf"{DAYS[0]} was stored in layout 1.*--select pin_features .*{DAYS[0]}"):
        pin_state(site).require(DAYS[0])
    known = set(pins_of_older(site, DAYS[0]))
    write_log(tmp_path, [30], [31])
    ingest(site, *DAYS[:2])
    build(site, DAYS[1])
    assert set(pins_of(site, DAYS[1])) >= known | {30, 31}
    build(site, DAYS[0])
    pin_state(site).require(DAYS[0])
    assert set(pins_of(site, DAYS[0])) == known | {30}


def pins_of_older(site: Any, ds: str) -> list[int]:
    """Return the pins of a day that readers refuse."""
    state = pin_state(site)
    day = StateDay(state=state, manifest=json.loads(state.manifest_path(ds).read_text()))
    return day.open_bucket(0).to_table(columns=["pin_id"])["pin_id"].to_pylist()


@pytest.mark.parametrize("changed", ["log", "matrix"])
def test_pins_of_inputs_that_changed_meanwhile_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    write_log(tmp_path, [7, 3])
    saved_matrix(tmp_path, [[1.0], [2.0]], [3, 7])
    site = site_with(tmp_path, matrix_source())
    ingest(site, DAYS[0])
    read = read_log_pins

    def read_and_meddle(*arguments: Any) -> Any:
        found = read(*arguments)
        if changed == "log":
            write_log(tmp_path, [7, 3, 5])
            ingest(site, DAYS[0])
        else:
            saved_matrix(tmp_path, [[1.0], [2.0], [3.0]], [3, 7, 9])
        return found

    monkeypatch.setattr(features, "read_log_pins", read_and_meddle)
    message = {
        "log": "raw_actions 2026-01-01 was ingested again while pin_features 2026-01-01 was made from it; nothing was",
        "matrix": "the files of source.pins changed while pin_features 2026-01-01 was made from them; nothing was",
    }[changed]
    with LocalEngine(num_workers=1, memory_mb=64, temp_dir=tmp_path) as engine:
        with pytest.raises(PipelineError, match=message):
            list(build_pin_features(site, [DAYS[0]], engine=engine, progress=lambda _: None))
    assert pin_state(site).days() == []
    monkeypatch.undo()
    build(site, DAYS[0])
    assert set(pins_of(site, DAYS[0])) == ({3, 5, 7} if changed == "log" else {3, 7, 9})
