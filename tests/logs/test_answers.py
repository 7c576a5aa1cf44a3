"""Who agreed to be learned from, by a column of the log: the newest row decides, and nothing later adds a user."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.config.training_section import UsersConfig
from pf_core.days import ds_range, ds_start_us
from pf_core.errors import PipelineError
from pf_core.layouts import LAYOUTS
from pf_core.logs import answers as reading
from pf_core.logs.answers import ANSWERS, agreed_users
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.partition import ingested_days, partition_dir, raw_digest, require_manifest
from pf_core.logs.purge import purge_days
from pf_core.logs.settings import IngestSettings
from pf_core.logs.training_users import read_training_users
from pf_core.operations.forgetting import delete_users
from pf_core.operations.remains import find_remains
from pf_core.pins.counts import counts_as_of
from tests.support.scattered import ScatteredEngine
from tests.support.sites import START, SmallSite

DAYS = ds_range(START, "2026-01-03")
HOUR = 3600
DAY = 24 * HOUR
MakeSite = Callable[..., SmallSite]
Answered = tuple[Any, float, Any]
"""User, seconds since the start of the first day, what the column has."""


def asking(site: SmallSite, *values: Any) -> SmallSite:
    """Let the column `consent` decide who may be learned from."""
    users = UsersConfig(column="consent", values=values or ("yes",))
    site.site = site.site.model_copy(update={"training": site.site.training.model_copy(update={"users": users})})
    return site


def write(site: SmallSite, ds: str, rows: Sequence[Answered], pin: str = "p") -> None:
    path = site.root / "logs" / f"{ds}.csv"
    path.parent.mkdir(exist_ok=True)
    start_us = ds_start_us(START)
    lines = [
        f"{user},{pin},{start_us + round(second * 1e6)},save,home,1,{answer or ''}" for user, second, answer in rows
    ]
    path.write_text("\n".join(["user,pin,time_us,event,place,dwell_s,consent", *lines]))


def selected(site: SmallSite, as_of: str | None = None) -> list[Any]:
    listed = read_training_users(site.site, as_of=as_of).listed
    assert listed is not None
    return list(listed.to_pylist())


def answers(site: SmallSite, ds: str) -> dict[Any, bool]:
    manifest = require_manifest(site.site, ds)
    path = partition_dir(site.site.directory, ds) / manifest["build"] / manifest["answers"]["name"]
    return {row["user_id"]: row["answer"] for row in pq.read_table(path).to_pylist()}


# Which row decides


@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/*.csv"])
def test_the_newest_row_of_a_day_decides(small_site: MakeSite, path: str) -> None:
    site = asking(small_site(path=path, end_ds=DAYS[-1]))
    day_1 = [
        *[(1, 10 * HOUR, "yes"), (1, 11 * HOUR, "no")],
        *[(2, 11 * HOUR, "yes"), (2, 10 * HOUR, "no")],  # the order in the file does not count
        *[(3, 10 * HOUR, "yes"), (3, 11 * HOUR, None)],  # a row without a value does not agree
        *[(4, 10 * HOUR, "no"), (4, 10 * HOUR, "yes")],  # exact duplicates but for the answer
        *[(5, 10 * HOUR, "yes"), (5, 10 * HOUR, "yes")],
        *[(6, 10 * HOUR, "yes"), (6, 10 * HOUR, "Yes ")],  # another text
        *[(7, 10 * HOUR, "yes"), (8, 10 * HOUR, "yes")],
    ]
    late = [(7, 12 * HOUR, "no"), (8, 9 * HOUR, "no"), (9, 9 * HOUR, "yes")]
    write(site, DAYS[0], day_1)
    write(site, DAYS[1], late)
    site.ingest(DAYS[:1])
    assert answers(site, DAYS[0]) == {user: user in (2, 5, 8, 9) for user in range(1, 10)}
    assert selected(site) == [2, 5, 8, 9]


def test_rows_that_are_not_kept_say_nothing(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv", quality={"max_quarantined_share": 1.0}))
    write(site, DAYS[0], [(1, 10 * HOUR, "yes"), (2, 10 * HOUR, "no")])
    with (site.root / "logs" / f"{DAYS[0]}.csv").open("a") as file:
        file.write(f"\n1,p,{ds_start_us(START) + 11 * HOUR * 10**6},dance,home,1,no")
    [manifest] = site.ingest(DAYS[:1])
    assert manifest["counts"]["quarantined"] == 1
    assert selected(site) == [1]


def test_the_newest_day_decides_and_nothing_later_adds_a_user(small_site: MakeSite) -> None:
    """User 1 revokes on day 2, 2 agrees on day 2, 3 changes twice, 4 is silent after day 1, 5 agrees on day 3."""
    site = asking(small_site(path="logs/{ds}.csv", late_days=0))
    write(site, DAYS[0], [(1, HOUR, "yes"), (2, HOUR, "no"), (3, HOUR, "yes"), (4, HOUR, "yes")])
    write(site, DAYS[1], [(1, DAY, "no"), (2, DAY, "yes"), (3, DAY, "no")])
    write(site, DAYS[2], [(3, 2 * DAY, "yes"), (5, 2 * DAY, "yes")])
    assert selected(site) == []
    site.ingest(DAYS[:1])
    assert selected(site) == selected(site, DAYS[0]) == [1, 3, 4]
    site.ingest(DAYS[1:2])
    assert selected(site) == selected(site, DAYS[1]) == [2, 4]
    assert selected(site, DAYS[0]) == [4]  # 1 and 3 have revoked since
    site.ingest(DAYS[2:])
    assert selected(site) == [2, 3, 4, 5]
    assert selected(site, DAYS[1]) == [2, 4]
    assert selected(site, DAYS[0]) == [3, 4]  # 3 agreed on day 1, and agrees now


def test_answers_are_as_old_as_timelines(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv", late_days=0, timelines={"window_days": 2}))
    for number, ds in enumerate(DAYS):
        write(site, ds, [(number, number * DAY, "yes")])
    site.ingest(DAYS)
    assert selected(site, DAYS[1]) == [0, 1]
    assert selected(site, DAYS[2]) == [1, 2]


@given(st.lists(st.dictionaries(st.integers(0, 9), st.booleans()), max_size=6), st.data())
def test_the_newest_answers_are_those_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, days: list[dict[int, bool]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("days")
    paths = [folder / f"{number}.parquet" for number in range(len(days))]
    for path, day in zip(paths, days, strict=True):
        table = pa.table(
            {"user_id": pa.array(list(day), pa.int64()), "answer": pa.array(list(day.values()), pa.bool_())}
        )
        pq.write_table(table, path)
    cut = data.draw(st.integers(0, len(days)))
    before, now = dict[int, bool](), dict[int, bool]()
    for number, day in enumerate(days):
        now |= day
        before |= day if number < cut else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "ROWS_AT_ONCE", data.draw(st.sampled_from([0, 3, 100])))
        found = agreed_users(paths[:cut], paths[cut:], "int")
    assert found.to_pylist() == [user for user in sorted(now) if before.get(user) and now[user]]


# Which values agree


@pytest.mark.parametrize(
    ("values", "agreeing"),
    [
        (["yes"], ["yes"]),
        ([True], ["yes", "YES", "true", "True", "on"]),
        ([False], ["no", "Off"]),
        (["no", "maybe"], ["no", "maybe"]),
        ([1], ["1", "1.0", "01"]),
        (["1"], ["1"]),
        (["it's"], ["it's"]),
        ([True, 1], ["yes", "YES", "true", "True", "on", "1", "1.0", "01"]),
    ],
)
def test_how_values_are_compared(small_site: MakeSite, values: list[Any], agreeing: list[str]) -> None:
    texts = ["yes", "YES", "true", "True", "on", "no", "Off", "maybe", "1", "1.0", "01", "11", "yes!", "it's", None]
    site = asking(small_site(path="logs/{ds}.csv"), *values)
    write(site, DAYS[0], [(number, HOUR, text) for number, text in enumerate(texts)])
    site.ingest(DAYS[:1])
    assert [texts[number] for number in selected(site)] == agreeing


def foreign_file(site: SmallSite, suffix: str, column: pa.Array) -> None:
    """A file of the first day, one row for each value of the column."""
    number = len(column)
    table = pa.table(
        {
            "user": pa.array(range(number)),
            "pin": ["p"] * number,
            "time_us": [ds_start_us(START)] * number,
            "event": ["save"] * number,
            "place": ["home"] * number,
            "dwell_s": [1.0] * number,
            "consent": column,
        }
    )
    path = site.root / "logs" / f"{START}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        (pa.array([True, False, None]), True),
        (pa.array([1, 0, None]), 1),
        (pa.array([1.0, float("nan"), None]), 1),
        (pa.array(["yes", "no", None]), "yes"),
        (pa.array(["yes", "no", ""]), True),
        (pa.array(["yes", "no", None]).dictionary_encode(), "yes"),
    ],
)
def test_columns_of_other_formats(small_site: MakeSite, suffix: str, column: pa.Array, value: Any) -> None:
    site = asking(small_site(path=f"logs/{{ds}}.{suffix}"), value)
    foreign_file(site, suffix, column)
    site.ingest(DAYS[:1])
    assert answers(site, DAYS[0]) == {0: True, 1: False, 2: False}


def test_a_column_that_is_mapped_too_can_decide(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}.csv")
    users = UsersConfig(column="place", values=("home",))
    site.site = site.site.model_copy(update={"training": site.site.training.model_copy(update={"users": users})})
    write(site, DAYS[0], [(1, HOUR, None)])
    site.ingest(DAYS[:1])
    assert selected(site) == [1]


# What is stored


def digest(site: SmallSite, ds: str) -> str:
    path = partition_dir(site.site.directory, ds) / require_manifest(site.site, ds)["build"] / ANSWERS
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("id_type", ["int", "string"])
def test_machines_that_share_a_day_find_the_same_answers(small_site: MakeSite, id_type: str) -> None:
    site = asking(small_site(path="logs/{ds}.csv", id_type=id_type, timelines={"num_buckets": 5}))
    for number, ds in enumerate(DAYS):
        rows = [(user, number * DAY + user % 7, ("yes", "no", None)[(user + number) % 3]) for user in range(40)]
        write(site, ds, [*rows, *[(user, second + 1, "no") for user, second, _ in rows[::5]]])
    site.ingest(DAYS)
    alone, raw = [digest(site, ds) for ds in DAYS], [raw_digest(site.site, ds) for ds in DAYS]
    site.engine = ScatteredEngine(num_workers=2)
    site.ingest(DAYS)
    assert [digest(site, ds) for ds in DAYS] == alone
    assert [raw_digest(site.site, ds) for ds in DAYS] == raw
    names = {path.name for ds in DAYS for path in partition_dir(site.site.directory, ds).rglob("answers-*")}
    assert not names


def test_actions_are_the_same_with_and_without_answers(small_site: MakeSite) -> None:
    """A site without the column has the layout of before, and its days need not be made again."""
    site = small_site(path="logs/{ds}.csv")
    rows = [(user % 4, HOUR, ("yes", "no")[user % 2]) for user in range(9)]  # duplicates with different answers
    write(site, DAYS[0], rows)
    [plain] = site.ingest(DAYS[:1])
    before = raw_digest(site.site, DAYS[0])
    assert plain["layout"] == 1
    assert "answers" not in plain
    [manifest] = asking(site).ingest(DAYS[:1])
    assert raw_digest(site.site, DAYS[0]) == before
    assert manifest["layout"] == LAYOUTS["raw_actions"]
    assert manifest["answers"] == {"column": "consent", "values": ["yes"], "name": ANSWERS, "num_users": 4}
    assert manifest["counts"] == plain["counts"]
    assert manifest["site"] != plain["site"]


def test_a_day_without_rows_has_no_answers(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv"))
    write(site, DAYS[0], [])
    [manifest] = site.ingest(DAYS[:1])
    assert manifest["answers"]["num_users"] == 0
    assert selected(site) == []


def test_days_without_the_answers_are_named(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}.csv", late_days=0)
    for number, ds in enumerate(DAYS):
        write(site, ds, [(1, number * DAY, "yes")])
    site.ingest(DAYS)
    with pytest.raises(PipelineError, match=r"has 2026-01-01 to 2026-01-03 without the answers of column 'consent'"):
        selected(asking(site))
    site.ingest(DAYS[:1])
    expected = r"2026-01-02 to 2026-01-03 without .* the values 'yes': .*--partition-range 2026-01-02\.\.\.2026-01-03 "
    with pytest.raises(PipelineError, match=expected):
        selected(site)
    site.ingest(DAYS[1:])
    assert selected(site) == [1]
    with pytest.raises(PipelineError, match=r"2026-01-01 to 2026-01-03 without .* the values 'yes', True: "):
        selected(asking(site, "yes", True))
    asking(site, 1).ingest(DAYS)
    with pytest.raises(PipelineError, match=r"without .* the values True: "):
        selected(asking(site, True))  # true is not 1


def test_a_log_without_the_column_is_refused(small_site: MakeSite) -> None:
    for suffix, message in (("csv", "has no column 'consent'"), ("parquet", "has no column 'consent'")):
        site = asking(small_site(path=f"logs/{{ds}}.{suffix}"))
        foreign_file(site, "parquet", pa.array(["yes"]))
        table = pq.read_table(site.root / "logs" / f"{START}.parquet").drop_columns(["consent"])
        pq.write_table(table, site.root / "logs" / f"{START}.parquet")
        (site.root / "logs" / f"{START}.csv").write_text("user,pin,time_us,event,place,dwell_s\n")
        with pytest.raises(PipelineError, match=rf"{message}; .*fix the column names in the site file"):
            site.ingest(DAYS[:1])
    site = asking(small_site(path="logs/{ds}.parquet"))
    foreign_file(site, "parquet", pa.array([["yes"]]))
    with pytest.raises(PipelineError, match=r"'consent' .* not plain values; .*under `training\.users\.column` in the"):
        site.ingest(DAYS[:1])


def test_a_key_that_no_row_has_is_refused(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.jsonl"))
    foreign_file(site, "jsonl", pa.array(["yes"]))
    path = site.root / "logs" / f"{START}.jsonl"
    path.write_text(path.read_text().replace("consent", "agreed"))
    with pytest.raises(PipelineError, match="has a key 'consent'; the first row has"):
        site.ingest(DAYS[:1])


# Forgetting


def forget(site: SmallSite, *users: int) -> None:
    (site.root / "forget.txt").write_text("".join(f"{user}\n" for user in users))


def places(site: SmallSite, user: int) -> dict[str, Any]:
    return {place.name: place for place in find_remains(site.site, user, artifacts=[], models=[]).places}


def test_answers_of_a_forgotten_user_are_deleted(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv", timelines={"num_buckets": 3}))
    write(site, DAYS[0], [(user, HOUR + user, "yes") for user in range(12)])
    site.ingest(DAYS[:1])
    forget(site, 7)
    everybody, choice = set(range(12)), read_training_users(site.site).selection
    assert selected(site) == sorted(everybody - {7})  # the answer is still stored
    assert any("may be learned from" in found for found in places(site, 7)["raw_actions"].found)
    [purged] = purge_days(IngestSettings.of(site.site), ingested_days(site.site), read_deletion_list(site.site))
    assert purged.actions == 1
    assert answers(site, DAYS[0]).keys() == everybody - {7}
    assert require_manifest(site.site, DAYS[0])["answers"]["num_users"] == 11
    assert places(site, 7)["raw_actions"].state == "gone"
    assert read_training_users(site.site).selection == choice  # so nothing is made again for the deletion
    after = digest(site, DAYS[0])
    site.ingest(DAYS[:1])
    assert digest(site, DAYS[0]) == after


def test_an_answer_alone_is_found_and_deleted(small_site: MakeSite) -> None:
    """As an interrupted copy of a backup may have it: the actions are gone, the answer is not."""
    site = asking(small_site(path="logs/{ds}.csv"))
    write(site, DAYS[0], [(1, HOUR, "yes")])
    site.ingest(DAYS[:1])
    path = partition_dir(site.site.directory, DAYS[0]) / require_manifest(site.site, DAYS[0])["build"] / ANSWERS
    pq.write_table(pa.table({"user_id": [1, 7], "answer": [True, True]}), path)
    forget(site, 7)
    assert places(site, 7)["raw_actions"].state == "overdue"
    list(purge_days(IngestSettings.of(site.site), DAYS[:1], read_deletion_list(site.site)))
    assert places(site, 7)["raw_actions"].state == "gone"


def test_forgetting_does_not_wait_for_days_to_be_ingested_again(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv"))
    write(site, DAYS[0], [(user, HOUR + user, "yes") for user in range(12)])
    site.ingest(DAYS[:1])
    counts_as_of(site.site, DAYS[0])
    asking(site, "agreed")
    with pytest.raises(PipelineError, match="without the answers"):
        counts_as_of(site.site, DAYS[0])
    forget(site, 7)
    assert places(site, 7)["raw_actions"].state == "overdue"
    delete_users(site.site, read_deletion_list(site.site), artifacts=[], progress=lambda _: None)
    assert places(site, 7)["raw_actions"].state == places(site, 7)["pin_counts"].state == "gone"


# Counts


def test_only_days_of_users_who_changed_are_counted_again(small_site: MakeSite) -> None:
    site = asking(small_site(path="logs/{ds}.csv", late_days=0))
    site.site = site.site.model_copy(update={"training": site.site.training.model_copy(update={"held_out_share": 0.0})})
    write(site, DAYS[0], [(1, HOUR, "yes"), (2, HOUR, "yes")])
    write(site, DAYS[1], [(2, DAY, "yes"), (3, DAY, "yes"), (4, DAY, "no")])
    write(site, DAYS[2], [(3, 2 * DAY, "no"), (5, 2 * DAY, "yes")])
    site.ingest(DAYS[:2])

    def user_days(ds: str) -> int:
        return int(counts_as_of(site.site, ds).user_days_NW[0, -1])

    def written() -> list[int]:
        return [(site.site.directory / "pin_counts" / f"{ds}.arrow").stat().st_mtime_ns for ds in DAYS[:2]]

    assert user_days(DAYS[1]) == 2 + 2
    before = written()
    site.ingest(DAYS[2:])
    assert user_days(DAYS[2]) == 2 + 1 + 1  # of day 2, user 3 has revoked
    after = written()
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert user_days(DAYS[2]) == 2 + 1 + 1
    assert written() == after
