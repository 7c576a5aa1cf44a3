"""Every stage of the pipeline as a function of the site, a day and an engine, as its asset calls it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from pf_core.config.site import Site
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.pins import embed_pin_days
from pf_core.embeddings.snapshot import merge_days
from pf_core.embeddings.tables import embedding_state
from pf_core.embeddings.users import embed_days
from pf_core.engine.base import Engine
from pf_core.engine.local import LocalEngine
from pf_core.evaluation.promotion import NamedModel, evaluate_and_decide
from pf_core.logs.deletion_list import add_to_deletion_list, read_deletion_list
from pf_core.logs.ingest import ingest_days
from pf_core.operations.forgetting import delete_users
from pf_core.operations.remains import find_remains
from pf_core.pins.features import build_pin_features
from pf_core.serving.build_index import build_index_days
from pf_core.serving.export import export_embeddings
from pf_core.serving.publish import publish_release
from pf_core.serving.rollback import rollback
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import write_json
from pf_core.storage.locks import exclusive, relying_on
from pf_core.timelines.build import build_timelines
from pf_core.training.build_set import build_training_set
from pf_core.training.plan import PlannedModel, current_model, models_dir, plan_model, write_current_model
from pf_core.training.refit import planned_refit, read_judged, refits_dir, write_current_refit
from pf_core.training.trainer import train
from pf_core.training.training_set import latest_training_set, open_training_set
from tests.chaos.chaos_site import DAYS, MODELS, change_log, content_of, make_site, open_site, served


class Stage(Protocol):
    def __call__(self, site: Site, ds: str, engine: Engine, *, model: str) -> Any: ...


def _silent(message: str) -> None:
    pass


class _Silent:
    def say(self, message: str) -> None:
        pass

    def measure(self, step: int, values: dict[str, float]) -> None:
        pass


def _all(manifests: Iterable[Any]) -> None:
    for _ in manifests:
        pass


def raw_actions(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(ingest_days(site, [ds], engine=engine, forgotten=read_deletion_list(site), progress=_silent))


def pin_features(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(build_pin_features(site, [ds], engine=engine, progress=_silent))


def user_timelines(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(build_timelines(site, [ds], engine=engine, rebuild=False, progress=_silent))


def training_set(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    build_training_set(site, cut_ds=None, engine=engine, progress=_silent)


def _train(plan: PlannedModel) -> None:
    train(plan.config, training_set=plan.training_set, run_dir=plan.run_dir, num_workers=0, observer=_Silent())


def pinnerformer_model(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    with (
        relying_on(latest_training_set(site).parent, "training_set"),
        exclusive(models_dir(site), "pinnerformer_model"),
    ):
        plan = plan_model(site)
        _train(plan)
        write_current_model(site, plan, mlflow={})


def offline_evaluation(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    folder = site.directory / "offline_evaluation"
    with exclusive(folder, "offline_evaluation"), relying_on(latest_training_set(site).parent, "training_set"):
        manifest = evaluate_and_decide(
            site,
            open_training_set(latest_training_set(site)),
            *(NamedModel(name=name, path=served(site, name).path) for name in ("B", "A")),
            scores_path=folder / "scores.parquet",
            progress=_silent,
        )
        write_json(folder / MANIFEST, manifest)


def refitted_model(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    current = current_model(site)
    assert current is not None
    name = current["model_version"]
    judged = read_judged(models_dir(site) / name / "model", served_version=f"{name}-9", version=9)
    with exclusive(refits_dir(site), "refitted_model"):
        with planned_refit(site, judged, engine=engine, progress=_silent) as plan:
            _train(plan)
        write_current_refit(site, plan, judged, mlflow={})


def user_embeddings(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(
        embed_days(
            site,
            [ds],
            model_for=lambda _: served(site, model),
            everyone=False,
            engine=engine,
            progress=_silent,
        )
    )


def user_embedding_snapshot(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(merge_days(site, [ds], engine=engine, progress=_silent))


def _model_of_users(site: Site, ds: str) -> ServedModel:
    version = embedding_state(site).require(ds)["model_version"]
    return served(site, next(name for name, one in MODELS.items() if one == version))


def pin_embeddings(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(embed_pin_days(site, [ds], model_for=lambda day: _model_of_users(site, day), engine=engine, progress=_silent))


def pin_index(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    _all(build_index_days(site, [ds], engine=engine, progress=_silent))


def release(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    publish_release(site, ds, engine=engine, progress=_silent)


def roll_back(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    rollback(site)


def export(site: Site, ds: str, engine: Engine, *, model: str) -> None:
    for what in ("users", "pins"):
        out = Path(site.data_dir).parent / f"export-{what}"
        if not out.exists():
            export_embeddings(site, "users" if what == "users" else "pins", out, ds=ds, progress=_silent)


STAGES: dict[str, Stage] = {
    "raw_actions": raw_actions,
    "pin_features": pin_features,
    "user_timelines": user_timelines,
    "training_set": training_set,
    "pinnerformer_model": pinnerformer_model,
    "offline_evaluation": offline_evaluation,
    "refitted_model": refitted_model,
    "user_embeddings": user_embeddings,
    "user_embedding_snapshot": user_embedding_snapshot,
    "pin_embeddings": pin_embeddings,
    "pin_index": pin_index,
    "release": release,
    "rollback": roll_back,
    "export": export,
}
"""In the order of the pipeline: each of them can be run when those before it have been."""

MAKES_A_MODEL = ("training_set", "pinnerformer_model", "offline_evaluation", "refitted_model")
"""Stages that do not belong to a day."""

DAILY = tuple(name for name in STAGES if name not in (*MAKES_A_MODEL, "rollback", "export"))


def run_stage(root: Path, stage: str, ds: str, *, model: str = "A", num_workers: int = 1) -> None:
    site = open_site(root)
    with LocalEngine(num_workers=num_workers, memory_mb=256, temp_dir=site.workspace / "tmp") as engine:
        STAGES[stage](site, ds, engine, model=model)


def build_base(root: Path, trains: bool) -> None:
    """Build every day up to the fourth, release the last two of them, and train."""
    make_site(root)
    for ds in DAYS[:4]:
        for stage in DAILY:
            if ds >= DAYS[2] or stage not in ("pin_embeddings", "pin_index", "release"):
                run_stage(root, stage, ds)
    for stage in MAKES_A_MODEL if trains else ():
        run_stage(root, stage, DAYS[3])


def forget(root: Path, user: int) -> None:
    """Do what `pf forget` does until Dagster builds the newest days again."""
    site = open_site(root)
    add_to_deletion_list(site, [user])
    delete_users(site, read_deletion_list(site), artifacts=[], progress=_silent)


def remains(root: Path, user: int) -> dict[str, str]:
    found = find_remains(open_site(root), user, artifacts=[], models=[])
    return {place.name: place.state for place in found.places if place.state != "gone"}


CALLS: dict[str, Callable[..., Any]] = {
    "base": build_base,
    "stage": run_stage,
    "forget": forget,
    "remains": remains,
    "change_log": change_log,
    "content": content_of,
}
"""What a process of the chaos tests can be asked to do; the first argument is always the site's folder."""
