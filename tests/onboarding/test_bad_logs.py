"""What is no log, or too little of one: `pf init` and `pf check` say what it is and what to do, and write nothing."""

import gzip
import io
import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_core.config.site import load_site
from pf_core.onboarding import folders
from pf_core.onboarding.layout import Layout, layout_of
from tests.support.foreign_logs import Row, actions, write_lines

HEADER = "user_id,item_id,ts"
ROWS = actions()


def line(row: Row) -> str:
    return f"{row.user},{row.pin},{int(row.at.timestamp())}"


GOOD = "\n".join([HEADER, *map(line, ROWS)]).encode()


def output_of(*arguments: str) -> tuple[int, str]:
    """Exit code, and what is printed; an error that is no sentence fails the test."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or type(result.exception).__name__ in ("SystemExit", "PipelineError"), result
    return result.exit_code, f"{result.output}{result.exception or ''}"


def refused_by_init(logs: Path, out: Path) -> str:
    code, output = output_of("init", str(logs), "--yes", "--out", str(out))
    assert code == 1, output
    assert not out.exists()
    return output


BYTES = {
    "empty": ("log.csv", b"", "log.csv is empty; restore it, or leave it out"),
    "binary": ("log.csv", random.Random(0).randbytes(5000), "holds binary data, not a log; name files of CSV"),
    "a PDF": ("log.csv", b"%PDF-1.7\n1 0 obj\n", "is a PDF document, not a log; export the table as CSV"),
    "a header": ("log.csv", f"{HEADER}\n".encode(), "has a header and no rows; restore it, or leave it out"),
    "no gzip": ("log.csv.gz", GOOD, "or rename it without .gz if it is not compressed with gzip"),
    "cut gzip": ("log.csv.gz", gzip.compress(GOOD)[:3000], "the file was cut off: restore it"),
    "empty gzip": ("log.csv.gz", gzip.compress(b""), "log.csv.gz has no line"),
    "gzip": ("log.csv", gzip.compress(GOOD), "is compressed, and its name does not say so; let its name end with .gz"),
    "a page": ("log.csv", b"<!DOCTYPE html>\n<html><body>\nNot found\n</body></html>\n", "is no table: no separator"),
    "an array": (
        "log.json",
        b'[{"user": 1, "item": 2}, {"user": 1, "item": 3}]',
        "is one JSON array; write one object",
    ),
    "no Parquet": ("log.parquet", b"PAR1 and no more PAR1", "cannot be read: Parquet"),
    "UTF-16": ("log.csv", GOOD.decode().encode("utf-16"), "convert it to UTF-8, for example with: iconv -f UTF-16"),
}


@pytest.mark.parametrize("what", BYTES)
def test_a_file_that_is_no_log(tmp_path: Path, what: str) -> None:
    name, content, sentence = BYTES[what]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).write_bytes(content)
    assert sentence in refused_by_init(tmp_path / "logs", tmp_path / "out")


LINES: dict[str, tuple[str, Callable[[Row], str], str]] = {
    "one user": (HEADER, lambda r: f"7,{r.pin},{int(r.at.timestamp())}", "the log has a single user: column 'user_id'"),
    "one pin": (HEADER, lambda r: f"{r.user},9,{int(r.at.timestamp())}", "the log has a single pin: column 'item_id'"),
    "one day": (
        HEADER,
        lambda r: f"{r.user},{r.pin},{1_709_251_200 + r.number}",
        "all rows are of one day, 2024-03-01; name a log of more days",
    ),
    "two days": (
        HEADER,
        lambda r: f"{r.user},{r.pin},{1_709_251_200 + 70 * r.number}",
        "the log is too small to train on: 40 users and 2,400 actions on 2 days",
    ),
    "no time": (
        "user_id,item_id,price",
        lambda r: f"{r.user},{r.pin},{r.number % 7}.5",
        "no column is a time: in none can 90 % of the values be read",
    ),
    "the future": (
        HEADER,
        lambda r: f"{r.user},{r.pin},{int(r.at.timestamp()) + 10**9}",
        "100 % of the times in column 'ts' (seconds since 1970) are in the future, up to 2055-12-08; mend the clock",
    ),
    "nanoseconds": (
        HEADER,
        lambda r: f"{r.user},{r.pin},{int(r.at.timestamp()) * 10**9}",
        "looks like nanoseconds since 1970",
    ),
}


@pytest.mark.parametrize("what", LINES)
def test_a_log_that_lacks_something(tmp_path: Path, what: str) -> None:
    header, text, sentence = LINES[what]
    write_lines(tmp_path / "logs" / "log.csv", [header, *map(text, ROWS)])
    assert sentence in refused_by_init(tmp_path / "logs", tmp_path / "out")


def test_few_rows_of_the_future_are_left_out(tmp_path: Path) -> None:
    late = [f"{row.user},{row.pin},{int((row.at + timedelta(days=20_000)).timestamp())}" for row in ROWS[::20]]
    write_lines(tmp_path / "logs" / "log.csv", [HEADER, *map(line, ROWS), *late])
    code, output = output_of("init", str(tmp_path / "logs"), "--yes", "--out", str(tmp_path))
    assert code == 0, output
    assert "120 rows beyond it, until" in output
    assert load_site(tmp_path / "site.yaml", environment={}).end_ds == "2024-03-30"
    code, output = output_of("check", str(tmp_path / "site.yaml"))
    assert code == 0
    assert "120 outside the site's days" in output


# What is in the log's place when a run comes: the site file is there, and the log is another one


@pytest.mark.parametrize(
    "what", ["empty", "binary", "a PDF", "a header", "no gzip", "cut gzip", "empty gzip", "no Parquet", "UTF-16"]
)
def test_a_log_that_became_none(tmp_path: Path, what: str) -> None:
    name, content, _ = BYTES[what]
    logs = tmp_path / "logs"
    logs.mkdir()
    suffix = name.removeprefix("log")
    good = gzip.compress(GOOD) if suffix == ".csv.gz" else GOOD
    if suffix == ".parquet":
        pq.write_table(pa_csv.read_csv(io.BytesIO(GOOD)), logs / name)
    else:
        (logs / name).write_bytes(good)
    assert output_of("init", str(logs), "--yes", "--out", str(tmp_path))[0] == 0
    before = sorted(tmp_path.iterdir())
    (logs / name).write_bytes(content)
    code, output = output_of("check", str(tmp_path / "site.yaml"))
    assert code == 1, output
    assert name in output or "the log has no rows: all rows of 1 file" in output
    assert "; " in output.removesuffix("\n1").splitlines()[-1], "a remedy follows"
    assert sorted(tmp_path.iterdir()) == before


# Files and folders


def test_a_folder_without_files(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert "logs: no file there; name the log files" in refused_by_init(tmp_path / "logs", tmp_path / "out")
    assert "there is no " in refused_by_init(tmp_path / "nothing", tmp_path / "out")


def test_a_folder_of_other_tables(tmp_path: Path) -> None:
    write_lines(tmp_path / "logs" / "a.csv", ["name,city", "bob,Paris", "eve,Rome"])
    write_lines(tmp_path / "logs" / "b.csv", ["x;y;z", "1;2;3", "4;5;6"])
    (tmp_path / "logs" / "notes.txt").write_text("Hello there.\nThis is text")
    output = refused_by_init(tmp_path / "logs", tmp_path / "out")
    assert "none of 2 groups of files is a log, with a user, a pin and a time" in output
    assert "a.csv (0.029 kB): no column of times" in output


def test_the_log_among_other_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "logs" / "a.csv", ["name,city", "bob,Paris", "eve,Rome"])
    (tmp_path / "logs" / "events.csv").write_bytes(GOOD)
    (tmp_path / "logs" / "broken.parquet").write_bytes(BYTES["no Parquet"][1])
    code, output = output_of("init", str(tmp_path / "logs"), "--yes", "--out", str(tmp_path))
    assert code == 0, output
    assert f"log        {tmp_path}/logs/events.csv" in output
    assert "left out   " in output
    assert "broken.parquet cannot be read" in output


def test_ten_thousand_files_are_not_all_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = actions(per_day=340)[:10_000]
    for place, row in enumerate(rows):
        folder = tmp_path / "logs" / f"{place // 500:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"part-{random.Random(place).getrandbits(64):016x}.csv"
        (folder / name).write_text(f"{HEADER}\n{line(row)}\n")
    opened: list[Path] = []

    def counted(path: Path) -> Layout:
        opened.append(path)
        return layout_of(path)

    monkeypatch.setattr(folders, "layout_of", counted)
    code, output = output_of("init", str(tmp_path / "logs"), "--yes", "--out", str(tmp_path))
    assert code == 0, output
    assert "spread over 10,000 files" in output
    assert f"log        {tmp_path}/logs/*/part-*.csv" in output
    assert len(opened) < 100
    assert output_of("check", str(tmp_path / "site.yaml"))[0] == 0


@pytest.fixture
def without_rights(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Takes the right to read a file or folder away, also from root, whom the system lets read everything."""

    def take_away(path: Path) -> None:
        path.chmod(0)
        if os.geteuid() == 0:
            for owner, name in ((Path, "open"), (os, "scandir")):
                monkeypatch.setattr(owner, name, refusing(getattr(owner, name), path))

    return take_away


def refusing(function: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """The function, which raises what the system raises for anybody but root if its first argument is this path."""

    def called(own: Any, *arguments: Any, **options: Any) -> Any:
        if Path(own) == path:
            raise PermissionError(13, "Permission denied", str(own))
        return function(own, *arguments, **options)

    return called


@pytest.mark.parametrize("name", ["log.csv", "."])
def test_a_path_without_permission(tmp_path: Path, name: str, without_rights: Callable[[Path], None]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.csv").write_bytes(GOOD)
    path = (tmp_path / "logs" / name).resolve()
    without_rights(path)
    output = refused_by_init(tmp_path / "logs", tmp_path / "out")
    assert f"{path} cannot be read: Permission denied; let the user who runs pf read it" in output
    path.chmod(0o700)
