"""Is a day of the serving path fit to be served? Judgements free of any orchestrator.

The same is validated before a partition is published; these look at what was published, from the outside.
"""

from pf_core.check_result import CheckResult
from pf_core.config.site import Site
from pf_core.embeddings.tables import pin_embedding_state, snapshot_state
from pf_core.hashing import digest_of
from pf_core.serving.index import index_dir
from pf_core.serving.releases import DESCRIPTION, opened_store, read_pointer, release_root
from pf_core.storage.builds import MANIFEST
from pf_core.storage.files import read_json


def judge_index(site: Site, ds: str) -> CheckResult:
    """The index finds the target share of what exact search finds, and is that of the day's pin embeddings."""
    manifest, pins = read_json(index_dir(site, ds) / MANIFEST), pin_embedding_state(site).manifest(ds)
    target, recall = site.serving.index.target_recall, manifest["recall_at_10"]
    if pins is not None and pins["digest"] != manifest["inputs"]["pin_embeddings"]:
        return CheckResult(ds, False, "pin_embeddings were re-run, and the index was not")
    if manifest["digest"] != digest_of(manifest["inputs"]):
        return CheckResult(ds, False, "the manifest's digest does not fit its inputs")
    reason = (
        f"recall@10 against exact search is {recall:.4f} for {manifest['judged_users']:,} users at ef "
        f"{manifest['ef']}, at least {target:g} is wanted"
    )
    return CheckResult(ds, recall >= target, reason)


def judge_release(site: Site) -> CheckResult:
    """The current release's store has every user of its day's snapshot, but the forgotten."""
    current = read_pointer(site).current
    if current is None:
        return CheckResult(site.start_ds, False, "nothing was released yet")
    folder = release_root(site) / current
    manifest = read_json(folder / DESCRIPTION)
    with opened_store(site, folder) as store:
        stored = store.count()
    ds, snapshot = manifest["ds"], snapshot_state(site).manifest(manifest["ds"])
    if snapshot is not None and snapshot["model_version"] != manifest["model_version"]:
        return CheckResult(ds, False, f"the release has model {manifest['model_version']}, its snapshot another by now")
    expected = manifest["counts"]["users"]
    if snapshot is not None and snapshot["digest"] == manifest["inputs"]["snapshot"]:
        left_out = manifest["checks"]["forgotten_left_out"] + manifest.get("forgotten_since", 0)
        expected = snapshot["counts"]["users"] - left_out
    return CheckResult(ds, stored == expected, f"release {current} holds {stored:,} users, {expected:,} are expected")
