"""A partition of raw_actions: one day's actions in the columns of the contract.

    raw_actions/2026-01-03/
        manifest.json               what the partition holds (RawManifest); names the build that readers use
        build-000002/
            bucket-00000.parquet    actions of one user bucket, sorted, without exact duplicates
            bucket-00003.parquet    a bucket without actions on that day has no file
            quarantine.parquet      rejected rows, if there are any
            answers.parquet         who may be learned from, if the site file names a column for it (answers.py)

Because the files are bucketed and sorted here, later stages read single buckets and never shuffle again. The same rows
give the same bytes, so the SHA-256 of the files shows whether a day changed.

This module defines the layout and reads partitions; `partition_writer.py` writes and publishes them.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.config.source import ActionsSource
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import refuse_other_layout
from pf_core.logs.answers import AnswersEntry
from pf_core.logs.routing import InputFile
from pf_core.schemas import QUARANTINE_SCHEMA
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import find_json, read_parquet

# The manifest


class RawCounts(TypedDict):
    """Number of rows; read + received = kept + duplicates + skipped + sent + forgotten + quarantined."""

    read: int
    """Rows in the day's own files; of an undated log, rows of the day."""
    received: int
    """Rows of this day found in the files of other days."""
    kept: int
    duplicates: int
    skipped: int
    """Rows left out by a rule of the mapping."""
    sent: int
    """Rows in the day's own files that belong to another day."""
    forgotten: int
    """Rows of users on the deletion list."""
    quarantined: int
    redacted: NotRequired[int]
    """How many of the quarantined rows are kept without their content; absent in the manifests of older versions."""
    users: int
    """Number of distinct users among the kept rows."""
    positive: int
    """Number of kept rows that are positive engagement."""


class BucketEntry(TypedDict):
    """One bucket's Parquet file."""

    bucket: int
    name: str
    num_rows: int
    num_bytes: int
    sha256: str


class RawManifest(TypedDict):
    """Content of a partition's manifest.json."""

    ds: str
    layout: NotRequired[int]
    """Not in manifests of earlier versions, which are of layout 1."""
    site: str
    """Fingerprint of the site file that the partition was made with."""
    seconds: float
    num_buckets: int
    counts: RawCounts
    sent_to: dict[str, int]
    """Number of rows sent to each other day."""
    outside_site_days: int
    """Number of rows of an undated log that belong to no day of the site, usable or not."""
    other_days: int
    """Number of rows of an undated log that belong to days of the site which the run did not write."""
    by_type: dict[str, int]
    by_surface: dict[str, int]
    quarantined_by_reason: dict[str, int]
    quarantine_file: str | None
    files: list[BucketEntry]
    answers: NotRequired[AnswersEntry]
    """Who may be learned from; only if the day was ingested with a column for it."""
    inputs: list[InputFile]
    """The day's own log files."""
    neighbours: list[InputFile]
    """Log files of other days that were searched for rows of this day."""
    build: str
    """Name of the folder with the files."""
    ingested_digest: NotRequired[str]
    """Digest of the rows as they were ingested, if rows of forgotten users have been deleted since (`purge.py`)."""
    users_deleted: NotRequired[int]
    """Number of forgotten users whose rows have been deleted since."""


def rows_not_kept(counts: RawCounts) -> list[str]:
    """Return what became of the rows that were not kept, such as "42 skipped by a rule"."""
    named = (
        (counts["duplicates"], "duplicates"),
        (counts["skipped"], "skipped by a rule"),
        (counts["sent"], "sent to the day on which they happened"),
        (counts["forgotten"], "of forgotten users"),
        (counts["quarantined"], "quarantined"),
    )
    return [f"{number:,} {outcome}" for number, outcome in named if number]


def partition_dir(directory: Path, ds: str) -> Path:
    """Return the folder of a partition, given the folder of the site's assets."""
    return directory / "raw_actions" / ds


def lock_folder(directory: Path, actions: ActionsSource, ds: str) -> Path:
    """Return the folder whose lock is that of a day. An undated log may have more days than a process can lock: one
    lock for all of them."""
    return partition_dir(directory, ds if actions.is_dated else ".")


# Reading


def ingested_days(site: Site) -> list[str]:
    """Return the days that have a partition, in ascending order."""
    return sorted(path.parent.name for path in (site.directory / "raw_actions").glob(f"*/{MANIFEST}"))


def read_manifest(site: Site, ds: str) -> RawManifest | None:
    """Return the manifest of a day, or None if it has no partition; one of another layout is a PipelineError."""
    manifest: RawManifest | None = find_json(partition_dir(site.directory, ds) / MANIFEST)
    if manifest is not None:
        command = materialize_command("raw_actions", ds)
        refuse_other_layout("raw_actions", manifest, what=f"raw_actions {ds}", command=command)
    return manifest


def require_manifest(site: Site, ds: str) -> RawManifest:
    """Return the manifest of a day; raise PipelineError if it has no partition."""
    manifest = read_manifest(site, ds)
    if manifest is None:
        raise PipelineError(
            f"raw_actions has no partition {ds}", f"make it with: {materialize_command('raw_actions', ds)}"
        )
    return manifest


def raw_digest(site: Site, ds: str) -> str:
    """Return a digest of the partition's rows; it does not depend on when they were written."""
    return digest_of_rows(require_manifest(site, ds))


def bucket_files(site: Site, ds: str) -> dict[int, Path]:
    """Return the Parquet file of each bucket that has actions on that day; a missing partition is an error."""
    return files_of(site, require_manifest(site, ds))


def digest_of_rows(manifest: RawManifest) -> str:
    """Return a digest of the rows of the partition that a manifest describes.

    Deleting rows of forgotten users does not change it: what was built from the rows leaves these users out.
    """
    return manifest.get("ingested_digest") or digest_of_files(manifest["files"])


def digest_of_files(files: Sequence[BucketEntry]) -> str:
    return hashlib.sha256("".join(entry["sha256"] for entry in files).encode()).hexdigest()[:16]


def files_of(site: Site, manifest: RawManifest) -> dict[int, Path]:
    """Return the Parquet file of each bucket that has actions; another number of buckets is a PipelineError."""
    ds = manifest["ds"]
    if manifest["num_buckets"] != site.timelines.num_buckets:
        raise PipelineError(
            f"raw_actions {ds} has {manifest['num_buckets']} buckets, the site file says {site.timelines.num_buckets}",
            "re-materialize raw_actions and rebuild user_timelines, or change num_buckets back",
        )
    build = partition_dir(site.directory, ds) / manifest["build"]
    return {entry["bucket"]: build / entry["name"] for entry in manifest["files"]}


def read_quarantine(site: Site, ds: str) -> pa.Table:
    """Return the rejected rows of a day; an empty table if there are none, or no partition."""
    manifest = read_manifest(site, ds)
    if manifest is None or not manifest["quarantine_file"]:
        return QUARANTINE_SCHEMA.empty_table()
    return read_parquet(partition_dir(site.directory, ds) / manifest["build"] / manifest["quarantine_file"])
