"""Samples of logs: small ones whole, large ones in pieces that are spread evenly and lose or double no line."""

import gzip
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pf_core.config.files import Files
from pf_core.logs import sample as sample_module
from pf_core.logs.sample import MAX_PIECES, Piece, evenly, plan_sample, read_piece, size_text

CSV = Files(path="x.csv")
JSONL = Files(path="x.jsonl")


def write_log(path: Path, num_rows: int, *, end: str = "\n", first: int = 0) -> Path:
    """Rows of a number and a text of 0 to 39 characters."""
    rows = [f"{number},{'x' * (number % 40)}" for number in range(first, first + num_rows)]
    path.write_bytes(f"n,text{end}".encode() + end.join(rows).encode() + end.encode())
    return path


def numbers(piece: Piece, source: Files = CSV, column: str = "n") -> list[int]:
    found = []
    for batch in read_piece(piece, source, [column]):
        assert not batch.malformed
        assert batch.file == piece.file
        found += [int(value) for value in batch.rows[column].to_pylist()]
    return found


def test_a_small_log_is_read_whole(tmp_path: Path) -> None:
    files = [write_log(tmp_path / f"{number}.csv", 10, first=10 * number) for number in range(3)]
    plan = plan_sample(files, CSV, max_bytes=10_000)
    assert plan.is_whole
    assert str(plan).startswith("all rows of 3 files (")
    assert [number for piece in plan.pieces for number in numbers(piece)] == list(range(30))
    assert {piece.weight for piece in plan.pieces} == {1.0}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_large_log_is_read_in_pieces_from_its_start_to_its_end(tmp_path: Path, end: str) -> None:
    files = [
        write_log(tmp_path / "a.csv", 30_000, end=end),
        write_log(tmp_path / "b.csv", 10_000, end=end, first=30_000),
    ]
    plan = plan_sample(files, CSV, max_bytes=100_000)
    assert not plan.is_whole
    assert plan.num_read_bytes <= 100_000
    by_piece = [numbers(piece) for piece in plan.pieces]
    found = [number for own in by_piece for number in own]
    assert len(found) == len(set(found))
    assert (found[0], found[-1]) == (0, 39_999)
    assert max(np.diff(found)) < 3 * 40_000 / MAX_PIECES  # nowhere a large gap
    estimate = sum(piece.weight * len(own) for piece, own in zip(plan.pieces, by_piece, strict=True))
    assert abs(estimate - 40_000) < 0.02 * 40_000


@settings(max_examples=25)
@given(st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(15, 200))
@example(17, "\n", 15)  # a piece without a line end
def test_adjoining_pieces_have_each_line_once(num_rows: int, end: str, size: int) -> None:
    """Wherever a file is cut, a line belongs to the piece in which it begins."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_log(Path(folder) / "a.csv", num_rows, end=end)
        num_bytes = path.stat().st_size
        pieces = [Piece(file=path, start=start, size=size) for start in range(0, num_bytes, size)]
        found = Counter(number for piece in pieces for number in numbers(piece))
    assert found == Counter(range(num_rows))


def test_a_piece_of_json_lines_may_lack_a_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(100)) + '{"n": 100, "rare": 1}\n')
    piece = Piece(file=path, start=0, size=50)
    (batch,) = read_piece(piece, JSONL, ["n", "rare"])
    assert batch.rows["rare"].null_count == batch.rows.num_rows > 0


def test_compressed_files_are_read_from_their_starts(tmp_path: Path) -> None:
    files = []
    for name, first in (("a.csv.gz", 0), ("b.csv.gz", 20_000)):
        plain = write_log(tmp_path / "plain.csv", 20_000, first=first).read_bytes()
        (tmp_path / name).write_bytes(gzip.compress(plain, compresslevel=1))
        files.append(tmp_path / name)
    plan = plan_sample(files, CSV, max_bytes=20_000)
    assert plan.misses_ends
    assert str(plan).endswith("the ends of compressed files and of long row groups cannot be seen")
    assert [(piece.file.name, piece.start) for piece in plan.pieces] == [("a.csv.gz", 0), ("b.csv.gz", 0)]
    of_first, of_second = (numbers(piece) for piece in plan.pieces)
    assert of_first == list(range(len(of_first)))
    assert of_second == list(range(20_000, 20_000 + len(of_second)))
    assert 100 < len(of_first) < 2000


def test_row_groups_of_parquet_are_read_at_equal_distances(tmp_path: Path) -> None:
    path, source = tmp_path / "a.parquet", Files(path="a.parquet")
    pq.write_table(pa.table({"n": np.arange(50_000)}), path, row_group_size=1000)
    plan = plan_sample([path], source, max_bytes=40 * 1000)  # 1,000 rows of 40 bytes
    assert plan.misses_ends
    found = [numbers(piece, source) for piece in plan.pieces]
    assert found == [list(range(start, start + 20)) for start in range(0, 50_000, 1000)]
    assert {piece.weight for piece in plan.pieces} == {50.0}
    (batch,) = read_piece(plan.pieces[3], source, ["n"])
    assert batch.row_number[0] == 3001
    assert plan_sample([path], source, max_bytes=40 * 50_000).is_whole


def test_of_many_small_files_only_some_are_opened(tmp_path: Path) -> None:
    files = [write_log(tmp_path / f"{number:04d}.csv", 1, first=number) for number in range(1000)]
    plan = plan_sample(files, CSV, max_bytes=1 << 20)
    assert len(plan.pieces) <= MAX_PIECES
    assert not plan.is_whole
    found = [number for piece in plan.pieces for number in numbers(piece)]
    assert (found[0], found[-1]) == (0, 999)
    assert abs(sum(piece.weight * len(numbers(piece)) for piece in plan.pieces) - 1000) < 50


def test_a_terabyte_is_not_read(tmp_path: Path) -> None:
    """A file with holes has the size of a large log; what lies between its pieces is never touched."""
    path = write_log(tmp_path / "a.csv", 1000)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    plan = plan_sample([path], CSV, max_bytes=1 << 20)
    assert plan.num_read_bytes <= 1 << 20
    assert "spread over 1 file (1.1 TB)" in str(plan)
    assert numbers(plan.pieces[0])[:3] == [0, 1, 2]
    assert sum(len(batch.row_number) for piece in plan.pieces[1:] for batch in read_piece(piece, CSV, ["n"])) == 0


def test_a_header_longer_than_usual_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "HEADER_BYTES", 3)
    path = write_log(tmp_path / "a.csv", 100)
    assert numbers(Piece(file=path, start=200, size=100))[0] > 0


def test_values_at_equal_distances() -> None:
    assert evenly(range(5), 5) == [0, 1, 2, 3, 4]
    assert evenly(range(101), 5) == [0, 25, 50, 75, 100]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(1, "0.001 kB"), (4_190_000, "4.19 MB"), (221_000_000, "221 MB"), (3 * 10**12, "3 TB")]
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
