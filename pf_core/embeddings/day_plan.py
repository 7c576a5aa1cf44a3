"""Decide who is embedded on a day, by which model, and whether the days before allow it.

Everyone with a timeline is embedded on the first day, whenever the model changes (vectors of two models cannot be
compared) or serving.seen_size does, and when the run's configuration says so; otherwise the users who were active on
the day.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.tables import Mode, UserEmbeddingManifest, UserEmbeddingState
from pf_core.errors import PipelineError, materialize_command
from pf_core.layouts import layout_fault
from pf_core.timelines.build import content_digest, timeline_state


@dataclass(frozen=True, kw_only=True)
class DayPlan:
    """Which users a day embeds, and by which model."""

    ds: str
    served: ServedModel
    mode: Mode
    reason: str
    """Why this mode was chosen."""


def refuse_if_too_many(state: UserEmbeddingState, days: Sequence[str], *, retention_days: int) -> None:
    """Refuse days of which the first would be dropped in the same run: the snapshot still has to read them all."""
    state.refuse_if_dropped(days, retention_days)
    kept = sorted({*state.days(), *days})[-retention_days:]
    if days[0] < kept[0]:
        raise PipelineError(
            f"user_embeddings {days[0]} would be dropped in the same run, because {retention_days} days are kept",
            f"begin with {kept[0]}, or raise serving.retention_days in the site file",
        )


def refuse_stale_days_before(site: Site, state: UserEmbeddingState, ds: str) -> None:
    """Refuse ds if timelines of an earlier day changed after it was embedded: later days embed only active users."""
    stale_ds, day = None, shift_ds(ds, -1)
    while (known := state.manifest(day)) is not None:
        timelines = timeline_state(site).manifest(day)
        if timelines is not None and content_digest(timelines) != known["inputs"]["timelines"]:
            stale_ds = day
        day = shift_ds(day, -1)
    if stale_ds is not None:
        raise PipelineError(
            f"user_timelines {stale_ds} changed after user_embeddings {stale_ds} was embedded, and {ds} builds on it",
            f"repair all days from there with: pf repair --since {stale_ds}",
        )


def plan_day(state: UserEmbeddingState, ds: str, served: ServedModel, *, everyone: bool, seen_size: int) -> DayPlan:
    """Choose the mode of a day; `everyone` is the run's own choice, `seen_size` that of the site file."""
    mode: Mode = "everyone"
    if everyone:
        reason = "the run's configuration says so"
    elif not any(day < ds for day in state.days()):
        reason = "there is no earlier day"
    elif state.manifest(shift_ds(ds, -1)) is None:
        known = state.manifest(ds)
        if known is None or known["mode"] != "everyone":
            raise _gap_error(state, ds)
        reason = "an earlier run of this day embedded everyone"
    else:
        before = _before(state, ds)
        model_before, seen_before = before["model_version"], before["inputs"]["seen_size"]
        if model_before != served.model_version:
            reason = f"the model changed from {model_before} to {served.model_version}"
        elif seen_before != seen_size:
            reason = f"serving.seen_size changed from {seen_before} to {seen_size}"
        else:
            mode, reason = "active", f"the users who were active on {ds}"
    return DayPlan(ds=ds, served=served, mode=mode, reason=reason)


def _before(state: UserEmbeddingState, ds: str) -> UserEmbeddingManifest:
    """Return the manifest of the day before; refuse one of an older layout, whose snapshot cannot be merged into."""
    manifest = state.manifest(shift_ds(ds, -1))
    assert manifest is not None
    if not state.is_readable(manifest):
        fault = layout_fault(state.asset, manifest)
        raise PipelineError(
            f"{state.asset} {shift_ds(ds, -1)}, on which {ds} builds, {fault}",
            f"start again on {ds} by embedding everyone: {state.rebuild_command(ds)}",
        )
    return state.require(shift_ds(ds, -1))


def _gap_error(state: UserEmbeddingState, ds: str) -> PipelineError:
    """Return the error for a day whose day before is missing, with both commands that help."""
    first_ds = shift_ds(max(day for day in state.days() if day < ds), 1)
    everyone = materialize_command(state.asset, ds, config={"everyone": True})
    return PipelineError(
        f"{state.asset} {ds} builds on {shift_ds(ds, -1)}, which is missing",
        f"build the gap with: {materialize_command(state.asset, first_ds, until=ds)}; "
        f"or start again on {ds} by embedding everyone: {everyone}",
    )
