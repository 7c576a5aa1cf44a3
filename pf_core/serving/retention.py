"""Removes releases that are no longer kept, and what interrupted publications left behind."""

import fcntl
from pathlib import Path

from pf_core.config.site import Site
from pf_core.errors import PipelineError
from pf_core.progress import Progress
from pf_core.serving.releases import BUILDING, CURRENT, DESCRIPTION, READERS, RELEASE_ID, opened_store, release_root
from pf_core.storage.files import is_remote, list_folder, remove_tree

REMOVING = ".dropping-"
"""Prefix of the folder of a release while it is removed."""


def sweep(site: Site, kept: set[str] | None, progress: Progress) -> None:
    """Remove the rest of interrupted publications and, if `kept` is given, releases that are neither kept nor read."""
    for temporary in release_root(site).glob(f".{CURRENT}.*.tmp"):
        temporary.unlink()
    for folder in (path for path in list_folder(release_root(site)) if path.is_dir()):
        is_unfinished = folder.name.startswith((BUILDING, REMOVING))
        is_old = kept is not None and folder.name not in kept and RELEASE_ID.fullmatch(folder.name)
        if not (is_unfinished or is_old):
            continue
        try:
            removable = folder if is_unfinished else _hide_from_readers(folder)
            if removable is None:
                progress(f"release {folder.name} is still being read; a later publication removes it")
            else:
                remove_release(site, removable)
        except PipelineError as error:  # the publication itself has succeeded
            progress(f"{folder.name} could not be removed yet: {error}")


def _hide_from_readers(folder: Path) -> Path | None:
    """Rename a release so that it cannot be opened any more; returns None if somebody is reading it."""
    if is_remote(folder):
        return folder
    with (folder / READERS).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return folder.rename(folder.with_name(f"{REMOVING}{folder.name}"))


def remove_release(site: Site, folder: Path) -> None:
    """Remove the users first, wherever they are: only the manifest in the folder tells where."""
    if (folder / DESCRIPTION).exists():
        with opened_store(site, folder) as store:
            store.drop()
        (folder / DESCRIPTION).unlink()  # without it, the rest is no release
    remove_tree(folder)
