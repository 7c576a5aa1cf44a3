"""`pf demo`: makes the demo site's logs and runs the whole asset graph on them."""

import os
import time

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli.output import show
from pf_assets.cli.releases import show_recommendations
from pf_assets.cli.runs import materialize, missing_days
from pf_assets.cli.world import write_world
from pf_assets.metadata.evaluation import describe_index, describe_without_vector
from pf_assets.schedules import DAILY_ASSETS, KEEP_MODEL, morning_days
from pf_assets.settings import DEMO_SITE, mlflow_server
from pf_assets.tracking.runs import TrackedRun, run_url
from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site, load_site
from pf_core.days import ds_range, shift_ds
from pf_core.embeddings.snapshot import read_snapshot
from pf_core.embeddings.tables import snapshot_state
from pf_core.errors import PipelineError
from pf_core.evaluation.manifest import EvaluationManifest
from pf_core.evaluation.verdict import describe_comparison, describe_ratios, describe_vector, judge_baselines
from pf_core.logs.partition import read_manifest
from pf_core.pins.features import pin_state
from pf_core.serving.releases import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.timelines.build import timeline_state
from pf_core.training.plan import current_model, plan_model
from pf_core.training.refit import current_refit
from pf_core.world import config as world_config

SERVED_DAYS = 4
"""Number of the demo's newest days that are embedded and released."""

NEXT_LINE = "\n" + 22 * " "
"""Starts another line about the same asset in the summary."""


def demo() -> None:
    """Write the demo site's logs and materialize every asset on them; keep what exists already."""
    started = time.monotonic()
    if not DEMO_SITE.exists():
        raise PipelineError(
            f"pf demo needs the repository: there is no {DEMO_SITE}", "clone it, and run `make demo` in the clone"
        )
    site = load_site(DEMO_SITE, environment=os.environ)
    show("1. The demo site's logs", bold=True)
    write_world(world_config.demo(), site.log_root, "csv.gz")
    show("2. The asset graph", bold=True)
    for assets, days in missing_days(site).items():
        materialize(assets, days)
    missing = missing_model(site)
    if missing:
        materialize(",".join(missing))
    if missing or not _is_evaluated(site):
        materialize("offline_evaluation")
    if site.training.refit and _wants_refit(site):
        materialize("refitted_model")
    _serve(site)
    _summarize(site, time.monotonic() - started)
    show_recommendations(site, _active_user(site), k=10, recent=10)
    show("Next: `make dev` serves the UI on http://localhost:3000; `pf recommend USER`, `pf releases`, `pf status`")


def _serve(site: Site) -> None:
    """Embed and release the newest days: first a range, then the newest day as the daily schedule does."""
    assert site.end_ds is not None
    if any(manifest["ds"] == site.end_ds for manifest in list_releases(site)):
        return
    serving = ",".join(DAILY_ASSETS[DAILY_ASSETS.index("user_embeddings") :])
    materialize(serving, ds_range(shift_ds(site.end_ds, 1 - SERVED_DAYS), shift_ds(site.end_ds, -1)))
    materialize(",".join(DAILY_ASSETS), morning_days(site, site.end_ds), config=KEEP_MODEL)


def missing_model(site: Site) -> list[str]:
    """Return the assets to materialize until the model that the site file describes is trained and registered."""
    if not (site.directory / "training_set" / MANIFEST).exists():
        return ["training_set", "pinnerformer_model"]
    trained = current_model(site)
    is_registered = trained is not None and trained["mlflow"]["version"] is not None
    is_wanted = trained is not None and trained["model_version"] == plan_model(site).model_version
    return [] if is_registered and is_wanted else ["pinnerformer_model"]


def _is_evaluated(site: Site) -> bool:
    """Whether the newest evaluation is of the current candidate, and has led to a champion."""
    tracking, manifest = Tracking(site), read_evaluation(site)
    candidate = tracking.candidate()
    is_its = manifest is not None and candidate is not None and manifest["candidate"] == candidate.served_version
    return is_its and tracking.champion() is not None


def _wants_refit(site: Site) -> bool:
    """Whether the candidate was accepted, and has no refit yet."""
    tracking = Tracking(site)
    champion = tracking.champion()
    return champion is not None and champion == tracking.candidate() and tracking.refit_of(champion) is None


def _summarize(site: Site, seconds: float) -> None:
    assert site.end_ds is not None
    days = ds_range(site.start_ds, site.end_ds)
    manifests = [manifest for ds in days if (manifest := read_manifest(site, ds)) is not None]
    totals = {name: sum(m["counts"][name] for m in manifests) for name in ("read", "kept", "duplicates", "quarantined")}
    pins = pin_state(site).require(site.end_ds)["counts"]
    timelines = timeline_state(site).require(site.end_ds)["counts"]
    training, model = read_json(site.directory / "training_set" / MANIFEST), current_model(site)
    evaluation = read_evaluation(site)
    assert model is not None
    assert evaluation is not None
    result, snapshot = model["result"], snapshot_state(site).require(site.end_ds)["counts"]
    release = next(manifest for manifest in list_releases(site) if manifest["is_current"])
    show(f"\nDone in {seconds:.0f} s. As of {site.end_ds}:", keep="\n", bold=True)
    show(
        f"  raw_actions         {totals['kept']:,} actions in {len(manifests)} days "
        f"({totals['read']:,} rows read, {totals['duplicates']:,} duplicates, {totals['quarantined']:,} quarantined)\n"
        f"  pin_features        {pins['pins']:,} pins, {pins['candidates']:,} of them candidates\n"
        f"  user_timelines      {timelines['users']:,} users, {timelines['actions']:,} actions\n"
        f"  training_set        {training['counts']['train']['users']:,} users until {training['cut_ds']}, "
        f"{training['counts']['held_out']['users']:,} held out\n"
        f"  pinnerformer_model  {model['model_version']}: recall@10 {result['metrics']['recall_at_10']:.3f} on "
        f"users who do not train, after {result['num_steps']:,} steps in {result['seconds'] / 60:.1f} min\n"
        f"                      {run_url(TrackedRun(**model['mlflow']), mlflow_server())}\n"
        f"  offline_evaluation  {NEXT_LINE.join(_evaluation_lines(evaluation))}\n"
        f"{_refit_line(site)}"
        f"  snapshot            {snapshot['users']:,} users: {snapshot['refreshed']:,} refreshed, "
        f"{snapshot['new']:,} new, {snapshot['carried_over']:,} carried over\n"
        f"  release             {release['release']}: {release['counts']['users']:,} users, "
        f"{release['counts']['pins']:,} pins, model {release['model_version']}\n"
        f"  in                  {site.directory}\n",
        keep="\n",
    )


def _refit_line(site: Site) -> str:
    """Return the line about the refit that serves; empty without one."""
    refit = current_refit(site) if site.training.refit else None
    if refit is None:
        return ""
    return (
        f"  refitted_model      {refit['model_version']}: {refit['refit_of']} trained until {refit['cut_ds']} "
        f"instead of {refit['judged_cut_ds']}, in {refit['result']['seconds'] / 60:.1f} min\n"
    )


def _evaluation_lines(manifest: EvaluationManifest) -> list[str]:
    """Return what has no vector, both questions against the best baseline, verdict and decision.

    The model is compared as it is served, and its vector alone.
    """
    verdict, against, decision = judge_baselines(manifest), manifest.get("against_baselines", {}), manifest["decision"]
    lines = [describe_without_vector(manifest["without_vector"])] if "without_vector" in manifest else []
    lines += [f"index {describe_index(manifest)}"]
    lines += [describe_comparison(name, each) for name, each in against.items()]
    lines += [*describe_vector(manifest), *describe_ratios(manifest)]
    reasons = [reason for reason in decision["reason"].split("; ") if reason not in lines]
    outcome = "failed" if not verdict.passed else "passed" if against else verdict.reason
    return [
        *lines,
        f"model_beats_baselines: {outcome}",
        f"{'promoted' if decision['promote'] else 'not promoted'}: {'; '.join(reasons)}",
    ]


def _active_user(site: Site) -> str:
    """Return one of the users embedded last whose timeline is long enough to show."""
    assert site.end_ds is not None
    rows = read_snapshot(site, site.end_ds, 0, ["user_id", "computed_ds", "num_actions"]).to_pylist()
    rows = [row for row in rows if row["computed_ds"].isoformat() == site.end_ds]
    return str(max(rows, key=lambda row: (min(row["num_actions"], 40), row["user_id"]))["user_id"])
