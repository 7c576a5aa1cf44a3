"""Ingestion: foreign log files to raw_actions partitions.

Every row that is read is accounted for in a manifest: kept, duplicate, skipped by a rule, sent to its own day,
forgotten, or quarantined with a reason. A day is published whole or not at all.

There are two ways to the same bytes. On one machine, a task takes whole days: it reads their files, shuffles in memory
and writes. On an engine that spans machines, one day may be too large for any of them, so all share it in two steps:
1. route: a task reads some of the files and flushes their rows, by day and bucket, to a scratch folder on the shared
   disk, with its counts and its rejects;
2. gather: a task brings the parts of some buckets together, a few buckets at a time, and writes them.
A lost task is started again. So that rows never count twice, a task works in a folder of its own attempt, and what it
leaves gets its name by one rename, when it is whole.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.engine.base import Engine
from pf_core.engine.shuffle import ShuffleShare, merge_parts
from pf_core.errors import PipelineError
from pf_core.logs.partition import BucketFile, Manifest, Partitions, make_bucket, making_partitions
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.routing import Arrival, Router, Tally, find_arrivals, num_days_complete
from pf_core.progress import reporting_to
from pf_core.storage.files import is_remote, read_json, read_parquet, write_file, write_folder, write_json

DAYS_SHARED_AT_A_TIME = 7
"""Of a dated log on a cluster: more would fill the scratch folder, fewer would read neighbours' files more often."""

TASKS_PER_WORKER = 4
"""So that a worker with slow files does fewer tasks than the others."""

BUCKETS_AT_A_TIME = 4
"""Of a day, in a task's memory: every part is opened once for so many of them."""

TALLY = "tally.json"


def ingest_days(
    site: Site,
    days: Sequence[str],
    *,
    engine: Engine,
    forgotten: pa.Array,
    progress: Callable[[str], None],
) -> Iterator[Manifest]:
    """Write the partitions of consecutive days; yields each manifest once it is published.

    The days of a dated log are shared out among the workers of a machine; machines share each day. An undated log is
    read once, for all days.
    """
    if list(days) != ds_range(days[0], days[-1]):
        raise PipelineError(f"the days to ingest must be consecutive; {days[0]} … {days[-1]} has gaps")
    step = len(days)
    if site.source.actions.is_dated:
        step = DAYS_SHARED_AT_A_TIME if engine.spans_machines else -(-len(days) // engine.num_workers)
    passes = [list(days[start : start + step]) for start in range(0, len(days), step)]
    if engine.spans_machines:
        for chunk in passes:
            yield from _share_pass(site, chunk, engine, forgotten, progress)
        return
    shuffle = engine.shuffle(len(passes))
    tasks = [_Pass(site=site, days=chunk, forgotten=forgotten, shuffle=shuffle) for chunk in passes]
    for manifests in engine.map_buckets(_run_pass, tasks, progress):
        yield from manifests


# On one machine: a task takes whole days


@dataclass(frozen=True, kw_only=True)
class _Pass:
    site: Site
    days: list[str]
    forgotten: pa.Array
    shuffle: ShuffleShare


def _run_pass(task: _Pass) -> list[Manifest]:
    """Every file that may hold rows of the pass's days is read once.

    Files are read in the order of their days, and a day is written and published as soon as no later file can
    hold rows of it: memory holds a few days, not the pass.
    """
    site, num_buckets = task.site, task.site.timelines.num_buckets
    manifests: list[Manifest] = []
    with contextlib.ExitStack() as stack:
        partitions, scratch = stack.enter_context(making_partitions(site, task.days, site.workspace / "tmp"))
        shuffle = stack.enter_context(task.shuffle.open(scratch))
        router = Router(site, [day.tally for day in partitions.days.values()], task.forgotten)
        for arrival in find_arrivals(site, task.days):
            partitions.note(arrival)
            for rows, group in router.route(arrival):
                shuffle.add(rows, group)
            num_complete = num_days_complete(site, task.days, arrival)
            for number, actions, num_duplicates in shuffle.finish(below=num_complete * num_buckets):
                ds, bucket = task.days[number // num_buckets], number % num_buckets
                build = partitions.days[ds].build
                partitions.add(make_bucket(site, ds, build, bucket, actions, num_duplicates))
            for ds in task.days[len(manifests) : num_complete]:
                manifests.append(partitions.publish(ds, num_outside_site_days=router.num_outside_site_days))
    return manifests


# On many machines: all share each day


def _share_pass(
    site: Site, days: list[str], engine: Engine, forgotten: pa.Array, progress: Callable[[str], None]
) -> list[Manifest]:
    """Here is the driver: it locks the days, hands out the work, and publishes what came of it."""
    with making_partitions(site, days, site.directory / "tmp") as (partitions, scratch):
        arrivals = list(find_arrivals(site, days))
        for arrival in arrivals:
            partitions.note(arrival)
        with write_file(scratch / "forgotten.parquet") as path:
            pq.write_table(pa.table({"user_id": forgotten}), path)
        shares = _share_files(arrivals, TASKS_PER_WORKER * engine.num_workers)
        shuffle = engine.shuffle(len(shares))
        routes = [
            _Route(
                site=site,
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
        parts, num_outside_site_days = _take_together(partitions, [route.folder for route in routes])
        gathers = _share_buckets(partitions, parts, TASKS_PER_WORKER * engine.num_workers)
        progress(f"raw_actions {days[0]} … {days[-1]}: writing buckets in {len(gathers)} tasks")
        for files in engine.map_buckets(_gather_buckets, gathers, progress):
            for file in files:
                partitions.add(file)
        with reporting_to(progress):
            return [partitions.publish(ds, num_outside_site_days=num_outside_site_days) for ds in days]


def _share_files(arrivals: Sequence[Arrival], num_tasks: int) -> list[list[Arrival]]:
    """Consecutive files for each task, of about as many bytes as for any other.

    A file is never split, so a log should come in more files than there are workers. Consecutive, because then the
    tasks' rejects, one after the other, are in the order of the files.
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
    site: Site
    days: list[str]
    forgotten: Path
    arrivals: list[Arrival]
    folder: Path
    """Where everything goes that comes of these files."""
    shuffle: ShuffleShare


def _route_files(task: _Route) -> None:
    if (task.folder / TALLY).exists():
        return  # an earlier attempt was lost when its work was done
    with write_folder(task.folder, keep_first=True) as attempt:
        _route_to(attempt, task)


def _route_to(attempt: Path, task: _Route) -> None:
    tallies = [Tally(ds=ds, quarantine=Quarantine(attempt / f"quarantine-{ds}.parquet")) for ds in task.days]
    router = Router(task.site, tallies, read_parquet(task.forgotten)["user_id"].combine_chunks())
    shuffle = task.shuffle.fill(attempt)
    for arrival in task.arrivals:
        for rows, group in router.route(arrival):
            shuffle.add(rows, group)
    shuffle.flush()
    left = {
        "parts": [path.name for path in shuffle.spilled],
        "num_outside_site_days": router.num_outside_site_days,
        "days": {
            tally.ds: {"counts": tally.counts, "sent_to": tally.sent_to, "quarantine": tally.quarantine.close()}
            for tally in tallies
        },
    }
    write_json(attempt / TALLY, left)


def _take_together(partitions: Partitions, folders: Sequence[Path]) -> tuple[list[Path], int]:
    """Counts and rejects of all tasks, in the order of the files; returns the parts with the rows."""
    parts: list[Path] = []
    num_outside_site_days = 0
    for folder in folders:
        left = read_json(folder / TALLY)
        parts += [folder / name for name in left["parts"]]
        num_outside_site_days += left["num_outside_site_days"]
        for ds, found in left["days"].items():
            tally = partitions.days[ds].tally
            tally.counts.update(found["counts"])
            tally.sent_to.update(found["sent_to"])
            if found["quarantine"] is not None:
                tally.quarantine.absorb(folder / found["quarantine"])
    return parts, num_outside_site_days


@dataclass(frozen=True, kw_only=True)
class _Gather:
    site: Site
    ds: str
    build: Path
    buckets: range
    first_group: int
    """Of the day."""
    parts: list[Path]


def _share_buckets(partitions: Partitions, parts: list[Path], num_tasks: int) -> list[_Gather]:
    num_buckets = partitions.site.timelines.num_buckets
    step = -(-len(partitions.days) * num_buckets // num_tasks)
    return [
        _Gather(
            site=partitions.site,
            ds=ds,
            build=day.build,
            buckets=range(num_buckets)[first : first + step],
            first_group=number * num_buckets,
            parts=parts,
        )
        for number, (ds, day) in enumerate(partitions.days.items())
        for first in range(0, num_buckets, step)
    ]


def _gather_buckets(task: _Gather) -> list[BucketFile]:
    """A few buckets at a time; a second attempt writes the same bytes, and no reader ever sees half of them."""
    files = []
    for start in range(0, len(task.buckets), BUCKETS_AT_A_TIME):
        groups = [task.first_group + bucket for bucket in task.buckets[start : start + BUCKETS_AT_A_TIME]]
        for group, actions, num_duplicates in merge_parts(task.parts, groups):
            files.append(_put_bucket(task, group - task.first_group, actions, num_duplicates))
    return files


def _put_bucket(task: _Gather, bucket: int, actions: pa.Table, num_duplicates: int) -> BucketFile:
    if is_remote(task.build):  # where a file appears when it is whole
        return make_bucket(task.site, task.ds, task.build, bucket, actions, num_duplicates)
    attempt = task.build / f".{uuid.uuid4().hex}"
    attempt.mkdir()
    file = make_bucket(task.site, task.ds, attempt, bucket, actions, num_duplicates)
    os.replace(attempt / file.entry["name"], task.build / file.entry["name"])
    attempt.rmdir()
    return file
