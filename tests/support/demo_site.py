"""The demo's own site file on a tiny world, and Dagster runs of it in this process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from pf_assets.definitions import build_definitions
from pf_assets.settings import DEMO_SITE
from pf_core.config.site import Site, load_site
from pf_core.world.config import WorldConfig

STEPS = {"optimizer": {"num_steps": 4}, "log_every": 2, "evaluate_every": 4, "checkpoint_every": 4}


def write_site_file(path: Path, world: WorldConfig, *, environment: Mapping[str, str] = os.environ) -> Site:
    """Write the demo's site file, with the size of a tiny world."""
    content = yaml.safe_load(DEMO_SITE.read_text())
    content["start_ds"], content["end_ds"] = world.dates[0], world.dates[-1]
    content["engine"] = {"num_workers": 1, "memory_mb": 256}
    content["timelines"]["num_buckets"] = 2
    content["training"] |= {"preset": "tiny", "changes": STEPS, "evaluation_days": 2, "launch": {"num_workers": 0}}
    path.write_text(yaml.safe_dump(content))
    return load_site(path, environment=environment)


class Runs:
    """Dagster runs in this process instead of one process each."""

    def __init__(self, site: Site, instance: dg.DagsterInstance) -> None:
        self._site, self._instance = site, instance
        self.done: list[tuple[str, list[str] | None]] = []

    def materialize(
        self, assets: str, days: list[str] | None = None, *, config: dict[str, Any] | None = None, **shown: Any
    ) -> None:
        """Take the place of `pf_assets.cli.runs.materialize`; what it shows is not shown."""
        definitions = build_definitions(self._site)
        ranged = {} if days is None else {"start": days[0], "end": days[-1]}
        result = dg.materialize(
            [*(definitions.assets or []), *(definitions.asset_checks or [])],
            selection=dg.AssetSelection.assets(*assets.split(",")),
            instance=self._instance,
            tags={f"dagster/asset_partition_range_{name}": ds for name, ds in ranged.items()},
            run_config=config,
        )
        assert result.success
        self.done.append((assets, days))
