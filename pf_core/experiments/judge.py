"""The evaluation of one seed of an experiment, with the question that all experiments share (paper, section 4.1).

The scores of the users and the judgement are written to the seed's folder; the judgement is written last.
"""

import time

from pf_core.config.site import Site
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS, QueryEmbedder, open_model_embedder
from pf_core.evaluation.protocol import recall_by_density, score_embedder
from pf_core.evaluation.question import Question
from pf_core.evaluation.summary import summarize
from pf_core.experiments.judgement import ByDensity, Judgement
from pf_core.experiments.plan import JUDGEMENT, SCORES, PlannedSeed, has_content_noise
from pf_core.experiments.recipe import BASE, Set
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.progress import Progress
from pf_core.storage.files import read_json, write_json

COMPARED: Set = "model-comparison"
"""The set whose members are also evaluated with smaller indexes."""

RIVALS = ("pinnersage_20", "pinnersage_5", "mean_of_100")
"""Baselines that are compared with a model that reads noisy content vectors; they read the same vectors."""


def judge_seed(site: Site, plan: PlannedSeed, question: Question, *, progress: Progress) -> Judgement:
    """Evaluate the trained model or the baseline of `plan`, write scores and judgement, and return the judgement."""
    started = time.monotonic()
    if plan.model is None:
        embedder = BASELINE_EMBEDDERS[plan.experiment.name](question)
    else:
        embedder = open_model_embedder(question, plan.run_dir / "model", name=plan.title)
    scores = score_embedder(question, embedder, plan.title, frequencies=plan.experiment.frequencies, progress=progress)
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    scores.write(plan.run_dir / SCORES, forgotten=read_deletion_list(site))
    judgement = Judgement(
        recipe=plan.experiment.name,
        seed=plan.seed,
        config=plan.config,
        training_set=plan.fingerprint,
        code=None if plan.model is None else plan.model.code,
        judged_by=plan.judged_by,
        question=scores.question,
        counts={**question.counts, "pins": question.num_pins},
        metrics=summarize(scores),
        by_density=_by_density(plan, question, embedder, progress),
        beside_rivals=_beside_rivals(plan, question, embedder, progress),
        training=None if plan.model is None else read_json(plan.run_dir / "result.json"),
        judging_seconds=time.monotonic() - started,
    )
    write_json(plan.run_dir / JUDGEMENT, judgement)
    once = judgement["metrics"]["once"]
    progress(f"{plan.title}: recall@10 {once['recall_at_10']:.4f}, P90 coverage@10 {once['p90_coverage_at_10']:.4f}")
    return judgement


def _by_density(plan: PlannedSeed, question: Question, embedder: QueryEmbedder, progress: Progress) -> ByDensity:
    if COMPARED not in plan.experiment.sets:
        return {}
    return recall_by_density(question, embedder, plan.title, progress=progress)


def _beside_rivals(
    plan: PlannedSeed, question: Question, embedder: QueryEmbedder, progress: Progress
) -> dict[str, ByDensity]:
    """Return the metrics of the model and of its RIVALS, by name."""
    if not has_content_noise(plan.experiment):
        return {}
    embedders = {BASE: embedder} | {name: BASELINE_EMBEDDERS[name](question) for name in RIVALS}
    return {name: recall_by_density(question, each, name, progress=progress) for name, each in embedders.items()}
