"""What `pf check` tells about a site, as values for programs: the same figures that it prints as sentences."""

from typing import Any

import numpy as np

from pf_core.config.site import Site
from pf_core.days import ds_range
from pf_core.logs.preview import Tally
from pf_core.logs.routing import ds_of
from pf_core.onboarding.forecast import (
    KnownPins,
    describe_embedded,
    describe_pin_files,
    foresee_training,
    seconds_of,
    too_few,
)
from pf_core.onboarding.survey import Survey


def report_of(site: Site, survey: Survey, known: KnownPins | str | None) -> dict[str, Any]:
    """Return the figures; those of a sample are of what was read, except the ones that are called estimates."""
    report: dict[str, Any] = {
        "root": str(site.log_root),
        "read": str(survey.plan),
        "is_whole": survey.plan.is_whole,
        "rows": rows_of(survey.tally) | {"of_the_log_estimate": survey.num_rows, "duplicates": survey.num_duplicates},
        "examples": [{name: str(value) for name, value in row.items()} for row in survey.tally.first_actions],
    }
    if not survey.actions.num_actions:
        return report
    return report | {
        "days": _days(site, survey),
        "users": _users(survey),
        "pins": _pins(survey),
        "catalogue": describe_pin_files(site, survey, known),
        "embedded": describe_embedded(site, survey, known),
        "training": _training(site, survey, known),
    }


def rows_of(tally: Tally) -> dict[str, Any]:
    """Return what becomes of the rows, with the first example of each reason to reject one."""
    outside = [ds_of(day) for day in sorted(tally.days_outside)]
    return {
        "read": tally.num_read,
        "kept": tally.num_kept,
        "positive": tally.num_positive,
        "skipped": tally.num_skipped,
        "outside_the_days": tally.num_outside,
        "days_outside": [outside[0], outside[-1]] if outside else [],
        "quarantined": tally.num_rejected,
        "reasons": [
            {"reason": reason, "rows": found.num, "first": {"where": found.place(), "content": found.content}}
            for reason, found in sorted(tally.rejects.items(), key=lambda each: -each[1].num)
        ],
    }


def _days(site: Site, survey: Survey) -> dict[str, Any]:
    rows = survey.actions.rows_by_day()
    days = ds_range(site.start_ds, site.end_ds or max(rows))
    return {
        "first": min(rows),
        "last": max(rows),
        "with_rows": len(rows),
        "usual_rows_estimate": round(float(np.median(list(rows.values()))) * survey.scale),
        "without_rows": [ds for ds in days if ds not in rows],
    }


def _users(survey: Survey) -> dict[str, Any]:
    lengths = survey.actions.lengths()
    return {
        "number": len(lengths),
        "mean_actions": float(lengths.mean()),
        "median_actions": float(np.median(lengths)),
        "most_actions": int(lengths.max()),
        "share_with_one_action": float((lengths == 1).mean()),
    }


def _pins(survey: Survey) -> dict[str, Any]:
    actions = survey.actions
    counts = np.bincount(actions.timelines.pin, minlength=actions.num_pins)
    return {
        "number": actions.num_pins,
        "share_with_one_action": float((counts == 1).mean()),
        "repeat_share": float(actions.repeat_share()),
    }


def _training(site: Site, survey: Survey, known: KnownPins | str | None) -> dict[str, Any]:
    found = foresee_training(site, survey, known) if site.training.preset == "auto" else None
    if found is None:
        return {"preset": site.training.preset}
    problem = too_few(survey, found)
    seconds = seconds_of(found.config, num_pins=found.num_pins, num_actions=found.num_actions)
    return {
        "preset": site.training.preset,
        "problem": None if problem is None else str(problem),
        "until": found.cut_ds,
        "evaluation_days": found.evaluation_days,
        "users": found.num_users,
        "actions_estimate": found.num_actions,
        "pins": found.num_pins,
        "chosen": [dict(choice) for choice in found.chosen],
        "seconds_on_2_cores_estimate": round(seconds),
    }
