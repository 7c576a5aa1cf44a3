"""Ingestion shared by machines gives the same bytes, counts, rejects and errors as ingestion in one task."""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us
from pf_core.engine.local import LocalEngine
from pf_core.logs import ingest
from pf_core.logs.ingest import TASKS_PER_WORKER, _share_files
from pf_core.logs.routing import Arrival, InputFile
from pf_core.storage.files import write_folder
from tests.support.ingestion import outcome, write_parts
from tests.support.scattered import LostError, ScatteredEngine
from tests.support.sites import START, Row, SmallSite

DAY_S = 86_400
DAYS = ds_range("2026-01-01", "2026-01-04")
HEADER = "user,pin,time_us,event,place,dwell_s"
DEATHS = (1, 4)
"""Calls during which the machine dies."""
MakeSite = Callable[..., SmallSite]


def write_lines(site: SmallSite, name: str, lines: Sequence[str]) -> None:
    path = site.root / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEADER, *lines]))


def line(user: object, pin: str, second: float, event: str = "look", place: str = "home") -> str:
    return f"{user},{pin},{ds_start_us(START) + round(second * 1e6)},{event},{place},2.5"


def both_ways(
    site: SmallSite, days: Sequence[str], num_workers: int = 2, memory_mb: int = 256
) -> tuple[dict[str, Any], ScatteredEngine]:
    """Ingest in one task, then shared; assert that the results are equal."""
    alone = outcome(site, days)
    local, engine = site.engine, ScatteredEngine(num_workers=num_workers, memory_mb=memory_mb)
    site.engine = engine
    shared = outcome(site, days)
    site.engine = local
    assert shared == alone
    return alone, engine


def rows_of_day(offset: int, part: int) -> list[Row]:
    """Actions, some of them late or in several parts, rejects of every kind."""
    second = offset * DAY_S
    good: list[Row] = [(u, f"p{u % 5}", second + 600 * u + part, "look") for u in range(part, 40, 2)]
    late: list[Row] = [(u, "late", second - DAY_S + 60 * u, "save") for u in range(part, 12)]
    bad: list[Row] = [(None, "p", second, "look"), (7, "p", second + part, "dance"), (3, "p", second - 3 * DAY_S, "go")]
    return [*good[:9], bad[0], *late, *good[9:], *bad[1:], (8, "future", second + 2 * DAY_S, "look")]


@pytest.mark.parametrize("id_type", ["int", "string"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_dated_log_with_late_rows_and_rejects(small_site: MakeSite, id_type: str, num_workers: int) -> None:
    site = small_site(path="logs/{ds}/*.parquet", late_days=1, id_type=id_type, timelines={"num_buckets": 5})
    for offset, ds in enumerate(DAYS):
        write_parts(site, ds, [rows_of_day(offset, part) for part in range(6)])
    (site.root / "forget.txt").write_text("7\n11\n")
    found, engine = both_ways(site, DAYS, num_workers)
    counts = found["manifests"][DAYS[2]]["counts"]
    assert min(counts[name] for name in ("kept", "duplicates", "sent", "received", "forgotten", "quarantined")) > 0
    assert engine.num_tasks[0] == min(TASKS_PER_WORKER * num_workers, 4 * 6)
    both_ways(site, DAYS[1:3])  # with neighbours on both sides


def test_an_undated_log(small_site: MakeSite) -> None:
    site = small_site(path="logs/*.csv", end_ds=DAYS[-1])
    for number in range(5):
        lines = [line(u, "p", number * 40_000 + u * 7_000, "look" if u % 3 else "dance") for u in range(20)]
        write_lines(site, f"{number}.csv", ["broken", *lines[:9], "1,b,yesterday,look,home,1", *lines[9:], "a,b"])
    write_lines(site, "9.csv", [line(1, "stray", 40 * DAY_S)])
    found, _ = both_ways(site, DAYS)
    assert found["manifests"][DAYS[0]]["outside_site_days"] > 0
    assert sum(len(rows) for rows in found["quarantine"].values()) > 5 * 3


def test_malformed_lines_stay_among_the_other_rejects(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}-*.csv")
    for number in range(4):
        write_lines(
            site, f"{DAYS[0]}-{number}.csv", [line(1, "a", 5), line(1, "a", 6, "dance"), "broken", line(2, "b", 7)]
        )
    found, _ = both_ways(site, DAYS[:1])
    places = [(Path(row["source_file"]).name, row["row_number"]) for row in found["quarantine"][DAYS[0]]]
    assert places == [(f"{DAYS[0]}-{number}.csv", row) for number in range(4) for row in (3, 4)]


def test_categories_that_the_log_names_itself(small_site: MakeSite) -> None:
    """The files contain the values in different orders."""
    site = small_site(path="logs/{ds}/*.parquet")
    source = site.site.source
    event = source.actions.action_type.model_copy(update={"values": None})
    source = source.model_copy(update={"actions": source.actions.model_copy(update={"action_type": event})})
    site.site = site.site.model_copy(update={"source": source})
    names = ["bad", "c", "cba", "a"]
    parts = [[(u, "p", 10 * u + part, names[part][u % len(names[part])]) for u in range(30)] for part in range(4)]
    write_parts(site, DAYS[0], parts)
    found, _ = both_ways(site, DAYS[:1])
    assert set(found["manifests"][DAYS[0]]["by_type"]) == {"a", "b", "c", "d"}


def test_more_than_memory_holds(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}/*.parquet")
    site.engine = LocalEngine(num_workers=1, memory_mb=1, temp_dir=site.root / "tmp")
    parts = [[(u % 97, f"p{u % 31}", u * 0.7, "look") for u in range(n * 10_000, (n + 2) * 10_000)] for n in range(3)]
    write_parts(site, DAYS[0], parts)
    found, _ = both_ways(site, DAYS[:1], memory_mb=1)
    assert found["manifests"][DAYS[0]]["counts"]["duplicates"] > 0


def test_days_without_rows(small_site: MakeSite) -> None:
    site = small_site()
    for ds in DAYS[:2]:
        site.write_log(ds, [])
    found, _ = both_ways(site, DAYS[:2])
    assert found["manifests"][DAYS[1]]["files"] == []


def test_both_ways_raise_the_same_errors(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}/*.parquet")
    assert both_ways(site, DAYS[:1])[0]["result"].startswith("no file for 2026-01-01")
    write_parts(site, DAYS[0], [[(1, "p", 1.0, "look")], [(2, "p", 2.0, "look")]])
    write_parts(site, DAYS[1], [[(n, "p", DAY_S, "dance")] for n in range(3)])
    found, _ = both_ways(site, DAYS[:2])
    assert "not one of the 3 rows could be used" in found["result"]
    assert found["manifests"][DAYS[0]] is not None
    assert found["manifests"][DAYS[1]] is None
    torn = site.root / "logs" / DAYS[0] / "part-01.parquet"
    torn.write_bytes(torn.read_bytes()[:-30])
    assert "part-01.parquet cannot be read as parquet" in both_ways(site, DAYS[:1])[0]["result"]


def test_an_undated_log_without_files_or_times(small_site: MakeSite) -> None:
    site = small_site(path="logs/*.csv", end_ds=DAYS[0])
    assert both_ways(site, DAYS[:1])[0]["result"].startswith("no file matches")
    write_lines(site, "a.csv", [line(1, "p", 1)])
    write_lines(site, "b.csv", ["1,b,yesterday,look,home,1"])
    assert "b.csv: no row has a valid time; row 2" in both_ways(site, DAYS[:1])[0]["result"]


class RecordingEngine(ScatteredEngine):
    """Keeps the bytes of every task that it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[bytes] = []

    def _attempt(self, packed: bytes) -> bytes:
        self.tasks.append(packed)
        return super()._attempt(packed)


def test_a_long_range_is_shared_a_few_days_at_a_time(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "DAYS_SHARED_AT_A_TIME", 3)
    site = small_site(path="logs/{ds}/*.parquet", late_days=1)
    for offset, ds in enumerate(DAYS):
        write_parts(site, ds, [rows_of_day(offset, part) for part in range(2)])
    _, engine = both_ways(site, DAYS)
    assert len(engine.num_tasks) == 2 * 2


@pytest.mark.parametrize("step", ["write_json", "write_folder", "write_bucket"])
def test_a_machine_that_dies_changes_nothing(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It dies before its counts are written, after all its work is done, or before a written bucket is renamed."""
    site = small_site(path="logs/{ds}/*.parquet", late_days=1, timelines={"num_buckets": 5})
    for offset, ds in enumerate(DAYS):
        write_parts(site, ds, [rows_of_day(offset, part) for part in range(3)])
    alone = outcome(site, DAYS)
    whole, num_calls = getattr(ingest, step), 0

    def die_sometimes(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        dies = num_calls in DEATHS
        result = None if step == "write_json" and dies else whole(*arguments)
        if dies:
            raise LostError
        return result

    @contextlib.contextmanager
    def write_and_die_sometimes(target: Path, *, keep_first: bool) -> Iterator[Path]:
        with write_folder(target, keep_first=keep_first) as folder:
            yield folder
        die_sometimes()

    if step == "write_folder":
        whole = bool
        monkeypatch.setattr(ingest, step, write_and_die_sometimes)
    else:
        monkeypatch.setattr(ingest, step, die_sometimes)
    engine = ScatteredEngine()
    site.engine = engine
    assert outcome(site, DAYS) == alone
    assert engine.num_lost == len(DEATHS)


def test_of_two_attempts_at_once_the_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "whole"
    with write_folder(target, keep_first=True) as second:
        with write_folder(target, keep_first=True) as first:
            (first / "content").write_text("first")
        (second / "content").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert (target / "content").read_text() == "first"


def test_what_a_killed_run_left_is_removed(small_site: MakeSite) -> None:
    site = small_site()
    for offset, ds in enumerate(DAYS[:2]):
        site.write_log(ds, [(1, "p", offset * DAY_S, "look")])
    for ds in DAYS[:2]:
        (site.site.directory / "tmp" / f"raw_actions-{ds}-0123" / "000000").mkdir(parents=True)
    both_ways(site, DAYS[:2])


@pytest.mark.parametrize("spans_machines", [True, False])
def test_no_task_carries_a_secret_of_the_site_file(small_site: MakeSite, spans_machines: bool) -> None:
    site = small_site()
    store = {"kind": "redis", "url": "redis://:open-sesame@localhost:6379/0"}
    site.site = Site.model_validate(site.site.model_dump(by_alias=True) | {"serving": {"store": store}})
    assert b"open-sesame" in pickle.dumps(site.site)
    engine = RecordingEngine()
    engine.spans_machines = spans_machines
    site.engine = engine
    site.write_log(DAYS[0], [(1, "p", 1.0, "look")])
    site.ingest(DAYS[:1])
    assert len(engine.tasks) >= (2 if spans_machines else 1)  # routing and gathering, or whole days
    assert not any(b"open-sesame" in packed for packed in engine.tasks)


def test_files_are_shared_by_size_and_stay_in_order() -> None:
    sizes = [100, 1, 1, 1, 97, 0, 0, 50, 48, 100]  # together 4 * 100; a file counts for one byte at least
    arrivals = [
        Arrival(ds=ds, files=[InputFile(path=f"{ds}/{n}", num_bytes=sizes[n], changed=0) for n in numbers])
        for ds, numbers in (("a", range(5)), ("b", range(0)), ("c", range(5, 10)))
    ]
    shares = _share_files(arrivals, 4)
    paths = [[file["path"] for part in share for file in part.files] for share in shares]
    assert [path for share in paths for path in share] == [
        file["path"] for arrival in arrivals for file in arrival.files
    ]
    assert paths == [["a/0"], ["a/1", "a/2", "a/3", "a/4"], ["c/5", "c/6", "c/7", "c/8"], ["c/9"]]
    assert [[part.ds for part in share] for share in shares] == [["a"], ["a"], ["c"], ["c"]]
    assert len(_share_files(arrivals, 100)) <= len(sizes)
