"""pin_features: every pin that the site knows as of each day, with its content vector, its interest, and whether
Homefeed may show it.

The pins of a day are those of the catalogue, of the matrix of vectors, and every pin with an action in raw_actions up
to that day: a log alone is enough. The catalogue wins where it describes a pin. A pin without a content vector has null
as `feature`; without any vector there is no such column, and `dim` is 0. Nothing later than the day enters, except what
an undated catalogue or matrix knows.

A day builds on the day before: it adds the pins of its log, and those of its catalogue files if the catalogue is dated
(the newest row of a pin counts). Its cost grows with what the day adds. If an undated catalogue or matrix changed, or
if the day before is missing, such a site is read as a whole: the files, and the pin ids of all days of raw_actions. A
day whose inputs did not change is not rebuilt, and a day that adds nothing shares the version of the day before.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import lance
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_range, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import DailyState, Manifest, StateManifest, advance_bucket, create_bucket, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import LAYOUTS
from pf_core.logs.log_day import open_log_day, refuse_if_changed
from pf_core.logs.partition import bucket_files, ingested_days, raw_digest
from pf_core.logs.quarantine import Quarantine
from pf_core.pins.catalogue import Catalogue, nothing_usable
from pf_core.pins.inputs import (
    catalogue_files,
    dated_files,
    digest_of_ids,
    dim_of,
    joined,
    no_pins,
    read_described_pins,
    read_log_pins,
    rows_of_log_pins,
    undated_files,
    with_feature_column,
    without,
)
from pf_core.progress import Progress
from pf_core.schemas import id_arrow_type
from pf_core.storage.files import read_parquet, stamp_of


class PinTotals(TypedDict):
    """Numbers of pins of a partition."""

    pins: int
    candidates: int
    with_feature: int
    """Pins with a content vector."""
    new: int
    """Pins that the day before did not have; if the inputs are read as a whole, all pins of a new version."""
    new_in_log: int
    """New pins that only the log has."""
    updated: int
    """Pins of the day before that have a new row."""
    quarantined: int
    """Rejected rows of the catalogue."""
    fragments: int
    """Fragments of the Lance dataset."""


class PinOrigin(TypedDict):
    """What a partition was built from."""

    source: str
    """Digest of the site file's `pins` and of the files that are not dated."""
    raw_digests: dict[str, str]
    """Digest of raw_actions of each day whose pins are in the partition."""
    inputs: str
    """Digest of what the partition was built from."""
    added: str
    """Digest of what was added to which day; the same one means the same content."""


class PinManifest(StateManifest, PinOrigin):
    """Manifest of a partition of pin_features; it has one bucket."""

    content: str
    """`added` of the newest day that added anything."""
    dim: int
    """Dimension of the content vectors; 0 if no pin has one."""
    counts: PinTotals
    quarantined_by_reason: dict[str, int]


PinState = DailyState[PinManifest]


def pin_state(site: Site) -> PinState:
    return DailyState(root=site.directory / "pin_features", asset="pin_features", num_buckets=1)


def content_name(manifest: PinManifest | Manifest) -> str:
    """Return a name for the content of a partition: its version and a digest.

    The version alone is not enough: it counts from 1 again if the state is removed and rebuilt.
    """
    return f"{manifest['versions'][0]}-{manifest.get('content', manifest['inputs'])}"


def read_pin_features(site: Site, ds: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the pins of a day; `feature` is left out if no pin has one."""
    with pin_state(site).held(ds) as day:
        dataset = day.open_bucket(0)
        wanted = dataset.schema.names if columns is None else columns
        return dataset.to_table(columns=[name for name in wanted if name != "feature" or name in dataset.schema.names])


def build_pin_features(site: Site, days: Sequence[str], *, engine: Engine, progress: Progress) -> Iterator[PinManifest]:
    """Build the partitions of ascending days; yield each manifest once it is published."""
    state = pin_state(site)
    state.refuse_if_dropped(days, site.timelines.retention_days)
    with state.writing():
        for ds in days:
            manifest = _build_day(site, state, ds, is_first=ds == days[0])
            counts = manifest["counts"]
            progress(
                f"pin_features {ds}: {counts['pins']:,} pins, {counts['with_feature']:,} of them with a content "
                f"vector, {counts['new']:,} new"
            )
            yield manifest
        state.retain(site.timelines.retention_days, engine, progress)


def feature_coverage(site: Site, ds: str) -> float:
    """Return the share of the day's actions whose pin has a content vector; NaN on a day without actions, and for a
    site without vectors."""
    pins = read_pin_features(site, ds, ["pin_id", "has_feature"])
    with_feature = pins["pin_id"].filter(pins["has_feature"])
    num_actions = num_covered = 0
    for path in bucket_files(site, ds).values():
        pin_ids = read_parquet(path, columns=["pin_id"])["pin_id"]
        num_actions += len(pin_ids)
        num_covered += pc.sum(pc.is_in(pin_ids, with_feature)).as_py()
    if num_actions == 0 or site.source.pins.vectors is None:
        return float("nan")
    return num_covered / num_actions


# A day


def _build_day(site: Site, state: PinState, ds: str, *, is_first: bool) -> PinManifest:
    """Build a day on the day before, or from all files and logs; keep what is there if that would give the same."""
    source, dated = _source_digest(site), [stamp_of(file) for file in dated_files(site, ds)]
    base = _base(site, state, ds, source)
    log_days = [open_log_day(site, day) for day in _log_days(site, base, ds, is_first=is_first)]
    raw_digests = {day.ds: day.digest for day in log_days}
    built_on = None if base is None else content_name(base)
    inputs = _digest([source, built_on, raw_digests, dated])
    before = state.manifest(ds)
    if before is not None and before["inputs"] == inputs:
        return before
    log_pins, known = read_log_pins(site, log_days), None
    if base is not None:
        known = _open(state, base).to_table(columns=["pin_id"])["pin_id"]
        log_pins = without(log_pins, known)
    added = _digest([source, built_on, digest_of_ids(log_pins), dated])
    origin: PinOrigin = {
        "source": source,
        "raw_digests": raw_digests if base is None else base.get("raw_digests", {}) | raw_digests,
        "inputs": inputs,
        "added": added,
    }

    def refuse_if_changed_meanwhile() -> None:
        command = materialize_command("pin_features", ds)
        refuse_if_changed(site, log_days, what=f"pin_features {ds}", command=command)
        if (_source_digest(site), [stamp_of(file) for file in dated_files(site, ds)]) != (source, dated):
            raise PipelineError(
                f"the files of source.pins changed while pin_features {ds} was made from them; nothing was published",
                f"run again when they are complete: {command}",
            )

    if before is not None and before.get("added") == added:  # the actions changed, and their pins did not
        refuse_if_changed_meanwhile()
        return state.publish(ds, before["versions"], {**before, **origin})
    if base is None or known is None:
        described = read_described_pins(site, catalogue_files(site, ds), dim=None)
        if not described.rows.num_rows and described.quarantined:
            raise nothing_usable(ds, described.quarantined)
        rows = _with_log_pins(site, described.rows, log_pins)
        dataset = create_bucket(state.bucket_path(0), rows)
        num_new, num_log = rows.num_rows, rows.num_rows - described.rows.num_rows
        refuse_if_changed_meanwhile()
        return _publish(state, ds, dataset, described, origin, content=added, num_new=num_new, num_log=num_log)
    described = read_described_pins(site, dated_files(site, ds), dim=base["dim"] or None) if dated else no_pins(site)
    rows = _with_log_pins(site, described.rows, log_pins)
    dataset = _advance(site, state, base, rows)
    num_known = pc.sum(pc.is_in(described.rows["pin_id"], known)).as_py() or 0
    refuse_if_changed_meanwhile()
    return _publish(
        state,
        ds,
        dataset,
        described,
        origin,
        content=base["content"] if dataset.version == base["versions"][0] else added,
        num_new=rows.num_rows - num_known,
        num_log=rows.num_rows - described.rows.num_rows,
        carried=None if dated else base,
    )


def _source_digest(site: Site) -> str:
    """Return a digest of the site file's `pins` and of the files that are not dated."""
    return _digest(
        [LAYOUTS["pin_features"], site.source.pins.model_dump(mode="json"), *map(stamp_of, undated_files(site))]
    )


def _base(site: Site, state: PinState, ds: str, source: str) -> PinManifest | None:
    """Return the manifest of the day that ds builds on; None if ds is built from all files and logs.

    A dated catalogue needs the day before, because nobody promises that the files of all days are kept.
    """
    if ds == site.start_ds:
        return None
    previous_ds = shift_ds(ds, -1)
    previous = state.manifest(previous_ds)
    if not site.source.pins.is_incremental:
        return previous if previous is not None and previous.get("source") == source else None
    if previous is None:
        first = next((shift_ds(day, 1) for day in reversed(state.days()) if day < ds), site.start_ds)
        raise PipelineError(
            f"pin_features {ds} builds on {previous_ds}, which is missing",
            f"build the gap with: {materialize_command('pin_features', first, until=ds)}",
        )
    return previous


def _log_days(site: Site, base: PinManifest | None, ds: str, *, is_first: bool) -> list[str]:
    """Return the days whose pins have to be read: ds, and earlier days of raw_actions that the base does not know as
    they are now. Only the first day of a run looks for those.

    Built from all logs, a day needs those of the timelines' window; older ones are read as far as they exist.
    """
    if base is not None and not is_first:
        return [ds]
    ingested = [day for day in ingested_days(site) if day < ds]
    if base is not None:
        known = base.get("raw_digests", {})  # a day of layout 1 knows none
        return [*(day for day in ingested if raw_digest(site, day) != known.get(day)), ds]
    window = ds_range(max(site.start_ds, shift_ds(ds, 1 - site.timelines.window_days)), ds)
    return [*(day for day in ingested if site.start_ds <= day < window[0]), *window]


def _with_log_pins(site: Site, described: pa.Table, log_pins: pa.Array) -> pa.Table:
    """Return the described pins, and those pins of the log that are not among them."""
    return joined(described, rows_of_log_pins(without(log_pins, described["pin_id"]), site.source.pins))


def _advance(site: Site, state: PinState, base: PinManifest, rows: pa.Table) -> lance.LanceDataset:
    """Write a new version of the base with these rows; the base's own version if there are none."""
    path, dim = state.bucket_path(0), base["dim"] or dim_of(rows)
    if dim != base["dim"] or not state.is_readable(base):  # the first vectors of the site: every row gets a new column
        kept = _open(state, base).to_table()
        kept = kept.filter(pc.invert(pc.is_in(kept["pin_id"], rows["pin_id"])))
        return create_bucket(path, joined(kept, rows))
    return advance_bucket(
        path,
        base_version=base["versions"][0],
        upserts=with_feature_column(rows, dim),
        deleted_ids=pa.array([], id_arrow_type(site.source.pins.pin_id.type)),
        key="pin_id",
        compact_after=site.timelines.compact_after_fragments,
    )


def _open(state: PinState, manifest: PinManifest) -> lance.LanceDataset:
    return open_dataset(state.bucket_path(0), version=manifest["versions"][0])


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _publish(
    state: PinState,
    ds: str,
    dataset: lance.LanceDataset,
    described: Catalogue,
    origin: PinOrigin,
    *,
    content: str,
    num_new: int,
    num_log: int,
    carried: PinManifest | None = None,
) -> PinManifest:
    """Write the quarantine and the manifest of a day.

    `carried` is the day that read the undated catalogue: its quarantine is that of this day, too.
    """
    quarantine = Quarantine(state.root / "quarantine" / f"{ds}.parquet")
    quarantine.path.parent.mkdir(parents=True, exist_ok=True)
    quarantine.path.unlink(missing_ok=True)
    for row in described.quarantined:
        quarantine.add(*row)
    quarantine.close()
    counts: PinTotals = {
        "pins": dataset.count_rows(),
        "candidates": dataset.count_rows("is_candidate"),
        "with_feature": dataset.count_rows("has_feature"),
        "new": num_new,
        "new_in_log": num_log,
        "updated": described.rows.num_rows + num_log - num_new,
        "quarantined": len(described.quarantined) if carried is None else carried["counts"]["quarantined"],
        "fragments": len(dataset.get_fragments()),
    }
    manifest = {
        **origin,
        "content": content,
        "dim": dim_of(dataset.schema.empty_table()),
        "counts": counts,
        "quarantined_by_reason": (dict(quarantine.by_reason) if carried is None else carried["quarantined_by_reason"]),
    }
    return state.publish(ds, [dataset.version], manifest)
