"""The result of each asset in one line, from its manifests: what stands beside a finished stage."""

from collections.abc import Callable

from pf_assets.assets.evaluation import read_evaluation
from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.embeddings.tables import embedding_state, pin_embedding_state, snapshot_state
from pf_core.evaluation.verdict import judge_baselines
from pf_core.logs.partition import read_manifest
from pf_core.pins.features import pin_state
from pf_core.serving.index import describe_search, index_manifest
from pf_core.serving.releases import list_releases
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json
from pf_core.timelines.build import timeline_state
from pf_core.training.plan import current_model
from pf_core.training.refit import current_refit


def result_of(site: Site, ds: str, asset: str) -> str:
    """Return what an asset of the site's newest day, or without a day, is; empty if it is not there."""
    describe = RESULTS.get(asset)
    return "" if describe is None else describe(site, ds)


def _raw_actions(site: Site, ds: str) -> str:
    days = ds_range(site.start_ds, ds)
    manifests = [manifest for day in days if (manifest := read_manifest(site, day)) is not None]
    total = {
        name: sum(each["counts"][name] for each in manifests) for name in ("read", "kept", "duplicates", "quarantined")
    }
    return (
        f"{total['kept']:,} actions in {len(manifests)} days ({total['read']:,} rows read, {total['duplicates']:,} "
        f"duplicates, {total['quarantined']:,} quarantined)"
    )


def _pin_features(site: Site, ds: str) -> str:
    manifest = pin_state(site).manifest(ds)
    if manifest is None:
        return ""
    counts = manifest["counts"]
    return f"{counts['pins']:,} pins, {counts['candidates']:,} of them candidates"


def _user_timelines(site: Site, ds: str) -> str:
    manifest = timeline_state(site).manifest(ds)
    return (
        "" if manifest is None else f"{manifest['counts']['users']:,} users, {manifest['counts']['actions']:,} actions"
    )


def _training_set(site: Site, ds: str) -> str:
    path = site.directory / "training_set" / MANIFEST
    if not path.exists():
        return ""
    manifest = read_json(path)
    counts = manifest["counts"]
    return (
        f"{counts['train']['users']:,} users until {manifest['cut_ds']}, {counts['held_out']['users']:,} others are "
        "held out to judge"
    )


def _model(site: Site, ds: str) -> str:
    model = current_model(site)
    if model is None:
        return ""
    result = model["result"]
    return f"{model['model_version']}, {result['num_steps']:,} steps"


def _evaluation(site: Site, ds: str) -> str:
    manifest = read_evaluation(site)
    if manifest is None:
        return ""
    once = manifest["summaries"][manifest["candidate"]]["once"]
    verdict = "not below the best baseline" if judge_baselines(manifest).passed else "below a baseline"
    decision = "champion" if manifest["candidate_is_champion"] else "not promoted"
    if manifest["champion"] is None and manifest["candidate_is_champion"]:
        decision = "first model: champion"
    return f"recall@10 {once['recall_at_10']:.4f}, {verdict}; {decision}"


def _refit(site: Site, ds: str) -> str:
    refit = current_refit(site)
    if refit is None:
        return "nothing to refit"
    return f"{refit['model_version']}, trained until {refit['cut_ds']} instead of {refit['judged_cut_ds']}"


def _user_embeddings(site: Site, ds: str) -> str:
    manifest = embedding_state(site).manifest(ds)
    return "" if manifest is None else f"{manifest['counts']['users']:,} users embedded on {ds}"


def _snapshot(site: Site, ds: str) -> str:
    manifest = snapshot_state(site).manifest(ds)
    if manifest is None:
        return ""
    counts = manifest["counts"]
    return (
        f"{counts['users']:,} users: {counts['refreshed']:,} refreshed, {counts['new']:,} new, "
        f"{counts['carried_over']:,} carried over"
    )


def _pin_embeddings(site: Site, ds: str) -> str:
    manifest = pin_embedding_state(site).manifest(ds)
    return "" if manifest is None else f"{manifest['counts']['pins']:,} pins"


def _pin_index(site: Site, ds: str) -> str:
    manifest = index_manifest(site, ds)
    if manifest is None:
        return ""
    return f"finds {manifest['recall_at_10']:.1%} of what exact search finds, {describe_search(manifest)}"


def _release(site: Site, ds: str) -> str:
    current = [manifest for manifest in list_releases(site) if manifest["is_current"]]
    if not current:
        return ""
    counts = current[0]["counts"]
    return (
        f"{current[0]['release']}: {counts['users']:,} users, {counts['pins']:,} pins, model "
        f"{current[0]['model_version']}"
    )


RESULTS: dict[str, Callable[[Site, str], str]] = {
    "raw_actions": _raw_actions,
    "pin_features": _pin_features,
    "user_timelines": _user_timelines,
    "training_set": _training_set,
    "pinnerformer_model": _model,
    "offline_evaluation": _evaluation,
    "refitted_model": _refit,
    "user_embeddings": _user_embeddings,
    "user_embedding_snapshot": _snapshot,
    "pin_embeddings": _pin_embeddings,
    "pin_index": _pin_index,
    "release": _release,
}
