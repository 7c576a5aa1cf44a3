"""Which columns of the log nothing is read from, and what they have."""

from collections.abc import Iterator
from typing import Any

from pf_core.onboarding.actions import ActionMapping
from pf_core.onboarding.columns import Column
from pf_core.onboarding.log import Log
from pf_core.onboarding.questions import Notes

MAX_CHARS = 240
"""Characters of the note; the columns that do not fit are counted."""

MAX_NAMED_VALUES = 5


def note_not_read(log: Log, mapping: ActionMapping, notes: Notes) -> None:
    """Note the columns that no key of the site file names."""
    read = {*log.roles.names, *_columns_of(mapping)}
    texts = [_described(column) for name, column in log.columns.items() if name not in read]
    if not texts:
        return
    shown = 1
    while shown < len(texts) and sum(map(len, texts[: shown + 1])) + 2 * shown <= MAX_CHARS:
        shown += 1
    more = f", and {len(texts) - shown:,} more" if shown < len(texts) else ""
    notes.hints.append(f"not read: {', '.join(texts[:shown])}{more}")


def _columns_of(mapping: ActionMapping) -> Iterator[str]:
    """Yield the columns that the keys about actions read."""
    action_type: Any = mapping.action_type
    if isinstance(action_type, str):
        yield action_type
    else:
        for rule in action_type.get("rules", []):
            yield from rule.get("when", {})
    if mapping.surface:
        yield mapping.surface
    if mapping.duration_s:
        yield mapping.duration_s["column"]


def _described(column: Column) -> str:
    """Return a column and what it has: few texts themselves, else a number of values."""
    name = column.name[:40]
    if not column.num_distinct:
        return f"{name} (empty)"
    if column.is_constant:
        return f"{name} (always {column.examples()})"
    is_short = column.kind() == "texts" and column.num_distinct <= MAX_NAMED_VALUES
    values = f": {column.examples(MAX_NAMED_VALUES)}" if is_short else ""
    return f"{name} ({column.num_distinct:,} {column.kind()}{values})"
