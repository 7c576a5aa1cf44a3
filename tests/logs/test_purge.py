"""Forgotten users leave the logs: rejected rows that may be theirs, and days that were ingested before the request.

Deleting users from a day must give what ingesting the day without them gives.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.days import ds_range
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.partition import ingested_days, partition_dir, raw_digest, read_manifest, read_quarantine
from pf_core.logs.purge import PurgedDay, purge_days
from pf_core.logs.quarantine import REDACTED
from pf_core.logs.rejects import looks
from pf_core.logs.settings import IngestSettings
from pf_core.storage.files import write_json
from pf_core.storage.locks import exclusive
from pf_core.timelines.checks import audit_day
from tests.support.scattered import ScatteredEngine
from tests.support.sites import START, SmallSite

DAYS = ds_range(START, "2026-01-03")
START_US = 1_767_225_600_000_000
DAY_US = 86_400_000_000
MakeSite = Callable[..., SmallSite]


def write_csv(site: SmallSite, name: str, *rows: str) -> Path:
    path = site.root / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["user,pin,time_us,event,place,dwell_s", *rows]))
    return path


def line(user: str, event: str = "look", day: int = 0, second: int = 1) -> str:
    return f"{user},p,{START_US + day * DAY_US + second * 1_000_000},{event},home,1"


def forget(site: SmallSite, *users: int | str) -> None:
    (site.root / "forget.txt").write_text("".join(json.dumps({"user_id": user}) + "\n" for user in users))


def purge(site: SmallSite) -> list[PurgedDay]:
    settings = IngestSettings.of(site.site)
    return list(purge_days(settings, ingested_days(site.site), read_deletion_list(site.site)))


def contents(site: SmallSite, ds: str = START) -> dict[int, str]:
    """The content of each quarantined row, by its number."""
    return {row["row_number"]: row["raw"] for row in read_quarantine(site.site, ds).to_pylist()}


# At ingestion

SPELLINGS = ["777", "0777", "+777", " 777", "777 ", "777.0", "7.77e2", "٧٧７", "00777", "-777", "778", "7 77"]


@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/*.csv"])
def test_other_spellings_of_an_integer_are_not_kept(small_site: MakeSite, path: str) -> None:
    site = small_site(path=path, end_ds=START)
    write_csv(site, f"{START}.csv", line("1"), *(line(user, "dance") for user in SPELLINGS), "777,p", "1,p,x", '{"user')
    forget(site, 777)
    [manifest] = site.ingest([START])
    left = contents(site)
    assert {number for number, raw in left.items() if raw != REDACTED} == {12, 13}  # of -777 and 778, other users
    assert manifest["counts"]["forgotten"] == 3  # 777, 0777 and 00777 are the number
    assert manifest["counts"]["redacted"] == list(left.values()).count(REDACTED) == 10
    assert manifest["counts"]["quarantined"] == len(left) == 12
    assert "777" not in "".join(raw for number, raw in left.items() if number != 12)


@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/*.csv"])
def test_what_looks_like_a_forgotten_text_is_not_kept(small_site: MakeSite, path: str) -> None:
    site = small_site(path=path, end_ds=START, id_type="string")
    users = ["777", "0777", " 777", "+777.0", "Alice", "ＡＬＩＣＥ", "alice-", "bob", "7777"]
    write_csv(site, f"{START}.csv", *map(line, users), *(line(user, "dance") for user in users), line("", "look"), "al")
    forget(site, "777", "alice")
    [manifest] = site.ingest([START])
    assert {row[0] for row in site.actions(START)} == {*users} - {"777"}  # good rows are of the user whom they name
    left = [json.loads(raw)["user"] for raw in contents(site).values() if raw != REDACTED]
    assert left == ["bob", "7777"]
    assert (manifest["counts"]["forgotten"], manifest["counts"]["redacted"]) == (2, 8)


def test_nothing_is_redacted_while_nobody_is_forgotten(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}.csv")
    write_csv(site, f"{START}.csv", line("1"), line("x"), "777,p")
    [manifest] = site.ingest([START])
    assert contents(site)[4] == "777,p"
    assert '"user": "x"' in contents(site)[3]
    assert manifest["counts"]["redacted"] == 0


def test_machines_that_share_a_day_redact_the_same(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}-*.csv")
    for number in range(4):
        write_csv(site, f"{START}-{number}.csv", line("1"), line("777.0", "dance"), "777,p", line("2", "dance"))
    forget(site, 777)
    [alone] = site.ingest([START])
    kept, site.engine = contents(site), ScatteredEngine(num_workers=2, memory_mb=256)
    [shared] = site.ingest([START])
    assert shared["counts"] == alone["counts"]
    assert shared["counts"]["redacted"] == 8
    assert contents(site) == kept


@pytest.mark.parametrize(
    ("one", "other"),
    [("777", "+0777.00"), ("7.77E2", "٧٧٧"), ("alice", " Alice\n"), ("ﬁ", "FI"), ("a-b", "A B"), ("--", "--")],
)
def test_spellings_that_look_alike(one: str, other: str) -> None:
    assert looks(one) == looks(other)


@pytest.mark.parametrize(("one", "other"), [("777", "-777"), ("alice", "alice2"), ("--", "-"), ("nan", "777")])
def test_ids_that_do_not_look_alike(one: str, other: str) -> None:
    assert looks(one) != looks(other)


def test_ids_of_any_length_have_a_look() -> None:
    for text in ("9" * 100_000, "1e999999999999", "sNaN", "Infinity", "\0", "e" * 100_000):
        assert looks(text)


# Days that were ingested before


def some_rows(seed: int, id_type: str) -> list[str]:
    rng, rows = np.random.default_rng(seed), []
    for _ in range(200):
        user = rng.choice(["1", "2", "3", "777", "0777", "9", "777.0", "x", ""])
        event = rng.choice(["look", "save", "go", "dance"], p=[0.4, 0.3, 0.2, 0.1])
        row = line(user, event, day=int(rng.integers(-1, 3)), second=int(rng.integers(50)))
        rows.append(row if rng.random() < 0.9 else row[: rng.integers(len(row))])
    return rows


@pytest.mark.parametrize("id_type", ["int", "string"])
@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/*.csv"])
def test_deleting_users_gives_what_ingesting_without_them_gives(small_site: MakeSite, path: str, id_type: str) -> None:
    for seed in range(8):
        site, other = (small_site(path=path, end_ds=DAYS[-1], id_type=id_type, late_days=2) for _ in range(2))
        for day, ds in enumerate(DAYS):
            for each in (site, other):
                write_csv(each, f"{ds}.csv", *some_rows(10 * seed + day, id_type))
        users = (777, 3) if id_type == "int" else ("777", "3")
        site.ingest(DAYS)
        digests = [raw_digest(site.site, ds) for ds in DAYS]
        forget(site, *users)
        forget(other, *users)
        assert {day.ds for day in purge(site)} == set(DAYS)
        other.ingest(DAYS)
        assert [raw_digest(site.site, ds) for ds in DAYS] == digests  # nothing that was built from them is out of date
        for ds in DAYS:
            found, expected = read_manifest(site.site, ds), read_manifest(other.site, ds)
            assert found is not None
            assert expected is not None
            assert site.actions(ds) == other.actions(ds)
            assert [row["raw"] for row in read_quarantine(site.site, ds).to_pylist()] == [
                row["raw"] for row in read_quarantine(other.site, ds).to_pylist()
            ]
            for name in ("files", "by_type", "by_surface", "quarantined_by_reason"):
                assert found[name] == expected[name]
            counts = [dict(manifest["counts"]) for manifest in (found, expected)]
            spent = [each.pop("duplicates") + each.pop("forgotten") for each in counts]  # which of both is not known
            assert counts[0] == counts[1]
            assert spent[0] == spent[1]
        assert purge(site) == []


def test_a_day_of_one_forgotten_user_is_empty(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(START, [(7, "p", 1.0, "look"), (7, "q", 2.0, "dance")])
    site.ingest([START])
    forget(site, 7)
    [day] = purge(site)
    assert (day.actions, day.rejects, day.redacted) == (1, 1, 0)
    assert site.actions(START) == []
    manifest = read_manifest(site.site, START)
    assert manifest is not None
    assert (manifest["files"], manifest["quarantine_file"]) == ([], None)


def test_a_quarantine_of_another_mapping_is_redacted(small_site: MakeSite) -> None:
    """Whose a row is follows from its column of user ids: without it, nobody can tell."""
    site = small_site()
    site.write_log(START, [(1, "p", 1.0, "look"), (5, "p", 2.0, "dance")])
    site.ingest([START])
    user_id = site.site.source.actions.user_id.model_copy(update={"column": "account"})
    actions = site.site.source.actions.model_copy(update={"user_id": user_id})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"actions": actions})})
    forget(site, 99)
    purge(site)
    assert list(contents(site).values()) == [REDACTED]


def test_ids_that_json_shows_otherwise_are_redacted(small_site: MakeSite) -> None:
    site = small_site(id_type="string")
    log = site.write_log(START, [("777", "p", 1.0, "look"), ("777", "p", 2.0, "dance"), ("8", "p", 3.0, "dance")])
    table = pq.read_table(log)
    users = {"bytes": pa.binary(), "numbers": pa.int64(), "floats": pa.float64()}
    for name, kind in users.items():
        column = table["user"].cast(pa.int64()).cast(kind) if name != "bytes" else table["user"].cast(kind)
        pq.write_table(table.set_column(table.schema.get_field_index("user"), "user", column), log)
        (site.root / "forget.txt").write_text("")
        site.ingest([START])
        forget(site, "777")
        purge(site)
        left = [raw for raw in contents(site).values() if "777" in raw]
        assert left == [], name


def test_what_killed_runs_left_is_removed(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(START, [(7, "p", 1.0, "look"), (8, "p", 1.0, "look")])
    [manifest] = site.ingest([START])
    folder = partition_dir(site.site.directory, START)
    (folder / "build-000009").mkdir()
    pq.write_table(pa.table({"user_id": [7]}), folder / "build-000009" / "bucket-00000.parquet")
    scratch = site.site.directory / "tmp" / f"raw_actions-{START}-0123"
    write_json(scratch / "spilled.json", [7])
    forget(site, 99)
    assert purge(site) == []
    assert sorted(path.name for path in folder.glob("build-*")) == [manifest["build"]]
    assert not scratch.exists()


def test_a_day_that_is_being_written_is_not_touched(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(START, [(7, "p", 1.0, "look")])
    site.ingest([START])
    forget(site, 7)
    with exclusive(partition_dir(site.site.directory, START), "raw_actions"):
        with pytest.raises(PipelineError, match="another run is writing raw_actions 2026-01-01"):
            purge(site)
    assert len(site.actions(START)) == 1


def test_a_crash_leaves_the_day_as_it_was(small_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site = small_site()
    site.write_log(START, [(user, "p", 1.0, "look") for user in range(20)] + [(7, "p", 2.0, "dance")])
    site.ingest([START])
    forget(site, 7)
    before, replace = site.actions(START), os.replace
    for name in ("bucket-", "quarantine", "manifest"):

        def fail(source: Any, target: Any, name: str = name) -> None:
            if Path(target).name.startswith(name):
                raise OSError(28, "No space left on device")
            replace(source, target)

        if name != "quarantine":  # the only rejected row is the user's: no file is written
            monkeypatch.setattr(os, "replace", fail)
            with pytest.raises(PipelineError, match="No space left"):
                purge(site)
            monkeypatch.undo()
        assert site.actions(START) == before
    assert len(purge(site)) == 1
    assert 7 not in {row[0] for row in site.actions(START)}


def test_timelines_of_before_are_neither_stale_nor_at_fault(small_site: MakeSite) -> None:
    site = small_site()
    for day, ds in enumerate(DAYS):
        site.write_log(ds, [(user, "p", day * 86_400.0 + user, "look") for user in range(10)])
    site.ingest(DAYS)
    site.build(DAYS[:2])
    forget(site, 3, 4)
    purge(site)
    assert audit_day(site.site, DAYS[1]) is None
    site.build(DAYS[2:])
    site.build(DAYS[1:2])
    for ds in DAYS[1:]:
        assert audit_day(site.site, ds) is None
        assert 3 not in site.timelines(ds)
    incremental = site.timelines(DAYS[2])
    site.build(DAYS[2:], rebuild=True)
    assert site.timelines(DAYS[2]) == incremental
