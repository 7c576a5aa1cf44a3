"""What the demo model is worth: Recall@10 on held-out users in the 14 days after the cut, beside simple baselines.

The world has the days of the published figures, whatever day it is: the site file is the package's example, and its
data, made in about 4 minutes if it is not there, is in the cache, not that of `make demo`. The index is all candidates
of the demo site. Popularity is counted over the whole training period; the last week's, which is stronger on a site
whose pins come and go, is shown beside it. Training time is that of the steps, evaluation included.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import report, say

from pf_assets.settings import DEMO_SITE, INSTANCE_TEXT
from pf_core.config.site import Site, load_site
from pf_core.evaluation.embedders import BASELINE_EMBEDDERS
from pf_core.evaluation.protocol import score_baseline, score_model
from pf_core.evaluation.question import open_question
from pf_core.evaluation.summary import summarize
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import local_dir, read_json
from pf_core.training.training_set import latest_training_set, open_training_set

ROOT = local_dir() / "bench_demo_model"
ENVIRONMENT = {**os.environ, "PF_SITE": str(DEMO_SITE), "PF_DATA_DIR": str(ROOT / "data"), "DAGSTER_HOME": str(ROOT)}


def trained_demo() -> tuple[Site, Path]:
    """The demo site and its model's folder; made first if it is not there."""
    site = load_site(DEMO_SITE, environment=ENVIRONMENT)
    manifest = site.directory / "pinnerformer_model" / MANIFEST
    if not manifest.exists():
        say(f"no trained demo in {ROOT} yet: running `pf world` and `pf run`")
        ROOT.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTANCE_TEXT, ROOT)
        for command in (["world", str(site.log_root), "--preset", "demo"], ["run"]):
            subprocess.run([sys.executable, "-m", "pf_assets.cli.main", *command], env=ENVIRONMENT, check=True)
    return site, manifest.parent / read_json(manifest)["model_version"]


def _recall(summary: dict[str, Any]) -> tuple[float, float, float]:
    return summary["recall_at_10"], *summary["recall_at_10_interval"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only if the demo is there already")
    is_there = (ROOT / "data" / "demo" / "pinnerformer_model" / MANIFEST).exists()
    if parser.parse_args().quick and not is_there:
        report("demo_model.skipped", 0, "runs")
        return 0
    site, run_dir = trained_demo()
    question = open_question(site, open_training_set(latest_training_set(site)), progress=say)
    judged = score_model(question, run_dir / "model", frequencies=("once", "daily", "realtime"), progress=say)
    ours = summarize(judged)
    theirs = {}
    for name in BASELINE_EMBEDDERS:
        theirs[name] = summarize(score_baseline(question, name, frequencies=("once",), progress=say))["once"]
        say("{}: recall@10 {:.4f} (95 %: {:.4f} to {:.4f})".format(name, *_recall(theirs[name])))
    for frequency, summary in ours.items():
        say("model, {}: recall@10 {:.4f} (95 %: {:.4f} to {:.4f})".format(frequency, *_recall(summary)))
    say(f"{question.counts}, index of {question.num_pins:,} pins")
    recall = ours["once"]["recall_at_10"]
    mean = max(each["recall_at_10"] for name, each in theirs.items() if name.startswith("mean"))
    result = json.loads((run_dir / "result.json").read_text())
    report("demo_model.recall_at_10", recall, "recall")
    report("demo_model.recall_over_popularity", recall / theirs["popularity_ever"]["recall_at_10"], "x", bar=">= 3")
    report("demo_model.recall_over_last_weeks_popularity", recall / theirs["popularity_7d"]["recall_at_10"], "x")
    report("demo_model.recall_over_best_mean_of_recent_pins", recall / mean, "x", bar="> 1")
    report("demo_model.training_minutes", result["seconds"] / 60, "minutes", bar="<= 5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
