"""Readers of text logs: ours against pyarrow's and DuckDB's, on exactness first and on processor time second.

Exactness: mutated files of the fuzzer (tests/logs/test_reader_fuzz.py). A reader passes a file if the rows that it
returns and those that it reports as rejected make up the rows of the file, counted independently. A refusal of the
whole file is counted apart: no row is lost silently, but one broken line costs all others.

Time: processor time to read every row of three files as strings, in a process of its own: a CSV file without quotes,
one in which every value is quoted, and JSON lines. The smallest of the rounds counts.
"""

import argparse
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.csv as pa_csv
from measuring import measure, report, say, working_directory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pf_core.config.files import Files
from pf_core.logs.readers import read_file
from tests.logs.test_reader_fuzz import COLUMNS, csv_lines, csv_row, jsonl_lines, jsonl_row, some_file

NAMES = ["user", "pin", "time", "action", "surface", "note"]
WITNESS = b'{"user": 0, "dur\\u00e9e": 0}\n'
"""A row with both columns of the fuzzer: our reader refuses a file without one of them."""

Read = Callable[[Path, list[str]], tuple[int, int]]
"""Number of rows read and of rows reported as rejected."""


def ours(path: Path, columns: list[str]) -> tuple[int, int]:
    batches = [(len(b.row_number), len(b.malformed)) for b in read_file(path, Files(path=path.name), columns)]
    return sum(rows for rows, _ in batches), sum(malformed for _, malformed in batches)


def pyarrow_csv(path: Path, columns: list[str]) -> tuple[int, int]:
    """One thread: with several, the handler of invalid rows does not learn their numbers."""
    num_invalid = 0

    def skip(_: object) -> str:
        nonlocal num_invalid
        num_invalid += 1
        return "skip"

    reader = pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=8 << 20),
        parse_options=pa_csv.ParseOptions(invalid_row_handler=skip, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            include_columns=columns, column_types={name: pa.string() for name in columns}
        ),
    )
    num_rows = sum(batch.num_rows for batch in reader)
    return num_rows, num_invalid


def duckdb_csv(path: Path, columns: list[str]) -> tuple[int, int]:
    """All that could be sniffed is stated; in strict mode it refuses files with mixed line ends."""
    connection = duckdb.connect(config={"threads": 1})
    names = ", ".join(f"'{name}': 'VARCHAR'" for name in _header(path))
    selected = ", ".join(f'"{name}"' for name in columns)
    reader = connection.sql(
        f"""
        SELECT {selected} FROM read_csv('{path}', columns = {{{names}}}, header = true, auto_detect = false, sep = ',',
            quote = '"', escape = '"', strict_mode = false,
            store_rejects = true, max_line_size = {16 << 20})
        """
    ).to_arrow_reader(1 << 18)
    num_rows = sum(batch.num_rows for batch in reader)
    (num_rejected,) = connection.sql("SELECT count(DISTINCT line) FROM reject_errors").fetchall()[0]
    return num_rows, num_rejected


def duckdb_json(path: Path, columns: list[str]) -> tuple[int, int]:
    """A row that cannot be parsed is returned as a row of NULLs, without a number or a text."""
    connection = duckdb.connect(config={"threads": 1})
    names = ", ".join(f"'{name}': 'VARCHAR'" for name in columns)
    reader = connection.sql(
        f"""
        SELECT * FROM read_json('{path}', format = 'newline_delimited', columns = {{{names}}}, ignore_errors = true)
        """
    ).to_arrow_reader(1 << 18)
    return sum(batch.num_rows for batch in reader), 0


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # any line end
        return file.readline().strip().replace('"', "").split(",")


READERS: dict[str, dict[str, Read]] = {
    ".csv": {"ours": ours, "pyarrow": pyarrow_csv, "duckdb": duckdb_csv},
    ".jsonl": {"ours": ours, "duckdb": duckdb_json},
}


def count_exact(folder: Path, suffix: str, num_files: int) -> dict[str, tuple[int, int, int]]:
    """For each reader: files with all rows accounted for, refused files, files with lost or doubled rows."""
    found = {name: [0, 0, 0] for name in READERS[suffix]}
    for seed in range(num_files):
        rng = random.Random(seed)
        if suffix == ".csv":
            data = some_file(rng, csv_row, "user,note,durée".encode())
            expected = len(csv_lines(data))
        else:
            data = WITNESS + some_file(rng, jsonl_row, None)
            expected = len(jsonl_lines(data))
        path = folder / f"fuzz{suffix}"
        path.write_bytes(data)
        for name, read in READERS[suffix].items():
            try:
                outcome = 0 if sum(read(path, list(COLUMNS))) == expected else 2
            except Exception:  # whatever a library raises is a refusal
                outcome = 1
            found[name][outcome] += 1
    return {name: (exact, refused, wrong) for name, (exact, refused, wrong) in found.items()}


def write_files(folder: Path, num_rows: int) -> dict[str, Path]:
    paths = {name: folder / name for name in ("plain.csv", "quoted.csv", "lines.jsonl")}
    rows = f"""
        SELECT hash(i) % 1000000 AS user, hash(i + 7) % 200000 AS pin, 1700000000 + i AS time,
            ['click', 'save', 'closeup', 'hide'][1 + (hash(i + 3) % 4)::INT] AS action,
            ['home', 'search', 'related'][1 + (hash(i + 5) % 3)::INT] AS surface, 'note ' || hash(i + 11) % 1000 AS note
        FROM range({num_rows}) AS t(i)
    """
    duckdb.sql(f"COPY ({rows}) TO '{paths['plain.csv']}' (FORMAT csv, HEADER)")
    duckdb.sql(f"COPY ({rows}) TO '{paths['quoted.csv']}' (FORMAT csv, HEADER, FORCE_QUOTE *)")
    duckdb.sql(f"COPY ({rows}) TO '{paths['lines.jsonl']}' (FORMAT json)")
    return paths


def cpu_of(path: str, name: str) -> tuple[float, int]:
    """Processor time of one reading, and its rows."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    num_rows, _ = READERS[Path(path).suffix][name](Path(path), NAMES)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    num_rows, num_files = (20_000, 40) if arguments.quick else (3_000_000, 2_000)
    with working_directory(None) as folder:
        for suffix in READERS:
            for name, (exact, refused, wrong) in count_exact(folder, suffix, num_files).items():
                say(f"{suffix} {name}: of {num_files} mutated files {exact} exact, {refused} refused, {wrong} wrong")
                report(f"reader_fuzz{suffix}_{name}_wrong", wrong, "files", bar="<= 0" if name == "ours" else None)
        paths = write_files(folder, num_rows)
        for label, path in paths.items():
            seconds: dict[str, float] = {}
            for _ in range(arguments.rounds):
                for name in READERS[path.suffix]:
                    measured = measure(cpu_of, str(path), name)
                    cpu_s, rows = measured.outcome
                    assert rows == num_rows
                    seconds[name] = min(cpu_s, seconds.get(name, cpu_s))
                    say(
                        f"{label} {name}: {cpu_s:.2f} CPU-s, {path.stat().st_size / cpu_s / 1e6:.0f} MB/s, "
                        f"{measured.peak_gb:.2f} GB"
                    )
            for name in READERS[path.suffix]:
                if name != "ours":
                    report(f"reader_{label}_ours_against_{name}", seconds["ours"] / seconds[name], "x")


if __name__ == "__main__":
    main()
