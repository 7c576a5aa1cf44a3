"""Lookup of pins by id: the search in a file of ascending ids agrees with a dict."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.pins import lookup as pin_lookup
from pf_core.pins.lookup import find_pins

Id = int | str
INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 40)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text("ab\0é", max_size=4)
"""Arbitrary ids, and ids of few characters: they often repeat, share prefixes, or differ by a NUL or an accent only."""


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Let the search run through many blocks, and never hash a small catalogue instead."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pin_lookup, "WANTED_AT_ONCE", 3)
        patched.setattr(pin_lookup, "HASHED_ROWS", 0)
        yield


def write_ids(path: Path, ids: Sequence[Id], id_type: pa.DataType, *, batch_rows: int) -> None:
    schema = pa.schema([("pin_id", id_type)])
    with pa.ipc.new_file(path, schema) as writer:
        for start in range(0, len(ids), batch_rows):
            writer.write_batch(pa.record_batch([pa.array(ids[start : start + batch_rows], id_type)], schema=schema))


def check(known: set[Id], others: Sequence[Id], id_type: pa.DataType, *, batch_rows: int, data: st.DataObject) -> None:
    """Look up any mixture of known and other ids, in any order, with repeats."""
    ids = sorted(known, key=lambda one: one.encode() if isinstance(one, str) else one)
    row_of = {one: row for row, one in enumerate(ids)}
    wanted = data.draw(st.lists(st.sampled_from([*ids, *others]), max_size=60) if ids or others else st.just([]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pin_id.arrow"
        write_ids(path, ids, id_type, batch_rows=batch_rows)
        found = find_pins(path, pa.array(wanted, id_type))
    assert found.dtype == np.int64
    assert found.tolist() == [row_of.get(one, -1) for one in wanted]


@given(st.sets(INTEGERS, max_size=70), st.lists(INTEGERS, max_size=10), st.integers(1, 9), st.data())
def test_integers_are_found(known: set[Id], others: list[Id], batch_rows: int, data: st.DataObject) -> None:
    check(known, others, pa.int64(), batch_rows=batch_rows, data=data)


@given(st.sets(STRINGS, max_size=70), st.lists(STRINGS, max_size=10), st.integers(1, 9), st.data())
def test_strings_are_found(known: set[Id], others: list[Id], batch_rows: int, data: st.DataObject) -> None:
    check(known, others, pa.string(), batch_rows=batch_rows, data=data)


@given(st.sets(STRINGS, max_size=20), st.lists(STRINGS, max_size=10), st.data())
def test_a_small_catalogue_is_hashed(known: set[Id], others: list[Id], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pin_lookup, "HASHED_ROWS", 2)
        check(known, others, pa.string(), batch_rows=7, data=data)


@pytest.mark.parametrize("hashed_rows", [0, 2])
def test_none_are_wanted_or_none_are_there(tmp_path: Path, hashed_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_lookup, "HASHED_ROWS", hashed_rows)
    path, schema = tmp_path / "pin_id.arrow", pa.schema([("pin_id", pa.string())])
    write_ids(path, [], pa.string(), batch_rows=1)
    assert find_pins(path, pa.array(["a", "b", "a"])).tolist() == [-1, -1, -1]
    assert find_pins(path, pa.array([], pa.string())).tolist() == []
    with pa.ipc.new_file(path, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([], pa.string())], schema=schema))
    assert find_pins(path, pa.array(["a"])).tolist() == [-1]
    write_ids(path, ["a"], pa.string(), batch_rows=1)
    assert find_pins(path, pa.array([], pa.string())).tolist() == []


def test_only_batches_on_the_way_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ids among 1,024 batches: each needs 10 halvings to reach its batch."""
    path, opened = tmp_path / "pin_id.arrow", set[int]()
    write_ids(path, list(range(0, 8192, 2)), pa.int64(), batch_rows=4)
    open_batch = pin_lookup._OrderedIds._open

    def counted(ids: pin_lookup._OrderedIds, number: int) -> None:
        assert number not in opened
        opened.add(number)
        open_batch(ids, number)

    monkeypatch.setattr(pin_lookup._OrderedIds, "_open", counted)
    assert find_pins(path, pa.array([4242, 7001, 4242])).tolist() == [2121, -1, 2121]
    assert len(opened) <= 2 * (10 + 1)
