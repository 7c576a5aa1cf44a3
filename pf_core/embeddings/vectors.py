"""Columns of embeddings: conversion to and from numpy, norms, and the check that every row must pass.

Serving clients import this module: it must not import Lance, torch or DuckDB.
"""

import numpy as np
import pyarrow as pa

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
