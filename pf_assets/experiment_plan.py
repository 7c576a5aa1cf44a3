"""What an experiment comes to: a folder for each of its seeds, in which the judgement is the last file to appear.

    <site>/ablation_runs/<recipe>/<model_version>/   history.jsonl, model/, result.json, scores.parquet, evaluation.json

A trained model is taken up again as long as its configuration, training set and code are the same, and its judgement
as long as the question and the code that judges are. What has changed, and only that, is made anew.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pf_assets.model_plan import PlannedModel, code_fingerprint, plan_config
from pf_core.atomic import read_json
from pf_core.recipes import Experiment, Recipe
from pf_core.site import Site
from pf_core.training_set import DESCRIPTION, latest_training_set

JUDGEMENT = "evaluation.json"
SCORES = "scores.parquet"

JUDGING_MODULES = (
    *("scores", "search", "diversity", "pinnersage", "evaluation", "baselines", "contenders", "protocol"),
)
"""Of pf_core: with one of these changed, the same model may be judged otherwise."""


@dataclass(frozen=True, kw_only=True)
class PlannedSeed:
    """One run of an experiment."""

    experiment: Experiment
    seed: int
    training_set: str
    """Its fingerprint."""
    judged_by: str
    """The code that judges, and how many users and pins it asks about at most."""
    run_dir: Path
    model: PlannedModel | None
    """None: nothing is trained."""

    @property
    def judgement(self) -> dict[str, Any] | None:
        """What was found, if it was found by the code of today."""
        path = self.run_dir / JUDGEMENT
        found = read_json(path) if path.exists() else None
        return found if found is not None and found.get("judged_by") == self.judged_by else None

    @property
    def older_judgement(self) -> dict[str, Any] | None:
        """What any version of the code has found for the same configuration on the same training set; the newest."""
        same = {"seed": self.seed, "training_set": self.training_set, "config": self.config}
        paths = sorted(self.run_dir.parent.glob(f"*/{JUDGEMENT}"), key=lambda path: -path.stat().st_mtime)
        return next((found for found in map(read_json, paths) if same.items() <= found.items()), None)

    @property
    def config(self) -> dict[str, Any] | None:
        return None if self.model is None else self.model.config.model_dump(mode="json")


def experiments_dir(site: Site) -> Path:
    return site.directory / "ablation_runs"


def plan_experiments(
    site: Site, experiments: Iterable[Experiment], *, num_seeds: int | None = None
) -> dict[str, list[PlannedSeed]]:
    """By name, the runs of these experiments on the training set that is there; `num_seeds` for another number."""
    limits = site.serving.promotion
    judged_by = f"{code_fingerprint(JUDGING_MODULES)}, {limits.num_users} users, {limits.num_pins} pins"
    codes = {"code": code_fingerprint(), "judged_by": judged_by}
    fingerprint = str(read_json(latest_training_set(site) / DESCRIPTION)["fingerprint"])
    return {
        experiment.name: list(_plan(site, experiment, num_seeds or experiment.num_seeds, fingerprint, codes))
        for experiment in experiments
    }


def _plan(
    site: Site, experiment: Experiment, num_seeds: int, training_set: str, codes: Mapping[str, str]
) -> Iterator[PlannedSeed]:
    folder = experiments_dir(site) / experiment.name
    for seed in range(num_seeds if isinstance(experiment, Recipe) else 1):
        model = None
        if isinstance(experiment, Recipe):
            config = experiment.configure(site.training.train_config, seed=seed)
            model = plan_config(site, config, folder, code=codes["code"])
        yield PlannedSeed(
            experiment=experiment,
            seed=seed,
            training_set=training_set,
            judged_by=codes["judged_by"],
            run_dir=folder / training_set if model is None else model.run_dir,
            model=model,
        )
