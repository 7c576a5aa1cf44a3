"""`pf` commands that read releases, and rollback: they need the base installation only."""

import importlib.util
import re
from typing import Annotated, Any

import typer

from pf_assets.cli.output import confirm, cut, show, show_json
from pf_assets.settings import current_site
from pf_core.config.site import Site
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.deletion_list import parse_user_id
from pf_core.serving.client import Hit, Serving
from pf_core.serving.releases import list_releases
from pf_core.serving.rollback import rollback as rollback_release

NUM_RECENT = 10


def recommend(
    user: Annotated[str, typer.Argument(help="user id, as in the logs")],
    k: Annotated[int, typer.Option("-k", min=1, help="number of pins")] = 10,
    recent: Annotated[int, typer.Option(help="number of the user's newest actions to show")] = NUM_RECENT,
    new_only: Annotated[bool, typer.Option("--new-only", help="leave out pins that the user has seen")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the best pins for a user in the current release, and the user's newest actions."""
    site = current_site()
    if as_json:
        show_json(recommendations_json(site, user, k=k, recent=recent, new_only=new_only))
    else:
        show_recommendations(site, user, k=k, recent=recent, new_only=new_only)


def recommendations_json(site: Site, user: str, *, k: int, recent: int, new_only: bool) -> dict[str, Any]:
    """Return the recommendations of a user; `newest_actions` is null where Lance is not installed."""
    release = Serving(site).release()
    user_id = parse_user_id(user, site.source.actions.user_id.type)
    hits = release.recommend(user_id, k=k, new_only=new_only)
    manifest = release.manifest
    return {
        "user_id": user_id,
        "release": manifest["release"],
        "model": manifest["model_version"],
        "pins": [hit_json(hit) for hit in hits],
        "seen_is_complete": hits.seen_is_complete,
        "newest_actions": _actions_json(site, manifest["ds"], user_id, recent),
    }


def hit_json(hit: Hit) -> dict[str, Any]:
    return {"pin_id": hit.pin_id, "score": float(hit.score), "interest": hit.interest, "source": hit.source}


def _actions_json(site: Site, ds: str, user_id: int | str, limit: int) -> list[dict[str, Any]] | None:
    if importlib.util.find_spec("lance") is None:
        return None
    from pf_core.operations.inspect import newest_actions

    return [row | {"ts": row["ts"].isoformat()} for row in newest_actions(site, ds, user_id, limit)]


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
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the pins nearest to a pin in the current release."""
    site = current_site()
    release = Serving(site).release()
    pin_id: int | str = pin
    if site.source.pins.pin_id.type == "int":
        if not re.fullmatch("-?[0-9]+", pin):
            raise PipelineError(f"{pin!r} is not an integer pin id")
        pin_id = int(pin)
    hits = release.similar(pin_id, k=k)
    if as_json:
        show_json({"pin_id": pin_id, "release": release.manifest["release"], "pins": [hit_json(hit) for hit in hits]})
        return
    for hit in hits:
        show(f"{hit.score:.3f}  {hit.pin_id!s:<16} {cut(hit.interest)}")


def releases(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List the releases, newest first; an arrow marks the current one."""
    found = list_releases(current_site())
    if as_json:
        keys = ("release", "ds", "is_current", "model_version", "created_at", "counts")
        show_json([{key: value for key, value in manifest.items() if key in keys} for manifest in found])
        return
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
    yes: Annotated[bool, typer.Option("--yes", help="do not ask on a terminal")] = False,
) -> None:
    """Make an earlier release the current one, at once, and withdraw the releases after it."""
    site = current_site()
    current = next((each["release"] for each in list_releases(site) if each["is_current"]), None)
    if current is not None:
        target = f"release {to}" if to else "the release before it"
        confirm(f"{target} will serve instead of {current}, at once", yes=yes)
    manifest = rollback_release(site, to=to)
    show(f"current is {manifest['release']}: {manifest['counts']['users']:,} users, model {manifest['model_version']}")
