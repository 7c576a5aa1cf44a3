"""Metadata of raw_actions and pin_features, made from a partition's manifest."""

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg

from pf_assets.metadata.pages import MAX_SAMPLE_ROWS, Metadata, table
from pf_core.config.site import Site
from pf_core.logs.partition import partition_dir, read_quarantine
from pf_core.pins.features import read_pin_features


def describe_raw_actions(site: Site, manifest: Mapping[str, Any]) -> Metadata:
    """How many rows were read and kept, what became of the others, and a sample of the quarantine."""
    counts, ds = manifest["counts"], manifest["ds"]
    return {
        "actions": counts["kept"],
        "users": counts["users"],
        "positive_actions": counts["positive"],
        "rows_read": counts["read"],
        "accounting": table(
            [
                {"rows": "read from the day's files", "count": counts["read"]},
                {"rows": "+ received from other days' files", "count": counts["received"]},
                {"rows": "- sent to their own day", "count": counts["sent"]},
                {"rows": "- exact duplicates", "count": counts["duplicates"]},
                {"rows": "- skipped by a rule", "count": counts["skipped"]},
                {"rows": "- of forgotten users", "count": counts["forgotten"]},
                {"rows": "- quarantined", "count": counts["quarantined"]},
                {"rows": "= kept", "count": counts["kept"]},
            ]
        ),
        "actions_by_type": _shares("action_type", manifest["by_type"]),
        "actions_by_surface": _shares("surface", manifest["by_surface"]),
        "quarantine": _shares("reason", manifest["quarantined_by_reason"]),
        "quarantined_without_content": counts.get("redacted", 0),
        "quarantine_sample": table(_sample(site, read_quarantine(site, ds))),
        "rows_outside_site_days": manifest["outside_site_days"],
        "rows_of_other_days": manifest["other_days"],
        "bytes": sum(entry["num_bytes"] for entry in manifest["files"]),
        "seconds": manifest["seconds"],
        "path": dg.MetadataValue.path(str(partition_dir(site.directory, ds) / manifest["build"])),
        "dagster/row_count": counts["kept"],
    }


def describe_pin_features(site: Site, manifest: Mapping[str, Any], seconds: float) -> Metadata:
    """How many pins there are, how many are new or candidates, and their largest interests."""
    counts = manifest["counts"]
    interests = read_pin_features(site, manifest["ds"], ["interest"])["interest"].value_counts().to_pylist()
    by_interest = {row["values"]: row["counts"] for row in interests}
    return {
        "pins": counts["pins"],
        "candidates": counts["candidates"],
        "new_pins": counts["new"],
        "updated_pins": counts["updated"],
        "feature_dim": manifest["dim"],
        "interests": len(by_interest),
        "largest_interests": _shares("interest", by_interest),
        "quarantine": _shares("reason", manifest["quarantined_by_reason"]),
        "seconds": round(seconds, 2),
        "lance_version": manifest["versions"][0],
        "dagster/row_count": counts["pins"],
    }


def _sample(site: Site, quarantine: Any) -> list[Metadata]:
    """Return a few quarantined rows with the columns that fit on a page.

    Dagster keeps the page of every run: where a row names its user, the id is left out.
    """
    rows = quarantine.slice(0, MAX_SAMPLE_ROWS).to_pylist()
    for row in rows:
        row["source_file"] = row["source_file"].removeprefix(f"{site.log_root}/")
        row["raw"] = _without_user(row["raw"], site.source.actions.user_id.column)
    return [{name: row[name] for name in ("reason", "row_number", "source_file", "raw")} for row in rows]


def _without_user(raw: str, column: str) -> str:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return json.dumps({**content, column: "(left out)"}) if isinstance(content, dict) and column in content else raw


def _shares(name: str, counts: Mapping[str, int]) -> dg.MetadataValue:
    """Return a table of the largest counts with their shares of the total."""
    total = sum(counts.values())
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_SAMPLE_ROWS]
    return table([{name: key, "count": count, "share": f"{count / total:.2%}"} for key, count in largest])
