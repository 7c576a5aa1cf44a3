"""Read the experiments from the MLflow store and write the report's files.

<site>/paper_report/index.html               the report as one self-contained page
<site>/paper_report/report.md, figures/      the report for a repository
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from pf_assets.metadata.pages import Metadata, table
from pf_assets.report.report import NoisyFacts, RecipeFacts, ReportFacts, build_report, render_html, render_markdown
from pf_assets.report.views import Report
from pf_assets.settings import mlflow_server
from pf_assets.tracking.experiment_store import Outcome, StoredResults, read_results
from pf_assets.tracking.runs import TrackedRun, run_url
from pf_core.config.site import Site
from pf_core.evaluation.manifest import MetricSummary
from pf_core.experiments.bootstrap import Interval
from pf_core.experiments.claims import Results, read_explanations
from pf_core.experiments.paper_claims import all_claims
from pf_core.experiments.recipe import BASE
from pf_core.progress import Progress
from pf_core.storage.disk import disk_errors
from pf_core.storage.files import read_json, write_text
from pf_core.storage.privacy import private
from pf_core.training.plan import code_fingerprint
from pf_core.training.training_set import DESCRIPTION, latest_training_set

EXPLAINED_SITE = "experiments"
"""The site that EXPLANATIONS are about; claims fail for other reasons on other sites."""

EXPLANATIONS = Path(__file__).with_name("explanations.yaml")
"""Why claims do not hold on EXPLAINED_SITE, by claim id."""

PAGE, TEXT, FIGURES = "index.html", "report.md", "figures"


def report_dir(site: Site) -> Path:
    return site.workspace / "paper_report"


def write_report(site: Site, *, progress: Progress) -> Metadata:
    """Write the report on the experiments in the store, and return its metadata."""
    stored, folder = read_results(site), report_dir(site)
    for sentence in stored.left_out:
        progress(f"left out: {sentence}")
    results = Results(stored.scores())
    progress(f"{len(stored.outcomes)} recipes, {sum(map(len, stored.outcomes.values()))} runs")
    report = build_report(results, _facts(site, stored, results))
    with disk_errors(folder, "paper_report"), private(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / FIGURES, ignore_errors=True)
        write_text(folder / TEXT, render_markdown(report, folder / FIGURES))
        write_text(folder / PAGE, render_html(report))
    return describe_report(folder, report)


def describe_report(folder: Path, report: Report) -> Metadata:
    return {
        **{verdict.replace(" ", "_"): count for verdict, count in report.counts.items()},
        "claims": report.num_claims,
        "verdicts": table(
            [
                {"verdict": f"{claim.mark} {claim.verdict}", "claim": claim.says, "id": claim.id}
                for claim in report.claims
            ]
        ),
        "recipes": len(report.runs),
        "page": dg.MetadataValue.path(str(folder / PAGE)),
        "text": dg.MetadataValue.path(str(folder / TEXT)),
    }


def _facts(site: Site, stored: StoredResults, results: Results) -> ReportFacts:
    manifest = read_json(latest_training_set(site) / DESCRIPTION)
    base = site.training.towers_config
    claims = all_claims(base.model, results.tasks)
    return ReportFacts(
        origin=describe_origin([outcome for seeds in stored.outcomes.values() for outcome in seeds]),
        facts=_plain_facts(site, stored, manifest),
        recipes={name: _recipe_facts(seeds) for name, seeds in stored.outcomes.items()},
        noisy={noise: _noisy_facts(outcome) for noise, outcome in sorted(stored.noisy.items())},
        explanations=read_explanations(EXPLANATIONS, claims) if site.name == EXPLAINED_SITE else {},
        feature_dim=int(manifest["feature_dim"]),
        left_out=stored.left_out,
    )


def _plain_facts(site: Site, stored: StoredResults, manifest: Mapping[str, Any]) -> dict[str, object]:
    outcomes = [outcome for seeds in stored.outcomes.values() for outcome in seeds]
    trained = [outcome for outcome in outcomes if outcome.params]
    counts, evaluated = manifest["counts"], outcomes[0].judgement()["counts"]
    codes = sorted({outcome.tags["code"] for outcome in trained})
    return {
        "Site": site.name,
        "Training set": f"{manifest['fingerprint']}, until {manifest['cut_ds']}",
        "Users trained on": counts["train"]["users"],
        "Their actions": counts["train"]["actions"],
        "Pins": counts["pins"],
        "Question": stored.question,
        "Users who judge": evaluated["users"],
        "Their positives": evaluated["positives"],
        "Pins of the index": evaluated["pins"],
        "Steps of a training": site.training.towers_config.optimizer.num_steps,
        "Users of a step": site.training.towers_config.batch_users,
        "Models trained": len(trained),
        "Versions of the training code": ", ".join(codes),
        "Last run": max(outcome.ended_at for outcome in outcomes),
    }


def describe_origin(outcomes: Sequence[Outcome]) -> str:
    """Name the commits and the training code of the models, and whether the current code is another one."""
    trained = [outcome.tags for outcome in outcomes if outcome.params]
    if not trained:
        return ""
    commits = sorted({tags.get("mlflow.source.git.commit", "unknown")[:12] for tags in trained})
    codes = sorted({tags["code"] for tags in trained})
    origin = f"The models were trained at commit {', '.join(commits)} (training code {', '.join(codes)})."
    current = code_fingerprint()
    if codes == [current]:
        return origin
    return f"{origin} The training code has changed since, to {current}: models trained now may differ."


def _recipe_facts(seeds: Sequence[Outcome]) -> RecipeFacts:
    judgements, first = [outcome.judgement() for outcome in seeds], seeds[0]
    parent = TrackedRun(experiment_id=first.run.experiment_id, run_id=first.tags["mlflow.parentRunId"])
    trained = [judgement["training"] for judgement in judgements if judgement["training"] is not None]
    return RecipeFacts(
        seconds=sum(result["seconds"] for result in trained) / len(trained) if trained else None,
        num_parameters=trained[0]["num_parameters"] if trained else None,
        config=judgements[0]["config"],
        mlflow_url=run_url(parent, mlflow_server()),
        by_density=_by_density(judgements[0]["by_density"]),
    )


def _noisy_facts(outcome: Outcome) -> NoisyFacts:
    beside = outcome.judgement()["beside_rivals"]
    names = sorted(beside, key=lambda name: (name != BASE, name))
    recalls = {
        "all positives": {name: _by_density(beside[name]) for name in names},
        "discovery": {name: _discovery_by_density(beside[name]) for name in names},
    }
    return NoisyFacts(outcome.recipe, _recipe_facts([outcome]), recalls)


def _by_density(summaries: Mapping[str, MetricSummary]) -> dict[int, Interval]:
    return {
        int(size): Interval(summary["recall_at_10"], *summary["recall_at_10_interval"])
        for size, summary in summaries.items()
    }


def _discovery_by_density(summaries: Mapping[str, MetricSummary]) -> dict[int, Interval]:
    return {
        int(size): Interval(summary["discovery_at_10"], *summary["discovery_at_10_interval"])
        for size, summary in summaries.items()
    }
