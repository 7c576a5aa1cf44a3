"""How one seed of an experiment is judged: by the question that judges everything else (paper, section 4.1).

The scores by user and the judgement are written to the seed's folder; the judgement is written last.
"""

import time
from collections.abc import Callable
from typing import Any

from pf_core.evaluation.discovery import on_new_pins
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS, QueryEmbedder, open_model_embedder
from pf_core.evaluation.protocol import recall_by_density, score_embedder
from pf_core.evaluation.question import Question
from pf_core.evaluation.summary import summarize
from pf_core.experiments.plan import JUDGEMENT, SCORES, PlannedSeed, has_content_noise
from pf_core.experiments.recipe import BASE, Set
from pf_core.storage.files import read_json, write_json

COMPARED: Set = "model-comparison"
"""The set whose members are also judged with smaller indexes."""
RIVALS = ("pinnersage_20", "pinnersage_5", "mean_of_100")
"""Baselines that are judged beside a model that reads noisy content vectors, with the same vectors."""


def judge_experiment(plan: PlannedSeed, question: Question, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Judge the trained model or the baseline of `plan`, write scores and judgement, and return the judgement."""
    started = time.monotonic()
    if plan.model is None:
        embedder = BASELINE_EMBEDDERS[plan.experiment.name](question)
    else:
        embedder = open_model_embedder(question, plan.run_dir / "model", name=plan.title)
    scores = score_embedder(question, embedder, plan.title, frequencies=plan.experiment.frequencies, progress=progress)
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    scores.write(plan.run_dir / SCORES)
    by_density, beside_rivals = {}, {}
    if COMPARED in plan.experiment.sets:
        by_density = recall_by_density(question, embedder, plan.title, progress=progress)
    if has_content_noise(plan.experiment):
        beside_rivals = {
            "all positives": _judge_beside_rivals(question, embedder, progress),
            "positives on pins new to the user": _judge_beside_rivals(on_new_pins(question), embedder, progress),
        }
    judgement: dict[str, Any] = {
        "recipe": plan.experiment.name,
        "seed": plan.seed,
        "config": plan.config,
        "training_set": plan.fingerprint,
        "code": None if plan.model is None else plan.model.code,
        "judged_by": plan.judged_by,
        "question": scores.question,
        "counts": {**question.counts, "pins": question.num_pins},
        "metrics": summarize(scores),
        "by_density": by_density,
        "beside_rivals": beside_rivals,
        "training": None if plan.model is None else read_json(plan.run_dir / "result.json"),
        "judging_seconds": time.monotonic() - started,
    }
    write_json(plan.run_dir / JUDGEMENT, judgement)
    once = judgement["metrics"]["once"]
    progress(f"{plan.title}: recall@10 {once['recall_at_10']:.4f}, P90 coverage@10 {once['p90_coverage_at_10']:.4f}")
    return judgement


def _judge_beside_rivals(
    question: Question, embedder: QueryEmbedder, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    embedders = {BASE: embedder} | {name: BASELINE_EMBEDDERS[name](question) for name in RIVALS}
    return {name: recall_by_density(question, each, name, progress=progress) for name, each in embedders.items()}
