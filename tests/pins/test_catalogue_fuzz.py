"""Mutated catalogues: every row is a pin or a reject with its reason, or the file is refused by an error that names it.

    pytest tests/pins/test_catalogue_fuzz.py --fuzz 20000

Rows are counted here without the reader, as for logs (`tests/logs/test_reader_fuzz.py`, whose mutations these are).
"""

import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pf_core.config.source import PinsSource
from pf_core.errors import PipelineError
from pf_core.pins.catalogue import Catalogue, read_catalogue, read_matrix
from pf_core.pins.features import pin_state, read_pin_features
from tests.logs.test_reader_fuzz import csv_lines, jsonl_lines, some_column, some_file
from tests.pins.test_catalogue import DAYS, MATRIX, build, matrix_source, pins_source, site_with
from tests.support.tried import Tried

VECTORS = ["[1.0, 2.0]", "[0.5,-3]", "[]", "[1]", "[nan, 1]", "[1, null]", "", "two", "[1e39, 0]", "[1, 2"]
WORDS = ["art", "food", "", "naïve", "\x1b[31mred", "<b>"]
FLAGS = ["true", "false", "1", "0", "", "perhaps"]


def some_fields(rng: random.Random, number: int) -> tuple[str, str, str, str]:
    pin = rng.choice([str(number), str(number), str(number // 2), "", "x", str(2**63), f" {number} "])
    vector = rng.choice([VECTORS[0], VECTORS[0], VECTORS[1], rng.choice(VECTORS)])
    return pin, vector, rng.choice(WORDS), rng.choice([*FLAGS, "true", "true"])


def csv_row(rng: random.Random, number: int) -> bytes:
    pin, _, word, flag = some_fields(rng, number)
    return f"{pin},{word},{flag}".encode()


def jsonl_row(rng: random.Random, number: int) -> bytes:
    pin, vector, word, flag = some_fields(rng, number)
    try:
        parsed: Any = json.loads(vector)
    except json.JSONDecodeError:
        parsed = vector or None
    shown = rng.choice([flag, flag == "true", None])
    return json.dumps({"id": pin, "vector": parsed, "topic": word, "shown": shown}).encode()


def source_of(path: str, rng: random.Random) -> PinsSource:
    pin_id = {"column": "id", "type": rng.choice(["int", "string"])}
    vectors = None if path.endswith(".csv") else "vector"  # CSV has no lists
    return pins_source(catalogue={"path": path}, pin_id=pin_id, interest="topic", is_candidate="shown", vectors=vectors)


def read_or_refuse(source: PinsSource, path: Path) -> Catalogue | None:
    """Read a file; None if it is refused by an error that names it."""
    with contextlib.suppress(PipelineError):
        return read_catalogue(source, [path], dim=None)
    with pytest.raises(PipelineError, match=re.escape(path.name)):
        read_catalogue(source, [path], dim=None)
    return None


def assert_sound(catalogue: Catalogue, num_rows: int) -> None:
    rows = catalogue.rows
    assert len(rows) + len(catalogue.quarantined) == num_rows
    assert all(reason for _, _, reason, _ in catalogue.quarantined)
    ids = rows["pin_id"].to_pylist()
    assert ids == sorted(set(ids))
    assert None not in ids
    assert rows["interest"].null_count == rows["is_candidate"].null_count == 0
    if "feature" in rows.column_names:
        values = rows["feature"].combine_chunks().flatten().to_numpy()
        assert np.isfinite(values).all()


WITNESS = b'{"id": "0", "vector": [1, 2], "topic": "a", "shown": true}\n'
"""A row with all keys: a file without one of them is refused."""

FORMATS: dict[str, tuple[str, Callable[[random.Random, int], bytes], bytes | None, Any, bytes]] = {
    "csv": ("pins.csv", csv_row, b"id,topic,shown", csv_lines, b""),
    "jsonl": ("pins.jsonl", jsonl_row, None, jsonl_lines, WITNESS),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_row_of_a_text_catalogue_is_accounted_for(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried, kind: str
) -> None:
    name, row, header, lines_of, witness = FORMATS[kind]
    path, num_read = tmp_path / name, 0
    for seed in tried.each("mutated catalogues", pytestconfig.getoption("--fuzz")):
        rng = random.Random(seed)
        data = witness + some_file(rng, row, header)
        path.write_bytes(data)
        found = read_or_refuse(source_of(name, rng), path)
        if found is not None:
            assert_sound(found, len(lines_of(data)))
            num_read += 1
    assert num_read > pytestconfig.getoption("--fuzz") / 4


def test_every_row_of_a_parquet_catalogue_is_accounted_for_whatever_its_types(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    whole = pa.table(
        {
            "id": pa.array(range(20)),
            "vector": pa.array([[1.0, float(number)] for number in range(20)]),
            "topic": pa.array([f"t{number % 3}" for number in range(20)]),
            "shown": pa.array([number % 2 == 0 for number in range(20)]),
        }
    )
    path, num_read = tmp_path / "pins.parquet", 0
    for seed in tried.each("mutated catalogues", pytestconfig.getoption("--fuzz")):
        rng, table = random.Random(seed), whole
        for index in rng.sample(range(table.num_columns), rng.randrange(0, 4)):
            column = some_column(rng, 20, list(range(20)))
            if table.column_names[index] == "vector" and rng.random() < 0.5:
                column = some_vectors(rng)
            table = table.set_column(index, table.column_names[index], column)
        pq.write_table(table, path)
        if rng.random() < 0.2:
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            read_or_refuse(source_of(path.name, rng), path)  # a flipped bit may be a valid file of other values
        else:
            found = read_or_refuse(source_of(path.name, rng), path)
            if found is not None:
                assert_sound(found, 20)
                num_read += 1
    assert num_read


def some_vectors(rng: random.Random) -> pa.Array:
    values = [
        rng.choice([[1.0, 2.0], [1.0, 2.0], [], [1.0], None, [None, 1.0], [float("nan")] * 2, [1e300, 0.0]])
        for _ in range(20)
    ]
    column = pa.array(values, pa.list_(pa.float64()))
    kinds = [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float16()), pa.list_(pa.string())]
    return column.cast(rng.choice(kinds), safe=False)


def test_a_damaged_matrix_is_refused_or_read_whole(tmp_path: Path, pytestconfig: pytest.Config, tried: Tried) -> None:
    np.save(tmp_path / MATRIX.npy, np.arange(40, dtype=np.float32).reshape(20, 2))
    np.save(tmp_path / MATRIX.ids, np.arange(20))
    whole = {name: (tmp_path / name).read_bytes() for name in (MATRIX.npy, MATRIX.ids)}
    for seed in tried.each("mutated catalogues", pytestconfig.getoption("--fuzz") // 2):
        rng = random.Random(seed)
        for name, content in whole.items():
            data = bytearray(content)
            match rng.randrange(4):
                case 0:
                    del data[rng.randrange(len(data)) :]
                case 1:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 2:
                    data += rng.randbytes(rng.randrange(1, 9))
            (tmp_path / name).write_bytes(data)
        found = None
        with contextlib.suppress(PipelineError):
            found = read_matrix(MATRIX, tmp_path, matrix_source())
        if found is None:
            with pytest.raises(PipelineError, match=f"{MATRIX.npy}|{MATRIX.ids}"):
                read_matrix(MATRIX, tmp_path, matrix_source())
        else:
            assert len(found.rows["pin_id"].unique()) == len(found.rows), seed
            assert len(found.rows) + len(found.quarantined) == 20, seed
            assert np.isfinite(found.rows["feature"].combine_chunks().flatten().to_numpy()).all(), seed


def test_every_row_of_a_mutated_catalogue_is_accounted_for_by_pin_features(
    tmp_path: Path, pytestconfig: pytest.Config, tried: Tried
) -> None:
    name, row, header, lines_of, witness = FORMATS["jsonl"]
    num_built = 0
    for seed in tried.each("mutated catalogues", pytestconfig.getoption("--fuzz") // 5):
        rng = random.Random(seed)
        source = pins_source(catalogue={"path": name}, pin_id="id", interest="topic", is_candidate="shown")
        site = site_with(tmp_path, source)
        data = witness + some_file(rng, row, header)
        (tmp_path / name).write_bytes(data)
        manifests = []
        with contextlib.suppress(PipelineError):
            manifests = build(site, DAYS[0])
        if not manifests:
            with pytest.raises(PipelineError, match=re.escape(name)):
                build(site, DAYS[0])
        for manifest in manifests:
            counts = manifest["counts"]
            assert counts["pins"] + counts["quarantined"] == len(lines_of(data)), (seed, data)
            assert len(read_pin_features(site, DAYS[0])) == counts["pins"]
            assert sum(manifest["quarantined_by_reason"].values()) == counts["quarantined"]
            assert pin_state(site).days() == [DAYS[0]]
            num_built += 1
    assert num_built
