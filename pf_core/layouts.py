"""Layouts: the number of the form in which each kind of artifact is stored, in its manifest.

Whoever opens an artifact compares its layout with the one that this code writes; data of another layout is refused with
the command that rebuilds it, or migrated where a kind says so. Raise a number when code of before would misread what is
written now, or this code what was written before.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pf_core.errors import PipelineError

Kind = Literal[
    "raw_actions",
    "pin_features",
    "packed_pins",
    "pin_counts",
    "user_timelines",
    "training_set",
    "model",
    "pinnerformer_model",
    "refitted_model",
    "offline_evaluation",
    "user_embeddings",
    "user_embedding_snapshot",
    "pin_embeddings",
    "pin_index",
    "store",
    "release",
    "current_release",
]

LAYOUTS: dict[Kind, int] = {
    "raw_actions": 2,  # 1 has no answers of `training.users.column`; a day without them is still written in it
    "pin_features": 2,  # 1 had no pins of the log; a day of layout 1 is built upon
    "packed_pins": 1,  # a pack of another layout is packed again
    "pin_counts": 1,  # a day of another layout is counted again
    "user_timelines": 2,  # 1 had one row a user, no segments
    "training_set": 2,  # 1 had no pins without a content vector
    "model": 1,
    "pinnerformer_model": 1,
    "refitted_model": 1,
    "offline_evaluation": 1,
    "user_embeddings": 2,  # 1 had no memory and no seen pins
    "user_embedding_snapshot": 2,  # as user_embeddings
    "pin_embeddings": 1,
    "pin_index": 1,
    "store": 2,  # a user's record as the value of a key, in LMDB and Redis: its first byte; 1 was the vector alone
    "release": 2,  # 1 had no memory, no seen pins and no popular ones
    "current_release": 1,
}

ALSO_READ: dict[Kind, tuple[int, ...]] = {"raw_actions": (1,)}
"""Other layouts that this code reads as they are."""

LAYOUT = "layout"
"""Key of a manifest. Earlier versions did not write it everywhere: see `_unmarked`."""


def marked(kind: Kind) -> dict[str, int]:
    """Return what a manifest of this kind says of its layout."""
    return {LAYOUT: LAYOUTS[kind]}


def layout_of(kind: Kind, manifest: Mapping[str, Any]) -> int:
    """Return the layout of what a manifest describes."""
    return int(manifest[LAYOUT]) if LAYOUT in manifest else _unmarked(kind, manifest)


def is_current(kind: Kind, manifest: Mapping[str, Any]) -> bool:
    """Return whether this code reads what a manifest describes."""
    return layout_of(kind, manifest) in (LAYOUTS[kind], *ALSO_READ.get(kind, ()))


def layout_fault(kind: Kind, manifest: Mapping[str, Any]) -> str | None:
    """Return why this code cannot read what a manifest describes, as the end of a sentence; None if it can."""
    found = layout_of(kind, manifest)
    if is_current(kind, manifest):
        return None
    return f"was stored in layout {found}, and this version of the code reads layout {LAYOUTS[kind]}"


def refuse_other_layout(kind: Kind, manifest: Mapping[str, Any], *, what: str, command: str) -> None:
    """Refuse an artifact of another layout; `what` names it, and `command` rebuilds it."""
    fault = layout_fault(kind, manifest)
    if fault is not None:
        is_newer = layout_of(kind, manifest) > LAYOUTS[kind]
        raise PipelineError(
            f"{what} {fault}", f"{'use a newer version, or ' if is_newer else ''}rebuild it with: {command}"
        )


def _unmarked(kind: Kind, manifest: Mapping[str, Any]) -> int:
    """Return the layout of a manifest without the key: other keys tell it, or it is the first."""
    match kind:
        case "pin_features":
            return int(manifest.get("pin_layout", 1))
        case "user_timelines":
            return 2 if "stored_as" in manifest["settings"] else 1
        case "training_set":
            return 2 if "with_feature" in manifest["counts"] else 1
    return 1
