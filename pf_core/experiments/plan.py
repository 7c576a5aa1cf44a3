"""The runs of an experiment: a folder for each of its seeds, in which the judgement is the last file to appear.

    <site>/ablation_runs/<recipe>/<model_version>/   history.jsonl, model/, result.json, scores.parquet, evaluation.json

Experiments with noisy content vectors have a training set of their own, in <site>/noisy_training_set/<noise>/.
A trained model is reused as long as its configuration, training set and code are the same, and its judgement as long
as the question and the evaluation code are. Only what has changed is trained or evaluated again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf_core.config.site import Site
from pf_core.experiments.content_noise import make_noisy_set, noisy_manifest
from pf_core.experiments.judgement import Judgement
from pf_core.experiments.recipe import Experiment, Recipe
from pf_core.storage.files import read_json
from pf_core.training.plan import PlannedModel, code_fingerprint, plan_config
from pf_core.training.training_set import TrainingSetManifest, latest_training_set, read_training_set_manifest

JUDGEMENT = "evaluation.json"

SCORES = "scores.parquet"

JUDGING_CODE = ("hashing.py", "timelines/arrays.py", "metrics", "evaluation", "experiments/judge.py")
"""Files and folders of pf_core that decide a judgement: if a statement in one of them changes, the metrics of the same
model may change."""


@dataclass(frozen=True, kw_only=True)
class PlannedSeed:
    """One run of an experiment: its inputs, and its folder."""

    experiment: Experiment
    seed: int
    training_set: Path
    manifest: TrainingSetManifest
    """Manifest of the training set; a noisy training set may not have been made yet."""
    judged_by: str
    """Fingerprint of the evaluation code, and its limits on users and pins."""
    run_dir: Path
    model: PlannedModel | None
    """The model to train; None for a baseline."""

    @property
    def title(self) -> str:
        return f"{self.experiment.name}, seed {self.seed}"

    @property
    def judgement(self) -> Judgement | None:
        """The judgement in the seed's folder, if the current code has made it."""
        path = self.run_dir / JUDGEMENT
        found: Judgement | None = read_json(path) if path.exists() else None
        return found if found is not None and found.get("judged_by") == self.judged_by else None

    @property
    def older_judgement(self) -> Judgement | None:
        """The newest judgement of the same configuration on the same training set, by any version of the code."""
        same = {"seed": self.seed, "training_set": self.fingerprint, "config": self.config}
        paths = sorted(self.run_dir.parent.glob(f"*/{JUDGEMENT}"), key=lambda path: -path.stat().st_mtime)
        return next((found for found in map(read_json, paths) if same.items() <= found.items()), None)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the training set."""
        return str(self.manifest["fingerprint"])

    @property
    def config(self) -> dict[str, Any] | None:
        return None if self.model is None else self.model.config.model_dump(mode="json")


def experiments_dir(site: Site) -> Path:
    return site.workspace / "ablation_runs"


def plan_experiments(
    site: Site, experiments: Iterable[Experiment], *, num_seeds: int | None = None
) -> dict[str, list[PlannedSeed]]:
    """Return the runs of these experiments on the site's training set, by name; `num_seeds` overrides their own."""
    limits = site.serving.promotion
    judged_by = f"{code_fingerprint(JUDGING_CODE)}, {limits.num_users} users, {limits.num_pins} pins"
    codes = {"code": code_fingerprint(), "judged_by": judged_by}
    return {
        experiment.name: list(_plan(site, experiment, num_seeds or experiment.num_seeds, codes))
        for experiment in experiments
    }


def make_training_set(site: Site, plan: PlannedSeed) -> None:
    """Make the training set of a run, unless it is the site's own."""
    if "content_noise" in plan.manifest:
        make_noisy_set(latest_training_set(site), plan.manifest, plan.training_set)


def has_content_noise(experiment: Experiment) -> bool:
    """Whether the experiment is about noisy content vectors; noise 0, the site's own vectors, is one of these."""
    return isinstance(experiment, Recipe) and experiment.content_noise is not None


def results_version(plans: Sequence[PlannedSeed], question: str) -> str:
    """Hash of all that decides the judgements of an experiment's seeds on a question."""
    decisive = [question, *(f"{plan.run_dir.name} {plan.judged_by}" for plan in plans)]
    return hashlib.sha256("\n".join(decisive).encode()).hexdigest()[:16]


def _training_set(site: Site, experiment: Experiment) -> tuple[Path, TrainingSetManifest]:
    """Return the path of an experiment's training set, which may not exist yet, and its manifest."""
    path = latest_training_set(site)
    manifest = read_training_set_manifest(path)
    if isinstance(experiment, Recipe) and experiment.content_noise:
        manifest = noisy_manifest(manifest, experiment.content_noise)
        path = site.workspace / "noisy_training_set" / f"{experiment.content_noise:g}" / manifest["fingerprint"]
    return path, manifest


def _plan(site: Site, experiment: Experiment, num_seeds: int, codes: Mapping[str, str]) -> Iterator[PlannedSeed]:
    folder = experiments_dir(site) / experiment.name
    training_set, manifest = _training_set(site, experiment)
    for seed in range(num_seeds if isinstance(experiment, Recipe) else 1):
        model = None
        if isinstance(experiment, Recipe):
            config = experiment.configure(site.training.towers_config, seed=seed)
            model = plan_config(config, training_set, manifest, folder, code=codes["code"])
        yield PlannedSeed(
            experiment=experiment,
            seed=seed,
            training_set=training_set,
            manifest=manifest,
            judged_by=codes["judged_by"],
            run_dir=folder / manifest["fingerprint"] if model is None else model.run_dir,
            model=model,
        )
