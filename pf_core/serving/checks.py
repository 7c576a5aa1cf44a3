"""Checks of the published pin_index and release, free of any orchestrator.

The same is validated before a partition is published; these checks read what is published.
"""

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.hashing import digest_of
from pf_core.serving.index import describe_search, require_index
from pf_core.serving.releases import opened_store, read_published, read_release, release_root


def judge_index(site: Site, ds: str) -> CheckResult:
    """Check that the index reaches the target recall and is made of the day's pin_embeddings."""
    (manifest, _), pins = require_index(site, ds), pin_embedding_state(site).manifest(ds)
    target, recall = site.serving.index.target_recall, manifest["recall_at_10"]
    if pins is not None and pins["digest"] != manifest["inputs"]["pin_embeddings"]:
        return CheckResult(ds, False, "pin_embeddings was re-run, and the index was not")
    if manifest["digest"] != digest_of(manifest["inputs"]):
        return CheckResult(ds, False, "the manifest's digest is not that of its inputs")
    reason = (
        f"recall@10 against exact search is {recall:.4f} for {manifest['judged_users']:,} users "
        f"{describe_search(manifest)}, at least {target:g} is required"
    )
    return CheckResult(ds, recall >= target, reason)


def judge_release(site: Site) -> CheckResult:
    """Check that the current release's store has every user of its day's snapshot except the forgotten ones."""
    current = read_published(site).current
    if current is None:
        return CheckResult(site.start_ds, False, "there is no release yet")
    folder = release_root(site) / current
    manifest = read_release(folder)
    with opened_store(site, folder) as store:
        stored = store.count()
    ds, snapshot = manifest["ds"], snapshot_state(site).manifest(manifest["ds"])
    if snapshot is not None and snapshot["model_version"] != manifest["model_version"]:
        return CheckResult(ds, False, f"the release has model {manifest['model_version']}, its snapshot now another")
    expected = manifest["counts"]["users"]
    if snapshot is not None and snapshot["digest"] == manifest["inputs"]["snapshot"]:
        left_out = manifest["checks"]["forgotten_left_out"] + manifest.get("forgotten_since", 0)
        expected = snapshot["counts"]["users"] - left_out
    return CheckResult(ds, stored == expected, f"release {current} holds {stored:,} users, {expected:,} are expected")
