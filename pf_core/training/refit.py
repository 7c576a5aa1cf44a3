"""The refit: an accepted model, trained once more until the newest day, which serves in its place.

`offline_evaluation` judges a model on the days after its cut, so a judged model is out of date by these days when it
begins to serve. The refit has the judged model's recipe and number of steps, and a training set that ends with the
newest day. Held-out users stay out of it: they evaluate the next models, too.

A refit has seen the days of the question. It is never evaluated and never compared: the figures of the evaluation
belong to the judged model, and candidate and champion are judged models.

Its training set has a folder of its own, so that the judged model's set stays published for evaluation, and is removed
after the training: it would keep the actions of users who are forgotten later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.config.training import TrainConfig
from pf_core.engine.base import Engine
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import LAYOUTS, refuse_other_layout
from pf_core.progress import Progress
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json, remove_tree, write_json
from pf_core.training.build_set import publish_training_set
from pf_core.training.checks import judge_held_out_users
from pf_core.training.cut import EvaluationDays, newest_timelines
from pf_core.training.plan import (
    ModelManifest,
    PlannedModel,
    code_fingerprint,
    describe_model,
    plan_config,
    read_history,
    training_fault,
)
from pf_core.training.run_folder import RESULT, TrainingResult
from pf_core.training.training_set import read_training_set_manifest, training_sets_dir


@dataclass(frozen=True, kw_only=True)
class JudgedModel:
    """A model of the registry that was accepted."""

    served_version: str
    version: int
    """Version in the registry."""
    cut_ds: str
    """Last day of its training set."""
    config: TrainConfig
    num_steps: int
    """Number of steps that its weights were trained."""


class RefitManifest(ModelManifest):
    """Manifest of the asset refitted_model: the model that was refitted last."""

    refit_of: str
    """Served version of the judged model, which the figures of offline_evaluation belong to."""
    judged_version: int
    """Registry version of the judged model."""
    judged_cut_ds: str
    """Last day of the judged model's training set."""


def refits_dir(site: Site) -> Path:
    """Folder that holds a folder for each refitted model, and the manifest of the last one."""
    return site.directory / "refitted_model"


def current_refit(site: Site) -> RefitManifest | None:
    """Return the manifest of the model that was refitted last."""
    path = refits_dir(site) / MANIFEST
    if not path.exists():
        return None
    manifest: RefitManifest = read_json(path)
    command = materialize_command("refitted_model", config={"champion": True})
    refuse_other_layout("refitted_model", manifest, what="refitted_model", command=command)
    return manifest


def judge_refit(site: Site) -> CheckResult:
    """The loss of the model that was refitted last is finite and fell; without a refit there is nothing to judge."""
    manifest = current_refit(site)
    if manifest is None:
        return CheckResult(site.start_ds, True, "nothing was refitted yet")
    fault = training_fault(read_history(refits_dir(site) / manifest["refit_of"] / manifest["model_version"]))
    reason = f"{manifest['model_version']}, the refit of {manifest['refit_of']}: {fault or 'no fault found'}"
    return CheckResult(manifest["cut_ds"], fault is None, reason)


def read_judged(folder: Path, *, served_version: str, version: int) -> JudgedModel:
    """Read the recipe of a registered model from its folder, beside which the result of its training lies."""
    from pf_core.model.checkpoint import read_description  # brings torch, which takes seconds

    description = read_description(folder)
    config = TrainConfig.model_validate(description["config"])
    result: TrainingResult = read_json(folder.parent / RESULT)
    return JudgedModel(
        served_version=served_version,
        version=version,
        cut_ds=description["cut_ds"],
        config=config,
        num_steps=_chosen_steps(result),
    )


def _chosen_steps(result: TrainingResult) -> int:
    """Return the number of steps whose weights are the model's; older results have it among the metrics only."""
    chosen = result.get("chosen_steps", result["metrics"].get("chosen_steps"))
    return int(chosen) if chosen else result["num_steps"]


def refit_config(judged: JudgedModel) -> TrainConfig:
    """Return the judged model's configuration with the number of steps that it chose.

    The number is known, so that no training user is needed to choose it: they all train.
    """
    optimizer = judged.config.optimizer
    changes: dict[str, Any] = {
        "num_steps": judged.num_steps,
        "warmup_steps": min(optimizer.warmup_steps, judged.num_steps),
    }
    config = judged.config.model_copy(update={"optimizer": optimizer.model_copy(update=changes)})
    if config.parts is None:
        return config
    return config.model_copy(update={"parts": config.parts.model_copy(update={"validation_share": 0.0})})


def reason_not_to_refit(site: Site, judged: JudgedModel) -> str | None:
    """Return why a refit would have nothing to add; None if there are newer days than the model's cut."""
    newest_ds = newest_timelines(site)
    if newest_ds > judged.cut_ds:
        return None
    return f"{judged.served_version} was trained until {judged.cut_ds}, and the newest timelines are of {newest_ds}"


@contextmanager
def planned_refit(site: Site, judged: JudgedModel, *, engine: Engine, progress: Progress) -> Iterator[PlannedModel]:
    """Build the training set that ends with the newest day, and yield the plan; the set is removed afterwards."""
    folder = training_sets_dir(site) / "refit"
    newest_ds = newest_timelines(site)
    progress(f"refit of {judged.served_version}, which was trained until {judged.cut_ds}: until {newest_ds}")
    no_evaluation: EvaluationDays = {"num_days": 0, "reason": "a refit sees every day, and is not evaluated"}
    try:
        manifest = publish_training_set(
            site, folder, newest_ds, evaluation_days=no_evaluation, engine=engine, progress=progress
        )
        training_set = folder / manifest["build"]
        found = judge_held_out_users(site, training_set)
        if not found.passed:
            raise PipelineError(f"the refit's training set is not usable: {found.reason}")
        yield plan_config(
            refit_config(judged),
            training_set,
            read_training_set_manifest(training_set),
            refits_dir(site) / judged.served_version,
            code=code_fingerprint(),
        )
    finally:
        remove_tree(folder)


def write_current_refit(
    site: Site, plan: PlannedModel, judged: JudgedModel, *, mlflow: dict[str, Any]
) -> RefitManifest:
    """Keep the manifest of a refitted model as that of the asset, and return it."""
    manifest: RefitManifest = {
        **describe_model(plan, mlflow=mlflow),
        "layout": LAYOUTS["refitted_model"],
        "refit_of": judged.served_version,
        "judged_version": judged.version,
        "judged_cut_ds": judged.cut_ds,
    }
    write_json(refits_dir(site) / MANIFEST, manifest)
    return manifest
