"""How a run of the whole pipeline ends: how good the model is, one user's recommendations, and what to do next."""

import math
from collections.abc import Mapping
from typing import Any

from pf_assets.assets.evaluation import read_evaluation
from pf_assets.cli.output import duration, show, show_wrapped
from pf_assets.cli.releases import show_recommendations
from pf_assets.cli.results import RESULTS, result_of
from pf_assets.metadata.evaluation import describe_index, describe_without_vector, label_baseline
from pf_core.config.site import Site
from pf_core.embeddings.snapshot import read_snapshot
from pf_core.evaluation.manifest import ORACLES, EvaluationManifest, vector_alone
from pf_core.evaluation.verdict import QUESTION_TITLES, judge_baselines
from pf_core.pins.features import read_pin_features
from pf_core.timelines.build import read_bucket, timeline_state

NUM_SHOWN = 10

NUM_LOOKED_AT = 200
"""Number of users among whom the one with the most varied interests is shown."""

MAX_BASELINES = 4


def show_summary(site: Site, ds: str, seconds: float) -> None:
    """Print what there is now, how good it is, and one user."""
    show(f"\n{site.name}, as of {ds}, in {duration(seconds)}", keep="\n", bold=True)
    for asset in RESULTS:
        if line := result_of(site, ds, asset):
            show(f"  {asset:<24} {line}")
    show(f"  {'in':<24} {site.directory}")
    manifest = read_evaluation(site)
    if manifest is not None:
        show("\nHow good is it?", keep="\n", bold=True)
        for line in comparison_lines(manifest):
            show_wrapped(line, indent="  ")
    user = varied_user(site, ds)
    if user is not None:
        show("\nOne user", keep="\n", bold=True)
        show_recommendations(site, user, k=NUM_SHOWN, recent=NUM_SHOWN)


def summary_json(site: Site, ds: str, seconds: float) -> dict[str, Any]:
    """Return the same as JSON: undefined figures are null."""
    manifest = read_evaluation(site)
    return {
        "site": site.name,
        "ds": ds,
        "seconds": round(seconds, 1),
        "directory": str(site.directory),
        "results": {asset: line for asset in RESULTS if (line := result_of(site, ds, asset))},
        "evaluation": None if manifest is None else evaluation_json(manifest),
    }


def evaluation_json(manifest: EvaluationManifest) -> dict[str, Any]:
    """Return who was judged, how, and what followed."""
    verdict = judge_baselines(manifest)
    figures = {name: once_of(manifest, name) for name in manifest["summaries"]}
    return {
        "candidate": manifest["candidate"],
        "cut_ds": manifest["cut_ds"],
        "last_ds": manifest["last_ds"],
        "is_champion": manifest["candidate_is_champion"],
        "decision": decision_line(manifest),
        "beats_baselines": verdict.passed,
        "reason": verdict.reason,
        "figures": {
            name: {key: _number(once[key]) for key in ("recall_at_10", "discovery_at_10")}
            for name, once in figures.items()
        },
        "oracles": [name for name in figures if name in ORACLES],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def comparison_lines(manifest: EvaluationManifest) -> list[str]:
    """Return the model and the best baselines in both questions as a table, and the verdict."""
    candidate = manifest["candidate"]
    names = {"the model, as served": candidate, "its vector alone": vector_alone(candidate)}
    summaries = {label: once_of(manifest, name) for label, name in names.items() if name in manifest["summaries"]}
    models = {*names.values(), manifest["champion"]}
    baselines = {name: once_of(manifest, name) for name in manifest["summaries"] if name not in models}
    best = sorted((name for name in baselines if name not in ORACLES), key=lambda name: -_best(baselines[name]))
    shown = [*best[:MAX_BASELINES], *(name for name in ORACLES if name in baselines)]
    summaries |= {label_baseline(name): baselines[name] for name in shown}
    width = max(map(len, summaries))
    lines = [
        f"recall@10 of users whom training never saw, in the days from {manifest['cut_ds']} to {manifest['last_ds']}",
        f"(index {describe_index(manifest)})",
        f"{'':<{width}}  {QUESTION_TITLES['all']:>14}  {'new pins only':>14}",
    ]
    for label, once in summaries.items():
        lines.append(f"{label:<{width}}  {_figure(once['recall_at_10']):>14}  {_figure(once['discovery_at_10']):>14}")
    verdict = judge_baselines(manifest)
    intervals = "; ".join(
        f"{QUESTION_TITLES[name]} {low:+.4f} to {high:+.4f}"
        for name, each in manifest.get("against_baselines", {}).items()
        for low, high in [each["difference_interval"]]
        if math.isfinite(low)
    )
    sentence = "not below the best baseline in either question" if verdict.passed else "below a baseline"
    lines.append(f"{sentence} (95 % of the difference to the best: {intervals})" if intervals else verdict.reason)
    if not verdict.passed:
        lines.append("docs/quality.md says what to look at then; `pf status` has exit code 1")
    if "without_vector" in manifest:
        lines.append(describe_without_vector(manifest["without_vector"]))
    return [*lines, decision_line(manifest)]


def decision_line(manifest: EvaluationManifest) -> str:
    """Return whether the model serves, and why."""
    if not manifest["candidate_is_champion"]:
        return f"it does not serve: {manifest['decision']['reason']}"
    if manifest["champion"] is None:
        return "first model: champion"
    return "champion" if manifest["champion"] == manifest["candidate"] else "champion, better than the one before"


def once_of(manifest: EvaluationManifest, name: str) -> Mapping[str, Any]:
    return {**manifest["summaries"][name]["once"]}


def _best(once: Mapping[str, Any]) -> float:
    return float(max(0.0 if math.isnan(once[key]) else once[key] for key in ("recall_at_10", "discovery_at_10")))


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def varied_user(site: Site, ds: str) -> str | None:
    """Return the id of a user with varied interests among those embedded last, or None if nobody is embedded.

    Where pins have no interests it is one with many different pins.
    """
    users = read_snapshot(site, ds, 0, ["user_id", "computed_ds", "num_actions"])
    rows = [row | {"place": place} for place, row in enumerate(users.to_pylist())]
    if not rows:
        return None
    newest = max(row["computed_ds"] for row in rows)
    rows = sorted(
        (row for row in rows if row["computed_ds"] == newest),
        key=lambda row: (min(row["num_actions"], 40), row["user_id"]),
    )[-NUM_LOOKED_AT:]
    pins = read_pin_features(site, ds, ["pin_id", "interest"])
    interest = dict(zip(pins["pin_id"].to_pylist(), pins["interest"].to_pylist(), strict=True))
    ids = users["user_id"].take([row["place"] for row in rows]).combine_chunks()
    found = read_bucket(timeline_state(site), ds, 0, ["pin_id"], user_ids=ids, newest=NUM_SHOWN).to_pylist()
    if not found:
        return str(rows[-1]["user_id"])

    def variety(row: dict[str, Any]) -> tuple[int, int]:
        interests = {interest.get(pin) for pin in row["pin_id"]} - {None, ""}
        return len(interests), len(set(row["pin_id"]))

    return str(max(found, key=variety)["user_id"])
