"""Where the site file is and what every asset of a site shares."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pf_core.config.site import Site, load_site
from pf_core.days import ds_range, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.engine.spark import SparkEngine
from pf_core.storage.files import reaching

if TYPE_CHECKING:  # commands that only read a release work without dagster
    import dagster as dg

ENGINE_POOL = "engine"
"""Assets that use the whole machine; the instance lets one run of them at a time."""

TRAINING_POOL = "training"
"""The set and the models that are trained on it: one run at a time, so that the set stands while it is read."""

REPOSITORY = Path(__file__).resolve().parent.parent

DEMO_SITE = REPOSITORY / "dagster_home" / "demo.yaml"

EXPERIMENTS_SITE = REPOSITORY / "dagster_home" / "experiments" / "experiments.yaml"


def site_path(environment: Mapping[str, str], *, otherwise: Path = DEMO_SITE) -> Path:
    """PF_SITE names the site file; without it, it is the demo's, or what a command takes instead."""
    return Path(environment.get("PF_SITE") or otherwise)


def dagster_home(site_file: Path | None = None) -> str:
    """Where Dagster keeps what it knows of a site, by default of the one of PF_SITE.

    DAGSTER_HOME belongs to PF_SITE. Otherwise it is the folder of the site file, if a dagster.yaml lies beside it: two
    sites have assets of the same names, and the partitions of one must not be taken for those of the other.
    """
    chosen = site_path(os.environ).resolve()
    if os.environ.get("DAGSTER_HOME") and site_file in (None, chosen):
        return os.environ["DAGSTER_HOME"]
    folder = (site_file or chosen).parent
    return str(folder if (folder / "dagster.yaml").exists() else DEMO_SITE.parent)


def current_site() -> Site:
    return load_site(site_path(os.environ), environment=os.environ)


def mlflow_server() -> str:
    """Where people look at MLflow: links lead there. `pf dev` serves it on this machine."""
    return os.environ.get("PF_MLFLOW_SERVER") or "http://localhost:5000"


def daily_partitions(site: Site) -> "dg.DailyPartitionsDefinition":
    """One start for every daily asset; a site that has ended has no partitions after its last day."""
    import dagster as dg

    end_date = None if site.end_ds is None else shift_ds(site.end_ds, 1)  # dagster excludes it
    return dg.DailyPartitionsDefinition(start_date=site.start_ds, end_date=end_date)


def days_to_check(context: "dg.AssetCheckExecutionContext", existing: Sequence[str]) -> list[str]:
    """The run's partitions, without those that the retention has dropped; of a check run alone, the newest one."""
    tags = context.run.tags
    if "dagster/asset_partition_range_start" in tags:
        days = ds_range(tags["dagster/asset_partition_range_start"], tags["dagster/asset_partition_range_end"])
        return [ds for ds in days if ds in existing]
    if "dagster/partition" in tags:
        return [tags["dagster/partition"]]
    return list(existing[-1:])


def start_engine(site: Site) -> Engine:
    """Refuses, in a sentence, a site whose data cannot be reached."""
    for path in (site.directory, site.log_root):
        with reaching(path):
            path.exists()
    config = site.engine
    if config.kind == "spark":
        assert config.master is not None
        return SparkEngine(master=config.master, num_workers=config.num_workers, settings=config.spark)
    return LocalEngine(
        num_workers=site.engine.num_workers, memory_mb=site.engine.memory_mb, temp_dir=site.workspace / "tmp"
    )
