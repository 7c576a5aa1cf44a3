"""Page of ablation_runs: the metrics of each seed, and how the training went."""

import math
from collections.abc import Mapping, Sequence

import dagster as dg

from pf_assets.metadata.model import plot_training
from pf_assets.metadata.pages import Metadata, picture, table
from pf_core.experiments.judgement import Judgement
from pf_core.experiments.plan import PlannedSeed
from pf_core.training.plan import training_fault


def describe_recipe(
    plans: Sequence[PlannedSeed], judgements: Sequence[Judgement], means: Mapping[str, float], url: str
) -> Metadata:
    experiment, first = plans[0].experiment, plans[0]
    rows = [
        {
            "seed": judgement["seed"],
            "frequency": frequency,
            "recall_at_10": f"{metrics['recall_at_10']:.4f}",
            "95 % interval": "{:.4f} to {:.4f}".format(*metrics["recall_at_10_interval"]),
            "p90_coverage_at_10": f"{metrics['p90_coverage_at_10']:.4f}",
            "interest_entropy_at_50": f"{metrics.get('interest_entropy_at_50', math.nan):.4f}",
        }
        for judgement in judgements
        for frequency, metrics in judgement["metrics"].items()
    ]
    trained: Metadata = {}
    trainings = [judgement["training"] for judgement in judgements if judgement["training"] is not None]
    if first.model is not None:
        history, file = first.model.history, first.run_dir / "training.png"
        trained = {
            "training": picture(plot_training(history), file),
            "training_png": dg.MetadataValue.path(str(file)),
            "training_seconds": round(sum(training["seconds"] for training in trainings), 1),
            "parameters": trainings[0]["num_parameters"],
            "config": dg.MetadataValue.json(judgements[0]["config"] or {}),
            "fault": training_fault(history) or "none",
        }
    return {
        "recipe": experiment.name,
        "why": experiment.why,
        "sets": ", ".join(experiment.sets),
        "recall_at_10": means["once/recall_at_10"],
        "p90_coverage_at_10": means["once/p90_coverage_at_10"],
        "seeds": table(rows),
        "users": judgements[0]["counts"]["users"],
        "positives": judgements[0]["counts"]["positives"],
        "index_pins": judgements[0]["counts"]["pins"],
        "training_set": first.fingerprint,
        "question": judgements[0]["question"],
        "mlflow_run": dg.MetadataValue.url(url),
        "path": dg.MetadataValue.path(str(first.run_dir.parent)),
        **trained,
    }
