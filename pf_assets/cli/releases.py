"""`pf` commands that read releases, and rollback: they need the base installation only."""

import importlib.util
import re
from typing import Annotated

import typer

from pf_assets.cli.output import cut, show
from pf_assets.settings import current_site
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.deletion_list import parse_user_id
from pf_core.serving.client import Serving
from pf_core.serving.releases import list_releases
from pf_core.serving.rollback import rollback as rollback_release

NUM_RECENT = 10


def recommend(
    user: Annotated[str, typer.Argument(help="user id, as in the logs")],
    k: Annotated[int, typer.Option("-k", min=1, help="number of pins")] = 10,
    recent: Annotated[int, typer.Option(help="number of the user's newest actions to show")] = NUM_RECENT,
    new_only: Annotated[bool, typer.Option("--new-only", help="leave out pins that the user has seen")] = False,
) -> None:
    """Show the best pins for a user in the current release, and the user's newest actions."""
    show_recommendations(current_site(), user, k=k, recent=recent, new_only=new_only)


def show_recommendations(site: Site, user: str, *, k: int, recent: int, new_only: bool = False) -> None:
    release = Serving(site).release()
    user_id = parse_user_id(user, site.source.actions.user_id.type)
    hits = release.recommend(user_id, k=k, new_only=new_only)
    manifest = release.manifest
    show(f"user {user} in release {manifest['release']} (model {manifest['model_version']})", bold=True)
    _show_newest_actions(site, manifest["ds"], user_id, recent)
    show("  recommended pins:")
    for hit in hits:
        own = "  (own pin)" if hit.source == "memory" else ""
        show(f"    {hit.score:.3f}  {hit.pin_id!s:<16} {cut(hit.interest)}{own}")
    if new_only and not hits.seen_is_complete:
        show("  the user has seen more pins than the release knows: serving.seen_size in the site file")


def _show_newest_actions(site: Site, ds: str, user_id: int | str, limit: int) -> None:
    """Timelines are Lance datasets, which the base installation does not read; recommendations do not need them."""
    if importlib.util.find_spec("lance") is None:
        show("  newest actions: not shown, they need Lance; pip install 'pinnerformer[pipeline]'")
        return
    from pf_core.operations.inspect import newest_actions

    rows = newest_actions(site, ds, user_id, limit)
    if rows:
        show(f"  newest actions until {ds}:")
    for row in rows:
        action_type, interest = cut(row["action_type"]), cut(row["interest"])
        show(f"    {row['ts']:%Y-%m-%d %H:%M}  {action_type:<12} {row['pin_id']!s:<16} {interest}")


def similar(
    pin: Annotated[str, typer.Argument(help="pin id, as in the logs")],
    k: Annotated[int, typer.Option("-k", min=1, help="number of pins")] = 10,
) -> None:
    """Show the pins nearest to a pin in the current release."""
    site = current_site()
    release = Serving(site).release()
    pin_id: int | str = pin
    if site.source.pins.pin_id.type == "int":
        if not re.fullmatch("-?[0-9]+", pin):
            raise PipelineError(f"{pin!r} is not an integer pin id")
        pin_id = int(pin)
    for hit in release.similar(pin_id, k=k):
        show(f"{hit.score:.3f}  {hit.pin_id!s:<16} {cut(hit.interest)}")


def releases() -> None:
    """List the releases, newest first; an arrow marks the current one."""
    found = list_releases(current_site())
    if not found:
        show(f"no release yet; publish one with: {materialize_command('release', 'DAY')}")
    for manifest in found:
        mark = "→" if manifest["is_current"] else " "
        counts = manifest["counts"]
        show(
            f"{mark} {manifest['release']:<14} {counts['users']:>9,} users  {counts['pins']:>9,} pins  "
            f"model {manifest['model_version']}  built {manifest['created_at']}"
        )


def rollback(
    to: Annotated[
        str | None, typer.Option(help="release to return to, from `pf releases`; by default the previous one")
    ] = None,
) -> None:
    """Make an earlier release the current one, at once, and withdraw the releases after it."""
    manifest = rollback_release(current_site(), to=to)
    show(f"current is {manifest['release']}: {manifest['counts']['users']:,} users, model {manifest['model_version']}")
