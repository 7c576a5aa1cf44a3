"""pin_features: the content vector of every pin, its interest, and whether Homefeed may show it, as of each day.

A dated catalogue is incremental: a day adds its pins to those of the day before, and the newest row of a pin counts. A
day is not rebuilt if neither its files nor the day before changed. An undated catalogue, a matrix, and vectors learned
from co-engagement are read as a whole: a day whose inputs did not change shares the version of an earlier day. Learned
vectors exist from the day before `until` on: an earlier partition would contain knowledge of its future. They are
learned from the training users' actions only: held-out users, whom training never sees, are left out by their hash.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import lance
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.config.source import DAY, ColumnVectors, LearnedVectors, NpyVectors
from pf_core.days import ds_range, ds_start, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import DailyState, Manifest, advance_bucket, create_bucket, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.partition import bucket_files, require_manifest
from pf_core.logs.quarantine import Quarantine
from pf_core.logs.readers import find_files
from pf_core.pins.catalogue import UNKNOWN_INTEREST, Catalogue, QuarantinedRow, read_catalogue, read_matrix
from pf_core.pins.coengagement import CoengagementConfig, PinVectors, learn_pin_vectors
from pf_core.progress import Progress
from pf_core.schemas import id_arrow_type
from pf_core.storage.cache import fetched
from pf_core.storage.files import read_parquet, stamp_of


class PinCounts(TypedDict):
    """Numbers of pins of a partition."""

    pins: int
    candidates: int
    new: int
    """Pins that the day before did not have; if the inputs are read as a whole, all pins of a new version."""
    updated: int
    """Pins of the day before that have a new row."""
    quarantined: int
    """Rejected rows of the catalogue."""
    fragments: int
    """Fragments of the Lance dataset."""


class PinManifest(TypedDict):
    """Manifest of a partition of pin_features."""

    ds: str
    num_buckets: int
    """1: pins are not bucketed."""
    versions: list[int]
    """Version of the Lance dataset; one entry."""
    inputs: str
    """Digest of what the partition was built from."""
    dim: int
    """Dimension of the features."""
    counts: PinCounts
    quarantined_by_reason: dict[str, int]


def pin_state(site: Site) -> DailyState[PinManifest]:
    return DailyState(root=site.directory / "pin_features", asset="pin_features", num_buckets=1)


def content_name(manifest: PinManifest | Manifest) -> str:
    """Return a name for the content of a partition: its version and its inputs.

    The version alone is not enough: it counts from 1 again if the state is removed and rebuilt.
    """
    return f"{manifest['versions'][0]}-{manifest['inputs']}"


def read_pin_features(site: Site, ds: str, columns: Sequence[str] | None = None) -> pa.Table:
    return pin_state(site).open_bucket(ds, 0).to_table(columns=None if columns is None else list(columns))


def build_pin_features(site: Site, days: Sequence[str], *, engine: Engine, progress: Progress) -> Iterator[PinManifest]:
    """Build the partitions of ascending days; yield each manifest once it is published."""
    state = pin_state(site)
    state.refuse_if_dropped(days, site.timelines.retention_days)
    with state.writing():
        for ds in days:
            if site.source.pins.is_incremental:
                manifest = _add_day(site, state, ds)
            else:
                manifest = _build_whole(site, state, ds, progress)
            counts = manifest["counts"]
            progress(f"pin_features {ds}: {counts['pins']:,} pins, {counts['new']:,} new")
            yield manifest
        state.retain(site.timelines.retention_days, engine, progress)


def feature_coverage(site: Site, ds: str) -> float:
    """Return the share of the day's actions whose pin has a feature; NaN on a day without actions."""
    known = read_pin_features(site, ds, ["pin_id"])["pin_id"]
    num_actions = num_covered = 0
    for path in bucket_files(site, ds).values():
        pins = read_parquet(path, columns=["pin_id"])["pin_id"]
        num_actions += len(pins)
        num_covered += pc.sum(pc.is_in(pins, known)).as_py()
    return num_covered / num_actions if num_actions else float("nan")


def _add_day(site: Site, state: DailyState[PinManifest], ds: str) -> PinManifest:
    """Build a day of a dated catalogue: the pins of the day before, and the pins in the day's files."""
    pins = site.source.pins
    assert pins.catalogue is not None
    files = find_files(pins.catalogue, site.log_root, ds)
    if not files:
        raise PipelineError(
            f"no pin catalogue for {ds}: nothing matches {site.log_root / pins.catalogue.path.replace(DAY, ds)}",
            "if no pin was added that day, put a catalogue without rows there",
        )
    path = state.bucket_path(0)
    base = None if ds == site.start_ds else _previous(site, state, ds)
    version = None if base is None else base["versions"][0]
    inputs = _digest([pins.model_dump(mode="json"), version, *(stamp_of(file) for file in files)])
    known_day = state.manifest(ds)
    if known_day is not None and known_day["inputs"] == inputs:
        return known_day
    if base is None:
        added = read_catalogue(pins, files, dim=None)
        dataset = create_bucket(path, added.rows)
        return _publish(state, ds, dataset, added, num_new=added.rows.num_rows, inputs=inputs)
    added = read_catalogue(pins, files, dim=base["dim"])
    known = open_dataset(path, version=base["versions"][0]).to_table(columns=["pin_id"])["pin_id"]
    num_known = pc.sum(pc.is_in(added.rows["pin_id"], known)).as_py() or 0
    dataset = advance_bucket(
        path,
        base_version=base["versions"][0],
        upserts=added.rows,
        deleted_ids=pa.array([], id_arrow_type(pins.pin_id.type)),
        key="pin_id",
        compact_after=site.timelines.compact_after_fragments,
    )
    return _publish(state, ds, dataset, added, num_new=added.rows.num_rows - num_known, inputs=inputs)


def _previous(site: Site, state: DailyState[PinManifest], ds: str) -> PinManifest:
    """Return the manifest of the day before; raise PipelineError with the command that builds the missing days."""
    previous_ds = shift_ds(ds, -1)
    if state.manifest(previous_ds) is None:
        first = next((shift_ds(day, 1) for day in reversed(state.days()) if day < ds), site.start_ds)
        raise PipelineError(
            f"pin_features {ds} builds on {previous_ds}, which is missing",
            f"build the gap with: {materialize_command('pin_features', first, until=ds)}",
        )
    return state.require(previous_ds)


def _build_whole(site: Site, state: DailyState[PinManifest], ds: str, progress: Progress) -> PinManifest:
    """Build a day from inputs that are not dated, or share the version of a day with the same inputs."""
    inputs = _fingerprint_inputs(site, ds)
    for known_ds in reversed(state.days()):
        known = state.require(known_ds)
        if known["inputs"] == inputs:
            shared = known | {"counts": known["counts"] | {"new": 0}}
            return state.publish(ds, known["versions"], shared)
    pins = _read_whole(site, progress)
    dataset = create_bucket(state.bucket_path(0), pins.rows)
    return _publish(state, ds, dataset, pins, num_new=pins.rows.num_rows, inputs=inputs)


def _fingerprint_inputs(site: Site, ds: str) -> str:
    """Return a digest of everything that the partition is built from; nothing later than ds may be among it."""
    pins = site.source.pins
    files: list[Path] = []
    parts: list[Any] = [pins.model_dump(mode="json")]
    if pins.catalogue is not None:
        files += _catalogue_files(site)
    if isinstance(pins.vectors, NpyVectors):
        files += [site.log_root / pins.vectors.npy, site.log_root / pins.vectors.ids]
    if isinstance(pins.vectors, LearnedVectors):
        parts.append({"held_out_share": site.training.held_out_share})
        first_ds = shift_ds(pins.vectors.until, -1)
        if ds < first_ds:
            raise PipelineError(
                f"pin vectors are learned from the actions before {pins.vectors.until}, so pin_features exists from "
                f"{first_ds} on, not for {ds}",
                "start there, or set an earlier `until`",
            )
        for log_ds in ds_range(site.start_ds, first_ds):
            parts += [entry["sha256"] for entry in require_manifest(site, log_ds)["files"]]
    for file in files:
        if not file.is_file():
            raise PipelineError(f"no file at {file}", "fix `pins` in the site file")
        parts.append(stamp_of(file))
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _catalogue_files(site: Site) -> list[Path]:
    catalogue = site.source.pins.catalogue
    assert catalogue is not None
    files = find_files(catalogue, site.log_root)
    if not files:
        raise PipelineError(
            f"no pin catalogue matches {site.log_root / catalogue.path}", "fix `pins.catalogue.path` in the site file"
        )
    return files


def undated_catalogue_pins(site: Site) -> pa.Array | None:
    """Return the pins of an undated catalogue, with a vector or without; None if the site has no such catalogue."""
    pins = site.source.pins
    if pins.catalogue is None or pins.catalogue.is_dated:
        return None
    return read_catalogue(pins, _catalogue_files(site), dim=None).rows["pin_id"].combine_chunks()


def _read_whole(site: Site, progress: Progress) -> Catalogue:
    """Read all pins: vectors from a column, a matrix or the actions; interests and candidates from the catalogue."""
    pins = site.source.pins
    described = None
    if pins.catalogue is not None:
        described = read_catalogue(pins, _catalogue_files(site), dim=None)
        if isinstance(pins.vectors, ColumnVectors):
            return described
    if isinstance(pins.vectors, NpyVectors):
        vectors = read_matrix(pins.vectors, site.log_root, pins)
    else:
        assert isinstance(pins.vectors, LearnedVectors)
        vectors = _learn(site, pins.vectors, site.workspace / "pin_features" / "learning", progress)
    interest, candidate = pa.repeat(UNKNOWN_INTEREST, len(vectors)), pa.repeat(True, len(vectors))
    if described is not None:
        position = pc.index_in(vectors["pin_id"], described.rows["pin_id"])
        interest = described.rows["interest"].take(position).fill_null(UNKNOWN_INTEREST)
        candidate = described.rows["is_candidate"].take(position).fill_null(False)  # not in the catalogue
    rows = vectors.append_column("interest", interest).append_column("is_candidate", candidate)
    return Catalogue(rows, [] if described is None else described.quarantined)


def _learn(site: Site, vectors: LearnedVectors, temp_dir: Path, progress: Progress) -> pa.Table:
    days = ds_range(site.start_ds, shift_ds(vectors.until, -1))
    files = [fetched(path) for ds in days for path in bucket_files(site, ds).values()]
    progress(f"learning pin vectors from {len(days)} days of the training users' co-engagement")
    learned = learn_pin_vectors(
        files,
        until=ds_start(vectors.until),
        config=CoengagementConfig(**vectors.model_dump(exclude={"until"}), held_out_share=site.training.held_out_share),
        memory_limit=f"{site.engine.memory_mb}MB",
        temp_dir=temp_dir,
    )
    progress(_describe_learned(learned, vectors))
    return learned.table


def _describe_learned(learned: PinVectors, vectors: LearnedVectors) -> str:
    """Return how many pins and actions have a learned vector, and the keys of the site file that change it."""
    left_out = [
        f"{learned.num_pins_rare:,} pins have fewer than source.pins.vectors.min_count={vectors.min_count} users",
        f"{learned.num_pins_over_limit:,} are beyond source.pins.vectors.max_pins={vectors.max_pins}",
        f"{learned.num_pins_without_vector:,} share no user with another such pin often enough",
    ]
    counts = (learned.num_pins_rare, learned.num_pins_over_limit, learned.num_pins_without_vector)
    reasons = [reason for reason, num_pins in zip(left_out, counts, strict=True) if num_pins]
    return (
        f"learned vectors for {learned.num_pins_kept:,} of {learned.num_pins_seen:,} pins, which have "
        f"{learned.num_actions_kept / learned.num_actions:.1%} of the training users' {learned.num_actions:,} actions "
        f"before {vectors.until}" + (f"; without a vector: {', '.join(reasons)}" if reasons else "")
    )


def _publish(
    state: DailyState[PinManifest],
    ds: str,
    dataset: lance.LanceDataset,
    pins: Catalogue,
    *,
    num_new: int,
    inputs: str,
) -> PinManifest:
    """Write the quarantine and the manifest of a day."""
    if pins.rows.num_rows == 0 and dataset.count_rows() == 0:
        raise _nothing_usable(ds, pins.quarantined)
    quarantine = Quarantine(state.root / "quarantine" / f"{ds}.parquet")
    quarantine.path.parent.mkdir(parents=True, exist_ok=True)
    quarantine.path.unlink(missing_ok=True)
    for row in pins.quarantined:
        quarantine.add(*row)
    quarantine.close()
    published = state.publish(
        ds,
        [dataset.version],
        {
            "inputs": inputs,
            "dim": dataset.schema.field("feature").type.list_size,
            "counts": {
                "pins": dataset.count_rows(),
                "candidates": dataset.count_rows("is_candidate"),
                "new": num_new,
                "updated": pins.rows.num_rows - num_new,
                "quarantined": len(pins.quarantined),
                "fragments": len(dataset.get_fragments()),
            },
            "quarantined_by_reason": dict(quarantine.by_reason),
        },
    )
    return published


def _nothing_usable(ds: str, quarantined: list[QuarantinedRow]) -> PipelineError:
    if not quarantined:
        return PipelineError(f"pin_features {ds}: the catalogue has no pins at all")
    file, number, reason, _ = quarantined[0]
    return PipelineError(
        f"pin_features {ds}: no pin could be used. {file}, row {number}: {reason}", "fix `pins` in the site file"
    )
