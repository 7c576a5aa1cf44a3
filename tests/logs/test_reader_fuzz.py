"""Mutated log files: every row of the file is read or returned as malformed, and no row changes another one.

    pytest tests/logs/test_reader_fuzz.py --fuzz 20000

The rows of a file are counted here without the reader: by a regular expression over the bytes. Some files are read by
ingestion as a whole, of which the counts must add up.
"""

import contextlib
import functools
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.files import Files
from pf_core.days import ds_start_us
from pf_core.errors import PipelineError
from pf_core.logs import lines as lines_module
from pf_core.logs.lines import COMPRESSION
from pf_core.logs.readers import read_file
from tests.support.sites import START, SmallSite
from tests.support.tried import Tried

COLUMNS = ("user", "durée")
Result = dict[int, tuple[str | None, ...] | str]
"""By row number: the values, or the reason why the row is malformed."""

TOKENS = [b'"', b'""', b",", b"\r", b"\n", b"\r\n", b"\0", b"\xe9", b"\xff\xfe", b"\xef\xbb\xbf", b"\\", b"'", b"\x1f"]
TOKENS += ["é".encode(), "\u2028".encode(), b"\x1a", b"\x85", b"\n\n\n\n", b" ", b"\t", b"{", b"}", b"null", b"1e999"]
TOKENS += [
    "\x85".encode(),
    b"\x0b",
    b"\x0c",
    b"\x1c",
    b"\x1b[31m",
    b"\\ud800",
    b"\\u0000",
    b"NaN",
    b"[" * 300,
    b"::",
    b":",
]
TOKENS += [b"\nuser,note,dur\xc3\xa9e\n", b"\n \n", b"\n,,\n", b'\n""\n', "§".encode(), b"\xc2", b"|"]

STYLES: list[dict[str, str | None]] = [
    {"delimiter": ",", "quote": '"'},
    {"delimiter": "|", "quote": "'"},
    {"delimiter": "\t", "quote": None},
    {"delimiter": "::", "quote": '"'},
    {"delimiter": "§", "quote": '"'},
]
"""Descriptions of CSV files."""


def physical_lines(data: bytes, end: bytes) -> dict[int, bytes]:
    """The lines that are not blank, by their number."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    return {number: line for number, line in enumerate(re.split(end, data), 1) if line}


def csv_lines(data: bytes) -> dict[int, bytes]:
    found = physical_lines(data, rb"\r\n|\n|\r")
    return {number: line for number, line in found.items() if number != min(found)}  # without the header


def jsonl_lines(data: bytes) -> dict[int, bytes]:
    return {number: line for number, line in physical_lines(data, rb"\n").items() if line != b"\r"}


def read(path: Path, **style: str | None) -> Result:
    found: Result = {}
    file_format = "csv" if ".csv" in path.name else None
    for batch in read_file(path, Files(path=path.name, format=file_format, **style), COLUMNS):
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


def csv_row(rng: random.Random, number: int, delimiter: str = ",", quote: str | None = '"') -> bytes:
    note = rng.choice(['"quoted, twice"', '"say ""hi"""', 'say "hi"', "", "plain", '5" nail', "naïve"])
    return f"{number},{note},{rng.randrange(99)}".replace(",", delimiter).replace('"', quote or '"').encode()


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
        monkeypatch.setattr(lines_module, "BLOCK_LINES", rng.choice([5, 1 << 18, 1 << 18]))

    return choose


def test_every_row_of_a_csv_file_is_accounted_for(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried, small_blocks: Callable[[random.Random], None]
) -> None:
    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        small_blocks(rng)
        style = STYLES[0] if rng.random() < 0.5 else rng.choice(STYLES)
        header = "user,note,durée".replace(",", style["delimiter"] or "").encode()
        path, data = tmp_path / "x.csv", some_file(rng, functools.partial(csv_row, **style), header)
        path.write_bytes(data)
        expected, found = csv_lines(data), read(path, **style)
        assert found.keys() == expected.keys(), (seed, data)
        alone = tmp_path / "alone.csv"
        for number, line in expected.items():
            alone.write_bytes(header + b"\n" + line)
            assert found[number] == read(alone, **style)[2], (seed, number, line)


def test_every_row_of_a_jsonl_file_is_accounted_for(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried, small_blocks: Callable[[random.Random], None]
) -> None:
    witness = b'{"user": 0, "dur\\u00e9e": 0}'  # a row with both keys: a file without one of them is refused
    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz")):
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


def compressed(codec: str, data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl.gz", ".csv.bz2", ".csv.zst", ".csv.lz4"])
def test_a_damaged_compressed_file_is_refused_or_read_whole(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried, suffix: str
) -> None:
    """Cut off, with other bytes behind its end, of several members; bits are flipped where the codec has checksums."""
    is_csv, codec = suffix.startswith(".csv"), COMPRESSION[f".{suffix.rpartition('.')[2]}"]
    row, header = (csv_row, "user,note,durée\n".encode()) if is_csv else (jsonl_row, b"")
    whole = header + b"".join(row(random.Random(number), number) + b"\n" for number in range(40))
    path = tmp_path / f"x{suffix}"
    path.write_bytes(compressed(codec, whole))
    expected = read(path)
    assert len(expected) == 40
    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        place = rng.choice([0, rng.randrange(len(whole)), len(whole)])
        first, second = compressed(codec, whole[:place]), compressed(codec, whole[place:])
        data = bytearray(first + second)
        match rng.randrange(4):
            case 0:
                pass
            case 1:
                data += rng.choice([b"\0", b"\0" * 512, b"x", bytes(first[:3]), rng.randbytes(9)])
            case 2 if codec in ("gzip", "bz2"):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case _:
                del data[rng.choice([n for n in range(len(data)) if n != len(first)]) :]
        path.write_bytes(data)
        found = read_or_refuse(path)
        assert found is None or found == expected, seed


def test_a_damaged_parquet_file_is_refused_or_has_all_its_rows(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    table = pa.table({"user": pa.array(range(500)), "durée": pa.array([number % 7 for number in range(500)])})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=100, write_page_checksum=True)
    path = tmp_path / "x.parquet"
    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz")):
        rng, data = random.Random(seed), bytearray(sink.getvalue())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found = read_or_refuse(path)
        assert found is None or len(found) == 500, seed


FAR = [0, 1, -1, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**62]


def some_column(rng: random.Random, num_rows: int, valid: list[int]) -> pa.Array:
    """A column of one of many types, some of whose values are valid."""
    numbers = [rng.choice([number, number, number, rng.choice(FAR), None]) for number in valid]
    small = [None if number is None else number % 2**31 for number in numbers]
    texts = [None if number is None else str(number).encode() for number in numbers]
    texts = [
        rng.choice([text, text, text, b"", b"caf\xe9", b"\xff", b"a\0b", b"17850.0", b"\x1b[0m"]) for text in texts
    ]
    times = [pa.timestamp(unit, zone) for unit in ("ms", "us", "ns") for zone in (None, "UTC", "Mars/Base")]
    kind = rng.choice(
        [pa.int64(), pa.float64(), pa.float16(), pa.uint32(), pa.bool_(), pa.decimal128(38, 3), pa.date32()]
    )
    match rng.randrange(7):
        case 0 | 1:
            return pa.array(numbers, pa.int64())
        case 2:
            return pa.array(numbers, pa.int64()).cast(rng.choice([*times, pa.duration("us"), pa.time64("ns")]))
        case 3:
            return pa.array(small, pa.int32()).cast(kind, safe=False)
        case 4:
            column = pa.array(texts, pa.binary())
            return rng.choice([column, column.cast(pa.large_binary()), column.cast(pa.binary_view())])
        case 5:
            return pa.array(texts, pa.binary()).cast(pa.binary_view()).view(pa.string_view())
        case _:
            column = pa.array(texts, pa.binary()).view(pa.string())
            return rng.choice([column, column.dictionary_encode(), pa.nulls(num_rows)])


def account(site: SmallSite, days: list[str]) -> int | None:
    """Ingest the days; return the number of rows that are accounted for, or None if a file is refused."""
    manifests, refusal = [], "logs/"
    try:
        manifests = site.ingest(days)
    except PipelineError as error:
        refusal = str(error)
    assert "logs/" in refusal
    assert "INTERNAL" not in refusal
    if not manifests:
        return None
    for manifest in manifests:
        counts = manifest["counts"]
        spent = ("kept", "duplicates", "skipped", "sent", "forgotten", "quarantined")
        assert counts["read"] + counts["received"] == sum(counts[name] for name in spent)
    num_read = sum(manifest["counts"]["read"] for manifest in manifests)
    return num_read + int(manifests[-1]["outside_site_days"] + manifests[-1]["other_days"])


@pytest.mark.parametrize("path", ["logs/{ds}.parquet", "logs/*.parquet"])
def test_every_row_of_a_parquet_log_is_accounted_for_whatever_its_types(
    small_site: Callable[..., SmallSite], pytestconfig: pytest.Config, tried: Tried, path: str
) -> None:
    site = small_site(path=path)
    (site.root / "forget.txt").write_text("3\n4\n")
    log = site.write_log(START, [(user, f"p{user}", user * 1.0, "look") for user in range(20)])
    (log.parent / f"{START}.parquet").write_bytes(log.read_bytes())
    whole, log = pq.read_table(log), log.parent / f"{START}.parquet"
    num_accounted = 0
    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz") // 5):
        rng, table = random.Random(seed), whole
        for index in rng.sample(range(table.num_columns), rng.randrange(1, 4)):
            valid = whole["time_us"].to_pylist() if table.column_names[index] == "time_us" else list(range(20))
            table = table.set_column(index, table.column_names[index], some_column(rng, 20, valid))
        for other in log.parent.iterdir():
            other.unlink()
        pq.write_table(table, log)
        found = account(site, [START])
        assert found in (20, None), (seed, table.schema)
        num_accounted += found is not None
    assert num_accounted


@pytest.mark.parametrize("path", ["logs/{ds}.csv", "logs/*.csv"])
def test_every_row_of_a_mutated_log_is_accounted_for_by_ingestion(
    small_site: Callable[..., SmallSite],
    pytestconfig: pytest.Config,
    tried: Tried,
    small_blocks: Callable[[random.Random], None],
    path: str,
) -> None:
    site = small_site(path=path)
    (site.root / "forget.txt").write_text("3\n4\n")
    (site.root / "logs").mkdir()
    start_us, num_accounted = ds_start_us(START), 0

    def row(rng: random.Random, number: int) -> bytes:
        time_us = start_us + rng.choice([number, number, -number, number * 86_400_000_000])
        return f"{number},p,{time_us},{rng.choice(['look', 'save', 'dance'])},home,{rng.choice(['', '1.5'])}".encode()

    for seed in tried.each("mutated logs", pytestconfig.getoption("--fuzz") // 5):
        rng = random.Random(seed)
        small_blocks(rng)
        data = some_file(rng, row, b"user,pin,time_us,event,place,dwell_s")
        (site.root / "logs" / f"{START}.csv").write_bytes(data)
        found = account(site, [START])
        assert found in (len(csv_lines(data)), None), (seed, data)
        num_accounted += found is not None
    assert num_accounted
