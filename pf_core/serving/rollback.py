"""Changes to what is published, without a new build: return to an earlier release, delete forgotten users."""

from pathlib import Path

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.progress import Progress
from pf_core.serving.releases import (
    DESCRIPTION,
    PublishedReleases,
    ReleaseManifest,
    fault_of,
    opened_store,
    read_published,
    read_release,
    release_folders,
    release_root,
    write_published,
)
from pf_core.serving.retention import sweep
from pf_core.storage.files import is_remote, write_json
from pf_core.storage.locks import exclusive


def rollback(site: Site, *, to: str | None = None) -> ReleaseManifest:
    """Make the previous release, or the release `to`, the current one. Nothing is removed.

    All releases after it are withdrawn. If `to` is a withdrawn release, it becomes the current one again.
    """
    with exclusive(release_root(site), "release"):
        published = read_published(site)
        target = to or (published.previous[-1] if published.previous else None)
        if published.current is None or target is None:
            raise PipelineError("there is no earlier release to go back to", "list the releases with: pf releases")
        if target == published.current:
            raise PipelineError(f"release {target} is the current one already")
        if target not in published.names():
            raise PipelineError(f"there is no release {target}", "list the releases with: pf releases")
        fault = fault_of(site, target)
        if fault is not None:
            raise PipelineError(fault)
        _delete_users(site, release_root(site) / target, read_deletion_list(site))
        in_order = published.in_order()
        if target in in_order:
            position = in_order.index(target)
            withdrawn = (*published.withdrawn, *in_order[position + 1 :])
            previous = in_order[:position]
        else:
            withdrawn = tuple(name for name in published.withdrawn if name != target)
            previous = in_order
        write_published(
            site, PublishedReleases(current=target, previous=previous, withdrawn=withdrawn, revision=published.revision)
        )
        return read_release(release_root(site) / target)


def forget_users(site: Site, ids: pa.Array, progress: Progress) -> dict[str, int]:
    """Delete users from the store of every release; returns for each release how many of them it had.

    What killed publications left is removed, because nobody would delete the users from it.
    """
    with exclusive(release_root(site), "release"):
        sweep(site, None, progress)
        deleted = {folder.name: _delete_users(site, folder, ids) for folder in release_folders(site)}
        published = read_published(site)
        if published.current is not None and is_remote(release_root(site)):
            write_published(site, published)  # services have local copies, which they renew when current.json changes
        return deleted


def _delete_users(site: Site, folder: Path, ids: pa.Array) -> int:
    """Delete users from one store and correct the counts of its manifest, so that the release counts as complete."""
    with opened_store(site, folder) as store:
        num_deleted, num_left = store.delete(ids), store.count()
    manifest = read_release(folder)
    if num_left != manifest["counts"]["users"]:
        manifest["counts"]["users"] = num_left
        manifest["forgotten_since"] = manifest.get("forgotten_since", 0) + num_deleted
        write_json(folder / DESCRIPTION, manifest)
    return num_deleted
