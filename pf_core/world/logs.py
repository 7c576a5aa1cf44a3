"""The site's files, in a format of its own, which the pipeline reads through the mapping of a site file.

    <out_dir>/actions/<ds>/part-00000.parquet ...   one part per user chunk
    <out_dir>/actions/<ds>/actions.csv.gz           or one gzip member per user chunk
    <out_dir>/pins/<ds>.parquet                     the pins created on that day; the first day has all older ones
    <out_dir>/forget.txt                            users to be forgotten: none at first
    <out_dir>/world.json                            configuration, fingerprint and finished days, written last

A folder is named by the day on which its rows *arrived*. Days are written under `.writing` and renamed into
place in ascending order, the actions last: a day that has actions is complete. Memory holds one chunk.
"""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from pf_core.world.config import WorldConfig
from pf_core.world.log_defects import (
    LOG_COLUMNS,
    SOUND,
    LogRows,
    add_defects,
    break_line,
    break_table,
    clean_rows,
    to_table,
)
from pf_core.world.pins import BLOCK
from pf_core.world.streams import Stream, open_stream
from pf_core.world.world import CHUNKS_IN_MEMORY, World

FileFormat = Literal["csv.gz", "parquet"]

WRITING = ".writing"

WORLD_FILE = "world.json"

FORGET_FILE = "forget.txt"

GZIP_LEVEL = 1

DAYS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class WrittenLogs:
    """Result of `write_logs`; `num_rows` counts the days that it wrote, not the complete ones that it skipped."""

    days_written: tuple[str, ...]
    days_skipped: tuple[str, ...]
    num_rows: int


def write_logs(
    config: WorldConfig,
    out_dir: Path | str,
    *,
    file_format: FileFormat = "parquet",
    days: Sequence[str] | None = None,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> WrittenLogs:
    """Write the days (all by default) that are missing, in `workers` processes.

    The bytes of a day depend on the configuration and the format alone. Raises ValueError if the directory holds
    anything but this world in this format.
    """
    if file_format not in get_args(FileFormat):
        raise ValueError(f"file_format must be one of {get_args(FileFormat)}, not {file_format!r}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    unknown = sorted(set(days or ()) - set(config.dates))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a day of this world ({config.dates[0]} to {config.dates[-1]})")

    out = Path(out_dir)
    _claim(out, config, file_format)
    wanted = config.dates if days is None else sorted(set(days))
    missing = [ds for ds in wanted if not (out / "actions" / ds).exists()]
    num_rows = 0
    for done, (ds, num_rows_of_day) in enumerate(_make_all(config, out, file_format, missing, workers), 1):
        _publish(out, ds)
        num_rows += num_rows_of_day
        if progress is not None:
            progress(f"{ds}: {num_rows_of_day:,} rows ({done} of {len(missing)} days)")
    _finish(out, config, file_format)
    skipped = tuple(sorted(set(wanted) - set(missing)))
    return WrittenLogs(days_written=tuple(missing), days_skipped=skipped, num_rows=num_rows)


def read_config(out_dir: Path | str) -> WorldConfig:
    """Return the configuration of the world whose finished logs are in a directory."""
    return WorldConfig.from_dict(json.loads((Path(out_dir) / WORLD_FILE).read_text())["config"])


def find_config(out_dir: Path | str) -> WorldConfig | None:
    """Return the configuration of the world in a directory, also of an unfinished one; None if there is none."""
    for folder in (Path(out_dir), Path(out_dir) / WRITING):
        if (folder / WORLD_FILE).exists():
            return read_config(folder)
    return None


# The directory


def _identity(config: WorldConfig, file_format: FileFormat) -> dict[str, object]:
    return {"fingerprint": config.fingerprint(), "file_format": file_format, "config": config.to_dict()}


def _claim(out: Path, config: WorldConfig, file_format: FileFormat) -> None:
    """Check that the directory is empty or has this world, and remove what an interrupted run left unfinished."""
    markers = [path for path in (out / WORLD_FILE, out / WRITING / WORLD_FILE) if path.exists()]
    if not markers and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty, and does not hold the logs of a world")
    for marker in markers:
        found = json.loads(marker.read_text())
        if (found["fingerprint"], found["file_format"]) != (config.fingerprint(), file_format):
            raise ValueError(
                f"{out} holds another world: {found['config']['num_days']} days from {found['config']['start_ds']}, "
                f"fingerprint {found['fingerprint']} as {found['file_format']}, not {config.num_days} days from "
                f"{config.start_ds}, {config.fingerprint()} as {file_format}"
            )
    for folder in (out / WRITING, out / "actions", out / "pins"):
        folder.mkdir(parents=True, exist_ok=True)
    _write_json(out / WRITING / WORLD_FILE, _identity(config, file_format))
    for leftover in (out / WRITING).iterdir():
        if leftover.is_dir():
            shutil.rmtree(leftover)


def _publish(out: Path, ds: str) -> None:
    made = out / WRITING / ds
    os.replace(made / "pins.parquet", out / "pins" / f"{ds}.parquet")
    os.replace(made / "actions", out / "actions" / ds)
    made.rmdir()


def _finish(out: Path, config: WorldConfig, file_format: FileFormat) -> None:
    (out / FORGET_FILE).touch()
    finished = [ds for ds in config.dates if (out / "actions" / ds).exists()]
    _write_json(out / WORLD_FILE, {**_identity(config, file_format), "days": finished})
    shutil.rmtree(out / WRITING)


def _write_json(path: Path, content: dict[str, object]) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, path)


# The days

_world: World | None = None
"""The world of a worker process, which builds it once."""


def _open_world(config: WorldConfig) -> None:
    global _world
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _world = World(config)


def _end_with_parent() -> None:
    """End this worker when the process that started it has ended, also if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _make_days_in_worker(out: Path, file_format: FileFormat, days: list[str]) -> list[tuple[str, int]]:
    assert _world is not None
    return _make_days(_world, out, file_format, days)


def _make_all(
    config: WorldConfig, out: Path, file_format: FileFormat, days: list[str], workers: int
) -> Iterator[tuple[str, int]]:
    """Write days in ascending order, each to its folder under `.writing`; yield each day with its number of rows.

    If not all chunks fit into memory, a chunk of users is built once for several days.
    """
    at_once = 1 if config.num_chunks <= CHUNKS_IN_MEMORY else DAYS_AT_ONCE
    batches = [days[i : i + at_once] for i in range(0, len(days), at_once)]
    if workers == 1 or len(batches) <= 1:
        world = World(config)
        for batch in batches:
            yield from _make_days(world, out, file_format, batch)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_open_world, initargs=(config,)) as pool:
        for made in pool.map(partial(_make_days_in_worker, out, file_format), batches):
            yield from made


def _make_days(world: World, out: Path, file_format: FileFormat, days: list[str]) -> list[tuple[str, int]]:
    day_of = {ds: day for day, ds in enumerate(world.config.dates) if ds in days}
    num_rows = dict.fromkeys(days, 0)
    for ds, day in day_of.items():
        (out / WRITING / ds / "actions").mkdir(parents=True)
        _write_pins(world, day, out / WRITING / ds / "pins.parquet")
    for chunk in range(world.config.num_chunks):
        for ds, day in day_of.items():
            rows = log_rows(world, day, chunk)
            _write_rows(world, rows, chunk, file_format, out / WRITING / ds / "actions")
            num_rows[ds] += len(rows)
    return list(num_rows.items())


def _write_rows(world: World, rows: LogRows, chunk: int, file_format: FileFormat, folder: Path) -> None:
    table = to_table(rows, world.user_id(rows.user), world.pin_id(rows.pin))
    if file_format == "parquet":
        pq.write_table(
            break_table(table, rows),
            folder / f"part-{chunk:05d}.parquet",
            compression="zstd",
            use_dictionary=["event", "surface"],
            store_schema=False,
        )
    else:
        with (folder / "actions.csv.gz").open("ab") as file:
            text = _to_csv(table, rows, with_header=chunk == 0)
            file.write(gzip.compress(text, GZIP_LEVEL, mtime=0))


def log_rows(world: World, day: int, chunk: int) -> LogRows:
    """Return the log that arrives on a day from one chunk of users, with its defects."""
    rng = open_stream(world.config.seed, Stream.DEFECTS, day, chunk)
    return add_defects(clean_rows(world.actions(day, chunk)), world.config.dirt, rng)


def _to_csv(table: pa.Table, rows: LogRows, *, with_header: bool) -> bytes:
    """Return the rows as CSV: well-formed rows by Arrow, the few malformed lines between them one by one."""
    options = pa_csv.WriteOptions(include_header=False, quoting_style="none")
    buffer = pa.BufferOutputStream()
    if with_header:
        buffer.write((",".join(LOG_COLUMNS) + "\n").encode())
    start = 0
    for stop in (*np.flatnonzero(rows.defect != SOUND), len(rows)):
        if stop > start:
            pa_csv.write_csv(table.slice(start, stop - start), buffer, options)
        if stop < len(rows):
            values = table.slice(stop, 1).to_pylist()[0].values()
            line = ",".join("" if value is None else str(value) for value in values)
            buffer.write((break_line(line, int(rows.defect[stop])) + "\n").encode())
        start = stop + 1
    return bytes(buffer.getvalue().to_pybytes())


def _write_pins(world: World, day: int, path: Path) -> None:
    start, stop = world.created_on(day)
    dim = world.config.content.dim
    schema = pa.schema(
        {
            "pin": pa.string(),
            "vector": pa.list_(pa.float32(), dim),
            "topic": pa.string(),
            "on_homefeed": pa.bool_(),
            "created_ms": pa.int64(),
        }
    )
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for low in range(start, stop, 4 * BLOCK):
            index = np.arange(low, min(low + 4 * BLOCK, stop))
            flat = pa.array(world.vectors(int(index[0]), int(index[-1]) + 1).ravel())
            columns = [
                world.pin_id(index),
                pa.FixedSizeListArray.from_arrays(flat, dim),
                pa.array(world.pin_topics(index)),
                pa.array(world.pins.is_candidate[index]),
                pa.array(np.floor(world.pins.created_s[index] * 1000).astype(np.int64)),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
