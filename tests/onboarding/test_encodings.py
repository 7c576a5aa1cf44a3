"""`pf init` on text that is not UTF-8: cp1252 and Latin-1 are recognised, also where they come late."""

import codecs
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pf_assets.cli.main import app
from pf_core.config.site import load_site
from pf_core.onboarding.encodings import cp1252_evidence
from tests.support.foreign_logs import Row, actions, write_lines

ROWS = actions()
HEADER = "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"
COUNTRIES = ["United Kingdom", "France", "EIRE", "Germany"]


def order(
    row: Row, *, names: Sequence[str] = ("CAFÉ AU LAIT BOWL", '"MUG, £5 GIFT"', "CHÂTEAU CANDLE", "HEART")
) -> str:
    """A line as in Online Retail; every fourth row has no customer."""
    at = f"{row.at.month}/{row.at.day}/{row.at.year} {row.at.hour}:{row.at:%M}"
    customer = "" if row.number % 4 == 1 else f"{12346 + row.user}"
    return (
        f"{536365 + row.number // 3},{21000 + row.pin}{'A' if row.pin % 7 == 0 else ''},{names[row.pin % len(names)]},"
        f"{1 + row.number % 12},{at},{1 + row.pin % 9}.{row.pin % 10}5,{customer},{COUNTRIES[row.user % 4]}"
    )


ASCII = {"names": ["CAFE AU LAIT BOWL"]}


def init(logs: Path, out: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", str(logs), "--out", str(out), "--yes"])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def accepted(logs: Path, out: Path) -> tuple[dict[str, Any], str, str]:
    """`source` of the site file, its text, and what `pf check` prints."""
    code, output = init(logs, out)
    assert code == 0, output
    checked = CliRunner().invoke(app, ["check", str(out / "site.yaml")])
    assert checked.exit_code == 0, f"{checked.output}{checked.exception}"
    text = (out / "site.yaml").read_text()
    return yaml.safe_load(text)["source"], " ".join(text.replace("#", " ").split()), checked.output


@pytest.mark.parametrize("name", ["OnlineRetail.csv", "OnlineRetail.csv.gz"])
def test_online_retail(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / "logs" / name, [HEADER, *map(order, ROWS)], encoding="iso-8859-1")
    source, text, checked = accepted(tmp_path / "logs", tmp_path)
    assert source["actions"]["encoding"] == "cp1252"
    assert source["actions"]["user_id"] == "CustomerID"
    num = sum(row.pin % 4 != 3 for row in ROWS)  # one of four names is ASCII
    assert f"guessed: {num:,} lines that were read are not UTF-8, and as cp1252 they say " in text
    assert "'CAFÉ AU LAIT BOWL'" in text
    assert "Latin-1 has the same characters here encoding: cp1252" in text
    assert "2,400 read: 1,800 kept, 1,800 of them positive, 600 skipped by a rule, 0 quarantined" in checked


def test_letters_that_come_late_in_the_file(tmp_path: Path) -> None:
    """Only the last 10 of 2,400 rows have a letter that is not ASCII: the start of the file does not show it."""
    lines = [order(row, **ASCII) for row in ROWS[:-10]] + [order(row, names=["PÂTÉ £9"]) for row in ROWS[-10:]]
    path = write_lines(tmp_path / "logs" / "log.csv", [HEADER, *lines], encoding="iso-8859-1")
    assert path.read_bytes()[: 1 << 16].isascii()
    source, text, checked = accepted(tmp_path / "logs", tmp_path)
    assert source["actions"]["encoding"] == "cp1252"
    assert "10 lines that were read are not UTF-8, and as cp1252 they say 'PÂTÉ £9'; Latin-1" in text
    assert "0 quarantined" in checked


def test_one_file_of_many(tmp_path: Path) -> None:
    for number in range(10):
        options = {"names": ["RÔTI"]} if number == 6 else ASCII
        lines = [HEADER, *(order(row, **options) for row in ROWS[240 * number : 240 * (number + 1)])]
        write_lines(tmp_path / "logs" / f"part-{number}.csv", lines, encoding="cp1252")
    source, text, checked = accepted(tmp_path / "logs", tmp_path)
    assert source["actions"]["encoding"] == "cp1252"
    assert "240 lines that were read are not UTF-8" in text
    assert "2,400 read" in checked
    assert "0 quarantined" in checked


def test_columns_whose_names_are_not_ascii(tmp_path: Path) -> None:
    lines = [f"{row.user};{row.pin};{int(row.at.timestamp())};{['Käufe', 'Ansichten'][row.number % 2]}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user_id;größe_id;ts;Aktivität", *lines], encoding="cp1252")
    source, _, checked = accepted(tmp_path / "logs", tmp_path)
    assert source["actions"]["encoding"] == "cp1252"
    assert source["actions"]["pin_id"] == "größe_id"
    assert "0 quarantined" in checked


def test_json_lines(tmp_path: Path) -> None:
    documents = [
        {"user": f"u{row.user}", "item": row.pin, "ts": int(row.at.timestamp()), "titel": "Süßes"} for row in ROWS
    ]
    lines = [json.dumps(document, ensure_ascii=False) for document in documents]
    write_lines(tmp_path / "logs" / "log.jsonl", lines, encoding="cp1252")
    source, _, checked = accepted(tmp_path / "logs", tmp_path)
    assert source["actions"]["encoding"] == "cp1252"
    assert "0 quarantined" in checked


def test_a_catalogue_beside_a_log_in_utf_8(tmp_path: Path) -> None:
    lines = [f"{row.user},{row.pin},{int(row.at.timestamp())},\N{SNOWMAN}" for row in ROWS]
    write_lines(tmp_path / "logs" / "log.csv", ["user_id,item_id,ts,note", *lines])
    films = [f"{pin},L’été {pin},{['Comédie', 'Drame'][pin % 2]}" for pin in range(60)]
    write_lines(tmp_path / "logs" / "films.csv", ["item_id,title,category", *films], encoding="cp1252")
    source, text, checked = accepted(tmp_path / "logs", tmp_path)
    assert "encoding" not in source["actions"]
    assert source["pins"]["catalogue"]["encoding"] == "cp1252"
    assert source["pins"]["interest"] == "category"
    assert "60 lines that were read are not UTF-8, and as cp1252 they say 'L’été 0', 'Comédie'" in text
    assert "Latin-1" not in text  # it has no ’
    assert "catalogue  60 pins" in checked


def test_utf_8_needs_no_key(tmp_path: Path) -> None:
    write_lines(tmp_path / "logs" / "log.csv", [HEADER, *map(order, ROWS)])
    source, _, _ = accepted(tmp_path / "logs", tmp_path)
    assert "encoding" not in source["actions"]
    assert load_site(tmp_path / "site.yaml", environment={}).source.actions.encoding == "utf-8"


def test_a_broken_line_of_utf_8_is_no_other_encoding(tmp_path: Path) -> None:
    lines = [order(row).encode() for row in ROWS]
    lines[7] = lines[7].replace(lines[7].split(b",")[2], b"CAF\xc3")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.csv").write_bytes(b"\n".join([HEADER.encode(), *lines]))
    source, _, checked = accepted(tmp_path / "logs", tmp_path)
    assert "encoding" not in source["actions"]
    assert "1 quarantined" in checked
    assert "malformed: not valid UTF-8" in checked


def test_files_of_two_encodings_are_refused(tmp_path: Path) -> None:
    """A key for all files cannot describe them."""
    for number, encoding in enumerate(["utf-8", "cp1252"]):
        lines = [HEADER, *map(order, ROWS[number::2])]
        write_lines(tmp_path / "logs" / f"part-{number}.csv", lines, encoding=encoding)
    code, output = init(tmp_path / "logs", tmp_path)
    assert code == 1
    assert "not valid UTF-8" in output
    assert "set `encoding: cp1252` in the site file if that is how CSV or JSON lines are written, or convert" in output


@pytest.mark.parametrize(("num_in_utf8", "is_told"), [(0, False), (120, False), (1200, True), (2400, True)])
def test_check_tells_lines_that_the_encoding_of_the_site_file_misreads(
    tmp_path: Path, num_in_utf8: int, is_told: bool
) -> None:
    """5 % of the rows may be valid UTF-8 by chance; half of them are not."""
    log = write_lines(
        tmp_path / "logs" / "log.csv", [HEADER, *(order(r, names=["CAFÉ"]) for r in ROWS)], encoding="cp1252"
    )
    accepted(tmp_path / "logs", tmp_path)
    head, *lines = log.read_bytes().splitlines()
    lines[:num_in_utf8] = [line.decode("cp1252").encode() for line in lines[:num_in_utf8]]
    log.write_bytes(b"\n".join([head, *lines]))
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "site.yaml")]).output
    assert "2,400 read: 1,800 kept" in checked
    warning = (
        f"warning    {num_in_utf8:,} of 2,400 lines with characters beyond ASCII are UTF-8, and are misread as cp1252"
    )
    assert (warning in checked) == is_told


@pytest.mark.parametrize("encoding", ["cp1251", "koi8-r", "cp1253", "shift_jis", "gb18030", "mac_roman", "cp850"])
def test_other_encodings_are_refused_with_what_to_do(tmp_path: Path, encoding: str) -> None:
    names = {
        "cp1251": "Кружка большая",
        "koi8-r": "Кружка большая",
        "cp1253": "Κούπα μεγάλη",
        "shift_jis": "マグカップ おおきい",
        "gb18030": "大杯子 白色",
    }
    name = names.get(encoding, "Käse süß Größe XL café crème")
    write_lines(tmp_path / "logs" / "log.csv", [HEADER, *(order(r, names=[name]) for r in ROWS)], encoding=encoding)
    code, output = init(tmp_path / "logs", tmp_path / "out")
    assert code == 1, output
    assert not (tmp_path / "out").exists()
    assert "no line of" in output
    assert "malformed: not valid UTF-8; set `encoding: cp1252` in the site file if" in output
    assert "iconv" in output


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_utf_16_is_refused_with_the_command_that_converts_it(tmp_path: Path, encoding: str, name: str) -> None:
    write_lines(tmp_path / "logs" / name, [HEADER, *map(order, ROWS)], encoding=encoding)
    code, output = init(tmp_path / "logs", tmp_path / "out")
    assert code == 1
    assert "UTF-16 or UTF-32 text, not a log; convert it to UTF-8, for example with: iconv -f UTF-16" in output


BINARIES = {
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
    "image": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "gzip": gzip.compress(b"user,pin,ts\n1,2,3\n"),
    "control characters": bytes(range(1, 256)) * 20,
}


@pytest.mark.parametrize("what", BINARIES)
def test_a_binary_file_is_still_no_log(tmp_path: Path, what: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.csv").write_bytes(BINARIES[what])
    code, output = init(tmp_path / "logs", tmp_path / "out")
    assert code == 1
    assert "not a log" in output or "is compressed" in output


# The evidence


@pytest.mark.parametrize(
    "text",
    [
        "£",
        "5 €",
        "Søren Ærø Åse",
        "Ñandú ¿qué?",
        "ÉTÉ À LA CARTE",
        "naïve façade Œuvre",
        "it’s “so” – nice…",
        "süß 20 °C",
    ],
)
def test_western_text(text: str) -> None:
    assert cp1252_evidence([b"plain", text.encode("cp1252")]) is not None
    assert cp1252_evidence([b"plain", text.encode()]) is None


def test_what_is_no_evidence() -> None:
    assert cp1252_evidence([]) is None
    assert cp1252_evidence([b"plain"]) is None
    assert cp1252_evidence([codecs.BOM_UTF8 + b"plain"]) is None
    assert cp1252_evidence(["é".encode()] * 2 + ["é".encode("cp1252")] * 8) is None  # 80 % of the lines, not 90
    assert cp1252_evidence(["é".encode()] + ["é".encode("cp1252")] * 9) is not None
