"""raw_actions: a day's actions as the contract wants them. `ingest` makes them; here is what a partition is.

A partition is a build of Parquet files, one a user bucket, sorted and free of exact duplicates, so that
everything after it reads buckets and never shuffles again.
"""

import contextlib
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.positives import positive_mask
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.routing import Arrival, InputFile, Tally, day_number
from pf_core.progress import report
from pf_core.schemas import QUARANTINE_SCHEMA, raw_actions_schema
from pf_core.storage.builds import MANIFEST, building, publish_build
from pf_core.storage.files import read_json, read_parquet, remove_tree, write_file
from pf_core.storage.locks import exclusive

Manifest = dict[str, Any]


def partition_dir(site: Site, ds: str) -> Path:
    return site.directory / "raw_actions" / ds


def read_manifest(site: Site, ds: str) -> Manifest | None:
    path = partition_dir(site, ds) / MANIFEST
    return read_json(path) if path.exists() else None


def require_manifest(site: Site, ds: str) -> Manifest:
    manifest = read_manifest(site, ds)
    if manifest is None:
        raise PipelineError(
            f"raw_actions has no partition {ds}", f"make it with: {materialize_command('raw_actions', ds)}"
        )
    return manifest


def raw_digest(site: Site, ds: str) -> str:
    """Of the partition's content: the same for the same rows, whenever they were written."""
    digests = [entry["sha256"] for entry in require_manifest(site, ds)["files"]]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def ingested_days(site: Site) -> list[str]:
    return sorted(path.parent.name for path in (site.directory / "raw_actions").glob(f"*/{MANIFEST}"))


def bucket_files(site: Site, ds: str) -> dict[int, Path]:
    """The Parquet file of each bucket that has actions on that day; a missing partition is an error."""
    manifest = require_manifest(site, ds)
    if manifest["num_buckets"] != site.timelines.num_buckets:
        raise PipelineError(
            f"raw_actions {ds} has {manifest['num_buckets']} buckets, the site file says "
            f"{site.timelines.num_buckets}: re-materialize raw_actions and rebuild user_timelines, or change it back"
        )
    build = partition_dir(site, ds) / manifest["build"]
    return {entry["bucket"]: build / entry["name"] for entry in manifest["files"]}


def write_bucket(build: Path, bucket: int, actions: pa.Table, site: Site) -> dict[str, Any]:
    """One bucket's sorted rows as Parquet; returns what the manifest says of the file."""
    source = site.source.actions
    path = build / f"bucket-{bucket:05d}.parquet"
    for name, category in (("action_type", source.action_type), ("surface", source.surface)):
        if category.vocabulary is None:  # then codes are in the order in which values were met
            actions = actions.set_column(actions.schema.get_field_index(name), name, _by_name(actions[name]))
    # Sorted ids and times shrink to their differences, and LZ4 reads three times as fast as Zstandard.
    ascending = ["ts", "user_id"] if source.user_id.type == "int" else ["ts"]
    with write_file(path) as local:
        pq.write_table(
            actions.cast(raw_actions_schema(source.user_id.type, source.pin_id.type)),
            local,
            compression="lz4",
            use_dictionary=["action_type", "surface"],
            column_encoding=dict.fromkeys(ascending, "DELTA_BINARY_PACKED"),
        )
        with local.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = local.stat().st_size
    return {"name": path.name, "num_rows": actions.num_rows, "num_bytes": num_bytes, "sha256": sha256}


def _by_name(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """The same values, with codes in the order of their names: the same rows are the same bytes."""
    texts = column.combine_chunks().cast(pa.string())
    names = texts.unique().sort()
    return pa.DictionaryArray.from_arrays(pc.index_in(texts, names).cast(pa.int16()), names)


def read_quarantine(site: Site, ds: str) -> pa.Table:
    manifest = read_manifest(site, ds)
    if manifest is None or not manifest["quarantine_file"]:
        return QUARANTINE_SCHEMA.empty_table()
    return read_parquet(partition_dir(site, ds) / manifest["build"] / manifest["quarantine_file"])


COUNTS = ("read", "kept", "users", "positive", "duplicates", "skipped", "sent", "received", "forgotten", "quarantined")


@dataclass(frozen=True, kw_only=True)
class BucketFile:
    """What the manifest says of a bucket's file and of its rows."""

    ds: str
    entry: dict[str, Any]
    counts: dict[str, int]
    by_type: dict[str, int]
    by_surface: dict[str, int]


@dataclass(kw_only=True)
class _Day:
    tally: Tally
    build: Path
    by_type: Counter[str] = field(default_factory=Counter)
    by_surface: Counter[str] = field(default_factory=Counter)
    files: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[InputFile] = field(default_factory=list)
    neighbours: list[InputFile] = field(default_factory=list)  # other days' files that were looked through


class Partitions:
    """Consecutive days, from empty build folders to their publication."""

    def __init__(self, site: Site, builds: Mapping[str, Path]) -> None:
        self.site, self.days = site, {ds: _start_day(ds, build) for ds, build in builds.items()}
        self._started = time.monotonic()

    def note(self, arrival: Arrival) -> None:
        """Remember which files a day's rows came from, and which might have held some."""
        source = self.site.source.actions
        for ds, day in self.days.items():
            if arrival.ds is None or arrival.ds == ds:
                day.inputs += arrival.files
            elif -source.early_days <= day_number(arrival.ds) - day_number(ds) <= source.late_days:
                day.neighbours += arrival.files

    def add(self, bucket: BucketFile) -> None:
        day = self.days[bucket.ds]
        day.files.append(bucket.entry)
        day.tally.counts.update(bucket.counts)
        day.by_type.update(bucket.by_type)
        day.by_surface.update(bucket.by_surface)

    def publish(self, ds: str, *, num_outside_site_days: int) -> Manifest:
        day = self.days[ds]
        counts, quarantine = day.tally.counts, day.tally.quarantine
        quarantine_file = quarantine.close()
        counts["quarantined"] = quarantine.by_reason.total()
        if counts["quarantined"] and counts["quarantined"] == counts["read"]:
            first = read_parquet(quarantine.path).slice(0, 1).to_pylist()[0]
            raise PipelineError(
                f"{ds}: not one of the {counts['read']:,} rows could be used. {first['source_file']}, "
                f"row {first['row_number']}: {first['reason']}. Mend the mapping in the site file"
            )
        manifest: Manifest = {
            "ds": ds,
            "site": self.site.fingerprint(),
            "seconds": round(time.monotonic() - self._started, 2),
            "num_buckets": self.site.timelines.num_buckets,
            "counts": {name: counts[name] for name in COUNTS},
            "sent_to": dict(day.tally.sent_to),
            "outside_site_days": num_outside_site_days,
            "by_type": dict(day.by_type),
            "by_surface": dict(day.by_surface),
            "quarantined_by_reason": dict(quarantine.by_reason),
            "quarantine_file": quarantine_file,
            "files": sorted(day.files, key=lambda entry: int(entry["bucket"])),
            "inputs": day.inputs,
            "neighbours": day.neighbours,
        }
        self._started = time.monotonic()
        for lost in day.build.glob(".*"):  # attempts at a bucket whose machine died
            remove_tree(lost)
        publish_build(day.build, manifest)
        report(
            f"raw_actions {ds}: {counts['kept']:,} actions of {counts['users']:,} users, "
            f"{counts['duplicates']:,} duplicates, {counts['quarantined']:,} quarantined"
        )
        return manifest | {"build": day.build.name}


def _start_day(ds: str, build: Path) -> _Day:
    return _Day(build=build, tally=Tally(ds=ds, quarantine=Quarantine(build / "quarantine.parquet")))


@contextlib.contextmanager
def making_partitions(site: Site, days: Sequence[str], tmp: Path) -> Iterator[tuple[Partitions, Path]]:
    """The partitions and a folder in `tmp`, which nobody else writes meanwhile; what is not published is removed."""
    with contextlib.ExitStack() as stack:
        for ds in days if site.source.actions.is_dated else ["."]:  # an undated log: more days than one may lock
            stack.enter_context(exclusive(partition_dir(site, ds), f"raw_actions {ds}"))
        for ds in days:
            for leftover in tmp.glob(f"raw_actions-{ds}-*"):  # of a run that was killed
                remove_tree(leftover)
        partitions = Partitions(site, {ds: stack.enter_context(building(partition_dir(site, ds))) for ds in days})
        scratch = tmp / f"raw_actions-{days[0]}-{uuid.uuid4().hex}"  # a lost task knows the old one
        scratch.mkdir(parents=True)
        stack.callback(remove_tree, scratch)
        yield partitions, scratch


def make_bucket(site: Site, ds: str, folder: Path, bucket: int, actions: pa.Table, num_duplicates: int) -> BucketFile:
    ids = actions["user_id"].combine_chunks()
    num_users = 1 + int(np.count_nonzero(pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)))
    num_positive = int(positive_mask(actions, site.source.positive).sum())
    by_type, by_surface = (
        {row["values"]: row["counts"] for row in actions[column].value_counts().to_pylist()}
        for column in ("action_type", "surface")
    )
    return BucketFile(
        ds=ds,
        entry={"bucket": bucket, **write_bucket(folder, bucket, actions, site)},
        counts={
            "kept": actions.num_rows,
            "users": num_users,
            "duplicates": num_duplicates,
            "positive": num_positive,
        },
        by_type=by_type,
        by_surface=by_surface,
    )
