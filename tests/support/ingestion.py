"""Results of a run of ingestion, as values by which two runs can be compared."""

from collections.abc import Sequence
from typing import Any

from pf_core.errors import PipelineError
from pf_core.logs.partition import partition_dir, read_manifest, read_quarantine
from tests.support.sites import Row, SmallSite


def write_parts(site: SmallSite, ds: str, parts: Sequence[Sequence[Row]]) -> None:
    for number, rows in enumerate(parts):
        path = site.write_log(ds, rows)  # the name ends in *.parquet
        path.rename(path.with_name(f"part-{number:02d}.parquet"))


def outcome(site: SmallSite, days: Sequence[str]) -> dict[str, Any]:
    """Return manifests (or the error) and quarantined rows of a run, without its duration and build numbers."""
    try:
        result: Any = [_timeless(manifest) for manifest in site.ingest(days)]
    except PipelineError as error:
        result = str(error)
    manifests = {ds: read_manifest(site.site, ds) for ds in days}
    assert list((site.site.directory / "tmp").glob("raw_actions-*")) == []
    for ds, manifest in manifests.items():
        builds = [] if manifest is None else [manifest["build"], "manifest.json"]
        assert sorted(path.name for path in partition_dir(site.site.directory, ds).glob("[!.]*")) == builds
        if manifest is not None:
            names = [path.name for path in (partition_dir(site.site.directory, ds) / manifest["build"]).iterdir()]
            rejects = [manifest["quarantine_file"]] if manifest["quarantine_file"] else []
            assert sorted(names) == sorted([entry["name"] for entry in manifest["files"]] + rejects)
    return {
        "result": result,
        "manifests": {ds: manifest and _timeless(manifest) for ds, manifest in manifests.items()},
        "quarantine": {ds: read_quarantine(site.site, ds).to_pylist() for ds in days},
    }


def _timeless(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in ("seconds", "build")}
