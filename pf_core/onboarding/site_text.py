"""The text of a site file, with a comment for each guess that says what the log shows."""

import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pf_core.errors import PipelineError
from pf_core.onboarding.draft import Draft
from pf_core.printable import printable

WIDTH = 118

MAX_EVIDENCE_CHARS = 600

SECTIONS = ("source", "actions", "pins", "catalogue", "positive", "quality", "action_type", "rules")
"""Keys whose values are written over several lines."""


def site_text(draft: Draft, folder: Path) -> str:
    """Return the text of a site file in a folder."""
    content = draft.content()
    content["source"]["root"] = _root(draft.root, folder)
    lines = [
        *_comment(f"Made by `pf init` from {draft.plan}; about {draft.num_rows:,} rows.", ""),
        *_comment("What is guessed says what the log shows: change what is wrong, then run `pf check`.", ""),
        *_comment("docs/site-file.md has all keys.", ""),
        *(line for hint in draft.notes.hints for line in _comment(f"Note: {hint}", "")),
    ]
    text = "\n".join([*lines, *_mapping(content, _comments(draft), "")]) + "\n"
    if "${" in text:
        raise PipelineError(
            "the log has a path, a column or a value with ${ in it, which stands for an environment variable in a site "
            "file",
            "rename it",
        )
    return text


def _root(root: Path, folder: Path) -> str:
    """Return the folder of the log as seen from the site file, if it is below that, and otherwise as absolute path."""
    own = folder.resolve()
    return os.path.relpath(root, own) if root.is_relative_to(own) else str(root)


def _comments(draft: Draft) -> dict[str, str]:
    """Return the evidence by dotted key."""
    guessed, days = draft.notes.guessed, draft.days
    places = {
        "start_ds": days.start_reason,
        "end_ds": f"{days.end_reason}; delete the line once new days arrive",
        "source.actions.path": guessed.get("path"),
        "source.actions.encoding": guessed.get("encoding"),
        "source.actions.late_days": guessed.get("late_days"),
        "source.actions.early_days": guessed.get("late_days") if "late_days" not in draft.actions else None,
        "source.actions.missing_days": guessed.get("missing_days"),
        "source.actions.user_id": guessed.get("user_id"),
        "source.actions.pin_id": guessed.get("pin_id"),
        "source.actions.ts": "; ".join(guessed[key] for key in ("ts", "timezone") if key in guessed),
        "source.actions.action_type": guessed.get("action_type"),
        "source.actions.surface": guessed.get("surface"),
        "source.actions.duration_s": guessed.get("duration_s"),
        "source.pins.catalogue": guessed.get("catalogue"),
        "source.pins.catalogue.encoding": guessed.get("catalogue_encoding"),
        "source.pins.interest": guessed.get("interest"),
        "source.pins.is_candidate": guessed.get("is_candidate"),
        "source.pins.vectors": guessed.get("vectors"),
        "source.positive": guessed.get("positive"),
        "quality.min_volume_ratio": days.quality_reason,
        "quality.max_quarantined_share": guessed.get("max_quarantined_share"),
    }
    return {key: text for key, text in places.items() if text}


def _mapping(content: Mapping[str, Any], comments: Mapping[str, str], indent: str, prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in comments:
            yield from _comment(f"guessed: {comments[name]}", indent)
        if key in SECTIONS and isinstance(value, dict) and not _is_short(value):
            yield f"{indent}{key}:"
            yield from _mapping(value, comments, f"{indent}  ", f"{name}.")
        elif key in SECTIONS and isinstance(value, list):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_flow(item)}" for item in value)
        else:
            yield f"{indent}{key}: {_flow(value)}"


def _is_short(value: dict[str, Any]) -> bool:
    return len(value) == 1 and "rules" not in value


def _flow(value: Any) -> str:
    """Return a value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, indent: str) -> Iterator[str]:
    """Yield the lines of a comment; content of the log in it cannot end it."""
    shown = printable(text, max_chars=MAX_EVIDENCE_CHARS)
    for place, line in enumerate(textwrap.wrap(shown, WIDTH - len(indent) - 4, break_long_words=True)):
        yield f"{indent}# {line}" if place == 0 else f"{indent}#   {line}"
