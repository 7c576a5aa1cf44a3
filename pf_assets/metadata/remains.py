"""Searches what Dagster keeps: pages of raw_actions, each of which shows a few rejected rows, and the logs of runs."""

import json
import re
from pathlib import Path

import dagster as dg

from pf_assets.settings import dagster_home
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.logs.partition import ingested_days
from pf_core.operations.remains import Place

PAGES_AT_ONCE = 500

NAME = "pages in Dagster"

LOG_FILES = ("logs/*.log", "storage/*/compute_logs/*")
"""Text files of a Dagster home: logs of `pf`, and what the processes of runs wrote."""

MIN_ID_CHARS = 5
"""A shorter id is in every log, as a number of something else."""


def search_pages(site: Site, user_id: int | str) -> Place:
    """Return the pages of raw_actions on which a rejected row has the user's id."""
    if not ingested_days(site):
        return Place(name=NAME, searched="0 pages")
    try:
        with dg.DagsterInstance.from_config(dagster_home()) as instance:
            return _search(instance, user_id)
    except Exception as error:  # of the database, too: whatever it is, nobody knows what the pages hold
        return Place(name=NAME, searched="none", found=(f"they cannot be searched: {error}",), is_overdue=True)


def search_run_logs(user_id: int | str) -> Place:
    """Return the logs of runs with the user's id. They should have none: no message is about one user."""
    name = "logs of runs"
    try:
        home = Path(dagster_home())
        files = [path for pattern in LOG_FILES for path in sorted(home.glob(pattern)) if path.is_file()]
        if len(str(user_id)) < MIN_ID_CHARS:
            return Place(name=name, searched=f"not searched: so short an id is a number in all of {len(files):,} files")
        alone = _alone(user_id)
        found = [str(path) for path in files if _has_line(path, alone)]
    except (PipelineError, OSError) as error:
        return Place(name=name, searched="none", found=(f"they cannot be searched: {error}",), is_overdue=True)
    until = "newer logs have taken its place, or you remove the file" if found else None
    return Place(name=name, searched=f"{len(files):,} files", found=tuple(found), until=until)


def _has_line(path: Path, alone: re.Pattern[str]) -> bool:
    with path.open(errors="replace") as file:
        return any(alone.search(line) for line in file)


def _search(instance: dg.DagsterInstance, user_id: int | str) -> Place:
    found, num_pages, cursor = [], 0, None
    while True:
        result = instance.fetch_materializations(dg.AssetKey("raw_actions"), limit=PAGES_AT_ONCE, cursor=cursor)
        num_pages += len(result.records)
        for record in result.records:
            materialization = record.asset_materialization
            if materialization is not None and _names(materialization, user_id):
                found.append(f"{record.partition_key}, run {record.run_id}")
        if not result.has_more:
            break
        cursor = result.cursor
    until = None
    if found:
        until = "the run is deleted in Dagster, with its history: dagster run delete RUN"
    return Place(name=NAME, searched=f"{num_pages:,} pages of raw_actions", found=tuple(found), until=until)


def _names(materialization: dg.AssetMaterialization, user_id: int | str) -> bool:
    sample = materialization.metadata.get("quarantine_sample")
    if not isinstance(sample, dg.TableMetadataValue):
        return False
    alone = _alone(user_id)
    return any(alone.search(str(record.data.get("raw", ""))) for record in sample.records)


def _alone(user_id: int | str) -> re.Pattern[str]:
    """Return what finds an id in a text, but not within another word or number."""
    texts = {str(user_id), json.dumps(user_id).strip('"')}  # rows that were parsed are shown as JSON
    return re.compile(rf"(?<!\w)0*({'|'.join(map(re.escape, texts))})(?!\w)")
