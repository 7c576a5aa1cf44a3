"""Ingestion: foreign log files to raw_actions partitions.

Every row that is read is accounted for in a manifest: kept, duplicate, skipped by a rule, sent to its own day,
forgotten, or quarantined with a reason. A day is published as a whole or not at all.

There are two ways, and both write the same bytes. On one machine, a task processes whole days: it reads their files,
shuffles in memory and writes. On an engine that spans machines, one day may be too large for any of them, so all
machines share it in two steps:
1. route: a task reads some of the files and writes their rows, by day and bucket, to a scratch folder on the shared
   disk, with its counts and its rejects;
2. gather: a task merges the parts of some buckets, a few buckets at a time, and writes the partition's files.
A lost task is started again. So that no row counts twice, every attempt writes to a folder of its own, which is renamed
to its final name when it is complete.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.engine.base import Engine
from pf_core.engine.shuffle import ShuffleShare, merge_parts
from pf_core.errors import PipelineError
from pf_core.logs.partition import RawManifest
from pf_core.logs.partition_writer import BucketFile, PartitionWriter, write_bucket, writing_partitions
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.routing import Arrival, Router, Tally, find_arrivals, num_days_complete
from pf_core.logs.settings import IngestSettings
from pf_core.progress import Progress, reporting_to
from pf_core.storage.files import is_remote, read_json, read_parquet, write_file, write_folder, write_json

DAYS_SHARED_AT_A_TIME = 7
"""Days of a dated log that a cluster ingests together: with more of them the scratch folder grows, with fewer the files
of neighbouring days are read more often."""

TASKS_PER_WORKER = 4
"""More than one, so that a worker with slow files does fewer tasks than the others."""

BUCKETS_AT_A_TIME = 4
"""Buckets that a gathering task holds in memory; it opens every part once for each such set of buckets."""

TALLY = "tally.json"


def ingest_days(
    site: Site,
    days: Sequence[str],
    *,
    engine: Engine,
    forgotten: pa.Array,
    progress: Progress,
) -> Iterator[RawManifest]:
    """Write the partitions of consecutive days; yield each manifest once it is published.

    On one machine, the workers divide the days of a dated log among them; on a cluster, they share every day. An
    undated log is read once, for all days.
    """
    if list(days) != ds_range(days[0], days[-1]):
        raise PipelineError(f"the days to ingest must be consecutive; {days[0]} … {days[-1]} has gaps")
    settings = IngestSettings.of(site)
    step = len(days)
    if site.source.actions.is_dated:
        step = DAYS_SHARED_AT_A_TIME if engine.spans_machines else -(-len(days) // engine.num_workers)
    passes = [list(days[start : start + step]) for start in range(0, len(days), step)]
    if engine.spans_machines:
        for chunk in passes:
            yield from _share_pass(settings, chunk, engine, forgotten, progress)
        return
    shuffle = engine.shuffle(len(passes))
    tasks = [_Pass(settings=settings, days=chunk, forgotten=forgotten, shuffle=shuffle) for chunk in passes]
    for manifests in engine.map_buckets(_run_pass, tasks, progress):
        yield from manifests


# On one machine: a task processes whole days


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A task: consecutive days, whose files are read once."""

    settings: IngestSettings
    days: list[str]
    forgotten: pa.Array
    shuffle: ShuffleShare


def _run_pass(task: _Pass) -> list[RawManifest]:
    """Read every file that may hold rows of the days once, and publish the days.

    Files are read in the order of their days, and a day is written and published as soon as no later file can
    hold rows of it: memory holds a few days, not all days of the task.
    """
    settings, num_buckets = task.settings, task.settings.num_buckets
    manifests: list[RawManifest] = []
    with (
        writing_partitions(settings, task.days, settings.workspace / "tmp") as (writer, scratch),
        task.shuffle.open(scratch) as shuffle,
    ):
        router = Router(settings, [day.tally for day in writer.days.values()], task.forgotten)
        for arrival in find_arrivals(settings, task.days):
            writer.add_inputs(arrival)
            for rows, group in router.route(arrival):
                shuffle.add(rows, group)
            num_complete = num_days_complete(task.days, arrival, late_days=settings.actions.late_days)
            for number, actions, num_duplicates in shuffle.finish(below=num_complete * num_buckets):
                ds, bucket = task.days[number // num_buckets], number % num_buckets
                writer.add_bucket(write_bucket(settings, ds, writer.days[ds].build, bucket, actions, num_duplicates))
            for ds in task.days[len(manifests) : num_complete]:
                outside, other = router.num_outside_site_days, router.num_other_days
                manifests.append(writer.publish(ds, num_outside_site_days=outside, num_other_days=other))
    return manifests


# On many machines: all share each day


def _share_pass(
    settings: IngestSettings,
    days: list[str],
    engine: Engine,
    forgotten: pa.Array,
    progress: Progress,
) -> list[RawManifest]:
    """Run the two steps for some days. This is the driver: it locks the days, sends out the tasks, and publishes."""
    with writing_partitions(settings, days, settings.directory / "tmp") as (writer, scratch):
        arrivals = list(find_arrivals(settings, days))
        for arrival in arrivals:
            writer.add_inputs(arrival)
        with write_file(scratch / "forgotten.parquet") as path:
            pq.write_table(pa.table({"user_id": forgotten}), path)
        shares = _share_files(arrivals, TASKS_PER_WORKER * engine.num_workers)
        shuffle = engine.shuffle(len(shares))
        routes = [
            _Route(
                settings=settings,
                days=days,
                forgotten=scratch / "forgotten.parquet",
                arrivals=share,
                folder=scratch / f"{number:06d}",
                shuffle=shuffle,
            )
            for number, share in enumerate(shares)
        ]
        num_files = sum(len(arrival.files) for arrival in arrivals)
        progress(f"raw_actions {days[0]} … {days[-1]}: reading {num_files:,} files in {len(routes)} tasks")
        for _ in engine.map_buckets(_route_files, routes, progress):
            pass
        parts, outside, other = _collect_tallies(writer, [route.folder for route in routes])
        gathers = _share_buckets(writer, parts, TASKS_PER_WORKER * engine.num_workers)
        progress(f"raw_actions {days[0]} … {days[-1]}: writing buckets in {len(gathers)} tasks")
        for files in engine.map_buckets(_gather_buckets, gathers, progress):
            for file in files:
                writer.add_bucket(file)
        with reporting_to(progress):
            return [writer.publish(ds, num_outside_site_days=outside, num_other_days=other) for ds in days]


def _share_files(arrivals: Sequence[Arrival], num_tasks: int) -> list[list[Arrival]]:
    """Divide the files into at most `num_tasks` runs of consecutive files, of about the same number of bytes.

    A file is never split, so a log should come in more files than there are workers. The files are consecutive, so
    that the rejects of the tasks, one task after the other, are in the order of the files.
    """
    total = sum(max(1, file["num_bytes"]) for arrival in arrivals for file in arrival.files)
    num_before = 0
    shares: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        split: dict[int, Arrival] = {}
        for file in arrival.files:
            share = split.setdefault(num_before * num_tasks // total, Arrival(ds=arrival.ds, files=[]))
            share.files.append(file)
            num_before += max(1, file["num_bytes"])
        for number, share in split.items():
            shares.setdefault(number, []).append(share)
    return list(shares.values())


@dataclass(frozen=True, kw_only=True)
class _Route:
    """A task of the first step: some of the files."""

    settings: IngestSettings
    days: list[str]
    forgotten: Path
    """Parquet file with the user ids on the deletion list."""
    arrivals: list[Arrival]
    folder: Path
    """Folder for the rows, the counts and the rejects of these files."""
    shuffle: ShuffleShare


def _route_files(task: _Route) -> None:
    if (task.folder / TALLY).exists():
        return  # an earlier attempt finished its work and was lost afterwards
    with write_folder(task.folder, keep_first=True) as attempt:
        _route_to(attempt, task)


def _route_to(attempt: Path, task: _Route) -> None:
    tallies = [Tally(ds=ds, quarantine=Quarantine(attempt / f"quarantine-{ds}.parquet")) for ds in task.days]
    router = Router(task.settings, tallies, read_parquet(task.forgotten)["user_id"].combine_chunks())
    shuffle = task.shuffle.fill(attempt)
    for arrival in task.arrivals:
        for rows, group in router.route(arrival):
            shuffle.add(rows, group)
    shuffle.flush()
    tally_file = {
        "parts": [path.name for path in shuffle.spilled],
        "num_outside_site_days": router.num_outside_site_days,
        "num_other_days": router.num_other_days,
        "days": {
            tally.ds: {"counts": tally.counts, "sent_to": tally.sent_to, "quarantine": tally.quarantine.close()}
            for tally in tallies
        },
    }
    write_json(attempt / TALLY, tally_file)


def _collect_tallies(writer: PartitionWriter, folders: Sequence[Path]) -> tuple[list[Path], int, int]:
    """Add the counts and rejects of all routing tasks to the days, in the order of the files.

    Returns the files with the routed rows, and the numbers of rows outside the site's days and of its other days.
    """
    parts: list[Path] = []
    num_outside_site_days = num_other_days = 0
    for folder in folders:
        tally_file = read_json(folder / TALLY)
        parts += [folder / name for name in tally_file["parts"]]
        num_outside_site_days += tally_file["num_outside_site_days"]
        num_other_days += tally_file["num_other_days"]
        for ds, found in tally_file["days"].items():
            tally = writer.days[ds].tally
            tally.counts.update(found["counts"])
            tally.sent_to.update(found["sent_to"])
            if found["quarantine"] is not None:
                tally.quarantine.absorb(folder / found["quarantine"])
    return parts, num_outside_site_days, num_other_days


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """A task of the second step: some buckets of one day."""

    settings: IngestSettings
    ds: str
    build: Path
    buckets: range
    first_group: int
    """Group number of the day's bucket 0."""
    parts: list[Path]
    """Files with the routed rows of all days."""


def _share_buckets(writer: PartitionWriter, parts: list[Path], num_tasks: int) -> list[_Gather]:
    num_buckets = writer.settings.num_buckets
    step = -(-len(writer.days) * num_buckets // num_tasks)
    return [
        _Gather(
            settings=writer.settings,
            ds=ds,
            build=day.build,
            buckets=range(num_buckets)[first : first + step],
            first_group=number * num_buckets,
            parts=parts,
        )
        for number, (ds, day) in enumerate(writer.days.items())
        for first in range(0, num_buckets, step)
    ]


def _gather_buckets(task: _Gather) -> list[BucketFile]:
    """Merge and write the buckets, a few at a time. A second attempt writes the same bytes."""
    files = []
    for start in range(0, len(task.buckets), BUCKETS_AT_A_TIME):
        groups = [task.first_group + bucket for bucket in task.buckets[start : start + BUCKETS_AT_A_TIME]]
        for group, actions, num_duplicates in merge_parts(task.parts, groups):
            files.append(_write_at_once(task, group - task.first_group, actions, num_duplicates))
    return files


def _write_at_once(task: _Gather, bucket: int, actions: pa.Table, num_duplicates: int) -> BucketFile:
    """Write a bucket under a temporary name and rename it, so that a lost attempt leaves no half-written file."""
    if is_remote(task.build):  # an object appears only when it is complete
        return write_bucket(task.settings, task.ds, task.build, bucket, actions, num_duplicates)
    attempt = task.build / f".{uuid.uuid4().hex}"
    attempt.mkdir()
    file = write_bucket(task.settings, task.ds, attempt, bucket, actions, num_duplicates)
    for made in attempt.iterdir():
        os.replace(made, task.build / made.name)
    attempt.rmdir()
    return file
