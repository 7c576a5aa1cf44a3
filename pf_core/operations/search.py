"""Searches files for the id of one user: Parquet and Arrow tables, and all versions of Lance datasets."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.hashing import bucket_of
from pf_core.storage.files import is_remote, list_folder, open_arrow

USER = "user_id"

BATCH_ROWS = 1 << 20

TABLES = (".parquet", ".arrow")

LANCE = ".lance"


def has_user(path: Path, ids: pa.Array) -> bool:
    """Return whether a Parquet or Arrow file has a column of user ids with one of these ids."""
    return any(pc.any(pc.is_in(column, ids)).as_py() for column in _user_columns(path, ids.type))


def _user_columns(path: Path, kind: pa.DataType) -> Iterator[pa.Array]:
    """Yield the column of user ids in batches; nothing if the file has none of this type."""
    if path.suffix == ".arrow":
        with open_arrow(path) as file:
            if USER in file.schema.names and file.schema.field(USER).type == kind:
                yield from (file.get_batch(number).column(USER) for number in range(file.num_record_batches))
        return
    with path.open("rb") as stream, pq.ParquetFile(stream) as file:
        if USER in file.schema_arrow.names and file.schema_arrow.field(USER).type == kind:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[USER]):
                yield batch.column(USER)


def tables_below(folder: Path, *, without: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the Parquet and Arrow files below a folder, sorted; `without` are names of entries to leave out."""
    if is_remote(folder):
        found = sorted(path for path in folder.rglob("*") if path.suffix in TABLES)
        yield from (path for path in found if not set(path.relative_to(folder).parts[:1]) & set(without))
        return
    for root, folders, files in os.walk(folder):
        is_top = Path(root) == folder
        folders[:] = sorted(name for name in folders if not name.endswith(LANCE) and not (is_top and name in without))
        yield from (Path(root, name) for name in sorted(files) if name.endswith(TABLES))


def datasets_below(folder: Path) -> Iterator[Path]:
    """Yield the Lance datasets below a folder on this machine."""
    for root, folders, _ in os.walk(folder):
        yield from (Path(root, name) for name in sorted(folders) if name.endswith(LANCE))
        folders[:] = sorted(name for name in folders if not name.endswith(LANCE))


def versions_with(path: Path, ids: pa.Array) -> list[int]:
    """Return the versions of a Lance dataset that have a row of these users."""
    newest = lance.dataset(str(path))
    if USER not in newest.schema.names:
        return []
    return [version["version"] for version in newest.versions() if _has_row(path, version["version"], ids)]


def _has_row(path: Path, version: int, ids: pa.Array) -> bool:
    scanner = lance.dataset(str(path), version=version).scanner(columns=[USER], batch_size=BATCH_ROWS)
    return any(pc.any(pc.is_in(batch.column(USER), ids)).as_py() for batch in scanner.to_batches())


def has_deleted_row(path: Path, version: int, ids: pa.Array) -> bool:
    """Return whether the files of a version have a row of these users, deleted or not."""
    scanner = lance.dataset(str(path), version=version).scanner(
        columns=[USER], include_deleted_rows=True, with_row_id=True
    )
    return any(pc.any(pc.is_in(batch.column(USER), ids)).as_py() for batch in scanner.to_batches())


def unnamed_files(path: Path) -> list[str]:
    """Return the data files of a Lance dataset that no version names: a killed run left them, or one is at work."""
    versions = [lance.dataset(str(path), version=each["version"]) for each in lance.dataset(str(path)).versions()]
    named = {file.path for dataset in versions for part in dataset.get_fragments() for file in part.data_files()}
    return sorted(file.name for file in list_folder(path / "data") if file.name not in named)


def bucket_number(ids: pa.Array, num_buckets: int) -> int:
    """Return the bucket of the only id."""
    [bucket] = bucket_of(ids, num_buckets).tolist()
    return int(bucket)
