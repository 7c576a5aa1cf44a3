"""Readers of foreign files: every row is returned once, with the line number that an editor shows."""

import bz2
import gzip
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pf_core.config.files import Files
from pf_core.errors import PipelineError
from pf_core.logs import lines as lines_module
from pf_core.logs import readers as reading
from pf_core.logs.raw_batch import RawBatch
from pf_core.logs.readers import find_files, read_file

COLUMNS = ("a", "b")


def batches(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> list[RawBatch]:
    found = list(read_file(path, Files(path=path.name, **options), columns))
    assert found
    assert all(batch.file == path for batch in found)
    assert all(len(batch.row_number) == batch.rows.num_rows for batch in found)
    return found


def rows(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> dict[int, tuple[Any, ...]]:
    """The values of each row, by row number."""
    found = {}
    for batch in batches(path, columns, **options):
        for number, row in zip(batch.row_number.tolist(), batch.rows.to_pylist(), strict=True):
            assert number not in found
            found[number] = tuple(row[column] for column in columns)
    return found


def malformed(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> dict[int, tuple[str, str]]:
    """Reason and text of each row that the format cannot take, by row number."""
    entries = [entry for batch in batches(path, columns, **options) for entry in batch.malformed]
    assert len({number for number, _, _ in entries}) == len(entries)
    return {number: (reason, text) for number, reason, text in entries}


def refusal(path: Path, columns: Sequence[str] = COLUMNS, **options: Any) -> str:
    """The message; it always names the file."""
    with pytest.raises(PipelineError) as error:
        batches(path, columns, **options)
    assert str(path) in str(error.value)
    return str(error.value)


def written(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_the_module_imports_all_that_it_uses() -> None:
    """In a new interpreter: in this one, other modules may have imported pyarrow.csv already."""
    check = "import sys, pf_core.logs.readers; assert {'pyarrow.csv', 'pyarrow.parquet'} <= sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


# CSV


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_csv_values_come_as_text(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, "a,ignored,b\n1,x,2.50\n007,y,true\n")
    assert rows(path) == {2: ("1", "2.50"), 3: ("007", "true")}
    assert malformed(path) == {}


def test_csv_empty_values_are_missing(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "x.csv", 'a,b\n1,\n,2\n"",NULL\n')) == {
        2: ("1", None),
        3: (None, "2"),
        4: (None, "NULL"),
    }


def test_csv_quotes(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", 'a,b\n"1,5","say ""hi"""\n2,plain\n')
    assert rows(path) == {2: ("1,5", 'say "hi"'), 3: ("2", "plain")}


def test_csv_without_quoting(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", 'a,b\n"1,5"\n')
    assert rows(path, quote=None) == {2: ('"1', '5"')}


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ";"), ("x.tsv", "\t"), ("x.csv", "|")])
def test_csv_delimiters(tmp_path: Path, name: str, delimiter: str) -> None:
    path = written(tmp_path / name, f"a{delimiter}b\n1,5{delimiter}2\n")
    assert rows(path, delimiter=delimiter) == {2: ("1,5", "2")}


def test_csv_of_other_systems(tmp_path: Path) -> None:
    """A byte order mark, CRLF, and no newline at the end."""
    assert rows(written(tmp_path / "x.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n3,4")) == {2: ("1", "2"), 3: ("3", "4")}


def test_csv_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n") + gzip.compress(b"3,4\n"))
    assert rows(path) == {2: ("1", "2"), 3: ("3", "4")}


def test_csv_broken_lines_keep_their_number_and_text(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b\n1,2\nfew\n3,4\ntoo,many,fields\n5,6\n")
    assert rows(path) == {2: ("1", "2"), 4: ("3", "4"), 6: ("5", "6")}
    assert malformed(path) == {
        3: ("malformed: 1 fields instead of 2", "few"),
        5: ("malformed: 3 fields instead of 2", "too,many,fields"),
    }


def test_csv_broken_lines_at_the_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b\nfirst\n1,2\nlast\n")
    assert rows(path) == {3: ("1", "2")}
    assert {number: text for number, (_, text) in malformed(path).items()} == {2: "first", 4: "last"}


def test_csv_with_broken_lines_only(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b\n1\n2\n3\n")
    assert rows(path) == {}
    assert sorted(malformed(path)) == [2, 3, 4]


@settings(max_examples=60, deadline=None, database=None)
@given(kinds=st.lists(st.sampled_from(["good", "few", "many", "blank"]), max_size=60), block=st.integers(24, 120))
def test_csv_row_numbers_hold_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], block: int
) -> None:
    """Each line contains its own number, so that the reader's numbers can be compared with the content."""
    shapes = {"good": "{0},x{0}", "few": "{0}", "many": "{0},y,z", "blank": ""}
    lines = [shapes[kind].format(number) for number, kind in enumerate(kinds, 2)]
    path = written(tmp_path_factory.mktemp("blocks") / "x.csv", "\n".join(["a,b", *lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", block)
        found, broken = rows(path), malformed(path)
    numbers = {kind: [number for number, k in enumerate(kinds, 2) if k == kind] for kind in shapes}
    assert found == {number: (str(number), f"x{number}") for number in numbers["good"]}
    assert {number: text for number, (_, text) in broken.items()} == {
        number: lines[number - 2] for number in (*numbers["few"], *numbers["many"])
    }


def test_csv_small_blocks_give_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.csv", "a,b\n" + "".join(f"{number},x\n" for number in range(2, 102)))
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 64)
    assert len(batches(path)) > 3
    assert rows(path) == {number: (str(number), "x") for number in range(2, 102)}


@pytest.mark.parametrize("content", ["", "\n", "\n\n", "a,b\n", "a,b\r\n", "a,b"])
def test_csv_without_rows(tmp_path: Path, content: str) -> None:
    path = written(tmp_path / "x.csv", content)
    (batch,) = batches(path)
    assert batch.rows.column_names == ["a", "b"]
    assert batch.rows.num_rows == 0
    assert batch.malformed == []


def test_csv_bytes_that_are_no_utf8_cost_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b"a,b\n1,caf\xe9\n2,fine\n")
    assert rows(path) == {3: ("2", "fine")}
    ((number, (reason, text)),) = malformed(path).items()
    assert (number, reason) == (2, "malformed: not valid UTF-8")
    assert "caf\\xe9" in text


def test_csv_bytes_that_are_no_utf8_in_a_broken_line_cost_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b"a,b\n1,caf\xe9,3\n2,fine\n")
    assert rows(path) == {3: ("2", "fine")}
    assert list(malformed(path)) == [2]


def test_csv_header_that_is_no_utf8_costs_only_its_column(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b"a,b,caf\xe9\n1,2,3\n")
    assert rows(path) == {2: ("1", "2")}
    assert "caf" in refusal(path, ["a", "coffee"])


def test_csv_an_open_quote_costs_its_own_line(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", 'a,b,note\n1,2,ok\n3,4,"oops\n5,6,ok\n7,8,ok\n9,10,"closed"\n')
    assert rows(path) == {2: ("1", "2"), 4: ("5", "6"), 5: ("7", "8"), 6: ("9", "10")}
    assert malformed(path) == {3: ("malformed: a quoted value does not end in its line", '3,4,"oops')}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('x"y,z', ('x"y', "z")),
        ('"a""b",c', ('a"b', "c")),
        ('"a"b,c', ("ab", "c")),
        ('"",c', (None, "c")),
        ('5" nail,"6"" nail"', ('5" nail', '6" nail')),
        ('x"y,"z', None),
        ('"a""b,c', None),
        ('"a,b', None),
        ('a,"', None),
        ('""",b', None),
    ],
)
def test_csv_a_quote_begins_a_value_or_is_a_character(
    tmp_path: Path, line: str, expected: tuple[str | None, str] | None
) -> None:
    path = written(tmp_path / "x.csv", f"a,b\n1,2\n{line}\n3,4\n")
    assert rows(path) == {2: ("1", "2"), 4: ("3", "4")} | ({} if expected is None else {3: expected})
    assert list(malformed(path)) == ([3] if expected is None else [])


def test_csv_a_long_header_is_a_header(tmp_path: Path) -> None:
    wide = ",".join(f"column{number}" for number in range(9_000))
    path = written(tmp_path / "x.csv", f"a,b,{wide}\n1,2{',' * 9_000}\n")
    assert rows(path) == {2: ("1", "2")}


def test_csv_lines_may_end_with_cr_alone(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "x.csv", "a,b\r1,2\r3,4\r")) == {2: ("1", "2"), 3: ("3", "4")}
    assert rows(written(tmp_path / "y.csv", "a,b\r\n1,2\r3,4\n\r5,6")) == {2: ("1", "2"), 3: ("3", "4"), 5: ("5", "6")}


def test_csv_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "\n" * 70_000 + "a,b\n" + "\r\n" * 3 + "1,2\n\n")
    assert rows(path) == {70_005: ("1", "2")}
    assert malformed(path) == {}


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_line_that_is_too_long_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 50)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100)
    good, long = ("{0},x", "y" * 1000) if name == "x.csv" else ('{{"a": {0}, "b": "x"}}', '{"a": "' + "y" * 1000)
    newline = end or "\n"
    content = newline.join([*(["a,b"] if name == "x.csv" else []), good.format(1), long, good.format(2)]) + end
    first = 2 if name == "x.csv" else 1
    path = written(tmp_path / name, content)
    assert rows(path) == {first: ("1", "x"), first + 2: ("2", "x")}
    ((number, (reason, text)),) = malformed(path).items()
    assert (number, "longer than" in reason) == (first + 1, True)
    assert text.startswith(long[:90])


def test_csv_a_nul_byte_costs_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", b"a,b\n1,2\n3,\x004\n5,6\n")
    assert rows(path) == {2: ("1", "2"), 4: ("5", "6")}
    assert [reason for reason, _ in malformed(path).values()] == ["malformed: contains a NUL byte"]


def test_utf16_is_refused(tmp_path: Path) -> None:
    assert "UTF-16" in refusal(written(tmp_path / "x.csv", "a,b\n1,2\n".encode("utf-16")))


@pytest.mark.parametrize("name", ["x.csv.gz", "x.jsonl.gz"])
def test_a_compressed_file_without_bytes_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert "cut off" in refusal(tmp_path / name)


def test_csv_without_a_header_and_with_a_long_delimiter(tmp_path: Path) -> None:
    path = written(tmp_path / "x.dat", '1::2::"q\n3::4\n5::6::7\n8::\x1f9::0\n')
    files = Files(path=path.name, format="csv", delimiter="::", columns=("a", "b", "c"))
    (batch,) = read_file(path, files, ["c", "a"])
    assert batch.rows.to_pylist() == [{"c": '"q', "a": "1"}, {"c": "7", "a": "5"}]
    assert batch.row_number.tolist() == [1, 3]
    assert batch.malformed == [
        (2, "malformed: 2 fields instead of 3", "3::4"),  # with the delimiter of the file
        (4, "malformed: contains the control character 0x1F", "8::\x1f9::0"),
    ]


@pytest.mark.parametrize("delimiter", ["§", "日", "::", "|"])
def test_csv_a_delimiter_may_have_several_bytes(tmp_path: Path, delimiter: str) -> None:
    lines = [["a", "b", "x\x1fy"], ["1", "é", "z"], ["2"], ["3", "", ""]]
    path = written(tmp_path / "x.csv", "\n".join(map(delimiter.join, lines)))
    assert rows(path, delimiter=delimiter) == {2: ("1", "é"), 4: ("3", None)}
    assert list(malformed(path, delimiter=delimiter)) == [3]


@pytest.mark.parametrize(("delimiter", "shown"), [(";", '";"'), ("\t", '"\\t"'), ("::", '"::"'), ("|", '"|"')])
def test_a_header_with_another_delimiter_names_it(tmp_path: Path, delimiter: str, shown: str) -> None:
    path = written(tmp_path / "x.csv", f"a{delimiter}b\n1{delimiter}2\n")
    assert refusal(path).endswith(f"; its header is not divided: set `delimiter: {shown}` in the site file")


def test_jsonl_keys_of_objects_within_a_row_are_named_with_dots(tmp_path: Path) -> None:
    lines = ['{"a": {"id": 1, "c": {"d": "x"}}, "b": 2}', '{"a": 7, "b": 3}', '{"a.id": 4, "a": {"id": 5}, "b": 6}']
    path = written(tmp_path / "x.jsonl", "\n".join(lines))
    batches = read_file(path, Files(path=path.name), ["b", "a.c.d", "a.id"])
    assert [row for batch in batches for row in batch.rows.to_pylist()] == [
        {"b": "2", "a.c.d": "x", "a.id": "1"},
        {"b": "3", "a.c.d": None, "a.id": None},
        {"b": "6", "a.c.d": None, "a.id": "4"},  # the key itself counts before the object
    ]
    with pytest.raises(PipelineError, match=r"no row .* has a key 'a\.user'; the first row has \['a', 'b'\]"):
        list(read_file(path, Files(path=path.name), ["a.user", "b"]))


def test_parquet_fields_of_structs_are_named_with_dots(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [{"id": 1, "c": {"d": "x"}}, None], "b": [2, 3], "e.f": [4, 5]}), path)
    (batch,) = read_file(path, Files(path=path.name), ["b", "a.c.d", "a.id", "e.f"])
    assert batch.rows.select(["b", "a.c.d", "a.id", "e.f"]).to_pylist() == [
        {"b": 2, "a.c.d": "x", "a.id": 1, "e.f": 4},
        {"b": 3, "a.c.d": None, "a.id": None, "e.f": 5},
    ]
    with pytest.raises(
        PipelineError, match=r"no column 'a\.user'; it has 'a', 'a\.id', 'a\.c', 'a\.c\.d', 'b', 'e\.f'"
    ):
        list(read_file(path, Files(path=path.name), ["a.user", "b"]))


def test_csv_a_header_with_an_open_quote_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path / "x.csv", 'a,b,"no\nte"\n1,2,x\n'))
    assert 'a quoted name in the header does not end in its line: a,b,"no; write the header as one line' in message


def test_a_block_has_a_bounded_number_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short malformed lines need a hundred times their size as Python objects."""
    monkeypatch.setattr(lines_module, "BLOCK_LINES", 10)
    path = written(tmp_path / "x.csv", "a,b\n" + "1,2\n" * 7 + "x\n" * 40 + "\n" * 13 + "3,4\n")
    assert rows(path) == {**dict.fromkeys(range(2, 9), ("1", "2")), 9 + 40 + 13: ("3", "4")}
    assert list(malformed(path)) == list(range(9, 9 + 40))
    assert all(len(batch.row_number) + len(batch.malformed) <= 10 for batch in batches(path))


@pytest.mark.parametrize("content", ["x" * 100 + "\n", "x" * 100 + ",y\n"])
def test_joined_batches_are_bounded_by_the_size_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 200)
    monkeypatch.setattr(reading, "JOINED_BYTES", 1000)
    path = written(tmp_path / "x.csv", "a,b\n" + content * 500)
    joined = list(reading.join_batches([read_file(path, Files(path=path.name), COLUMNS)]))
    sizes = [sum(len(batch.row_number) + len(batch.malformed) for batch in held) for held in joined]
    assert sum(sizes) == 500
    assert max(sizes) <= (1000 + 2 * 200) // 100


def test_joined_batches_are_bounded_by_malformed_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_LINES", 10)
    monkeypatch.setattr(reading, "JOINED_ROWS", 20)
    path = written(tmp_path / "x.csv", "a,b\n" + "x\n" * 500)
    joined = list(reading.join_batches([read_file(path, Files(path=path.name), COLUMNS)]))
    assert max(sum(len(batch.malformed) for batch in held) for held in joined) <= 20 + 10


def test_jsonl_keys_are_found_whatever_their_characters(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"durée": 1, "a/b~c\\"d": 2}\n{"dur\\u00e9e": 3, "*": 4}\n')
    assert rows(path, ["durée", 'a/b~c"d', "*"]) == {1: ("1", "2", None), 2: ("3", None, "4")}


def test_jsonl_a_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"a": null, "b": 1}\n{"b": 2}\n')
    assert rows(path) == {1: (None, "1"), 2: (None, "2")}  # null is a value of a key
    assert "has a key 'dwel'; the first row has ['a', 'b']" in refusal(path, ["b", "dwel"])


def test_jsonl_a_lone_cr_is_white_space(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "x.jsonl", '{"a": 1,\r"b": 2}\r\n{"a": 3, "b": 4}\n')) == {
        1: ("1", "2"),
        2: ("3", "4"),
    }
    assert rows(written(tmp_path / "y.jsonl", '{"a": 1, "b": 2}\r{"a": 3, "b": 4}\r')) == {1: ("1", "2"), 2: ("3", "4")}


def test_csv_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    message = refusal(written(tmp_path / "x.csv", "a,c\n1,2\n"))
    assert "has no column 'b'" in message
    assert "it has 'a', 'c'" in message


def test_csv_missing_columns_are_noticed_without_rows(tmp_path: Path) -> None:
    assert "has no column 'b'" in refusal(written(tmp_path / "x.csv", "a,c\n"))


def test_csv_a_needed_column_may_not_come_twice(tmp_path: Path) -> None:
    assert "column 'a' more than once" in refusal(written(tmp_path / "x.csv", "a,b,a\n1,2,3\n"))


def test_csv_another_column_may_come_twice(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "x.csv", "a,b,c,c\n1,2,3,4\n")) == {2: ("1", "2")}


# JSON lines


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.ndjson", "x.json"])
def test_jsonl_values_come_as_text(tmp_path: Path, name: str) -> None:
    lines = ['{"a": 1, "b": "x, \\"y\\""}', '{"b": true, "a": 2.5, "c": 0}', '{"a": null}']
    path = written(tmp_path / name, "\n".join(lines))
    assert rows(path) == {1: ("1", 'x, "y"'), 2: ("2.5", "true"), 3: (None, None)}


def test_jsonl_nested_values_come_as_json(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"a": [1, 2.5], "b": {"c": "d"}}\n')
    assert rows(path) == {1: ("[1,2.5]", '{"c":"d"}')}


def test_jsonl_large_integers_keep_every_digit(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"a": 9223372036854775807, "b": 12345678901234567890123}\n')
    assert rows(path) == {1: ("9223372036854775807", "12345678901234567890123")}


def test_jsonl_unusual_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"user.id": 1, "a b": 2, "$ref": 3, "it\'s": 4, "q\\"q": 5}\n')
    assert rows(path, ["user.id", "a b", "$ref", "it's", 'q"q']) == {1: ("1", "2", "3", "4", "5")}


def test_jsonl_keys_that_differ_in_case_only(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"id": 1, "ID": 2}\n')
    assert rows(path, ["id", "ID"]) == {1: ("1", "2")}


def test_jsonl_broken_lines_keep_their_number_and_text(tmp_path: Path) -> None:
    lines = ['{"a": 1, "b": 1}', "[1, 2]", '{"a": ', "", '"text"', '{"a": 2, "b": 2}', '{"a": 3}{"a": 4}', "null"]
    path = written(tmp_path / "x.jsonl", "\n".join(lines) + "\n")
    assert rows(path) == {1: ("1", "1"), 6: ("2", "2")}
    assert malformed(path) == {
        number: ("malformed: not a JSON object", lines[number - 1])
        for number in (2, 3, 5, 7, 8)  # line 4 is blank: no row
    }


def test_jsonl_a_control_character_costs_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", '{"a": 1, "b": 1}\n{"a": "x\x01y"}\n{"a": 3, "b": 3}\n')
    assert rows(path) == {1: ("1", "1"), 3: ("3", "3")}
    assert list(malformed(path)) == [2]


def test_jsonl_bytes_that_are_no_utf8_cost_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", b'{"a": 1, "b": "caf\xe9"}\n{"a": 2, "b": 2}\n')
    assert rows(path) == {2: ("2", "2")}
    assert malformed(path)[1][0] == "malformed: not valid UTF-8"


@settings(max_examples=15, deadline=None, database=None)
@given(kinds=st.lists(st.sampled_from(["good", "array", "broken", "blank"]), min_size=1, max_size=60))
def test_jsonl_row_numbers_hold_across_blocks(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> None:
    shapes = {"good": '{{"a": {0}, "b": "x"}}', "array": "[{0}]", "broken": '{{"a": {0}', "blank": ""}
    lines = [shapes[kind].format(number) for number, kind in enumerate(kinds, 1)]
    path = written(tmp_path_factory.mktemp("blocks") / "x.jsonl", "\n".join([*lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", 64)
        found, broken = rows(path), malformed(path)
    assert found == {number: (str(number), "x") for number, kind in enumerate(kinds, 1) if kind == "good"}
    assert {number: text for number, (_, text) in broken.items()} == {
        number: lines[number - 1] for number, kind in enumerate(kinds, 1) if kind in ("array", "broken")
    }


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_jsonl_without_rows(tmp_path: Path, name: str, content: str) -> None:
    """A silent day is an empty file: the error for a missing file says so."""
    (batch,) = batches(written(tmp_path / name, content))
    assert batch.rows.column_names == ["a", "b"]
    assert batch.rows.num_rows == 0
    assert batch.malformed == []


# Parquet


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    table = pa.table({"b": [1.5, None], "ignored": ["x", "y"], "a": [7, 8]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert rows(tmp_path / "x.parquet") == {1: (7, 1.5), 2: (8, None)}
    (batch,) = batches(tmp_path / "x.parquet")
    assert batch.rows.schema.field("a").type == pa.int64()


def test_parquet_row_numbers_hold_across_row_groups_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = list(range(1, 101))
    pq.write_table(pa.table({"a": numbers, "b": numbers}), tmp_path / "x.parquet", row_group_size=30)
    monkeypatch.setattr(reading, "BATCH_ROWS", 7)
    assert len(batches(tmp_path / "x.parquet")) >= 100 // 7
    assert rows(tmp_path / "x.parquet") == {number: (number, number) for number in numbers}


def test_parquet_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    (batch,) = batches(tmp_path / "x.parquet")
    assert batch.rows.column_names == ["a", "b"]
    assert batch.rows.num_rows == 0


def test_parquet_missing_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "c": [{"b": 1}]}), tmp_path / "x.parquet")
    message = refusal(tmp_path / "x.parquet")
    assert "has no column 'b'" in message
    assert "it has 'a', 'c'" in message


def test_parquet_a_needed_column_may_not_come_twice(tmp_path: Path) -> None:
    columns = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.Table.from_arrays(columns, names=["a", "b", "a"]), tmp_path / "x.parquet")
    assert "column 'a' more than once" in refusal(tmp_path / "x.parquet")


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_parquet_text_that_is_no_utf8_costs_one_row(tmp_path: Path, is_dictionary: bool) -> None:
    texts = pa.array([b"ok", b"caf\xe9", None, b"\xed\xa0\x80", "é".encode()], pa.binary()).view(pa.string())
    column = texts.dictionary_encode() if is_dictionary else texts
    pq.write_table(pa.table({"a": range(5), "b": column}), tmp_path / "x.parquet")
    assert rows(tmp_path / "x.parquet") == {1: (0, "ok"), 3: (2, None), 5: (4, "é")}
    assert malformed(tmp_path / "x.parquet") == {
        2: ("malformed: not valid UTF-8", '{"a": 1, "b": "caf\\\\xe9"}'),
        4: ("malformed: not valid UTF-8", '{"a": 3, "b": "\\\\xed\\\\xa0\\\\x80"}'),
    }


def test_parquet_types_without_kernels_are_plain_ones(tmp_path: Path) -> None:
    views = {"a": pa.array(["x", None], pa.string_view()), "b": pa.array([b"\xff", b"y"], pa.binary_view())}
    pq.write_table(pa.table(views), tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": pa.array([7, None]).dictionary_encode(), "b": [1, 2]}), tmp_path / "y.parquet")
    assert rows(tmp_path / "x.parquet") == {1: ("x", b"\xff"), 2: (None, b"y")}
    assert [batch.rows.schema.types for batch in batches(tmp_path / "x.parquet")] == [
        [pa.large_string(), pa.large_binary()]
    ]
    assert [batch.rows.schema.types for batch in batches(tmp_path / "y.parquet")] == [[pa.int64(), pa.int64()]]


@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.99])
def test_parquet_truncated(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": range(1000), "b": range(1000)}), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if kept < 1 else int(kept)])
    assert "cannot be read as parquet" in refusal(path)


def test_parquet_damaged_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 40 + data[44:])
    assert "cannot be read as parquet" in refusal(path)


# Compression


@pytest.mark.parametrize(("name", "line"), [("x.csv.gz", b"1,2\n"), ("x.jsonl.gz", b'{"a": 1, "b": 2}\n')])
@pytest.mark.parametrize("num_missing", [1, 8, 30])
def test_truncated_gzip_is_refused(tmp_path: Path, name: str, line: bytes, num_missing: int) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a,b\n" + line * 10_000)[:-num_missing])
    assert "cannot be read" in refusal(path)
    assert refusal(path).endswith("; the file was cut off: restore it")


@pytest.mark.parametrize("name", ["x.csv.gz", "x.jsonl.gz"])
def test_plain_text_under_a_gzip_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    assert "cannot be read" in refusal(tmp_path / name)
    assert "; restore the file, or rename it without .gz if it is not compressed with gzip" in refusal(tmp_path / name)


def test_bzip2_files_that_begin_with_empty_members_are_refused(tmp_path: Path) -> None:
    """Arrow cannot read them."""
    path = tmp_path / "x.csv.bz2"
    path.write_bytes(bz2.compress(b"") * 3 + bz2.compress(b"a,b\n1,2\n"))
    assert "cannot be read as csv" in refusal(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for name in ("x.csv", "x.jsonl", "x.parquet"):
        refusal(tmp_path / name)


# Finding files


def planted(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_a_dated_path_gives_the_files_of_a_day(tmp_path: Path) -> None:
    planted(tmp_path, "2026-01-01/b.csv", "2026-01-01/a.csv", "2026-01-01/c.txt", "2026-01-02/d.csv")
    files = Files(path="{ds}/*.csv")
    assert find_files(files, tmp_path, "2026-01-01") == [tmp_path / "2026-01-01/a.csv", tmp_path / "2026-01-01/b.csv"]
    assert find_files(files, tmp_path, "2026-01-02") == [tmp_path / "2026-01-02/d.csv"]
    assert find_files(files, tmp_path, "2026-01-03") == []


def test_the_day_may_stand_several_times(tmp_path: Path) -> None:
    planted(tmp_path, "2026-01-01/log-2026-01-01.csv", "2026-01-01/log-2026-01-02.csv")
    found = find_files(Files(path="{ds}/log-{ds}.csv"), tmp_path, "2026-01-01")
    assert found == [tmp_path / "2026-01-01/log-2026-01-01.csv"]


def test_globs_reach_into_folders_and_skip_them(tmp_path: Path) -> None:
    planted(tmp_path, "x/y/a.parquet", "b.parquet", "x/folder.parquet/part")
    found = find_files(Files(path="**/*.parquet"), tmp_path)
    assert found == [tmp_path / "b.parquet", tmp_path / "x/y/a.parquet"]


def test_a_file_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path, "a.csv", os.fsdecode(b"name/caf\xe9.csv"))
    for folder, target in (("gone", "nowhere.csv"), ("loop", "b.csv")):
        planted(tmp_path, f"{folder}/a.csv")
        (tmp_path / folder / "b.csv").symlink_to(target)
        with pytest.raises(PipelineError, match=rf"{folder}/b.csv is a link to a file that does not exist"):
            find_files(Files(path=f"{folder}/*.csv"), tmp_path)
    with pytest.raises(PipelineError, match=r"the name of .*caf\\udce9.csv is not UTF-8; rename the file"):
        find_files(Files(path="name/*.csv"), tmp_path)

    os.mkfifo(tmp_path / "gone" / "pipe.log")  # opening it would wait for a writer, maybe for ever
    with pytest.raises(PipelineError, match=r"pipe.log is no file but a pipe, a socket or a device; remove it"):
        find_files(Files(path="gone/*.log", format="csv"), tmp_path)

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(PipelineError, match=r"a.csv cannot be read: Permission denied"):
        find_files(Files(path="*.csv"), tmp_path)


def test_a_root_is_a_folder_not_a_pattern(tmp_path: Path) -> None:
    root = tmp_path / "site [old]"
    planted(root, "a.csv")
    assert find_files(Files(path="*.csv"), root) == [root / "a.csv"]
