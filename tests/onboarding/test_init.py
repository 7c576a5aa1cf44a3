"""`pf init` on the logs that people have: what it writes, what it says, and that `pf check` and a run accept it."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from pf_assets.cli.main import app
from pf_assets.settings import INSTANCE_TEXT, REPOSITORY
from pf_core.config.site import Site, load_site
from pf_core.days import ds_range
from pf_core.engine.local import LocalEngine
from pf_core.logs.checks import judge_quarantine, judge_volume
from pf_core.logs.ingest import ingest_days
from tests.support.foreign_logs import LOGS, actions, advertising, movielens, ratings, shop, write_lines

ANY: dict[str, Any] = {"longer_than_s": {}, "surfaces": None}


def init(logs: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["init", str(logs), "--out", str(out), *options])


def written(logs: Path, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The `source` of the site file, and what was printed."""
    result = init(logs, out, "--yes", *options)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    return yaml.safe_load((out / "site.yaml").read_text())["source"], result.output


EXPECTED: dict[str, dict[str, Any]] = {
    "shop": {
        "path": "sales_{ds}.csv",
        "user_id": "CustomerID",
        "pin_id": {"column": "StockCode", "type": "string"},
        "ts": {"column": "InvoiceDate", "format": "%m/%d/%Y %H:%M"},
        "action_type": {
            "rules": [
                {"skip": True, "when": {"CustomerID": {"missing": True}}},
                {"skip": True, "when": {"Quantity": {"at_most": 0}}},
                {"is": "purchase"},
            ]
        },
    },
    "events": {
        "path": "events.parquet",
        "user_id": {"column": "visitor_id", "type": "string"},
        "pin_id": "product_id",
        "ts": {"column": "occurred_at"},
        "action_type": {
            "rules": [
                {"skip": True, "when": {"product_id": {"missing": True}}},
                {"is": "view", "when": {"event_name": "view"}},
                {"is": "add_to_cart", "when": {"event_name": "add_to_cart"}},
                {"is": "purchase", "when": {"event_name": "purchase"}},
                {"is": "remove_from_cart", "when": {"event_name": "remove_from_cart"}},
                {"is": "other"},
            ]
        },
        "surface": "page_type",
        "duration_s": {"column": "dwell_seconds", "unit": "s"},
    },
    "ratings": {
        "path": "ratings.dat",
        "format": "csv",
        "delimiter": "::",
        "columns": ["user", "pin", "rating", "time"],
        "user_id": "user",
        "pin_id": {"column": "pin", "type": "string"},
        "ts": {"column": "time", "unit": "s"},
        "action_type": {"constant": "rating"},
    },
    "plays": {
        "path": "plays.tsv.gz",
        "columns": ["user", "time", "column_3", "column_4", "pin", "column_6"],
        "user_id": {"column": "user", "type": "string"},
        "pin_id": {"column": "pin", "type": "string"},
        "ts": {"column": "time", "unit": "iso"},
        "action_type": {"constant": "play"},
    },
    "documents": {
        "path": "stream.jsonl",
        "user_id": {"column": "actor.userId", "type": "string"},
        "pin_id": "object.article.id",
        "ts": {"column": "context.timestamp", "unit": "ms"},
        "action_type": "type",
        "surface": "context.page",
    },
    "movielens": {
        "path": "ratings.csv",
        "user_id": "userId",
        "pin_id": "movieId",
        "ts": {"column": "timestamp", "unit": "s"},
        "action_type": {"constant": "rating"},
    },
    "advertising": {
        "path": "impressions.tsv",
        "user_id": {"column": "user_id", "type": "string"},
        "pin_id": {"column": "product_id", "type": "string"},
        "ts": {"column": "click_timestamp", "unit": "s"},
        "action_type": {
            "rules": [{"is": "Sale", "when": {"Sale": 1}}, {"is": "click", "when": {"click": 1}}, {"skip": True}]
        },
        "surface": "device_type",
    },
}
POSITIVE = {
    "shop": ["purchase"],
    "events": ["view", "add_to_cart", "purchase"],
    "ratings": ["rating"],
    "plays": ["play"],
    "documents": ["article_read", "article_shared"],
    "movielens": ["rating"],
    "advertising": ["Sale", "click"],
}
PINS = {
    "ratings": {
        "catalogue": {
            "path": "movies.dat",
            "format": "csv",
            "delimiter": "::",
            "columns": ["pin", "column_2", "column_3"],
        },
        "pin_id": {"column": "pin", "type": "string"},
    },
    "movielens": {"catalogue": {"path": "movies.csv"}, "pin_id": "movieId", "interest": "genres"},
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_described_and_checked(tmp_path: Path, name: str) -> None:
    source, output = written(LOGS[name](tmp_path / "logs"), tmp_path)
    assert source == {
        "root": "logs",
        "actions": EXPECTED[name],
        **({"pins": PINS[name]} if name in PINS else {}),
        "positive": {"action_types": POSITIVE[name], **ANY},
    }
    assert "read all rows of " in output
    site = load_site(tmp_path / "site.yaml", environment={})
    assert (site.start_ds, site.end_ds) == ("2024-03-01", "2024-03-30")
    assert (tmp_path / "dagster.yaml").read_text() == INSTANCE_TEXT.read_text()
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "site.yaml")])
    assert checked.exit_code == 0, f"{checked.output}\n{checked.exception}"
    assert "warning" not in checked.output
    assert "30 with rows from 2024-03-01 to 2024-03-30" in checked.output


@pytest.mark.parametrize("name", ["shop", "events", "advertising"])
def test_a_run_accepts_every_day(tmp_path: Path, name: str) -> None:
    LOGS[name](tmp_path / "logs")
    written(tmp_path / "logs", tmp_path)
    site = load_site(tmp_path / "site.yaml", environment={})
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=tmp_path / "tmp") as engine:
        days = ds_range(site.start_ds, str(site.end_ds))
        forgotten = pa.array([], pa.int64() if site.source.actions.user_id.type == "int" else pa.string())
        made = list(ingest_days(site, days, engine=engine, forgotten=forgotten, progress=lambda _: None))
    assert [manifest["ds"] for manifest in made] == days
    assert sum(manifest["counts"]["kept"] for manifest in made) > 1500
    for place, manifest in enumerate(made):
        assert judge_quarantine(manifest, site.quality).passed
        assert judge_volume(manifest, made[:place][::-1], site.quality).passed


def test_what_is_guessed_is_marked_with_evidence(tmp_path: Path) -> None:
    written(shop(tmp_path / "logs"), tmp_path)
    text = (tmp_path / "site.yaml").read_text()
    for line in (
        "# Made by `pf init` from all rows of 30 files",
        "# Note: 25 % of the rows have no user (column CustomerID): left out.",
        "# guessed: 40 integers in 1,800 rows, such as 12346, 12347, 12348\n    user_id: CustomerID\n",
        "# guessed: text in the format %m/%d/%Y %H:%M, 100 % can be read",
        "# guessed: the last day of the log; delete the line once new days arrive\nend_ds: '2024-03-30'\n",
    ):
        assert line in text, text
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_written_is_private_because_it_quotes_the_log(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        written(shop(tmp_path / "logs"), tmp_path)
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("site.yaml", "dagster.yaml")} == {0o600}


def test_the_demo_has_the_same_dagster_home() -> None:
    assert INSTANCE_TEXT.read_text() == (REPOSITORY / "dagster_home" / "dagster.yaml").read_text()


# Files


def test_a_catalogue_can_be_named(tmp_path: Path) -> None:
    movielens(tmp_path / "all")
    lonely = tmp_path / "log"
    lonely.mkdir()
    (tmp_path / "all" / "ratings.csv").rename(lonely / "ratings.csv")
    source, output = written(lonely, tmp_path, "--catalogue", str(tmp_path / "all" / "movies.csv"))
    assert source["root"] == "."
    assert source["actions"]["path"] == "log/ratings.csv"
    assert source["pins"] == {"catalogue": {"path": "all/movies.csv"}, "pin_id": "movieId", "interest": "genres"}
    assert "Use movies.csv" not in output


def test_a_catalogue_that_is_none_is_refused(tmp_path: Path) -> None:
    movielens(tmp_path)
    write_lines(tmp_path / "other.csv", ["id,name", *(f"{number},thing" for number in range(1000, 1100))])
    result = init(tmp_path / "ratings.csv", tmp_path / "out", "--yes", "--catalogue", str(tmp_path / "other.csv"))
    assert result.exit_code == 1
    assert "is no catalogue of the log: no column has each value once, and ids of the log's column 'movieId'" in str(
        result.exception
    )
    assert not (tmp_path / "out").exists()


def test_a_catalogue_in_parquet_has_vectors_interests_and_candidates(tmp_path: Path) -> None:
    rows = actions()
    write_lines(
        tmp_path / "logs" / "a.csv",
        ["user_id,item_id,ts", *(f"{row.user},{row.pin},{int(row.at.timestamp())}" for row in rows)],
    )
    pins = range(70)
    table = pa.table(
        {
            "item_id": pa.array(pins),
            "topic": [f"t{pin % 5}" for pin in pins],
            "is_available": [pin % 10 != 0 for pin in pins],
            "embedding": pa.array([[float(pin), 1.0] for pin in pins], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "logs" / "items.parquet")
    source, _ = written(tmp_path / "logs", tmp_path)
    assert source["pins"] == {
        "catalogue": {"path": "items.parquet"},
        "pin_id": "item_id",
        "interest": "topic",
        "is_candidate": "is_available",
        "vectors": "embedding",
    }
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "site.yaml")])
    assert checked.exit_code == 0, checked.output
    assert "7 are none: `is_available` does not say that they may be recommended" in checked.output
    assert "content on: the pins have content vectors of 2 numbers" in checked.output


def test_several_files_can_be_named(tmp_path: Path) -> None:
    shop(tmp_path / "logs")
    (tmp_path / "logs" / "notes.txt").write_text("These are\nnotes. Nothing, really,\nis a table here.\n")
    files = [str(file) for file in sorted((tmp_path / "logs").glob("*.csv"))]
    result = CliRunner().invoke(app, ["init", *files, "--yes", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load((tmp_path / "site.yaml").read_text())["source"]["actions"]["path"] == "sales_{ds}.csv"


def test_days_without_a_file_are_allowed_where_the_log_has_some(tmp_path: Path) -> None:
    shop(tmp_path / "logs")
    (tmp_path / "logs" / "sales_2024-03-10.csv").unlink()
    source, _ = written(tmp_path / "logs", tmp_path)
    assert source["actions"]["missing_days"] == "allow"
    assert "# guessed: 1 of 30 days have no file, such as 2024-03-10" in (tmp_path / "site.yaml").read_text()


def test_names_with_other_days_than_the_rows_make_no_dated_log(tmp_path: Path) -> None:
    shop(tmp_path / "logs")
    for file in sorted((tmp_path / "logs").iterdir()):
        file.rename(file.with_name(file.name.replace("2024", "2023")))
    source, _ = written(tmp_path / "logs", tmp_path)
    assert source["actions"]["path"] == "sales_*.csv"
    assert "The names of the files have days, but not those of their rows" in (tmp_path / "site.yaml").read_text()


# Deciding, asking, writing


def test_an_unsure_log_needs_a_decision(tmp_path: Path) -> None:
    ratings(tmp_path / "logs")
    result = init(tmp_path / "logs", tmp_path / "out")
    assert result.exit_code == 1
    assert "  unsure     Which column is the user? column_1: 40 integers" in result.output
    assert "run it again with --yes to take the guesses, or on a terminal to be asked" in result.output
    assert not (tmp_path / "out").exists()


def test_a_clear_log_needs_none(tmp_path: Path) -> None:
    lines = [f"{row.user},{row.pin},{int(row.at.timestamp())}" for row in actions()]
    write_lines(tmp_path / "logs" / "a.csv", ["user_id,item_id,ts", *lines])
    result = init(tmp_path / "logs", tmp_path)
    assert result.exit_code == 0, result.output
    assert "unsure" not in result.output


@pytest.mark.parametrize("name", ["site.yaml", "dagster.yaml"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    advertising(tmp_path / "logs")
    (tmp_path / name).write_text("mine")
    result = init(tmp_path / "logs", tmp_path, "--yes")
    assert (tmp_path / name).read_text() == "mine"
    if name == "site.yaml":
        assert result.exit_code == 1
        assert "site.yaml exists, and pf init overwrites nothing" in result.output
        assert not (tmp_path / "dagster.yaml").exists()
    else:  # a Dagster home that is there is the site's
        assert result.exit_code == 0
        assert (tmp_path / "site.yaml").exists()


def test_an_interrupted_write_leaves_no_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advertising(tmp_path / "logs")
    link = os.link

    def interrupted(source: Path, target: Path) -> None:
        if target.name == "site.yaml":
            raise KeyboardInterrupt
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", interrupted)
        init(tmp_path / "logs", tmp_path / "out", "--yes")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["dagster.yaml"]
    assert init(tmp_path / "logs", tmp_path / "out", "--yes").exit_code == 0


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    advertising(tmp_path / "logs")
    (tmp_path / "file").write_text("x")
    result = init(tmp_path / "logs", tmp_path / "file" / "out", "--yes")
    assert result.exit_code == 1
    assert (
        "cannot be written to: Not a directory; name another folder with --out" in f"{result.exception}{result.output}"
    )


def test_check_reads_the_site_file_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PF_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 1
    assert "no site file at site.yaml; make one from your logs with `pf init LOGS`" in str(result.exception)
    written(advertising(tmp_path / "logs"), tmp_path)
    assert CliRunner().invoke(app, ["check"]).exit_code == 0


def in_terminal(arguments: list[str], answers: list[tuple[str, str]]) -> tuple[int, str]:
    """Run `pf` on a pseudo-terminal; give each answer when its question appears."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "pf_assets.cli.main", *arguments]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen, waiting = "", list(answers)
    while process.poll() is None or select.select([leader], [], [], 0)[0]:
        if not select.select([leader], [], [], 1)[0]:
            continue
        try:
            seen += os.read(leader, 65_536).decode()
        except OSError:  # the other end is closed
            break
        if waiting and waiting[0][0] in seen.replace("\r\n", ""):
            os.write(leader, f"{waiting.pop(0)[1]}\n".encode())
    os.close(leader)
    assert not waiting, seen
    return process.wait(), seen


def test_on_a_terminal_it_asks_what_it_does_not_know(tmp_path: Path) -> None:
    ratings(tmp_path / "logs")
    code, seen = in_terminal(
        ["init", str(tmp_path / "logs"), "--out", str(tmp_path)],
        [
            ("Which column is the user?", "column_7"),  # there is none: it asks again
            ("no possible answer", "column_2"),
            ("Which column is the pin?", "column_1"),
            ("Which ratings are positive", "6"),
        ],
    )
    assert code == 0, seen
    site: Site = load_site(tmp_path / "site.yaml", environment={})
    assert site.source.actions.columns == ("pin", "user", "rating", "time")
    assert site.source.positive.action_types == ("high_rating",)
    assert site.source.pins.catalogue is None  # films have other ids than users
    assert "(your answer)" in seen
