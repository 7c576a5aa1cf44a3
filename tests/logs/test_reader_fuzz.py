"""Mutated log files: every row of the file is read or returned as malformed, and no row changes another one.

    pytest tests/logs/test_reader_fuzz.py --fuzz 20000

The rows of a file are counted here without the reader: by a regular expression over the bytes.
"""

import contextlib
import gzip
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.source import Files
from pf_core.errors import PipelineError
from pf_core.logs import lines as lines_module
from pf_core.logs.readers import read_file

COLUMNS = ("user", "durée")
Result = dict[int, tuple[str | None, ...] | str]
"""By row number: the values, or the reason why the row is malformed."""

TOKENS = [b'"', b'""', b",", b"\r", b"\n", b"\r\n", b"\0", b"\xe9", b"\xff\xfe", b"\xef\xbb\xbf", b"\\", b"'", b"\x1f"]
TOKENS += ["é".encode(), "\u2028".encode(), b"\x1a", b"\x85", b"\n\n\n\n", b" ", b"\t", b"{", b"}", b"null", b"1e999"]


def physical_lines(data: bytes, end: bytes) -> dict[int, bytes]:
    """The lines that are not blank, by their number."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    return {number: line for number, line in enumerate(re.split(end, data), 1) if line}


def csv_lines(data: bytes) -> dict[int, bytes]:
    found = physical_lines(data, rb"\r\n|\n|\r")
    return {number: line for number, line in found.items() if number != min(found)}  # without the header


def jsonl_lines(data: bytes) -> dict[int, bytes]:
    return {number: line for number, line in physical_lines(data, rb"\n").items() if line != b"\r"}


def read(path: Path) -> Result:
    found: Result = {}
    for batch in read_file(path, Files(path=path.name), COLUMNS):
        for number, row in zip(batch.row_number.tolist(), batch.rows.to_pylist(), strict=True):
            assert number not in found
            found[number] = tuple(row[name] for name in COLUMNS)
        for number, reason, _ in batch.malformed:
            assert number not in found
            found[number] = reason
    return found


def read_or_refuse(path: Path) -> Result | None:
    """Read a file; None if it is refused by an error that names it."""
    with contextlib.suppress(PipelineError):
        return read(path)
    with pytest.raises(PipelineError, match=re.escape(str(path))):
        read(path)
    return None


def csv_row(rng: random.Random, number: int) -> bytes:
    note = rng.choice(['"quoted, twice"', '"say ""hi"""', 'say "hi"', "", "plain", '5" nail', "naïve"])
    return f"{number},{note},{rng.randrange(99)}".encode()


def jsonl_row(rng: random.Random, number: int) -> bytes:
    content = {"user": number, "note": rng.choice(["x", 'q"', "naïve", None]), "durée": rng.randrange(99)}
    return json.dumps(content, ensure_ascii=rng.random() < 0.5).encode()


def mutate(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data = data[:place] + rng.choice(TOKENS) + data[place:]
            case 1:
                data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
            case 2:
                data = data[:place]
            case 3:
                data = data[:place] + data[place : place + rng.randrange(60)] + data[place:]
            case _:
                data = data[:place] + rng.choice([b"\n", b"\r", b"x"]) * rng.choice([3, 200]) + data[place:]
    return data


def some_file(rng: random.Random, row: Callable[[random.Random, int], bytes], header: bytes | None) -> bytes:
    ends = rng.choice([[b"\n"], [b"\r\n"], [b"\n", b"\r\n"], [b"\r"], [b"\n", b"\r"]])
    lines = [row(rng, number) for number in range(rng.randrange(1, 30))]
    content = b"".join(line + rng.choice(ends) for line in lines)
    start = rng.choice([b"", b"", b"\xef\xbb\xbf"]) + (b"" if header is None else header + rng.choice(ends))
    return start + mutate(rng, content)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[random.Random], None]:
    def choose(rng: random.Random) -> None:
        monkeypatch.setattr(lines_module, "BLOCK_BYTES", rng.choice([7, 64, 1000, 1 << 20]))
        monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", rng.choice([60, 1 << 20]))

    return choose


def test_every_row_of_a_csv_file_is_accounted_for(
    tmp_path: Path, pytestconfig: pytest.Config, small_blocks: Callable[[random.Random], None]
) -> None:
    for seed in range(pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        small_blocks(rng)
        path, data = tmp_path / "x.csv", some_file(rng, csv_row, "user,note,durée".encode())
        path.write_bytes(data)
        expected, found = csv_lines(data), read(path)
        assert found.keys() == expected.keys(), (seed, data)
        alone = tmp_path / "alone.csv"
        for number, line in expected.items():
            alone.write_bytes("user,note,durée\n".encode() + line)
            assert found[number] == read(alone)[2], (seed, number, line)


def test_every_row_of_a_jsonl_file_is_accounted_for(
    tmp_path: Path, pytestconfig: pytest.Config, small_blocks: Callable[[random.Random], None]
) -> None:
    witness = b'{"user": 0, "dur\\u00e9e": 0}'  # a row with both keys: a file without one of them is refused
    for seed in range(pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        small_blocks(rng)
        path, data = tmp_path / "x.jsonl", witness + b"\n" + some_file(rng, jsonl_row, None)
        path.write_bytes(data)
        expected, found = jsonl_lines(data), read(path)
        assert found.keys() == expected.keys(), (seed, data)
        for number, line in list(expected.items())[:: max(1, len(expected) // 4)]:
            alone = tmp_path / "alone.jsonl"
            alone.write_bytes(witness + b"\n" + line)
            assert found[number] == read(alone)[2], (seed, number, line)


@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl.gz"])
def test_a_damaged_gzip_file_is_refused_or_read_whole(tmp_path: Path, pytestconfig: pytest.Config, suffix: str) -> None:
    row, header = (csv_row, "user,note,durée\n".encode()) if suffix == ".csv.gz" else (jsonl_row, b"")
    whole = header + b"".join(row(random.Random(number), number) + b"\n" for number in range(40))
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(whole, mtime=0))
    expected = read(path)
    assert len(expected) == 40
    for seed in range(pytestconfig.getoption("--fuzz")):
        rng, data = random.Random(seed), bytearray(gzip.compress(whole, mtime=0))
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = read_or_refuse(path)
        assert found is None or found == expected, seed


def test_a_damaged_parquet_file_is_refused_or_has_all_its_rows(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    table = pa.table({"user": pa.array(range(500)), "durée": pa.array([number % 7 for number in range(500)])})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=100, write_page_checksum=True)
    path = tmp_path / "x.parquet"
    for seed in range(pytestconfig.getoption("--fuzz")):
        rng, data = random.Random(seed), bytearray(sink.getvalue())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = read_or_refuse(path)
        assert found is None or len(found) == 500, seed
