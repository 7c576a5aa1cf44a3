"""Exports a day's embeddings as Parquet, one file for each bucket, for tools that do not read Lance.

Users on the deletion list are left out. An export of users is recorded in the site's folder `exports`, so that users
who are forgotten later can be deleted from it, as long as it stays where it was written.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.engine.daily_state import StateDay
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.progress import Progress
from pf_core.storage.disk import disk_errors, disk_problem
from pf_core.storage.files import list_folder, read_json, write_file, write_json
from pf_core.storage.privacy import private

BATCH_ROWS = 65_536


PARTIAL = ".tmp"
"""End of the name of an export that is being written, or whose run was killed."""


class ExportRecord(TypedDict):
    """Content of a file in the site's folder `exports`."""

    path: str
    """Folder of the export."""
    ds: str
    num_buckets: int
    created_at: str


def export_embeddings(
    site: Site, what: Literal["users", "pins"], out: Path, *, ds: str | None, progress: Progress
) -> int:
    """Write a day (by default the newest) into a new folder, which appears when it is complete; returns the rows.

    The folder is private, as the state is: whoever exports decides with `chmod` who else reads it.
    """
    state = snapshot_state(site) if what == "users" else pin_embedding_state(site)
    if out.exists():
        raise PipelineError(f"{out} exists already", "name a new folder")
    ds = ds or next(reversed(state.days()), None)
    if ds is None:
        raise PipelineError(f"{state.asset} has no day yet")
    if what == "users":
        with disk_errors(_records_dir(site), "the record of the export"):
            _record(site, out, ds)
    with disk_errors(out.parent, f"the export to {out}"), private(out.parent), state.held(ds) as day:
        return _write(site, day, out, progress)


def _write(site: Site, day: StateDay[Any], out: Path, progress: Progress) -> int:
    """Write the files of an export without the forgotten users; return the number of rows."""
    state, ds = day.state, day.manifest["ds"]
    partial = out.with_name(f".{out.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    num_rows = 0
    try:
        partial.mkdir(parents=True)
        # After the folder is there: `pf forget` removes it, if the request comes later.
        forgotten = read_deletion_list(site) if state.asset == "user_embedding_snapshot" else None
        for bucket, dataset in enumerate(day.buckets()):
            reader = dataset.scanner(batch_size=BATCH_ROWS).to_reader()
            with pq.ParquetWriter(_file(partial, bucket), reader.schema, compression="lz4") as writer:
                for batch in reader:
                    rows = pa.Table.from_batches([batch])
                    if forgotten is not None:
                        rows = _without(rows, forgotten)
                    writer.write_table(rows)
                    num_rows += len(rows)
            progress(f"{state.asset} {ds}: {bucket + 1} of {state.num_buckets} buckets, {num_rows:,} rows")
        os.replace(partial, out)
    except FileNotFoundError as error:
        raise PipelineError(
            f"{partial} was removed while the export was written, as `pf forget` does, because it may hold the user",
            "export again",
        ) from error
    except OSError as error:
        if disk_problem(error) is not None:
            raise
        raise PipelineError(f"cannot write to {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_rows


def _file(folder: Path, bucket: int) -> Path:
    return folder / f"part-{bucket:05d}.parquet"


def _without(rows: pa.Table, user_ids: pa.Array) -> pa.Table:
    return rows.filter(pc.invert(pc.is_in(rows["user_id"], user_ids))) if len(user_ids) else rows


# Users who are forgotten after an export


def _records_dir(site: Site) -> Path:
    return site.directory / "exports"


def _record(site: Site, out: Path, ds: str) -> None:
    record: ExportRecord = {
        "path": str(out.resolve()),
        "ds": ds,
        "num_buckets": site.timelines.num_buckets,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(_records_dir(site) / f"{uuid.uuid4().hex}.json", record)


def recorded_exports(site: Site) -> list[ExportRecord]:
    """Return the exports of users, in the order in which they were made; their folders may be gone."""
    records = [read_json(path) for path in list_folder(_records_dir(site)) if path.suffix == ".json"]
    return sorted(records, key=lambda record: str(record["created_at"]))


def files_of_export(record: ExportRecord, user_ids: pa.Array) -> Iterator[Path]:
    """Yield the files of an export in which these users would be; none if its folder is gone."""
    for bucket in sorted(set(bucket_of(user_ids, record["num_buckets"]).tolist())):
        path = _file(Path(record["path"]), bucket)
        if path.is_file():
            yield path


def partial_exports(record: ExportRecord) -> list[Path]:
    """Return the folders of exports to the same place that are being written, or whose runs were killed."""
    out = Path(record["path"])
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9]+{re.escape(PARTIAL)}")
    return [path for path in list_folder(out.parent) if name.fullmatch(path.name)]


def forget_in_exports(site: Site, user_ids: pa.Array) -> dict[str, int]:
    """Delete users from the exports that are where they were written; return for each how many rows it had.

    An export that is not complete is removed: its run was killed, or it may have read the list before the request.
    """
    deleted: dict[str, int] = {}
    for record in recorded_exports(site):
        for partial in partial_exports(record):
            shutil.rmtree(partial)
        num_rows = sum(_delete_users(path, user_ids) for path in files_of_export(record, user_ids))
        deleted[record["path"]] = deleted.get(record["path"], 0) + num_rows
    return deleted


def _delete_users(path: Path, user_ids: pa.Array) -> int:
    """Rewrite a file of an export without these users, if it has any; return how many."""
    with pq.ParquetFile(path) as file:
        columns = (batch["user_id"] for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=["user_id"]))
        num_rows = sum(pc.sum(pc.is_in(column, user_ids)).as_py() or 0 for column in columns)
        if num_rows:
            schema = file.schema_arrow
            with write_file(path) as partial, pq.ParquetWriter(partial, schema, compression="lz4") as writer:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    writer.write_table(_without(pa.Table.from_batches([batch]), user_ids))
    return num_rows
