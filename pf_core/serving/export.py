"""Exports a day's embeddings as Parquet, one file for each bucket, for tools that do not read Lance."""

import os
import shutil
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.errors import PipelineError
from pf_core.progress import Progress

BATCH_ROWS = 65_536


def export_embeddings(
    site: Site, what: Literal["users", "pins"], out: Path, *, ds: str | None, progress: Progress
) -> int:
    """Write a day (by default the newest) into a new folder, which appears when it is complete; returns the rows."""
    state = snapshot_state(site) if what == "users" else pin_embedding_state(site)
    if out.exists():
        raise PipelineError(f"{out} exists already", "name a new folder")
    ds = ds or next(reversed(state.days()), None)
    if ds is None:
        raise PipelineError(f"{state.asset} has no day yet")
    day = state.open_day(ds)
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    num_rows = 0
    try:
        partial.mkdir(parents=True)
        for bucket, dataset in enumerate(day.buckets()):
            reader = dataset.scanner(batch_size=BATCH_ROWS).to_reader()
            with pq.ParquetWriter(partial / f"part-{bucket:05d}.parquet", reader.schema, compression="lz4") as writer:
                for batch in reader:
                    writer.write_table(pa.Table.from_batches([batch]))
                    num_rows += len(batch)
            progress(f"{state.asset} {ds}: {bucket + 1} of {state.num_buckets} buckets, {num_rows:,} rows")
        os.replace(partial, out)
    except OSError as error:
        raise PipelineError(f"cannot write to {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_rows
