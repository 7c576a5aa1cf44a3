"""The demo's site file, which `pf demo` writes: the example of the package, on the newest days that the world can have.

In a clone it is `dagster_home/demo.yaml`, and the data is in `data`. Installed from a wheel, everything is in the
folder `demo` of the current folder.
"""

import os
from pathlib import Path

from pf_assets.settings import DEMO_SITE, INSTANCE_FILE, INSTANCE_TEXT, demo_site_path, in_clone
from pf_core.config.site import Site, load_site
from pf_core.days import parse_ds, shift_ds
from pf_core.errors import PipelineError
from pf_core.storage.files import write_new_text
from pf_core.storage.privacy import private
from pf_core.world import config as world_config
from pf_core.world.config import WorldConfig
from pf_core.world.logs import find_config

BESIDE, INSIDE = ":-../data}", ":-data}"
"""The default data folder: as the example has it, beside the site file's folder, and in it."""


def open_demo(today_ds: str, until: str | None = None) -> tuple[Path, WorldConfig]:
    """Return the demo's site file, written if it is not there, and its world.

    The world ends by `until`, which by default is the day before `today_ds`. A demo that is there keeps its days.
    """
    path = demo_site_path()
    if until is not None and parse_ds(until).isoformat() >= today_ds:
        raise PipelineError(f"{until} is not over yet", f"give --until a day before {today_ds}, or leave it out")
    wanted = world_config.ending_by(world_config.demo(), until or shift_ds(today_ds, -1))
    if not path.exists():
        _refuse_other_content(path.parent)
        _write(path, wanted)
    site = load_site(path, environment=os.environ)
    world = world_of(path, site)
    if until is not None and world != wanted:
        raise PipelineError(
            f"the demo of {path} ends on {site.end_ds}, not on {wanted.dates[-1]}: a demo keeps its days",
            f"{'`make clean` removes it' if in_clone() else f'remove {path.parent}'}, or leave out --until",
        )
    return path, world


def world_of(path: Path, site: Site) -> WorldConfig:
    """Return the world of a demo's site file."""
    if site.name == "demo" and site.end_ds is not None:
        world = world_config.ending_by(world_config.demo(), site.end_ds)
        if (world.dates[0], world.dates[-1]) == (site.start_ds, site.end_ds):
            return world
    raise PipelineError(
        f"{path} is not the demo's site file: its name is {site.name}, with days from {site.start_ds} to {site.end_ds}",
        "move it away, or run pf demo in another folder",
    )


def _refuse_other_content(folder: Path) -> None:
    """Refuse a folder with anything but what an interrupted call has written; a clone's has other sites in it."""
    if in_clone() or not folder.exists():
        return
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ["it is a file"]
    others = [name for name in found if name != INSTANCE_FILE]
    if others:
        raise PipelineError(
            f"pf demo writes to {folder}, where something else is: {', '.join(others[:3])}",
            "run it in another folder, such as an empty one",
        )


def _write(path: Path, newest: WorldConfig) -> None:
    """Write the site file, and before it the dagster.yaml beside it, if it is not there."""
    published, world = world_config.demo(), _world_there() or newest
    text = DEMO_SITE.read_text(encoding="utf-8")
    text = text.replace(f"start_ds: {published.dates[0]}\n", f"start_ds: {world.dates[0]}\n")
    text = text.replace(f"end_ds: {published.dates[-1]}\n", f"end_ds: {world.dates[-1]}\n")
    text = text if in_clone() else text.replace(BESIDE, INSIDE)
    try:
        with private(path.parent):
            path.parent.mkdir(exist_ok=True)
            if not (path.parent / INSTANCE_FILE).exists():
                write_new_text(path.parent / INSTANCE_FILE, INSTANCE_TEXT.read_text(encoding="utf-8"))
            write_new_text(path, text)
    except OSError as error:
        raise PipelineError(
            f"{path.parent} cannot be written to: {error.strerror}", "run pf demo in a folder where you may write"
        ) from error


def _world_there() -> WorldConfig | None:
    """Return the demo's world if a clone has its logs already, on any days."""
    if not in_clone():
        return None
    found = find_config(load_site(DEMO_SITE, environment=os.environ).log_root)
    is_its = found is not None and found == world_config.ending_by(world_config.demo(), found.dates[-1])
    return found if is_its else None
