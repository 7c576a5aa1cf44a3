"""The experiments' site file on a tiny world: the same words, surfaces and kinds of action, in seconds."""

from pathlib import Path
from typing import Any

from pf_core.config.site import Site, load_site
from pf_core.config.training_section import LaunchConfig, TrainingConfig
from pf_core.days import ds_range
from pf_core.engine.local import LocalEngine
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.pins.features import build_pin_features
from pf_core.storage.files import path_of, upload
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.world.config import tiny
from pf_core.world.logs import write_logs

EXPERIMENTS_SITE = Path(__file__).parents[2] / "dagster_home" / "experiments" / "experiments.yaml"
NUM_DAYS, EVALUATION_DAYS = 24, 7
STEPS = {"optimizer": {"num_steps": 3}, "log_every": 1, "evaluate_every": 3, "checkpoint_every": 3}


def make_tiny_site(root: Path, *, bucket: str | None = None, **training: Any) -> Site:
    """Everything up to the training set; nothing is trained. With a bucket (s3://…), all of it is there."""
    world = tiny(num_days=NUM_DAYS)
    write_logs(world, root / "experiments_site", file_format="parquet")
    if bucket is not None:
        upload(root / "experiments_site", path_of(f"{bucket}/experiments_site"))
    site = load_site(EXPERIMENTS_SITE, environment={"PF_DATA_DIR": bucket or str(root)})
    chosen: dict[str, Any] = {"preset": "tiny", "changes": STEPS, "launch": LaunchConfig(num_workers=0)} | training
    site = site.model_copy(
        update={
            "end_ds": world.dates[-1],
            "timelines": site.timelines.model_copy(update={"num_buckets": 2}),
            "engine": site.engine.model_copy(update={"num_workers": 1, "memory_mb": 256}),
            "training": TrainingConfig(evaluation_days=EVALUATION_DAYS, held_out_share=0.3, **chosen),
        }
    )
    days = ds_range(site.start_ds, world.dates[-1])
    with LocalEngine(num_workers=1, memory_mb=256, temp_dir=root / "tmp") as engine:
        forgotten = read_deletion_list(site)
        list(ingest_days(site, days, engine=engine, forgotten=forgotten, progress=_silent))
        made = build_timelines(site, days, engine=engine, rebuild=False, progress=_silent)
        assert [manifest["ds"] for manifest in made] == days
        list(build_pin_features(site, days, engine=engine, progress=_silent))
        build_training_set(site, cut_ds=None, engine=engine, progress=_silent)
    return site


def _silent(message: str) -> None:
    pass
