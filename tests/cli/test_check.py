"""`pf check`: what it tells about a log; where a run would fail it names the cause and what to do, and exits with 1."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.shop_site import DAY_S, ROWS, check, message_of, shop_rows, write_log, write_site


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", [*ROWS, "4,9,soon,vue"])
    site = write_site(tmp_path, quality={"max_quarantined_share": 0.5}, training={})
    report = json.loads(check(site, "--json", "--rows", "1").output)
    assert (report["rows"]["read"], report["rows"]["kept"], report["rows"]["quarantined"]) == (7, 6, 1)
    (found,) = report["rows"]["reasons"]
    assert (found["reason"], found["rows"]) == ("ts: not a time in unit s (column at)", 1)
    assert found["first"]["where"] == "in row 8 of a.csv"
    assert len(report["examples"]) == 1
    assert (report["users"]["number"], report["users"]["mean_actions"], report["pins"]["number"]) == (3, 6 / 3, 2)
    assert (report["days"]["first"], report["days"]["last"], report["days"]["with_rows"]) == ("2024-03-04",) * 2 + (1,)
    assert len(report["days"]["without_rows"]) == 31 - 1
    assert report["training"]["problem"].startswith("the log is too small to train on: 3 users and 6 actions on 1 day")
    assert report["problems"] == [report["training"]["problem"]]


def test_json_names_what_a_run_would_fail_on(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", [*ROWS, *["1,7,soon,vue"] * 6])
    result = check(write_site(tmp_path), "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.output)["problems"]
    assert problem.startswith("50.00% of 12 rows quarantined, at most 2.00% allowed")


def test_a_good_site_passes(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    result = check(write_site(tmp_path))
    assert result.exit_code == 0, message_of(result)
    assert "6 read: 6 kept, 6 of them positive, 0 skipped by a rule, 0 quarantined\n" in result.output
    assert "warning" not in result.output


@pytest.mark.parametrize(
    ("changes", "log", "expected"),
    [
        ({"actions": {"ts": {"column": "at", "unit": "ms"}}}, {}, ["ts: outside 2000-2100", "fix the mapping"]),
        ({}, {"rows": [row.replace(",", ";") for row in ROWS]}, ["1 fields instead of 4", "fix `delimiter`"]),
        ({}, {"rows": [row.replace("vue", "été") for row in ROWS], "encoding": "latin-1"}, ["`encoding: cp1252`"]),
        ({}, {"rows": [row.replace(",", ".0,", 1) for row in ROWS]}, ["like 17850.0", "fix the mapping"]),
    ],
)
def test_a_log_without_a_usable_row_is_an_error(
    tmp_path: Path, changes: dict[str, Any], log: dict[str, Any], expected: list[str]
) -> None:
    write_log(tmp_path / "a.csv", **log)
    result = check(write_site(tmp_path, **changes))
    assert result.exit_code == 1
    assert "100.00% of 6 rows quarantined, at most 2.00% allowed" in result.output
    assert all(text in result.output for text in expected), result.output


def test_the_share_of_unusable_rows_is_compared_with_the_limit_of_the_site(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", [*ROWS, ",7,1,vue"])
    assert check(write_site(tmp_path)).exit_code == 1
    assert check(write_site(tmp_path, quality={"max_quarantined_share": 0.2})).exit_code == 0


@pytest.mark.parametrize("path", ["a.csv", "{ds}.csv"])
def test_a_log_of_other_days_is_an_error(tmp_path: Path, path: str) -> None:
    for name in ("a.csv", "2022-03-01.csv"):
        write_log(tmp_path / name)
    site = write_site(tmp_path, start_ds="2022-03-01", end_ds="2022-03-31", actions={"path": path})
    result = check(site)
    assert result.exit_code == 1
    assert "0 kept" in result.output
    assert "fix `start_ds`, `end_ds` or the unit of `ts`" in result.output
    if path == "a.csv":
        assert "6 rows are from 2024-03-04 to 2024-03-04" in result.output


def test_rows_before_the_first_day_of_the_site_are_normal(tmp_path: Path) -> None:
    """The beginning of a long undated log may lie before the site's first day."""
    write_log(tmp_path / "a.csv", [f"1,7,{DAY_S - 86_400},vue", *ROWS])
    result = check(write_site(tmp_path, start_ds="2024-03-04"))
    assert result.exit_code == 0, message_of(result)
    outside = "1 outside the site's days (2024-03-03 to 2024-03-03)"
    assert f"7 read: 6 kept, 6 of them positive, 0 skipped by a rule, {outside}, 0 quarantined\n" in result.output


def test_each_reason_to_quarantine_has_an_example(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", [ROWS[0], "broken", *ROWS[1:], ",7,1,vue", "broken, too", "1,x\x1b[2J,1,vue"])
    result = check(write_site(tmp_path, quality={"max_quarantined_share": 0.5}))
    assert result.exit_code == 0, message_of(result)
    assert "10 read: 6 kept, 6 of them positive, 0 skipped by a rule, 4 quarantined\n" in result.output
    assert "1 quarantined: malformed: 1 fields instead of 4; first in row 3 of a.csv: broken\n" in result.output
    assert "1 quarantined: malformed: 2 fields instead of 4; first in row 10 of a.csv: broken, too\n" in result.output
    missing = '{"at": "1", "event": "vue", "pin": "7", "user": null}'
    assert f"1 quarantined: user_id: missing (column user); first in row 9 of a.csv: {missing}\n" in result.output
    assert "1 quarantined: pin_id: not an integer (column pin); ids that are text need `pin_id: " in result.output
    assert "; first in row 11 of a.csv: " in result.output
    assert "\x1b" not in result.output


def test_of_a_large_log_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 20 rows a user comes to the next pin; the pieces are spread over all of the log."""
    rows = [f"{number % 20},{number // 20},{DAY_S + 300 * number},vue" for number in range(8000)]
    write_log(tmp_path / "a.csv", rows)
    monkeypatch.setattr("pf_core.onboarding.survey.SURVEY_BYTES", 50_000)
    result = check(write_site(tmp_path))
    assert result.exit_code == 0, message_of(result)
    assert ": a sample: 256 pieces, " in result.output
    (read, about), (first, last) = (
        re.findall(r"([\d,]+) read of about ([\d,]+):", result.output)[0],
        re.findall(r"with rows from (\S+) to (\S+),", result.output)[0],
    )
    assert int(read.replace(",", "")) < 3000
    assert 7600 < int(about.replace(",", "")) < 8400
    assert (first, last) == ("2024-03-04", "2024-03-31")  # all 28 days of 8,000 rows every 5 minutes


def test_a_log_of_skipped_rows_is_an_error(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    rules = {"rules": [{"skip": True, "when": {"event": "vue"}}, {"is": "click"}]}
    result = check(write_site(tmp_path, actions={"action_type": rules}, positive={"action_types": ["click"]}))
    assert result.exit_code == 1
    assert "all 6 rows that were read are skipped by a rule; fix the rules" in result.output


# What else a run needs


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "deletion_list: no file at"), ("5\nx\n", "line 2: 'x' is not an integer user id")]
)
def test_the_deletion_list_is_read(tmp_path: Path, content: str | None, expected: str) -> None:
    write_log(tmp_path / "a.csv")
    if content is not None:
        (tmp_path / "forget.txt").write_text(content)
    result = check(write_site(tmp_path, deletion_list="forget.txt"))
    assert result.exit_code == 1
    assert expected in result.output
    assert "6 kept" in result.output


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "training.users.file: no file at"),
        ("", "names no user, so nobody may be learned from"),
        ("5\nx\n", "line 2: 'x' is not an integer user id"),
    ],
)
def test_the_list_of_who_may_be_learned_from_is_read(tmp_path: Path, content: str | None, expected: str) -> None:
    write_log(tmp_path / "a.csv")
    if content is not None:
        (tmp_path / "consent.txt").write_text(content)
    site = write_site(tmp_path, training={"preset": "tiny", "users": {"file": "consent.txt"}})
    result = check(site)
    assert result.exit_code == 1
    assert expected in result.output
    (tmp_path / "consent.txt").write_text("999\n")
    assert "training.users selects 0 of them to learn from" in check(site).output


def test_a_column_says_who_may_be_learned_from(tmp_path: Path) -> None:
    answers = {1: "yes", 2: "no", 3: "Yes"}
    rows = [f"{row},{answers[int(row[0])]}" for row in ROWS]
    write_log(tmp_path / "a.csv", [*rows, f"1,7,{DAY_S + 3600},vue,no"], header="user,pin,at,event,consent")
    site = write_site(tmp_path, training={"preset": "tiny", "users": {"column": "consent", "values": [True]}})
    result = check(site)
    assert result.exit_code == 0
    assert "training.users selects 1 of them to learn from" in result.output
    assert "answer=False" in result.output
    write_log(tmp_path / "a.csv")
    assert "has no column 'consent'; it has 'user', 'pin', 'at', 'event'" in message_of(check(site))


def test_a_log_alone_is_enough(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", shop_rows("2024-03-04", num_days=14))
    result = check(write_site(tmp_path, pins={}, training={}))
    assert result.exit_code == 0, message_of(result)
    assert "warning" not in result.output


def test_the_files_of_the_pins_are_examined(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    result = check(write_site(tmp_path, pins={"vectors": {"npy": "none.npy", "ids": "i.npy"}}))
    assert result.exit_code == 1
    assert "fix `source.pins.vectors.npy`" in result.output
    site = write_site(tmp_path, pins={"vectors": "vector", "pin_id": "id", "catalogue": {"path": "pins.parquet"}})
    result = check(site)
    assert result.exit_code == 1
    assert "fix `source.pins.catalogue.path`" in result.output
    pq.write_table(pa.table({"id": [7], "vectors": [[0.0, 1.0]]}), tmp_path / "pins.parquet")
    result = check(site)
    assert result.exit_code == 1
    assert "has no column 'vector'; it has 'id', 'vectors'" in result.output
    pq.write_table(pa.table({"id": [7], "vector": [[0.0, 1.0]]}), tmp_path / "pins.parquet")
    assert check(site).exit_code == 0


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv", ["x"])
    pins = {"vectors": {"npy": "none.npy", "ids": "i.npy"}}
    result = check(write_site(tmp_path, deletion_list="forget.txt", pins=pins))
    assert "100.00% of 1 rows" in result.output
    assert "deletion_list: no file" in result.output
    assert "fix `source.pins.vectors.npy`" in result.output


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            ["ja", "nein"],
            "pin_features 2024-03-01: no pin of the catalogue could be used. {file}, row 2: is_candidate: not true or "
            "false, t or f, yes or no, y or n, 1 or 0 (column lieferbar); fix `pins` in the site file",
        ),
        (["0", "no"], "none of the 40 pins is a candidate: no row of the catalogue has a true `lieferbar`; fix source"),
        (["Yes", "F"], None),
    ],
)
def test_the_words_for_candidates_must_be_known(tmp_path: Path, values: list[str], problem: str | None) -> None:
    write_log(tmp_path / "a.csv", shop_rows("2024-03-04", num_days=14))
    pins = [f"{pin},{values[pin % 2]}" for pin in range(40)]
    write_log(tmp_path / "pins.csv", pins, header="pin,lieferbar")
    source = {"pin_id": "pin", "catalogue": {"path": "pins.csv"}, "is_candidate": "lieferbar"}
    result = check(write_site(tmp_path, pins=source, training={}))
    assert result.exit_code == (0 if problem is None else 1), message_of(result)
    if problem is not None:
        assert f"error: {problem.format(file=tmp_path / 'pins.csv')}" in result.output


# Days without a file


def test_a_closed_day_is_allowed(tmp_path: Path) -> None:
    write_log(tmp_path / "2024-03-04.csv")
    actions = {"path": "{ds}.csv", "missing_days": "allow"}
    site = write_site(tmp_path, actions=actions, start_ds="2024-03-03", end_ds="2024-03-05")
    result = check(site)
    assert result.exit_code == 0, message_of(result)
    assert "6 kept" in result.output
    assert "2 without rows: 2024-03-03, 2024-03-05\n" in result.output
    assert "warning" not in result.output
    assert check(site, "--ds", "2024-03-05").exit_code == 1, "a day that is named must have a file"


def test_days_without_a_file_on_which_a_run_would_stop_are_a_warning(tmp_path: Path) -> None:
    for day in ("2024-03-04", "2024-03-06"):
        write_log(tmp_path / f"{day}.csv")
    actions = {"path": "{ds}.csv", "late_days": 3}
    result = check(write_site(tmp_path, actions=actions))
    assert (
        "warning    no file for 1 day, on which a run stops: 2024-03-05; put logs without rows there" in result.output
    )


def test_a_missing_file_has_a_remedy(tmp_path: Path) -> None:
    for path, options in (("{ds}.csv", ["--ds", "2024-03-03"]), ("b.csv", [])):
        result = check(write_site(tmp_path, actions={"path": path}), *options)
        assert result.exit_code == 1
        assert "fix `root` or `actions.path` in the site file" in message_of(result)
        assert ("--ds" in message_of(result)) == (path == "{ds}.csv")
        assert "2024-03-03.csv" in message_of(result) or path == "b.csv"


# Positive engagement


def test_a_name_in_positive_that_no_row_has_is_a_warning(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    result = check(write_site(tmp_path, positive={"action_types": ["vue", "vu"]}))
    assert result.exit_code == 0, message_of(result)
    assert (
        "warning    no row that was read has the action_type vu of `source.positive.action_types`; the rows have vue\n"
        in result.output
    )


def test_the_settings_of_positive_are_shown_as_yaml(tmp_path: Path) -> None:
    write_log(tmp_path / "a.csv")
    result = check(write_site(tmp_path, positive={"action_types": ["achat"], "longer_than_s": {}}))
    assert result.exit_code == 1
    assert "source.positive is {action_types: [achat], longer_than_s: {}, surfaces: null}, the" in result.output
