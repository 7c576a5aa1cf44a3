"""Which group of files is the log: the one with a user, a pin and a time, whose pins come again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pf_core.errors import PipelineError
from pf_core.onboarding.actions import find_action_type, find_rating
from pf_core.onboarding.columns import Column, describe
from pf_core.onboarding.folders import Group
from pf_core.onboarding.keys import find_keys
from pf_core.onboarding.questions import Notes, Question
from pf_core.onboarding.roles import Roles, find_roles, likeness, missing_roles
from pf_core.onboarding.sampled import SAMPLE_BYTES, SMALL_BYTES, Sampled, sample_of

MAX_GROUPS = 30
"""Groups of files that are read, the largest first."""

NOT_READ = "one of many groups of files, and not read"

SIMILAR = 1.0
"""Groups whose likeness to a log differs by less are told apart by their size, and a person is asked."""


@dataclass(frozen=True, eq=False)
class Log:
    """The log, a sample of it, and its columns."""

    sampled: Sampled
    columns: dict[str, Column]
    roles: Roles

    @property
    def group(self) -> Group:
        return self.sampled.group


@dataclass(frozen=True)
class Stranger:
    """A group of files that is not the log."""

    group: Group
    reason: str


def find_log(
    groups: Sequence[Group], refused: Sequence[PipelineError], notes: Notes, catalogue: Group | None = None
) -> tuple[Log, list[Stranger]]:
    """Return the log, and the other groups of files; a catalogue that was named is none of them."""
    if not groups:
        if len(refused) == 1:
            raise refused[0]
        some = "\n  ".join(map(str, refused[:5]))
        raise PipelineError(
            f"none of {len(refused):,} files is a log:\n  {some}", "name files of CSV, JSON lines or Parquet"
        )
    group, strangers = _choose_group(groups, notes) if len(groups) > 1 else (groups[0], [])
    sampled = sample_of(group, SAMPLE_BYTES)
    columns = describe(sampled.table)
    beside = [stranger.group for stranger in strangers] if catalogue is None else [catalogue]
    keys = find_keys(columns, beside)
    try:
        roles = find_roles(columns, notes, keys)
    except PipelineError as error:
        if not group.layout.nested:
            raise
        raise PipelineError(
            f"{error}; the lists in {', '.join(map(repr, group.layout.nested))} are not read",
            "write one row for each action in them",
        ) from error
    notes.guessed["path"] = group.layout.evidence
    if sampled.group.layout.encoding_evidence is not None:
        notes.guessed["encoding"] = sampled.group.layout.encoding_evidence
    if group.layout.partial:
        notes.hints.append(f"Columns that some files do not have are not read: {', '.join(group.layout.partial)}.")
    return _with_names(Log(sampled, columns, roles)), strangers


def _choose_group(groups: Sequence[Group], notes: Notes) -> tuple[Group, list[Stranger]]:
    """Return the group that is most like a log, and the others."""
    strangers = [Stranger(group, NOT_READ) for group in groups[MAX_GROUPS:]]
    found: list[tuple[float, Group]] = []
    for group in groups[:MAX_GROUPS]:
        try:
            columns = describe(sample_of(group, SMALL_BYTES).table)
        except PipelineError as error:
            strangers.append(Stranger(group, str(error)))
            continue
        reason = missing_roles(columns)
        if reason is None:
            found.append((likeness(columns), group))
        else:
            strangers.append(Stranger(group, reason))
    if not found:
        read = sorted(strangers, key=lambda stranger: stranger.reason == NOT_READ)  # those that say something first
        some = "\n  ".join(f"{stranger.group}: {stranger.reason}" for stranger in read[:5])
        raise PipelineError(
            f"none of {len(groups)} groups of files is a log, with a user, a pin and a time:\n  {some}",
            "name the files of the log alone, to see what is missing",
        )
    best = max(score for score, _ in found)
    similar = [group for score, group in found if score > best - SIMILAR]  # the largest first
    chosen = similar[0]
    if len(similar) > 1:
        answer = notes.ask(
            Question(
                text="Which files are the log?",
                evidence=f"{'; '.join(map(str, similar))} all have users, pins and times",
                options=[str(group.files[0]) for group in similar],
                default=str(chosen.files[0]),
            )
        )
        chosen = next(group for group in similar if str(group.files[0]) == answer)
    also = "could be a log, too: to use both, write them as one table"
    others = [Stranger(group, also) for _, group in found if group is not chosen]
    return chosen, [*others, *strangers]


def _with_names(log: Log) -> Log:
    """Give the columns of a log without a header names that say what they are."""
    if not log.group.layout.kinds:
        return log
    roles = log.roles
    names = {roles.user.name: "user", roles.pin.name: "pin", roles.time.column.name: "time"}
    free = {name: column for name, column in log.columns.items() if name not in roles.names}
    action, rating = find_action_type(free), find_rating(free)
    names |= {action.name: "action"} if action is not None else {}
    names |= {rating.name: "rating"} if rating is not None and rating is not action else {}
    columns = {
        names.get(name, name): replace(column, name=names.get(name, name)) for name, column in log.columns.items()
    }
    field = roles.time.field.model_copy(update={"column": "time"})
    time = replace(roles.time, column=columns["time"], field=field)
    return Log(log.sampled.renamed(names), columns, Roles(columns["user"], columns["pin"], time))
