"""The stages of the pipeline without an orchestrator: one function for each asset, in order, on a small site.

The model is one of parts that is trained for a few steps: what is tested is that its vectors arrive.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pf_core.config.site import Site
from pf_core.config.training import auto
from pf_core.config.training_section import TrainingConfig
from pf_core.days import ds_range
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.users import embed_days
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.pins.features import build_pin_features
from pf_core.serving.build_index import build_index_days
from pf_core.serving.publish import publish_release
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.training.plan import code_fingerprint, current_model, models_dir, plan_config, write_current_model
from pf_core.training.trainer import train
from pf_core.training.training_set import latest_training_set, read_training_set_manifest
from tests.support.daily import day, make_daily_site
from tests.support.sites import START

BUILT = ds_range(START, day(3))
"""Days of the site; the last of them evaluates the model and is released."""

Stage = Callable[[Site, Engine, Sequence[str]], None]


class Silent:
    """An observer of a training."""

    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def silent(message: str) -> None:
    pass


def make_staged_site(root: Path, **options: Any) -> Site:
    """Logs and catalogue of one day more than BUILT; nothing is built."""
    training = TrainingConfig(evaluation_days=1, held_out_share=0.3)
    return make_daily_site(root, last=day(len(BUILT)), **options).model_copy(update={"training": training})


def _ingest(site: Site, engine: Engine, days: Sequence[str]) -> None:
    list(ingest_days(site, days, engine=engine, forgotten=read_deletion_list(site), progress=silent))


def _features(site: Site, engine: Engine, days: Sequence[str]) -> None:
    list(build_pin_features(site, days, engine=engine, progress=silent))


def _timelines(site: Site, engine: Engine, days: Sequence[str]) -> None:
    list(build_timelines(site, days, engine=engine, rebuild=False, progress=silent))


def _training_set(site: Site, engine: Engine, days: Sequence[str]) -> None:
    build_training_set(site, cut_ds=None, engine=engine, progress=silent)


def _model(site: Site, engine: Engine, days: Sequence[str]) -> None:
    path, base = latest_training_set(site), auto()
    optimizer = base.optimizer.model_copy(update={"num_steps": 6, "warmup_steps": 2})
    changes = {"optimizer": optimizer, "batch_users": 16, "evaluate_every": 3, "checkpoint_every": 3}
    manifest = read_training_set_manifest(path)
    config = base.model_copy(update=changes)
    plan = plan_config(config, path, manifest, models_dir(site), code=code_fingerprint())
    train(plan.config, training_set=path, run_dir=plan.run_dir, num_workers=0, observer=Silent())
    write_current_model(site, plan, mlflow={"experiment_id": "1", "run_id": "1", "version": 1})


def served_model(site: Site) -> ServedModel:
    """The model that was trained last."""
    manifest = current_model(site)
    assert manifest is not None
    version = manifest["model_version"]
    return ServedModel(model_version=f"{version}-1", path=models_dir(site) / version / "model")


def _embed(site: Site, engine: Engine, days: Sequence[str]) -> None:
    model = served_model(site)
    list(
        embed_days(
            site,
            days,
            model_for=lambda ds: model,
            everyone=False,
            engine=engine,
            progress=silent,
        )
    )


def _merge(site: Site, engine: Engine, days: Sequence[str]) -> None:
    list(merge_days(site, days, engine=engine, progress=silent))


def _embed_pins(site: Site, engine: Engine, days: Sequence[str]) -> None:
    model = served_model(site)
    list(embed_pin_days(site, days[-1:], model_for=lambda ds: model, engine=engine, progress=silent))


def _index(site: Site, engine: Engine, days: Sequence[str]) -> None:
    list(build_index_days(site, days[-1:], engine=engine, progress=silent))


def _release(site: Site, engine: Engine, days: Sequence[str]) -> None:
    publish_release(site, days[-1], engine=engine, progress=silent)


STAGES: dict[str, Stage] = {
    "raw_actions": _ingest,
    "pin_features": _features,
    "user_timelines": _timelines,
    "training_set": _training_set,
    "pinnerformer_model": _model,
    "user_embeddings": _embed,
    "user_embedding_snapshot": _merge,
    "pin_embeddings": _embed_pins,
    "pin_index": _index,
    "release": _release,
}
"""In the order of the pipeline, by asset."""

DAILY = tuple(name for name in STAGES if name not in ("training_set", "pinnerformer_model"))


def run_stage(site: Site, name: str, days: Sequence[str] = BUILT, *, num_workers: int = 1) -> None:
    """Build days of an asset."""
    with LocalEngine(num_workers=num_workers, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        STAGES[name](site, engine, days)


def run_stages(site: Site, names: Sequence[str] = tuple(STAGES), days: Sequence[str] = BUILT) -> Site:
    for name in names:
        run_stage(site, name, days)
    return site
