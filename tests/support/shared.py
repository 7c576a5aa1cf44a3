"""Sites that are expensive to make: built once in a test session for all of its workers, copied for each test."""

import contextlib
import fcntl
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from pf_assets.tracking.tracking import Tracking
from pf_core.config.site import Site
from tests.support.sites import SmallSite

SITE_FILE = "made.json"
"""Written when the site is complete."""

MLFLOW_PATHS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "model_versions": ("source", "storage_location"),
}
"""Columns of MLflow's tables that hold absolute paths."""


class SharedSites:
    """Named sites below one folder that all workers of a test session know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str, make: Callable[[Path], Site]) -> Site:
        """Return the site `name`, which the first caller makes while the others wait. Tests must not change it."""
        root = self.folder / name
        with _locked(self.folder / f"{name}.lock"):
            if not (root / SITE_FILE).exists():
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir(parents=True)
                (root / SITE_FILE).write_text(make(root).model_dump_json())
        return Site.model_validate_json((root / SITE_FILE).read_text())

    def copy(self, name: str, make: Callable[[Path], Site], target: Path) -> Site:
        """Return a copy of the site `name` in the folder `target`."""
        return copy_site(self.get(name, make), self.folder / name, target)

    def add_mlflow(self, site: Site) -> Site:
        """Give a site an empty MLflow database, whose migrations take seconds."""
        shutil.copytree(Tracking(self.get("mlflow", _make_mlflow)).root, Tracking(site).root)
        return site


def copy_site(site: Site, root: Path, target: Path) -> Site:
    """Copy a site whose logs, data and MLflow database are below `root`."""
    shutil.copytree(root, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SITE_FILE))
    for database in target.rglob("mlflow.db"):
        _replace_paths(database, str(root), str(target))
    return Site.model_validate_json(site.model_dump_json().replace(str(root), str(target)))


def _make_mlflow(root: Path) -> Site:
    site = SmallSite(root).site
    assert len(Tracking(site)._client.search_experiments()) == 1  # MLflow's own; this makes the database
    assert Tracking(site).champion() is None
    return site


def _replace_paths(database: Path, old: str, new: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for table, columns in MLFLOW_PATHS.items():
            for column in columns:
                connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock: `pf_core.storage.locks` refuses where another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
