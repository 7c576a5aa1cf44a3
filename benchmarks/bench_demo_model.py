"""What the demo model is worth: Recall@10 on held-out users in the 14 days after the cut, beside simple baselines.

Uses the model that `make demo` trained, or trains it (about 8 minutes) if there is none. The index is all candidates
of the demo site. Popularity is counted over the whole training period; the last week's, which is stronger on a site
whose pins come and go, is shown beside it. Training time is that of the steps, evaluation included.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from measuring import report, say

from pf_core.atomic import MANIFEST, read_json
from pf_core.checkpoint import load_model
from pf_core.evaluation import at_the_cut, baselines, read_future
from pf_core.site import Site, load_site
from pf_core.training_set import latest_training_set, open_training_set
from pf_core.validation import HeldOut, ModelEmbedder

REPOSITORY = Path(__file__).resolve().parent.parent
SITE = REPOSITORY / "dagster_home" / "demo.yaml"
EVALUATION_DAYS = 14
RECENT = (10, 20, 50, 100, 200)


def trained_demo() -> tuple[Site, Path]:
    """The demo site and its model's folder; made first if it is not there."""
    site = load_site(SITE, environment=os.environ)
    manifest = site.directory / "pinnerformer_model" / MANIFEST
    if not manifest.exists():
        say("no trained demo yet: running `pf demo`")
        subprocess.run([sys.executable, "-m", "pf_assets.cli", "demo"], cwd=REPOSITORY, check=True)
    return site, manifest.parent / read_json(manifest)["model_version"]


def confidence(held_out: HeldOut, ours: ModelEmbedder) -> tuple[float, float]:
    """A 95 % bootstrap interval of the model's recall over users."""
    recall_U = held_out.recall_by_user(ours, k=10).numpy()
    draws = np.random.default_rng(0).choice(recall_U, (2000, len(recall_U))).mean(axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only if the demo is there already")
    if parser.parse_args().quick and not (REPOSITORY / "data" / "demo" / "pinnerformer_model" / MANIFEST).exists():
        report("demo_model.skipped", 0, "runs")
        return 0
    site, run_dir = trained_demo()
    data = open_training_set(latest_training_set(site))
    model, _ = load_model(run_dir / "model")
    future = read_future(site, data, EVALUATION_DAYS)
    held_out = at_the_cut(
        data, future, sequence_length=max(model.config.sequence_length, max(RECENT)), num_pins=1_000_000, seed=0
    )
    simple = baselines(data, popular_days=(7, 365), recent=RECENT)
    recalls = {name: held_out.recall(baseline, k=10) for name, baseline in simple.items()}
    ours = ModelEmbedder(model=model, data=data, device=torch.device("cpu"))
    judged = at_the_cut(data, future, sequence_length=model.config.sequence_length, num_pins=1_000_000, seed=0)
    recall = judged.recall(ours, k=10)
    low, high = confidence(judged, ours)
    for name, value in recalls.items():
        say(f"{name}: recall@10 {value:.4f}")
    say(f"model: recall@10 {recall:.4f} (95 % of bootstraps: {low:.4f} to {high:.4f})")
    say(
        f"{judged.num_users:,} users, {len(future.user):,} positives, index of {len(judged.index_pin):,} pins; "
        f"left out: {future.num_unknown_pins:,} positives on pins without a feature at the cut"
    )
    mean = max(value for name, value in recalls.items() if name.startswith("mean"))
    result = json.loads((run_dir / "result.json").read_text())
    report("demo_model.recall_at_10", recall, "recall")
    report("demo_model.recall_over_popularity", recall / recalls["popularity, 365 days"], "x", bar=">= 3")
    report("demo_model.recall_over_last_weeks_popularity", recall / recalls["popularity, 7 days"], "x")
    report("demo_model.recall_over_best_mean_of_recent_pins", recall / mean, "x", bar="> 1")
    report("demo_model.training_minutes", result["seconds"] / 60, "minutes", bar="<= 5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
