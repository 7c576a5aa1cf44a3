"""The cut: the last day that training sees. The days after it evaluate the model (section 4.1)."""

from typing import TypedDict

from pf_core.config.site import Site
from pf_core.days import parse_ds, shift_ds
from pf_core.errors import PipelineError, materialize_command
from pf_core.logs.partition import ingested_days
from pf_core.timelines.build import timeline_state

MAX_EVALUATION_DAYS = 14
"""Largest number of evaluation days that is chosen by default: the paper's."""


class EvaluationDays(TypedDict):
    """The newest days, which training does not see."""

    num_days: int
    reason: str
    """Where the number comes from."""


def choose_cut(site: Site, cut_ds: str | None) -> tuple[str, EvaluationDays]:
    """Return the cut, which is `cut_ds` if it is given, and the days between it and the newest timelines."""
    newest_ds = newest_timelines(site)
    if cut_ds is None:
        return cut_of(site), evaluation_days_of(site)
    num_days = max(0, (parse_ds(newest_ds) - parse_ds(cut_ds)).days)
    return cut_ds, {"num_days": num_days, "reason": f"the cut {cut_ds} was chosen for this run"}


def cut_of(site: Site) -> str:
    """Return the last day of training: the days after it, up to the newest timelines, are kept for evaluation."""
    newest_ds, num_days = newest_timelines(site), evaluation_days_of(site)["num_days"]
    cut_ds = shift_ds(newest_ds, -num_days)
    if cut_ds < site.start_ds:
        most = (parse_ds(newest_ds) - parse_ds(site.start_ds)).days
        raise PipelineError(
            f"the newest timelines are of {newest_ds}, and training ends {num_days} days earlier, on {cut_ds}, before "
            f"the site's start {site.start_ds}",
            f"set training.evaluation_days in the site file to at most {most}, or build later days of raw_actions, "
            "pin_features and user_timelines",
        )
    return cut_ds


def evaluation_days_of(site: Site) -> EvaluationDays:
    """Return the number of newest days that training does not see, and where the number comes from."""
    num_days = site.training.evaluation_days
    if num_days is not None:
        return {"num_days": num_days, "reason": "training.evaluation_days in the site file"}
    newest_ds = newest_timelines(site)
    known = sum(site.start_ds <= ds <= newest_ds for ds in ingested_days(site))
    num_days = default_evaluation_days(known)
    if num_days == 0:
        return {"num_days": 0, "reason": "the site has a single day, and training needs it"}
    if num_days == MAX_EVALUATION_DAYS:
        return {"num_days": num_days, "reason": f"the default for the site's {known} days"}
    return {"num_days": num_days, "reason": f"the default: a quarter of the site's {known} days"}


def default_evaluation_days(num_days: int) -> int:
    """Return a quarter of the days, rounded down: at least 1 and at most MAX_EVALUATION_DAYS; 0 of a single day."""
    return 0 if num_days <= 1 else min(MAX_EVALUATION_DAYS, max(1, num_days // 4))


def newest_timelines(site: Site) -> str:
    """Return the newest day of user_timelines."""
    days = timeline_state(site).days()
    if not days:
        raise PipelineError(
            "there are no user_timelines yet",
            "build them, and pin_features, for all days from the site's start with: "
            + materialize_command(
                "raw_actions,pin_features,user_timelines", site.start_ds, until=site.end_ds or "LAST_DAY"
            ),
        )
    return days[-1]
