from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.fields import CategoryField
from pf_core.config.source import Positive
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.engine.local import LocalEngine
from pf_core.errors import PipelineError
from pf_core.logs.checks import judge_late_rows
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.logs.partition import partition_dir, read_manifest, read_quarantine
from pf_core.logs.positives import positive_mask
from pf_core.logs.quarantine import Quarantine
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.storage.locks import exclusive
from tests.support.ingestion import write_parts
from tests.support.scattered import ScatteredEngine
from tests.support.sites import SmallSite

DAY_S = 86_400
DAYS = ds_range("2026-01-01", "2026-01-04")
MakeSite = Callable[..., Any]


@pytest.fixture(params=["one task", "shared"])
def small_site(small_site: MakeSite, request: pytest.FixtureRequest) -> MakeSite:
    """All tests run on both ways of ingestion."""

    def make(**options: Any) -> SmallSite:
        site: SmallSite = small_site(**options)
        if request.param == "shared":
            site.engine = ScatteredEngine()
        return site

    return make


def balance(manifest: dict[str, Any]) -> int:
    """Rows read and received, minus rows of every outcome; 0 if no row was lost."""
    counts = manifest["counts"]
    spent = ("kept", "duplicates", "skipped", "sent", "forgotten", "quarantined")
    return counts["read"] + counts["received"] - sum(counts[name] for name in spent)


def test_a_day_is_sorted_typed_and_free_of_duplicates(small_site: MakeSite) -> None:
    site = small_site()
    row = (7, "p", 10.0, "look")
    site.write_log(DAYS[0], [(7, "q", 20.0, "save"), row, (3, "p", 5.0, "go"), row, row])
    [manifest] = site.ingest(DAYS[:1])
    by_user: dict[int, list[str]] = {}
    for user, _, pin, action_type, surface, duration_s in site.actions(DAYS[0]):
        by_user.setdefault(user, []).append(f"{pin} {action_type} {surface} {duration_s}")
    assert by_user == {7: ["p closeup homefeed 20.0", "q repin homefeed 20.0"], 3: ["p click homefeed 20.0"]}
    assert manifest["counts"]["duplicates"] == 2
    assert manifest["counts"]["users"] == 2
    assert manifest["by_type"] == {"closeup": 1, "repin": 1, "click": 1}
    assert balance(manifest) == 0


def test_late_rows_go_to_their_day_and_later_ones_to_quarantine(small_site: MakeSite) -> None:
    site = small_site(late_days=1)
    for offset, ds in enumerate(DAYS):
        midnight_s = offset * DAY_S
        site.write_log(
            ds,
            [
                (1, "on-time", midnight_s + 1, "look"),
                (1, "one-late", midnight_s - DAY_S + 2, "look"),
                (1, "two-late", midnight_s - 2 * DAY_S + 3, "look"),
                (1, "future", midnight_s + DAY_S, "look"),
            ],
        )
    manifests = site.ingest(DAYS)
    pins = {ds: [row[2] for row in site.actions(ds)] for ds in DAYS}
    assert pins == {
        DAYS[0]: ["on-time", "one-late"],
        DAYS[1]: ["on-time", "one-late"],
        DAYS[2]: ["on-time", "one-late"],
        DAYS[3]: ["on-time"],  # its late row would be in the file of the day after, which does not exist
    }
    reasons = [Counter(read_quarantine(site.site, ds)["reason"].to_pylist()) for ds in DAYS]
    future = "ts: after its file's day (early_days: 0)"
    too_late = "ts: too late for its day (late_days: 1)"
    outside = "ts: outside the site's days"
    assert reasons[0] == {outside: 2, future: 1}  # both late rows are from before the site's first day
    assert reasons[1] == {outside: 1, future: 1}
    assert reasons[2] == reasons[3] == {too_late: 1, future: 1}
    assert manifests[2]["sent_to"] == {DAYS[1]: 1}
    assert [balance(manifest) for manifest in manifests] == [0, 0, 0, 0]


def test_a_range_equals_its_days_one_by_one(small_site: MakeSite) -> None:
    at_once, singly = small_site(late_days=2), small_site(late_days=2)
    for site in (at_once, singly):
        for offset, ds in enumerate(DAYS):
            rows = [(u, f"p{u}", max(0, offset * DAY_S + u * 9_000 - (u % 3) * DAY_S), "look") for u in range(9)]
            site.write_log(ds, rows)
    at_once.ingest(DAYS)
    for ds in reversed(DAYS):
        singly.ingest([ds])
    for ds in DAYS:
        one, other = read_manifest(at_once.site, ds), read_manifest(singly.site, ds)
        assert one is not None
        assert other is not None
        assert one["files"] == other["files"]  # sha256 of every file: the same bytes
        assert one["counts"] == other["counts"]


def test_files_cut_at_a_local_midnight(small_site: MakeSite) -> None:
    site = small_site(early_days=1, late_days=0, end_ds=DAYS[1])
    site.write_log(DAYS[0], [(1, "a", DAY_S - 1, "look"), (1, "b", DAY_S + 1, "look")])
    site.write_log(DAYS[1], [(1, "c", DAY_S + 2, "look")])
    site.ingest(DAYS[:2])
    assert [row[2] for row in site.actions(DAYS[0])] == ["a"]
    assert [row[2] for row in site.actions(DAYS[1])] == ["b", "c"]


def test_an_undated_log_is_cut_into_days_in_one_pass(small_site: MakeSite) -> None:
    site = small_site(path="logs/all.parquet", end_ds=DAYS[-1])
    rows = [(u, f"p{n}", n * 40_000.0, "look" if n % 5 else "nonsense") for n in range(9) for u in (1, 2)]
    site.write_log("", [*rows, (3, "stray", 40 * DAY_S, "look"), (None, "nobody", 3 * DAY_S, "look")])
    manifests = site.ingest(DAYS)
    kept = Counter(int(s // DAY_S) for _, _, s, event in rows if event == "look")
    rejected = Counter(int(s // DAY_S) for _, _, s, event in rows if event == "nonsense") + Counter([3])  # nobody
    assert [len(site.actions(ds)) for ds in DAYS] == [kept[day] for day in range(4)]
    assert [manifest["counts"]["quarantined"] for manifest in manifests] == [rejected[day] for day in range(4)]
    assert sum(rejected.values()) == 2 * 2 + 1
    assert manifests[0]["outside_site_days"] == 1
    assert [balance(manifest) for manifest in manifests] == [0, 0, 0, 0]


def test_undated_lines_without_a_time_go_with_the_row_before(small_site: MakeSite) -> None:
    site = small_site(path="logs/all.csv", end_ds=DAYS[1])
    start_us = ds_start_us(DAYS[0])
    lines = [
        "user,pin,time_us,event,place,dwell_s",
        "broken",
        f"1,a,{start_us + 5},look,home,1",
        "1,b,yesterday,look,home,1",
        f"1,c,{start_us + DAY_S * 1_000_000},look,home,1",
        "also,broken",
    ]
    (site.root / "logs").mkdir()
    (site.root / "logs/all.csv").write_text("\n".join(lines))
    site.ingest(DAYS[:2])
    rows = [read_quarantine(site.site, ds).select(["row_number", "reason"]).to_pylist() for ds in DAYS[:2]]
    assert [[row["row_number"] for row in day] for day in rows] == [[2, 4], [6]]
    assert rows[0][1]["reason"] == "ts: not a time in unit us (column time_us)"


UNDATED_LOGS = {
    # Rows by kind and day of the site (0 and 1 are its days), and the number of rows outside its days.
    "rejects after a row before the site": (["kept -3", "broken", "untimed", "kept 0", "kept 1"], 3),
    "rejects after a row behind the site": (["kept 0", "kept 1", "kept 7", "untimed", "broken"], 3),
    "rejects at the start of a log that begins before the site": (["broken", "untimed", "kept -1", "kept 0"], 3),
    "rejects with a time outside the site": (["kept 0", "unknown -1", "unknown 2", "kept 1"], 2),
    "rejects between rows of the site": (["broken", "kept 0", "untimed", "kept 1", "broken", "unknown 1"], 0),
    "skipped rows": (["skipped -1", "skipped 0", "broken", "skipped 5", "untimed", "kept 1", "skipped untimed"], 3),
    "forgotten users": (["forgotten -1", "forgotten 0", "forgotten untimed", "forgotten 9", "kept 0", "kept 1"], 2),
    "duplicates": (["kept 0", "kept 0", "broken", "kept 2", "kept 2", "broken", "kept 1", "broken"], 3),
    "no row of the site": (["kept -9", "broken", "kept 12", "unknown 12", "untimed"], 5),
    "no row": ([], 0),
}


@pytest.mark.parametrize("log", UNDATED_LOGS)
def test_every_row_of_an_undated_log_is_of_a_day_or_outside_the_site(small_site: MakeSite, log: str) -> None:
    """In a run over all days of the site, Σ read + rows outside the site's days = rows of the file."""
    rows, num_outside = UNDATED_LOGS[log]
    site = small_site(path="logs/all.csv", end_ds=DAYS[1])
    rules = [{"skip": True, "when": {"event": "ping"}}, {"is": "closeup", "when": {"event": "look"}}]
    by_rules = CategoryField.model_validate({"rules": rules})
    actions = site.site.source.actions.model_copy(update={"action_type": by_rules})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"actions": actions})})
    (site.root / "forget.txt").write_text("2\n")
    (site.root / "logs").mkdir()
    lines = ["user,pin,time_us,event,place,dwell_s", *map(undated_line, rows)]
    (site.root / "logs/all.csv").write_text("\n".join(lines))
    manifests = site.ingest(DAYS[:2])
    assert [manifest["outside_site_days"] for manifest in manifests] == [num_outside] * 2
    assert sum(manifest["counts"]["read"] for manifest in manifests) + num_outside == len(rows)
    assert [balance(manifest) for manifest in manifests] == [0, 0]


def test_rows_of_days_that_a_run_does_not_write_are_counted(small_site: MakeSite) -> None:
    """A site without an end has rows of the future; they are of no day of any run until then."""
    site = small_site(path="logs/all.csv", end_ds=None)
    rows = ["kept -1", "kept 0", "unknown 0", "kept 1", "unknown 1", "broken", "forgotten 1", "kept 20000", "untimed"]
    (site.root / "logs").mkdir()
    lines = ["user,pin,time_us,event,place,dwell_s", *map(undated_line, rows)]
    (site.root / "logs/all.csv").write_text("\n".join(lines))
    (site.root / "forget.txt").write_text("2\n")
    manifests = site.ingest(DAYS[:1])
    assert [manifest["counts"]["read"] for manifest in manifests] == [2]
    assert [(manifest["outside_site_days"], manifest["other_days"]) for manifest in manifests] == [(1, 4 + 2)]
    manifests = site.ingest(DAYS[:2])
    assert [(manifest["outside_site_days"], manifest["other_days"]) for manifest in manifests] == [(1, 2)] * 2
    assert sum(manifest["counts"]["read"] for manifest in manifests) == len(rows) - 1 - 2


@pytest.mark.parametrize("name", ["MAX_UNTIMED_ROWS", "MAX_UNTIMED_CHARS"])
def test_rows_that_wait_for_the_first_time_are_bounded(
    small_site: MakeSite, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("pf_core.logs.lines.BLOCK_BYTES", 100)
    monkeypatch.setattr(f"pf_core.logs.routing.{name}", 50)
    site = small_site(path="logs/all.csv", end_ds=DAYS[1])
    (site.root / "logs").mkdir()
    lines = ["user,pin,time_us,event,place,dwell_s", *["broken"] * 200, undated_line("kept 0")]
    (site.root / "logs/all.csv").write_text("\n".join(lines))
    with pytest.raises(PipelineError, match=r"all.csv: no row has a valid time among the first \d+; row 2: malformed"):
        site.ingest(DAYS[:2])


def test_the_quarantine_holds_a_bounded_number_of_characters(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.parquet")
    for number in range(40):
        quarantine.add("x.csv", number, "malformed", "x" * (1 << 20))
        assert len(quarantine.held) < 16
    quarantine.close()
    assert pq.read_table(quarantine.path)["row_number"].to_pylist() == list(range(40))


def undated_line(row: str) -> str:
    """A CSV line of "kind day", where the day counts from the site's first one or is "untimed"."""
    kind, _, day = row.partition(" ")
    if kind == "broken":
        return "broken"
    known_time = day not in ("", "untimed")
    time = str(ds_start_us(shift_ds(DAYS[0], int(day))) + 1) if known_time else "yesterday"
    user = 2 if kind == "forgotten" else 1
    event = {"skipped": "ping", "unknown": "dance"}.get(kind, "look")
    return f"{user},p,{time},{event},home,1"


def test_quarantine_names_file_row_and_reason_and_keeps_the_row(small_site: MakeSite) -> None:
    site = small_site()
    path = site.write_log(DAYS[0], [(1, "p", 1.0, "look"), (None, "p", 1.0, "look"), (1, "p", 2.0, "dance")])
    site.ingest(DAYS[:1])
    rows = read_quarantine(site.site, DAYS[0]).to_pylist()
    assert [(row["source_file"], row["row_number"], row["reason"]) for row in rows] == [
        (str(path), 2, "user_id: missing (column user)"),
        (str(path), 3, "action_type: unknown value (column event)"),
    ]
    assert '"event": "dance"' in rows[1]["raw"]


def test_a_mapping_that_fits_no_row_is_an_error_and_publishes_nothing(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(DAYS[0], [(1, "p", 1.0, "dance"), (2, "p", 1.0, "dance")])
    with pytest.raises(PipelineError, match=r"not one of the 2 rows .*row 1: action_type: unknown value"):
        site.ingest(DAYS[:1])
    assert read_manifest(site.site, DAYS[0]) is None
    assert list(partition_dir(site.site.directory, DAYS[0]).glob("[!.]*")) == []


def test_a_missing_day_is_an_error_and_an_empty_one_is_a_partition(small_site: MakeSite) -> None:
    site = small_site()
    with pytest.raises(PipelineError, match=r"no file for 2026-01-01: nothing matches .*2026-01-01.parquet"):
        site.ingest(DAYS[:1])
    site.write_log(DAYS[0], [])
    [manifest] = site.ingest(DAYS[:1])
    assert manifest["counts"]["kept"] == 0
    assert site.actions(DAYS[0]) == []


def test_a_day_without_a_file_can_be_declared_as_silent(small_site: MakeSite) -> None:
    site = small_site(late_days=1)
    with pytest.raises(PipelineError, match=r"no file for 2026-01-01: .*`source.actions.missing_days: allow`"):
        site.ingest(DAYS[:1])
    actions = site.site.source.actions.model_copy(update={"missing_days": "allow"})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"actions": actions})})
    site.write_log(DAYS[2], [(1, "late", 2 * DAY_S - 1.0, "look"), (1, "p", 2 * DAY_S, "look")])
    manifests = site.ingest(DAYS[:3])
    assert [manifest["counts"]["kept"] for manifest in manifests] == [0, 1, 1]
    assert [len(manifest["inputs"]) for manifest in manifests] == [0, 0, 1]
    assert [balance(manifest) for manifest in manifests] == [0, 0, 0]
    assert site.ingest([DAYS[3]])[0]["counts"]["kept"] == 0


def test_a_truncated_file_leaves_the_old_partition(small_site: MakeSite) -> None:
    site = small_site()
    path = site.write_log(DAYS[0], [(1, "p", 1.0, "look")])
    site.ingest(DAYS[:1])
    before = read_json(partition_dir(site.site.directory, DAYS[0]) / MANIFEST)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(PipelineError, match=r"2026-01-01\.parquet cannot be read as parquet"):
        site.ingest(DAYS[:1])
    assert read_json(partition_dir(site.site.directory, DAYS[0]) / MANIFEST) == before
    assert len(site.actions(DAYS[0])) == 1


def test_rerunning_gives_the_same_bytes_and_keeps_one_build(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(DAYS[0], [(u, "p", u * 3.0, "look") for u in range(50)])
    [first] = site.ingest(DAYS[:1])
    [second] = site.ingest(DAYS[:1])
    assert second["files"] == first["files"]
    assert second["build"] != first["build"]
    assert sorted(p.name for p in partition_dir(site.site.directory, DAYS[0]).glob("[!.]*")) == [
        second["build"],
        MANIFEST,
    ]


def test_forgotten_users_stay_out_and_are_counted(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(DAYS[0], [(1, "p", 1.0, "look"), (2, "p", 1.0, "look"), (2, "q", 2.0, "look")])
    (site.root / "forget.txt").write_text("2\n\n99\n")
    [manifest] = site.ingest(DAYS[:1])
    assert [row[0] for row in site.actions(DAYS[0])] == [1]
    assert manifest["counts"]["forgotten"] == 2
    assert balance(manifest) == 0
    (site.root / "forget.txt").write_text("2\nbob\n")
    with pytest.raises(PipelineError, match=r"forget.txt, line 2: 'bob' is not an integer"):
        site.ingest(DAYS[:1])


@pytest.mark.parametrize("path", ["logs/{ds}.parquet", "logs/*.parquet"])
def test_forgotten_users_are_not_in_the_quarantine(small_site: MakeSite, path: str) -> None:
    site = small_site(path=path)
    site.write_log(DAYS[0], [(1, "p", 1.0, "look"), (2, "p", 1.0, "dance"), (3, "p", 1.0, "dance")])
    (site.root / "forget.txt").write_text("2\n")
    [manifest] = site.ingest(DAYS[:1])
    assert [row["raw"][:10] for row in read_quarantine(site.site, DAYS[0]).to_pylist()] == ['{"dwell_s"']
    assert '"user": 2' not in str(read_quarantine(site.site, DAYS[0]).to_pylist())
    assert manifest["counts"]["forgotten"] == 1
    assert balance(manifest) == 0


@pytest.mark.parametrize("path", ["logs/{ds}.parquet", "logs/*.parquet"])
def test_forgotten_users_are_found_among_ids_that_are_no_text(small_site: MakeSite, path: str) -> None:
    site = small_site(path=path)
    log = site.write_log(DAYS[0], [(1, "p", 1.0, "look"), (2, "p", 1.0, "look"), (2, "p", 1.0, "dance")])
    (site.root / "forget.txt").write_text("2\n")
    whole = pq.read_table(log)
    users = {"decimal": whole["user"].cast(pa.decimal128(22, 2)), "bytes": pa.array([b"\xff", b"2", b"\xff"])}
    index = whole.schema.get_field_index("user")
    pq.write_table(whole.set_column(index, "user", users["decimal"]), log)
    [manifest] = site.ingest(DAYS[:1])
    assert (manifest["counts"]["kept"], manifest["counts"]["forgotten"]) == (1, 2)
    assert balance(manifest) == 0
    pq.write_table(whole.set_column(index, "user", users["bytes"]), log)
    with pytest.raises(PipelineError, match=r"not one of the 3 rows .*user_id: not an integer"):
        site.ingest(DAYS[:1])


def test_late_rows_of_a_day_that_was_ingested_before_fail_the_check(small_site: MakeSite) -> None:
    site = small_site(late_days=1)
    site.write_log(DAYS[0], [(1, "p", 1.0, "look")])
    site.ingest(DAYS[:1])  # in the morning of the day after, before its log exists
    site.write_log(DAYS[1], [(1, "p", DAY_S + 1.0, "look"), (2, "late", 5.0, "look")])
    [second] = site.ingest(DAYS[1:2])
    verdict = judge_late_rows(site.site, second)
    assert not verdict.passed
    assert "1 rows belong to 2026-01-01, ingested before they arrived; ingest them with: pf repair" in verdict.reason
    assert verdict.reason.endswith("--since 2026-01-02 --until 2026-01-02")
    site.ingest(DAYS[:2])
    assert sorted(row[2] for row in site.actions(DAYS[0])) == ["late", "p"]
    again = read_manifest(site.site, DAYS[1])
    assert again is not None
    assert judge_late_rows(site.site, again).passed


def test_gaps_in_a_range_are_refused(small_site: MakeSite) -> None:
    with pytest.raises(PipelineError, match="consecutive"):
        small_site().ingest([DAYS[0], shift_ds(DAYS[0], 2)])


def test_a_log_larger_than_the_memory_budget(small_site: MakeSite) -> None:
    roomy, tight = small_site(), small_site()
    tight.engine = LocalEngine(num_workers=1, memory_mb=1, temp_dir=tight.root / "tmp")
    for site in (roomy, tight):
        site.write_log(DAYS[0], [(u % 97, f"p{u % 31}", u * 0.7, "look") for u in range(30_000)])
    [expected], [manifest] = roomy.ingest(DAYS[:1]), tight.ingest(DAYS[:1])
    assert manifest["files"] == expected["files"]


def test_positive_is_type_surface_and_strictly_longer() -> None:
    table = pa.table(
        {
            "action_type": ["repin", "closeup", "closeup", "click", "repin", "hide"],
            "surface": ["homefeed", "homefeed", "homefeed", "homefeed", "search", "homefeed"],
            "duration_s": pa.array([0, 10, 10.5, 11, 30, 30], pa.float32()),
        }
    )
    assert positive_mask(table, Positive()).tolist() == [True, False, True, True, False, False]
    assert positive_mask(table, Positive(surfaces=None)).tolist() == [True, False, True, True, True, False]


def test_more_surfaces_in_a_day_than_are_possible_are_a_sentence(
    small_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file has too many, but all files of the day together have."""
    monkeypatch.setattr("pf_core.logs.readers.JOINED_ROWS", 1)
    site = small_site(path="logs/{ds}/*.parquet")
    actions = site.site.source.actions.model_copy(update={"surface": CategoryField(column="pin")})
    site.site = site.site.model_copy(update={"source": site.site.source.model_copy(update={"actions": actions})})
    num_rows = 20_000
    parts = [[(1, f"p{part}-{n}", 1.0, "look") for n in range(num_rows)] for part in range(2)]
    write_parts(site, DAYS[0], parts)
    with pytest.raises(PipelineError, match=r"surface has 40,000 .* 32,768 .*`source.actions.surface`"):
        site.ingest(DAYS[:1])


def test_files_are_plain_parquet(small_site: MakeSite) -> None:
    site = small_site()
    site.write_log(DAYS[0], [(1, "p", 1.0, "look")])
    [manifest] = site.ingest(DAYS[:1])
    path = partition_dir(site.site.directory, DAYS[0]) / manifest["build"] / manifest["files"][0]["name"]
    assert pq.read_schema(path).names == ["user_id", "ts", "pin_id", "action_type", "surface", "duration_s"]


def test_rejects_of_many_small_files_keep_their_file_and_row(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}/*.parquet")
    paths = []
    for number in range(4):
        rows = [(n, "p", 100.0 * number + n, "dance" if n == number else "look") for n in range(5)]
        written = site.write_log(DAYS[0], rows)  # the name ends in *.parquet
        paths.append(written.rename(written.with_name(f"part-{number}.parquet")))
    [manifest] = site.ingest(DAYS[:1])
    rejects = read_quarantine(site.site, DAYS[0]).to_pylist()
    assert [(row["source_file"], row["row_number"]) for row in rejects] == [
        (str(path), number + 1) for number, path in enumerate(paths)
    ]
    assert manifest["counts"]["kept"] == 4 * 4
    assert len(manifest["inputs"]) == 4


def test_a_second_writer_of_a_day_is_refused(small_site: MakeSite) -> None:
    site = small_site()
    for offset, ds in enumerate(DAYS[:2]):
        site.write_log(ds, [(1, "p", offset * DAY_S + 1.0, "look")])
    with exclusive(partition_dir(site.site.directory, DAYS[0]), "raw_actions"):
        with pytest.raises(PipelineError, match="another run is writing raw_actions 2026-01-01"):
            site.ingest(DAYS[:2])
        assert len(site.ingest(DAYS[1:2])) == 1
    assert len(site.ingest(DAYS[:2])) == 2


def test_the_line_of_a_day_accounts_for_every_row(small_site: MakeSite) -> None:
    site = small_site()
    look = (1, "p", 5.0, "look")
    site.write_log(DAYS[0], [look, look, (2, "q", 6.0, "look"), (3, "q", 7.0, "dance"), (9, "q", 8.0, "look")])
    site.write_log(DAYS[1], [(4, "q", 9.0, "look"), (4, "q", DAY_S + 9.0, "look")])
    (site.root / "forget.txt").write_text("9\n")
    lines: list[str] = []
    forgotten = read_deletion_list(site.site)
    list(ingest_days(site.site, DAYS[:2], engine=site.engine, forgotten=forgotten, progress=lines.append))
    assert [line for line in lines if "rows read" in line] == [
        f"raw_actions {DAYS[0]}: 5 rows read and 1 received from the files of other days: 3 actions of 3 users, "
        "1 duplicates, 1 of forgotten users, 1 quarantined",
        f"raw_actions {DAYS[1]}: 2 rows read: 1 actions of 1 users, 1 sent to the day on which they happened",
    ]


def test_text_in_another_encoding_is_refused_with_the_key_that_reads_it(small_site: MakeSite) -> None:
    site = small_site(path="logs/{ds}.csv")
    log = site.root / "logs" / f"{DAYS[0]}.csv"
    log.parent.mkdir()
    log.write_bytes("user,pin,time_us,event,place,dwell_s\n1,p,1,été,home,1\n".encode("latin-1"))
    with pytest.raises(
        PipelineError, match=r"row 2: malformed: not valid UTF-8; set `encoding: cp1252` in the site file"
    ):
        site.ingest(DAYS[:1])
