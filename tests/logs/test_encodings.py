"""Text logs in Latin-1 and cp1252: the same rows, values and numbers as from the same text in UTF-8."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pf_core.config.files import Files
from pf_core.config.source import PinsSource
from pf_core.days import ds_start_us
from pf_core.errors import PipelineError
from pf_core.logs import lines as lines_module
from pf_core.logs.partition import read_quarantine
from pf_core.logs.readers import read_file
from pf_core.logs.sample import plan_sample, read_piece
from pf_core.pins.catalogue import read_catalogue
from tests.support.scattered import ScatteredEngine
from tests.support.sites import START, SmallSite

LETTERS = {
    "utf-8": 'aZ09;|"£àéüß€’Ÿ\u2028中\x85',
    "latin-1": 'aZ09;|"£àéüß\xa0\x85\x9f',
    "cp1252": 'aZ09;|"£àéüß€’Ÿ',
}
"""Characters of values, by encoding."""


def write(path: Path, text: str, encoding: str) -> Path:
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path: Path, encoding: str, columns: tuple[str, ...] = ("né", "b"), **options: Any) -> dict[int, Any]:
    """Values of each row, or the reason and the text of a line that is no row, by row number."""
    found: dict[int, Any] = {}
    for batch in read_file(path, Files(path=path.name, encoding=encoding, **options), columns):
        rows = [tuple(row.values()) for row in batch.rows.to_pylist()]
        found |= dict(zip(batch.row_number.tolist(), rows, strict=True))
        found |= {number: (reason, text) for number, reason, text in batch.malformed}
    return found


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
def test_csv(tmp_path: Path, name: str, encoding: str) -> None:
    path = write(tmp_path / name, 'né,b\n1,"café, £5"\n\nfew é\n2,ß\n', encoding)
    assert read(path, encoding) == {
        2: ("1", "café, £5"),
        4: ("malformed: 1 fields instead of 2", "few é"),
        5: ("2", "ß"),
    }


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
def test_json_lines(tmp_path: Path, name: str, encoding: str) -> None:
    path = write(tmp_path / name, '{"né": "café", "b": "£"}\nnaïve\n{"né": 2, "b": "\\u20ac"}\n', encoding)
    assert read(path, encoding) == {
        1: ("café", "£"),
        2: ("malformed: not a JSON object", "naïve"),
        3: ("2", "€"),
    }


def test_cp1252_has_characters_where_latin_1_has_control_codes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"n\xe9,b\n1,5 \x80\n")
    assert read(path, "cp1252") == {2: ("1", "5 €")}
    assert read(path, "latin-1") == {2: ("1", "5 \x80")}


def test_a_byte_that_cp1252_does_not_define_costs_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"n\xe9,b\n1,\xe9\n2,caf\xe9 \x81\n3,\x9d\xc3\n4,\xc3\xa9\n")
    assert read(path, "cp1252") == {
        2: ("1", "é"),
        3: ("malformed: not valid cp1252", "2,café \\x81"),
        4: ("malformed: not valid cp1252", "3,\\x9dÃ"),
        5: ("4", "Ã©"),
    }


@pytest.mark.parametrize("delimiter", ["§", " £ "])
def test_a_delimiter_that_is_not_ascii(tmp_path: Path, delimiter: str) -> None:
    path = write(tmp_path / "x.csv", f"né{delimiter}b\n1{delimiter}é\n", "latin-1")
    assert read(path, "latin-1", delimiter=delimiter) == {2: ("1", "é")}


@settings(max_examples=60, deadline=None, database=None)
@given(
    seed=st.integers(0, 10**6),
    encoding=st.sampled_from(["latin-1", "cp1252"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    block=st.integers(16, 90),
)
def test_blocks_of_any_size_give_the_rows_of_the_same_text_in_utf_8(
    tmp_path_factory: pytest.TempPathFactory, seed: int, encoding: str, end: str, block: int
) -> None:
    rng = random.Random(seed)
    values = ["".join(rng.choices(LETTERS[encoding], k=rng.randrange(12))) for _ in range(40)]
    folder = tmp_path_factory.mktemp("blocks")
    text = end.join(["né,b", *(f"{number},{value}" for number, value in enumerate(values)), ""])
    own, other = write(folder / "own.csv", text, encoding), write(folder / "utf8.csv", text, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", block)
        found = read(own, encoding)
        assert found == read(other, "utf-8")
    assert sorted(found) == list(range(2, 42))


def test_a_file_larger_than_a_block(tmp_path: Path) -> None:
    """Each line has its number; 9 MB are two blocks, and 12 MB once they are UTF-8."""
    num_rows = (9 << 20) // len("1000000,éééééé\n")
    lines = [f"{1_000_000 + number},éééééé" for number in range(num_rows)]
    path = write(tmp_path / "x.csv", "\n".join(["né,b", *lines, ""]), "latin-1")
    assert path.stat().st_size > lines_module.BLOCK_BYTES
    assert read(path, "latin-1") == {2 + number: (str(1_000_000 + number), "éééééé") for number in range(num_rows)}


def test_a_line_that_is_too_long_keeps_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.csv", f"né,b\n1,{'é' * 500}\n2,é\n", "cp1252")
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 64)
    found = read(path, "cp1252")
    assert found[2][0] == "malformed: longer than 200 bytes"
    assert found[3] == ("2", "é")


def test_a_sample_has_the_same_rows(tmp_path: Path) -> None:
    lines = [f"{number},{'é' * (number % 30)}£" for number in range(20_000)]
    path = write(tmp_path / "x.csv", "\n".join(["né,b", *lines, ""]), "latin-1")
    source = Files(path="x.csv", encoding="latin-1")
    plan = plan_sample([path], source, max_bytes=50_000)
    assert not plan.is_whole
    batches = [batch for piece in plan.pieces for batch in read_piece(piece, source, ["né", "b"])]
    found = [f"{row['né']},{row['b']}" for batch in batches for row in batch.rows.to_pylist()]
    assert len(found) > 1000
    assert set(found) <= set(lines)
    assert not any(batch.malformed for batch in batches)


# A file that says otherwise


def test_utf_8_with_a_mark_is_refused_where_the_site_says_another_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "né,b\n1,é\n", "utf-8-sig")
    with pytest.raises(PipelineError, match=r"x\.csv is UTF-8 text with a mark of byte order.*says cp1252; delete `en"):
        read(path, "cp1252")
    assert read(path, "utf-8") == {2: ("1", "é")}


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_utf_16_is_refused_with_the_command_that_converts_it(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "x.csv", "né,b\n1,é\n", "utf-16")
    with pytest.raises(PipelineError, match=r"is UTF-16 or UTF-32 text; convert it .* iconv -f UTF-16 -t UTF-8"):
        read(path, encoding)


# The key


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("utf-8", "utf-8"),
        ("UTF8", "utf-8"),
        ("utf-8-sig", "utf-8"),
        ("us-ascii", "utf-8"),
        ("iso-8859-1", "latin-1"),
        ("ISO-8859-1", "latin-1"),
        ("Latin1", "latin-1"),
        ("windows-1252", "cp1252"),
        ("CP1252", "cp1252"),
    ],
)
def test_names_of_encodings(name: str, encoding: str) -> None:
    assert Files(path="x.csv", encoding=name).encoding == encoding  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["utf-16", "cp1250", "shift_jis", "no such", 1252, None])
def test_other_encodings_are_refused_with_what_to_do(name: Any) -> None:
    with pytest.raises(ValidationError, match=r"is not read, only utf-8, latin-1 \(ISO-8859-1\) and cp1252 .*iconv -f"):
        Files(path="x.csv", encoding=name)


def test_parquet_has_no_encoding() -> None:
    with pytest.raises(ValidationError, match=r"`encoding` is for CSV and JSON lines"):
        Files(path="x.parquet", encoding="cp1252")
    assert Files(path="x.parquet", encoding="utf-8").encoding == "utf-8"


# Through ingestion


@pytest.mark.parametrize("engine", ["local", "shared"])
@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/{ds}.csv.gz", "logs/{ds}.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252"])
def test_the_actions_of_a_day(tmp_path: Path, encoding: str, path: str, engine: str) -> None:
    names = {"column": "event", "values": {"gemerkt": "repin", "über": "closeup"}}
    site = SmallSite(
        tmp_path,
        {
            "path": path,
            "id_type": "string",
            "actions": {"encoding": encoding, "action_type": names},
            "quality": {"max_quarantined_share": 0.5},
        },
    )
    if engine == "shared":
        site.engine = ScatteredEngine()
    us = ds_start_us(START)
    header = ["user", "pin", "time_us", "event", "place", "dwell_s"]
    rows: list[list[Any]] = [
        ["Zoë", "Größe 1, süß", us + 1, "über", "home", 20],
        ["Zoë", "5 £", us + 2, "gemerkt", "home", 20],
        ["Óscar", "café", "später", "über", "home", 20],
        ["Óscar", "café", us + 4, "über", "find", 20],
    ]
    if ".csv" in path:
        lines = [",".join(f'"{value}"' for value in row) for row in [header, *rows]]
        bad_row = 4
    else:
        pairs = [zip(header, row, strict=True) for row in rows]
        lines = ["{" + ", ".join(f'"{key}": "{value}"' for key, value in each) + "}" for each in pairs]
        bad_row = 3
    (tmp_path / "logs").mkdir()
    write(tmp_path / path.replace("{ds}", START), "\n".join(lines), encoding)
    site.ingest([START])
    found = {(user, pin, kind, surface) for user, _, pin, kind, surface, _ in site.actions(START)}
    assert found == {
        ("Zoë", "Größe 1, süß", "closeup", "homefeed"),
        ("Zoë", "5 £", "repin", "homefeed"),
        ("Óscar", "café", "closeup", "search"),
    }
    (reject,) = read_quarantine(site.site, START).to_pylist()
    assert reject["row_number"] == bad_row
    assert reject["reason"] == "ts: not a time in unit us (column time_us)"
    assert json.loads(reject["raw"])["time_us"] == "später"


def test_a_day_in_another_encoding_than_the_site_says_names_the_key(tmp_path: Path) -> None:
    site = SmallSite(tmp_path, {"path": "{ds}.csv", "actions": {"encoding": "cp1252"}})
    line = b"1,p,1,look \x81,home,1\n"
    (tmp_path / f"{START}.csv").write_bytes(b"user,pin,time_us,event,place,dwell_s\n" + line)
    with pytest.raises(PipelineError, match=r"row 2: malformed: not valid cp1252; fix `encoding` in the site file, or"):
        site.ingest([START])


def test_a_catalogue(tmp_path: Path) -> None:
    path = write(tmp_path / "pins.csv", "pin;topic\nA;Möbel\nB;Café\n", "cp1252")
    catalogue = {"path": "pins.csv", "delimiter": ";", "encoding": "windows-1252"}
    pins = {"catalogue": catalogue, "pin_id": {"column": "pin", "type": "string"}, "interest": "topic"}
    rows = read_catalogue(PinsSource.model_validate(pins), [path], dim=None).rows
    assert rows.select(["pin_id", "interest"]).to_pylist() == [
        {"pin_id": "A", "interest": "Möbel"},
        {"pin_id": "B", "interest": "Café"},
    ]
