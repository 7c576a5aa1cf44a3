"""The experiments in MLflow: one run for each recipe, under it one for each seed, and the results read from there.

The seeds' runs have the scores of every evaluated user as an artifact: tables, intervals and verdicts are computed from
these alone, so that the store is enough to make the report. For each recipe and seed, the newest finished run on the
current training set counts; runs that do not count are listed, with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pf_assets.tracking.runs import RunStore, TrackedRun, artifact_path, flatten
from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.evaluation.scores import Scores, read_scores
from pf_core.experiments.judgement import Judgement
from pf_core.experiments.plan import JUDGEMENT, SCORES, PlannedSeed, has_content_noise, plan_experiments
from pf_core.experiments.recipe import BASE, Experiment
from pf_core.experiments.recipes import experiments
from pf_core.storage.files import read_json

if TYPE_CHECKING:
    from mlflow.entities import Run


RUNS_PER_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The finished run of one seed in the store."""

    recipe: str
    seed: int
    run: TrackedRun
    training_set: str
    question: str
    ended_at_ms: int
    artifacts: Path
    params: Mapping[str, str]
    tags: Mapping[str, str]

    @property
    def ended_at(self) -> str:
        """When the run ended, to the minute (UTC)."""
        return datetime.fromtimestamp(self.ended_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")

    def scores(self) -> Scores:
        return read_scores(self.artifacts / SCORES)

    def judgement(self) -> Judgement:
        judgement: Judgement = read_json(self.artifacts / JUDGEMENT)
        return judgement


@dataclass(frozen=True, kw_only=True)
class StoredResults:
    training_set: str
    question: str
    outcomes: Mapping[str, Sequence[Outcome]]
    """Runs by recipe, in the order of seeds; all have the same question."""
    noisy: Mapping[float, Outcome]
    """Runs by the noise of the content vectors; their training sets, and so their questions, are other ones."""
    left_out: Sequence[str]
    """One sentence for each run that does not count."""

    def scores(self) -> dict[str, list[Scores]]:
        return {recipe: [outcome.scores() for outcome in seeds] for recipe, seeds in self.outcomes.items()}


class ExperimentStore(RunStore):
    """The MLflow store of the models, with an MLflow experiment of its own."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.name = f"{self.name}-ablations"

    def start_recipe(self, folder: Path, experiment: Experiment, tags: Mapping[str, str]) -> TrackedRun:
        """Start or continue the parent run of the seeds' runs; a recipe has one for all training sets."""
        described = {
            "recipe": experiment.name,
            "sets": ", ".join(experiment.sets),
            "mlflow.note.content": experiment.why,
        }
        return self.start(folder, name=experiment.name, params={}, tags={**tags, **described})

    def start_seed(self, plan: PlannedSeed, parent: TrackedRun, tags: Mapping[str, str]) -> TrackedRun:
        """Start or continue the run of one seed."""
        name = plan.experiment.name
        described = {
            "mlflow.parentRunId": parent.run_id,
            "recipe": name,
            "seed": str(plan.seed),
            "training_set": plan.fingerprint,
            "sets": ", ".join(plan.experiment.sets),
        }
        run_name = name if plan.model is None else f"{name}, seed {plan.seed}"
        return self.start(plan.run_dir, name=run_name, params=plan.config or {}, tags={**tags, **described})

    def measure_final(self, run: TrackedRun, metrics: Mapping[str, float]) -> None:
        """Log metrics of a finished training."""
        self.measure(run, [{"step": 0, **metrics}])

    def is_finished(self, run: TrackedRun) -> bool:
        return str(self._client.get_run(run.run_id).info.status) == "FINISHED"

    def tag(self, run: TrackedRun, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._client.set_tag(run.run_id, key, value)

    def seeds(self) -> "Iterator[Run]":
        """Yield the runs of seeds, finished or not."""
        token: str | None = None
        while True:
            page = self._client.search_runs([self._experiment_id()], max_results=RUNS_PER_PAGE, page_token=token)
            yield from (run for run in page if "seed" in run.data.tags)
            token = page.token
            if not token:
                return


def read_results(site: Site) -> StoredResults:
    """Read the newest finished run of each recipe and seed on its current training set.

    For each training set, only runs with the newest run's question count.
    """
    wanted = plan_experiments(site, experiments(site).values())
    training_set = wanted[BASE][0].fingerprint
    found: list[Outcome] = []
    left_out: list[str] = []
    for run in ExperimentStore(site).seeds():
        reason = _why_not(run, wanted)
        if reason is None:
            found.append(_outcome(run))
        else:
            left_out.append(f"{run.info.run_name}: {reason}")
    if not any(outcome.training_set == training_set for outcome in found):
        raise PipelineError(
            f"no experiment on the training set {training_set} has been run yet",
            "`pf ablations` runs them" + "".join(f"\n  {sentence}" for sentence in left_out),
        )
    found.sort(key=lambda outcome: -outcome.ended_at_ms)
    questions: dict[str, str] = {}
    newest: dict[tuple[str, int], Outcome] = {}
    for outcome in found:
        if outcome.question != questions.setdefault(outcome.training_set, outcome.question):
            left_out.append(f"{outcome.recipe}, seed {outcome.seed}: it was judged by another question")
        elif newest.setdefault((outcome.recipe, outcome.seed), outcome) is not outcome:
            left_out.append(f"{outcome.recipe}, seed {outcome.seed}: there is a newer run")
    outcomes = {
        recipe: [newest[key] for key in sorted(newest) if key[0] == recipe]
        for recipe in wanted
        if any(key[0] == recipe for key in newest)
    }
    is_noisy = {name: has_content_noise(seeds[0].experiment) for name, seeds in wanted.items()}
    return StoredResults(
        training_set=training_set,
        question=questions[training_set],
        outcomes={recipe: seeds for recipe, seeds in outcomes.items() if not is_noisy[recipe]},
        noisy={
            float(wanted[recipe][0].manifest.get("content_noise", 0)): seeds[0]
            for recipe, seeds in outcomes.items()
            if is_noisy[recipe]
        },
        left_out=left_out,
    )


def _why_not(run: "Run", wanted: Mapping[str, Sequence[PlannedSeed]]) -> str | None:
    """Return why a run does not count; None if it does."""
    tags = run.data.tags
    if run.info.status != "FINISHED":
        return f"its status is {run.info.status}"
    if tags["recipe"] not in wanted:
        return f"there is no recipe {tags['recipe']!r} any more"
    if tags["training_set"] != wanted[tags["recipe"]][0].fingerprint:
        return f"its training set was {tags['training_set']}"
    expected = flatten(_without_seed(wanted[tags["recipe"]][0].config or {}))
    other = [name for name, value in expected.items() if run.data.params.get(name, value) != value]
    return f"its configuration was another one ({', '.join(other)})" if other else None


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "seed"}


def _outcome(run: "Run") -> Outcome:
    tags = run.data.tags
    return Outcome(
        recipe=tags["recipe"],
        seed=int(tags["seed"]),
        run=TrackedRun(experiment_id=run.info.experiment_id, run_id=run.info.run_id),
        training_set=tags["training_set"],
        question=tags["question"],
        ended_at_ms=int(run.info.end_time or 0),
        artifacts=artifact_path(run.info.artifact_uri or ""),
        params=run.data.params,
        tags=tags,
    )
