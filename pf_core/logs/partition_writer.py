"""Writes and publishes partitions of raw_actions; `partition.py` has their layout, `ingest.py` decides on the rows."""

import contextlib
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.config.source import ActionsSource
from pf_core.errors import PipelineError
from pf_core.layouts import LAYOUTS
from pf_core.logs.answers import ANSWERS, answers_of, join_parts, part_name, write_part
from pf_core.logs.partition import BucketEntry, RawManifest, lock_folder, partition_dir, rows_not_kept
from pf_core.logs.positives import positive_mask
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.remedies import remedy_of
from pf_core.logs.routing import Arrival, InputFile, Tally, day_number
from pf_core.logs.settings import IngestSettings
from pf_core.progress import report
from pf_core.schemas import ANSWER, raw_actions_schema
from pf_core.storage.builds import building, publish_build
from pf_core.storage.files import read_parquet, remove_tree, write_file
from pf_core.storage.locks import exclusive

# Buckets


@dataclass(frozen=True, kw_only=True)
class BucketFile:
    """A written bucket: its entry in the manifest, and what it adds to the day's counts."""

    ds: str
    entry: BucketEntry
    counts: dict[str, int]
    by_type: dict[str, int]
    by_surface: dict[str, int]


def write_bucket(
    settings: IngestSettings, ds: str, folder: Path, bucket: int, actions: pa.Table, num_duplicates: int
) -> BucketFile:
    """Write the sorted, distinct actions of one bucket to `folder`, and the answers of its users."""
    if settings.answers is not None:
        write_part(folder / part_name(bucket), answers_of(actions), settings.actions.user_id.type)
        actions = actions.drop_columns([ANSWER])
    ids = actions["user_id"].combine_chunks()
    num_users = 1 + int(np.count_nonzero(pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)))
    by_type, by_surface = (
        {row["values"]: row["counts"] for row in actions[column].value_counts().to_pylist()}
        for column in ("action_type", "surface")
    )
    return BucketFile(
        ds=ds,
        entry=write_actions(folder, bucket, actions, settings.actions),
        counts={
            "kept": actions.num_rows,
            "users": num_users,
            "duplicates": num_duplicates,
            "positive": int(positive_mask(actions, settings.positive).sum()),
        },
        by_type=by_type,
        by_surface=by_surface,
    )


def write_actions(folder: Path, bucket: int, actions: pa.Table, source: ActionsSource) -> BucketEntry:
    """Write the file of a bucket; the same actions give the same bytes."""
    path = folder / f"bucket-{bucket:05d}.parquet"
    for name, category in (("action_type", source.action_type), ("surface", source.surface)):
        if category.vocabulary is None:  # then codes are in the order in which values were read
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
    return BucketEntry(bucket=bucket, name=path.name, num_rows=actions.num_rows, num_bytes=num_bytes, sha256=sha256)


def _by_name(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return the same values with codes in alphabetical order, so that the same rows give the same bytes."""
    texts = column.combine_chunks().cast(pa.string())
    names = texts.unique().sort()
    return pa.DictionaryArray.from_arrays(pc.index_in(texts, names).cast(pa.int16()), names)


# Days


@contextlib.contextmanager
def writing_partitions(
    settings: IngestSettings, days: Sequence[str], tmp: Path
) -> Iterator[tuple["PartitionWriter", Path]]:
    """Lock the days; yield a writer of their partitions and a scratch folder in `tmp`.

    On exit the scratch folder and all builds that were not published are removed.
    """
    with contextlib.ExitStack() as stack:
        for ds in days if settings.actions.is_dated else days[:1]:
            what = f"raw_actions {ds}" if settings.actions.is_dated else "raw_actions"
            stack.enter_context(exclusive(lock_folder(settings.directory, settings.actions, ds), what))
        for ds in days:
            for leftover in tmp.glob(f"raw_actions-{ds}-*"):  # scratch folders of a run that was killed
                remove_tree(leftover)
        builds = {ds: stack.enter_context(building(partition_dir(settings.directory, ds))) for ds in days}
        writer = PartitionWriter(settings, builds)
        scratch = tmp / f"raw_actions-{days[0]}-{uuid.uuid4().hex}"  # a lost task may still write to an old one
        scratch.mkdir(parents=True)
        stack.callback(remove_tree, scratch)
        yield writer, scratch


@dataclass(kw_only=True)
class _Day:
    """A partition in the making."""

    tally: Tally
    build: Path
    by_type: Counter[str] = field(default_factory=Counter)
    by_surface: Counter[str] = field(default_factory=Counter)
    files: list[BucketEntry] = field(default_factory=list)
    inputs: list[InputFile] = field(default_factory=list)
    neighbours: list[InputFile] = field(default_factory=list)


class PartitionWriter:
    """Collects buckets and counts of consecutive days in new builds, and publishes each day when it is complete."""

    def __init__(self, settings: IngestSettings, builds: Mapping[str, Path]) -> None:
        self.settings = settings
        self.days = {ds: _start_day(ds, build) for ds, build in builds.items()}
        self._started = time.monotonic()

    def add_inputs(self, arrival: Arrival) -> None:
        """Record the files for the day on which they arrived, and for the days that may have rows in them."""
        source = self.settings.actions
        for ds, day in self.days.items():
            if arrival.ds is None or arrival.ds == ds:
                day.inputs += arrival.files
            elif -source.early_days <= day_number(arrival.ds) - day_number(ds) <= source.late_days:
                day.neighbours += arrival.files

    def add_bucket(self, bucket: BucketFile) -> None:
        day = self.days[bucket.ds]
        day.files.append(bucket.entry)
        day.tally.counts.update(bucket.counts)
        day.by_type.update(bucket.by_type)
        day.by_surface.update(bucket.by_surface)

    def publish(self, ds: str, *, num_outside_site_days: int, num_other_days: int) -> RawManifest:
        """Write the manifest of a day, which makes its build the one that readers use."""
        day = self.days[ds]
        counts, quarantine = day.tally.counts, day.tally.quarantine
        quarantine_file = quarantine.close()
        counts["quarantined"] = quarantine.by_reason.total()
        if counts["quarantined"] and counts["quarantined"] == counts["read"]:
            first = read_parquet(quarantine.path).slice(0, 1).to_pylist()[0]
            raise PipelineError(
                f"{ds}: not one of the {counts['read']:,} rows could be used. {first['source_file']}, "
                f"row {first['row_number']}: {first['reason']}",
                remedy_of(first["reason"]),
            )
        manifest: RawManifest = {
            "ds": ds,
            "layout": 1 if self.settings.answers is None else LAYOUTS["raw_actions"],
            "site": self.settings.fingerprint,
            "seconds": round(time.monotonic() - self._started, 2),
            "num_buckets": self.settings.num_buckets,
            "counts": {
                "read": counts["read"],
                "received": counts["received"],
                "kept": counts["kept"],
                "duplicates": counts["duplicates"],
                "skipped": counts["skipped"],
                "sent": counts["sent"],
                "forgotten": counts["forgotten"],
                "quarantined": counts["quarantined"],
                "redacted": quarantine.num_redacted,
                "users": counts["users"],
                "positive": counts["positive"],
            },
            "sent_to": dict(day.tally.sent_to),
            "outside_site_days": num_outside_site_days,
            "other_days": num_other_days,
            "by_type": dict(day.by_type),
            "by_surface": dict(day.by_surface),
            "quarantined_by_reason": dict(quarantine.by_reason),
            "quarantine_file": quarantine_file,
            "files": sorted(day.files, key=lambda entry: entry["bucket"]),
            "inputs": day.inputs,
            "neighbours": day.neighbours,
            "build": day.build.name,
        }
        if self.settings.answers is not None:
            buckets = (entry["bucket"] for entry in day.files)
            manifest["answers"] = {
                "column": self.settings.answers.column,
                "values": list(self.settings.answers.values),
                "name": ANSWERS,
                "num_users": join_parts(day.build, buckets, self.settings.actions.user_id.type),
            }
        self._started = time.monotonic()
        for lost in day.build.glob(".*"):  # unfinished attempts at a bucket, of machines that died
            remove_tree(lost)
        publish_build(day.build, dict(manifest))
        received = f" and {counts['received']:,} received from the files of other days" if counts["received"] else ""
        kept = f"{counts['kept']:,} actions of {counts['users']:,} users"
        outcomes = ", ".join([kept, *rows_not_kept(manifest["counts"])])
        report(f"raw_actions {ds}: {counts['read']:,} rows read{received}: {outcomes}")
        return manifest


def _start_day(ds: str, build: Path) -> _Day:
    return _Day(build=build, tally=Tally(ds=ds, quarantine=Quarantine(build / "quarantine.parquet")))
