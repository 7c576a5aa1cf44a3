"""Searches what Dagster keeps of the pages of raw_actions: each shows a few rejected rows as the log has them."""

import json
import re

import dagster as dg

from pf_assets.settings import dagster_home
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.logs.partition import ingested_days
from pf_core.operations.remains import Place

PAGES_AT_ONCE = 500

NAME = "pages in Dagster"


def search_pages(site: Site, user_id: int | str) -> Place:
    """Return the pages of raw_actions on which a rejected row has the user's id."""
    if not ingested_days(site):
        return Place(name=NAME, searched="0 pages")
    try:
        with dg.DagsterInstance.from_config(dagster_home()) as instance:
            return _search(instance, user_id)
    except (PipelineError, dg.DagsterError, OSError) as error:
        return Place(name=NAME, searched="none", found=(f"they cannot be searched: {error}",), is_overdue=True)


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
    texts = {str(user_id), json.dumps(user_id).strip('"')}  # rows that were parsed are shown as JSON
    alone = re.compile(rf"(?<!\w)0*({'|'.join(map(re.escape, texts))})(?!\w)")
    return any(alone.search(str(record.data.get("raw", ""))) for record in sample.records)
