"""Who is embedded on a day, by which model, and whether the days before allow it.

Everybody with a timeline is embedded on the first day, whenever the model changes (vectors of two models cannot be
compared), and when a run asks for it; otherwise those who were active on the day.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pf_core.config.site import Site
from pf_core.days import shift_ds
from pf_core.embeddings.inference import ServedModel
from pf_core.embeddings.tables import gap_error
from pf_core.engine.daily_state import DailyState
from pf_core.errors import PipelineError, materialize_command
from pf_core.timelines.build import content_digest, timeline_state

Mode = Literal["active", "everyone"]


@dataclass(frozen=True, kw_only=True)
class DayPlan:
    ds: str
    served: ServedModel
    mode: Mode
    reason: str


def refuse_if_too_many(site: Site, state: DailyState, days: Sequence[str]) -> None:
    """What follows reads these days after all of them are embedded: none may be dropped by then."""
    num_days = site.serving.retention_days
    state.refuse_if_dropped(days, num_days)
    kept = sorted({*state.days(), *days})[-num_days:]
    if days[0] < kept[0]:
        raise PipelineError(
            f"user_embeddings {days[0]} would be dropped in the same run, because {num_days} days are kept: begin with "
            f"{kept[0]}, or raise serving.retention_days in the site file"
        )


def refuse_stale_days_before(site: Site, state: DailyState, ds: str) -> None:
    """Users whose timelines changed on a day before, after it was embedded, would never be looked at again."""
    stale_ds, day = None, shift_ds(ds, -1)
    while (known := state.manifest(day)) is not None:
        timelines = timeline_state(site).manifest(day)
        if timelines is not None and content_digest(timelines) != known["inputs"]["timelines"]:
            stale_ds = day
        day = shift_ds(day, -1)
    if stale_ds is not None:
        raise PipelineError(
            f"user_timelines {stale_ds} changed after user_embeddings {stale_ds} was embedded, and {ds} builds on it. "
            f"Repair what follows from it: pf repair --since {stale_ds}"
        )


def plan_day(state: DailyState, ds: str, served: ServedModel, *, is_asked_for: bool) -> DayPlan:
    mode: Mode = "everyone"
    if is_asked_for:
        reason = "the run asks for it"
    elif not any(day < ds for day in state.days()):
        reason = "there is no earlier day"
    elif state.manifest(shift_ds(ds, -1)) is None:
        known = state.manifest(ds)
        if known is not None and known["mode"] == "everyone":
            return DayPlan(ds=ds, served=served, mode="everyone", reason="this day began anew before")
        raise PipelineError(
            f"{gap_error('user_embeddings', state, ds)} Or begin anew on {ds} by embedding everybody: "
            f"""{materialize_command("user_embeddings", ds)} --config-json '"""
            """{"ops": {"user_embeddings": {"config": {"everyone": true}}}}'"""
        )
    else:
        model_before = state.require(shift_ds(ds, -1))["model_version"]
        reason = f"the model changed from {model_before} to {served.model_version}"
        if model_before == served.model_version:
            mode, reason = "active", f"the users who were active on {ds}"
    return DayPlan(ds=ds, served=served, mode=mode, reason=reason)
