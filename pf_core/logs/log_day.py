"""A day of raw_actions as a stage reads it: opened once, so that its files and its digest belong together.

A day can be ingested again at any time. What a stage records about a day comes from the manifest that named the files
which it read; it never asks a second time. At the end, a stage refuses to publish if the day was ingested again.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.logs.partition import (
    RawManifest,
    digest_of_rows,
    files_of,
    lock_folder,
    read_manifest,
    require_manifest,
)
from pf_core.storage.locks import relying_on


@dataclass(frozen=True, kw_only=True)
class LogDay:
    """One day of raw_actions, as its manifest was when it was read."""

    manifest: RawManifest
    files: dict[int, Path]
    """Parquet file of each bucket that has actions on the day."""
    digest: str
    """Digest of the day's rows; it does not depend on when they were written."""

    @property
    def ds(self) -> str:
        return self.manifest["ds"]


def open_log_day(site: Site, ds: str) -> LogDay:
    """Open a day; a missing partition, or one with another number of buckets, is a PipelineError."""
    manifest = require_manifest(site, ds)
    return LogDay(manifest=manifest, files=files_of(site, manifest), digest=digest_of_rows(manifest))


@contextlib.contextmanager
def relying_on_log_day(site: Site, ds: str) -> Iterator[LogDay]:
    """Open a day, and keep runs that would ingest it again out until the end."""
    require_manifest(site, ds)  # the lock would make the folder of a partition that does not exist
    with relying_on(lock_folder(site.directory, site.source.actions, ds), f"raw_actions {ds}"):
        yield open_log_day(site, ds)


def refuse_if_changed(site: Site, days: Iterable[LogDay], *, what: str, command: str) -> None:
    """Refuse to publish `what` if one of the days that it was made from was ingested again; `command` repeats it."""
    for day in days:
        now = read_manifest(site, day.ds)
        if now is None or digest_of_rows(now) != day.digest:
            raise PipelineError(
                f"raw_actions {day.ds} was ingested again while {what} was made from it; nothing was published",
                f"run again: {command}",
            )
