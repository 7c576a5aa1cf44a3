"""raw_actions: a day's actions as the contract wants them. `ingest` makes them; here is what a partition is.

A partition is a build of Parquet files, one a user bucket, sorted and free of exact duplicates, so that
everything after it reads buckets and never shuffles again.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.atomic import MANIFEST, read_json
from pf_core.contracts import QUARANTINE_SCHEMA, PipelineError, id_arrow_type, raw_actions_schema
from pf_core.site import Site
from pf_core.source import Positive
from pf_core.storage import path_of, read_parquet, written

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
            f"raw_actions has no partition {ds}; make it with: "
            f"dagster asset materialize --select raw_actions --partition {ds} -m pf_assets.definitions"
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
    with written(path) as local:
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


def positive_mask(actions: pa.Table, positive: Positive) -> np.ndarray:
    """Which rows are positive engagement (paper, section 3): type, surface, and longer than the type's bound."""
    types, type_code = _decode(actions["action_type"])
    surfaces, surface_code = _decode(actions["surface"])
    bound_s = [positive.longer_than_s.get(name, -1.0) if name in positive.action_types else np.inf for name in types]
    is_place = [positive.surfaces is None or name in positive.surfaces for name in surfaces]
    long_enough = actions["duration_s"].to_numpy() > np.array(bound_s, np.float32)[type_code]
    return long_enough & np.array(is_place, bool)[surface_code]


def _decode(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def parse_user_id(site: Site, text: str) -> int | str:
    """A user id as the logs have it, from what a person typed."""
    if site.source.actions.user_id.type == "string":
        return text
    if not re.fullmatch("-?[0-9]{1,19}", text) or abs(int(text)) >= 2**63:
        raise PipelineError(f"{text!r} is not an integer user id")
    return int(text)


def read_deletion_list(site: Site) -> pa.Array:
    """Ids of the users who asked to be forgotten, of the log's id type."""
    ids: set[int | str] = set()
    if site.deletion_list is not None:
        path = path_of(site.deletion_list)
        if not path.is_file():
            raise PipelineError(f"deletion_list: no file at {path}; make an empty one if nobody asked to be forgotten")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise PipelineError(f"deletion_list: {path} is not UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                ids |= {parse_user_id(site, line.strip())} if line.strip() else set()
            except PipelineError as error:
                raise PipelineError(f"{path}, line {number}: {error}") from None
    return pa.array(sorted(ids), id_arrow_type(site.source.actions.user_id.type))
