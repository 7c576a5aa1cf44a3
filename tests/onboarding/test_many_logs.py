"""Logs as teams have them: nested events, folders by day, other languages, time zones; and what is refused."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from pf_assets.cli.main import app
from tests.support.foreign_logs import Row, actions, write_lines

ROWS = actions()


def init(logs: Path, out: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", str(logs), "--out", str(out), "--yes", *options])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def accepted(logs: Path, out: Path, *options: str, check_code: int = 0) -> tuple[dict[str, Any], str, str]:
    """`source.actions` of the site file, what `pf init` prints, and what `pf check` prints."""
    code, output = init(logs, out, *options)
    assert code == 0, output
    checked = CliRunner().invoke(app, ["check", str(out / "site.yaml")])
    assert checked.exit_code == check_code, f"{checked.output}{checked.exception}"
    return yaml.safe_load((out / "site.yaml").read_text())["source"]["actions"], output, checked.output


def csv_of(folder: Path, header: str, line: Callable[[Row], str], rows: Sequence[Row] = ROWS) -> Path:
    write_lines(folder / "log.csv", [header, *map(line, rows)])
    return folder


def json_of(folder: Path, document: Callable[[Row], dict[str, Any]]) -> Path:
    write_lines(folder / "events.json", [json.dumps(document(row)) for row in ROWS])
    return folder


def test_nested_events_with_anonymous_users(tmp_path: Path) -> None:
    def event(row: Row) -> dict[str, Any]:
        at = f"{row.at:%Y-%m-%dT%H:%M:%S}.123Z"
        names = ["Product Viewed", "Product Viewed", "Product Added", "Page Viewed"]
        properties = {"path": "/"} if row.number % 4 == 3 else {"product_id": f"SKU-{row.pin:03d}", "price": 9.5}
        return {
            "messageId": f"m-{row.number:08d}",
            "anonymousId": f"{row.number // 2:08x}-0000-4000-8000-000000000000",
            "userId": None if row.user % 4 == 0 else f"user_{row.user:05d}",
            "event": names[row.number % 4],
            "originalTimestamp": at,
            "timestamp": at,
            "sentAt": at,
            "properties": properties,
            "context": {"page": {"path": f"/p/{row.pin}"}, "sessionId": 1_700_000_000_000 + row.number // 5},
        }

    found, output, _ = accepted(json_of(tmp_path / "logs", event), tmp_path)
    assert found["user_id"] == {"column": "userId", "type": "string"}
    assert found["pin_id"] == {"column": "properties.product_id", "type": "string"}
    assert found["ts"] == {"column": "timestamp", "unit": "iso"}
    assert "surface" not in found  # the path is that of the pin
    assert "anonymousId has a value in every row, and could be the user instead" in output


def analytics(row: Row) -> dict[str, Any]:
    """A row as Google Analytics exports it to BigQuery."""
    event = ["view_item", "view_item", "add_to_cart", "page_view"][row.number % 4]
    return {
        "event_date": f"{row.at:%Y%m%d}",
        "event_timestamp": str(int(row.at.timestamp()) * 1_000_000),
        "event_name": event,
        "user_pseudo_id": f"{10**9 + row.user}.{1_700_000_000 + row.user}",
        "user_id": None,
        "platform": "WEB",
        "items": [] if event == "page_view" else [{"item_id": f"I{row.pin}"}],
    }


def test_analytics_with_one_item_a_row(tmp_path: Path) -> None:
    def flat(row: Row) -> dict[str, Any]:
        document = analytics(row)
        items = document.pop("items")
        return document | {"item_id": items[0]["item_id"] if items else None}

    found, _, _ = accepted(json_of(tmp_path / "logs", flat), tmp_path)
    assert found["user_id"] == {"column": "user_pseudo_id", "type": "string"}
    assert found["pin_id"] == {"column": "item_id", "type": "string"}
    assert found["ts"] == {"column": "event_timestamp", "unit": "us"}


def test_items_in_lists_are_asked_for_as_rows(tmp_path: Path) -> None:
    code, output = init(json_of(tmp_path / "logs", analytics), tmp_path / "out")
    assert code == 1
    assert "no two columns could be users and pins" in output
    assert "the lists in 'items' are not read; write one row for each action in them" in output
    assert not (tmp_path / "out").exists()


def test_a_warehouse_with_a_folder_for_each_day(tmp_path: Path) -> None:
    for day in range(30):
        own = [row for row in ROWS if (row.at - ROWS[0].at.replace(hour=0, minute=0, second=0)).days == day]
        folder = tmp_path / "logs" / f"dt={own[0].at:%Y-%m-%d}"
        folder.mkdir(parents=True)
        for part in range(2):
            rows = own[part::2]
            table = pa.table(
                {
                    "user_id": [10**9 + row.user * 7919 for row in rows],
                    "item_id": pa.array([row.pin for row in rows], pa.int32()),
                    "event_type": pa.array([["view", "cart"][row.number % 2] for row in rows]).dictionary_encode(),
                    "event_ts": pa.array([row.at for row in rows], pa.timestamp("us")),
                }
            )
            pq.write_table(table, folder / f"part-{part:05d}-{day * 2654435761 % 2**32:08x}-c000.snappy.parquet")
        (folder / "_SUCCESS").write_text("")
    found, _, checked = accepted(tmp_path / "logs", tmp_path)
    assert found["path"].startswith("dt={ds}/part-")
    assert (found["user_id"], found["pin_id"], found["ts"]) == ("user_id", "item_id", {"column": "event_ts"})
    assert "30 with rows from 2024-03-01 to 2024-03-30" in checked


def orders(row: Row) -> str:
    """An order line of a German shop: decimal commas, returns with a negative quantity."""
    number = -1 if row.number % 40 == 3 else 1 + row.number % 3
    return (
        f"{5000 + row.number // 3};{row.at:%d.%m.%Y %H:%M};K{row.user:05d};A-{row.pin:05d};Größe {row.pin}, süß;"
        f"{number};{3 + row.pin % 20},{row.pin % 10}9"
    )


ORDERS = "Bestellnr;Datum;Kunde;Artikelnr;Bezeichnung;Menge;Preis"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_order_lines_in_another_language(tmp_path: Path, encoding: str) -> None:
    write_lines(tmp_path / "logs" / "log.csv", [ORDERS, *map(orders, ROWS)], encoding=encoding)
    found, output, checked = accepted(tmp_path / "logs", tmp_path)
    assert found.get("encoding", "utf-8") == encoding
    assert found["user_id"] == {"column": "Kunde", "type": "string"}
    assert found["pin_id"] == {"column": "Artikelnr", "type": "string"}
    assert found["ts"] == {"column": "Datum", "format": "%d.%m.%Y %H:%M"}
    assert found["action_type"] == {"rules": [{"skip": True, "when": {"Menge": {"at_most": 0}}}, {"is": "purchase"}]}
    assert "2.5 % of the rows have a Menge of 0 or less, as returns have: left out" in output
    assert "60 skipped by a rule" in checked


def test_excel_writes_a_mark_and_two_characters_at_the_end_of_a_line(tmp_path: Path) -> None:
    lines = [
        f"{row.user};{row.pin};{row.at.month}/{row.at.day}/{row.at.year} {row.at.hour}:{row.at:%M}" for row in ROWS
    ]
    text = "\r\n".join(["Customer ID;Item No.;Order Date", *lines])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "Export (1).csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    found, _, _ = accepted(tmp_path / "logs", tmp_path)
    assert found["delimiter"] == ";"
    assert (found["user_id"], found["pin_id"]) == ("Customer ID", "Item No.")


@pytest.mark.parametrize(
    ("above", "which", "number"),
    [
        (["sep=;"], "the first line is", 2),
        (["# exported on Monday", "# by user, item, time"], "the first 2 lines are", 3),
        (["Report of April", "", "all shops; all tills"], "the first 2 lines are", 3),
    ],
)
def test_lines_above_the_table_are_named(tmp_path: Path, above: list[str], which: str, number: int) -> None:
    lines = [f"{row.user};{row.pin};{int(row.at.timestamp())}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", [*above, "user;item;ts", *lines])
    code, output = init(tmp_path / "logs", tmp_path / "out")
    assert code == 1
    assert f"has a table, but {which} not of it" in output
    assert f"tail -n +{number}" in output


def test_a_header_may_begin_as_a_remark(tmp_path: Path) -> None:
    found, _, _ = accepted(csv_of(tmp_path / "a", "#user_id,item,ts", lambda r: f"{r.user},{r.pin},{r.at}"), tmp_path)
    assert found["user_id"] == "#user_id"


ZONED = "customer_id,sku,purchased_at"


def test_times_may_name_zones(tmp_path: Path) -> None:
    found, output, _ = accepted(
        csv_of(tmp_path / "a", ZONED, lambda r: f"{r.user},{r.pin},{r.at:%Y-%m-%d %H:%M:%S} Europe/Berlin"), tmp_path
    )
    assert found["ts"] == {"column": "purchased_at", "unit": "iso"}
    assert "In which time zone" not in output


def test_a_column_may_name_the_zone(tmp_path: Path) -> None:
    found, output, _ = accepted(
        csv_of(tmp_path / "a", f"{ZONED},tz", lambda r: f"{r.user},{r.pin},{r.at:%Y-%m-%d %H:%M},Asia/Tokyo"), tmp_path
    )
    assert found["ts"]["timezone"] == "Asia/Tokyo"
    assert "column tz says Asia/Tokyo in 100 % of the rows" in output


@pytest.mark.parametrize(
    ("header", "day", "clock", "expected"),
    [
        ("date,time", "%Y-%m-%d", "%H:%M:%S", {"column": "date", "unit": "iso"}),
        ("order_day,hour", "%Y-%m-%d 00:00:00", "%H:%M", {"column": "order_day", "unit": "iso"}),
        ("Datum,Uhrzeit", "%d.%m.%Y", "%H:%M", {"column": "Datum", "format": "%d.%m.%Y %H:%M"}),
        ("date,at", "%m/%d/%Y", "%I:%M %p", {"column": "date", "format": "%m/%d/%Y %I:%M %p"}),
    ],
)
def test_day_and_time_of_day_in_two_columns(
    tmp_path: Path, header: str, day: str, clock: str, expected: dict[str, str]
) -> None:
    logs = csv_of(
        tmp_path / "logs",
        f"{header},user,product,length",
        lambda row: f"{row.at:{day}},{row.at:{clock}},{row.user},{row.pin},0{row.pin % 9}:30",
    )
    found, output, checked = accepted(logs, tmp_path)
    assert found["ts"] == expected | {"time_of_day": header.split(",")[1]}
    assert "has the time of day, such as" in output
    assert "The times are days" not in (tmp_path / "site.yaml").read_text()
    assert f"ts={ROWS[0].at:%Y-%m-%d %H:%M}" in checked


def test_abbreviated_zones_are_refused(tmp_path: Path) -> None:
    line = f"{{}},{{}},{{:%Y-%m-%d %H:%M:%S}} {'CEST'}"
    logs = csv_of(tmp_path / "a", ZONED, lambda r: line.format(r.user, r.pin, r.at))
    code, output = init(logs, tmp_path / "out")
    assert code == 1
    assert "end with CEST, and time zones are not read by their abbreviations" in output


def test_mixed_zones_are_read(tmp_path: Path) -> None:
    def line(row: Row) -> str:
        hours, zone = [(0, "Z"), (2, "+02:00"), (-5, "-05:00")][row.number % 3]
        return f"{row.user},{row.pin},{row.at + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S}{zone}"

    _, output, checked = accepted(csv_of(tmp_path / "a", ZONED, line), tmp_path)
    assert "In which time zone" not in output
    assert "30 with rows from 2024-03-01 to 2024-03-30, 80 actions on a usual day (80 to 80)" in checked


def test_a_column_that_came_later_is_not_read(tmp_path: Path) -> None:
    for day in range(30):
        own = [row for row in ROWS if (row.at - ROWS[0].at.replace(hour=0, minute=0, second=0)).days == day]
        header, event = ("user_id,item_id,ts", "") if day < 15 else ("user_id,item_id,event,ts", "view,")
        lines = [f"{row.user},{row.pin},{event}{int(row.at.timestamp())}" for row in own]
        write_lines(tmp_path / "logs" / f"{own[0].at:%Y%m%d}.csv", [header, *lines])
    found, _, checked = accepted(tmp_path / "logs", tmp_path)
    assert found["path"] == "*.csv"
    assert "2,400 read: 2,400 kept" in checked
    assert "# Note: Columns that some files do not have are not read: event." in (tmp_path / "site.yaml").read_text()


def test_two_logs_side_by_side(tmp_path: Path) -> None:
    views = [f"{row.user},{row.pin},{row.at:%Y-%m-%dT%H:%M:%SZ},mail" for row in ROWS]
    bought = [f"{row.number},{row.user},{row.pin},1,{row.at:%Y-%m-%dT%H:%M:%SZ}" for row in ROWS[::7]]
    write_lines(tmp_path / "logs" / "views.csv", ["user_id,product_id,viewed_at,referrer", *views])
    write_lines(tmp_path / "logs" / "orders.csv", ["order_id,user_id,product_id,quantity,ordered_at", *bought])
    found, output, _ = accepted(tmp_path / "logs", tmp_path)
    assert found["path"] == "views.csv"
    assert "could be a log, too: to use both, write them as one table" in output


def test_many_rows_without_an_item(tmp_path: Path) -> None:
    def line(row: Row) -> str:
        is_home = row.number % 10 < 7
        return f"v{row.user},{'' if is_home else row.pin},{'home' if is_home else 'article'},{int(row.at.timestamp())}"

    _, output, checked = accepted(csv_of(tmp_path / "a", "visitor_id,article_id,page_type,timestamp", line), tmp_path)
    assert "70 % of the rows have no pin (column article_id): left out" in output
    assert "2,400 read: 720 kept" in checked


def test_a_table_of_users_is_no_catalogue(tmp_path: Path) -> None:
    """As in MovieLens 1M: users and films are 1, 2, 3, no column has a name, and the films are in Latin-1."""
    lines = [f"{1 + row.user}::{1 + row.pin}::{1 + row.number % 5}::{int(row.at.timestamp())}" for row in ROWS]
    write_lines(tmp_path / "logs" / "ratings.dat", lines)
    write_lines(tmp_path / "logs" / "users.dat", [f"{1 + user}::F::25::{user % 9}" for user in range(40)])
    films = [f"{1 + pin}::Misérables {pin}::Drama" for pin in range(64)]
    write_lines(tmp_path / "logs" / "movies.dat", films, encoding="latin-1")
    _, output, checked = accepted(tmp_path / "logs", tmp_path)
    assert "catalogue  movies.dat, column column_1: 100 % of the log's pins" in output
    assert "catalogue  64 pins, with all of those of the log" in checked


def test_sessions_instead_of_users_are_told_apart(tmp_path: Path) -> None:
    logs = csv_of(tmp_path / "a", "session_id,item_id,ts", lambda r: f"{r.number // 4},{r.pin},{r.at.timestamp():.0f}")
    _, output, checked = accepted(logs, tmp_path, check_code=1)
    assert "unsure     Which column is the user? session_id: 600 integers" in output
    assert "note       With these columns, the log is too small to train on" in output
    assert "of the users have all actions on one day, as sessions have" in output
    assert "training   would stop: the log is too small to train on" in checked
    assert "error: the log is too small to train on: 600 users" in checked


def test_the_time_that_names_a_zone_is_taken(tmp_path: Path) -> None:
    logs = csv_of(
        tmp_path / "a",
        "user_id,video_id,time,timestamp",
        lambda r: f"{r.user},{r.pin},{r.at + timedelta(hours=8):%Y-%m-%d %H:%M:%S},{r.at.timestamp():.0f}",
    )
    found, _, _ = accepted(logs, tmp_path)
    assert found["ts"] == {"column": "timestamp", "unit": "s"}


def test_users_come_back_on_other_days(tmp_path: Path) -> None:
    """Without names of columns, sessions stand before the users, and have more values."""
    lines = [f"{10**6 + row.number // 3}|{500 + row.user}|{row.pin}|{int(row.at.timestamp())}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.txt", lines)
    found, output, _ = accepted(tmp_path / "logs", tmp_path)
    assert found["columns"] == ["column_1", "user", "pin", "time"]
    assert "unsure     Which column is the user? column_2" in output
