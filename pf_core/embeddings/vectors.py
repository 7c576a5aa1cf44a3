"""Columns of embeddings: conversion to and from numpy, norms, and the check that every row must pass.

Serving clients import this module: it must not import Lance, torch or DuckDB.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NORM_TOLERANCE = 2e-3
"""How far the norm of a unit vector may be from 1 after rounding to float16."""

NORM_BLOCK = 1024


def matrix_of(embedding: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Convert a column of fixed-size lists to a matrix with one row per list."""
    array = embedding.combine_chunks() if isinstance(embedding, pa.ChunkedArray) else embedding
    return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), array.type.list_size)


def column_of(vectors: np.ndarray) -> pa.Array:
    """Convert the rows of a matrix to a column of fixed-size lists of float16."""
    values = pa.array(np.ascontiguousarray(vectors, np.float16).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])


def norms_of(embedding: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Return the Euclidean norm of each row, in float32.

    Rows are converted block by block, because float32 copies of all rows cost more than the arithmetic.
    """
    vector_ND = matrix_of(embedding)
    squared_N = np.empty(len(vector_ND), np.float32)
    for start in range(0, len(vector_ND), NORM_BLOCK):
        block_ND = vector_ND[start : start + NORM_BLOCK].astype(np.float32)
        np.einsum("nd,nd->n", block_ND, block_ND, out=squared_N[start : start + NORM_BLOCK])
    return np.sqrt(squared_N)


def record_fault(
    rows: pa.Table, *, model_version: str, norms: np.ndarray | None = None, seen_too: bool = False
) -> str | None:
    """Return a sentence about the first fault in these records of users, or None if they are sound.

    Beside what `embedding_fault` checks: every pin of memory has an increment, which is a number, no element of a list
    is missing, and memory has no pin twice. With `seen_too`, nor have the seen pins: their lists are long, so that this
    takes far longer than all the rest (50 µs a user).
    """
    fault = embedding_fault(rows, key="user_id", model_version=model_version, norms=norms)
    if fault is not None:
        return fault
    num_pins, num_increments = (pc.list_value_length(rows[f"memory_{name}"]) for name in ("pin_id", "increment"))
    if not num_pins.equals(num_increments):
        row = int(np.argmax(num_pins.to_numpy() != num_increments.to_numpy()))
        return (
            f"memory_pin_id and memory_increment differ in length, first for user_id "
            f"{rows['user_id'][row].as_py()!r}: {num_pins[row]} and {num_increments[row]}"
        )
    for name in ("memory_pin_id", "memory_increment", "seen_pin_id"):
        if num_missing := pc.list_flatten(rows[name]).null_count:
            return f"{num_missing:,} elements of {name} are missing"
    if not np.isfinite(pc.list_flatten(rows["memory_increment"]).to_numpy()).all():
        return "a memory_increment is not finite"
    for name in ("memory_pin_id", "seen_pin_id") if seen_too else ("memory_pin_id",):
        if (row_of_repeated := _repeated(rows[name])) is not None:
            return f"a pin is twice in {name} of user_id {rows['user_id'][row_of_repeated].as_py()!r}"
    return None


def _repeated(lists: pa.ChunkedArray) -> int | None:
    """Return a row whose list has a value twice, or None."""
    codes = pc.list_flatten(lists).combine_chunks().dictionary_encode()
    row = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
    pair = np.sort(row * max(1, len(codes.dictionary)) + codes.indices.to_numpy())
    is_repeated = pair[1:] == pair[:-1]
    return int(pair[np.argmax(is_repeated)] // len(codes.dictionary)) if is_repeated.any() else None


def embedding_fault(rows: pa.Table, *, key: str, model_version: str, norms: np.ndarray | None = None) -> str | None:
    """Return a sentence about the first fault in these rows of embeddings, or None if they are sound.

    No value is missing, no `key` occurs twice, and all embeddings are of this model and of unit norm. `norms` are the
    norms of the embeddings, if the caller has computed them.
    """
    for name in rows.column_names:
        if rows[name].null_count:
            return f"{name} is missing in {rows[name].null_count:,} rows"
    if len(rows[key].unique()) != rows.num_rows:
        return f"a {key} has two rows"
    versions = set(rows["model_version"].unique().to_pylist())
    if not versions <= {model_version}:
        return f"rows of model {', '.join(sorted(versions - {model_version}))} among those of {model_version}"
    norm = norms_of(rows["embedding"]) if norms is None else norms
    is_unit = np.abs(norm - 1) <= NORM_TOLERANCE  # False for NaN
    if not is_unit.all():
        row = int(np.argmin(is_unit))
        return (
            f"{int((~is_unit).sum()):,} embeddings are not of unit length; the first is that of "
            f"{key} {rows[key][row].as_py()!r}, with {norm[row]:.4f}"
        )
    return None
