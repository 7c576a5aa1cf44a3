"""A draft is tried before it is written: it is validated as a site file, and a sample is mapped with it as a run would.

So `pf check` accepts what `pf init` writes, or nothing is written and the reason is said. One reason is only noted in
the site file: too few rows to train on, where users or pins are a guess; then `pf check` fails, too.
"""

import math
from dataclasses import replace

from pydantic import ValidationError

from pf_core.config.site import QualityConfig, Site
from pf_core.errors import PipelineError
from pf_core.logs.preview import refuse_pins, refuse_without_positive, shown
from pf_core.logs.remedies import remedy_of
from pf_core.onboarding.draft import Draft
from pf_core.onboarding.forecast import foresee_training, too_few
from pf_core.onboarding.questions import percent
from pf_core.onboarding.survey import Survey, find_logs, survey_log

TRIAL_BYTES = 32 << 20

MOST_REJECTED = 0.2
"""A log of which more rows cannot be used is refused."""


def tried(draft: Draft) -> Draft:
    """Return the draft, with a higher limit of rejects where the log needs it; refuse a log that a run would refuse."""
    try:
        site = Site.model_validate(draft.content())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise PipelineError(f"no site file can describe this log: {problems}") from error
    strangers = {file for _, file in find_logs(site, None)} - set(draft.files)
    if strangers:
        raise PipelineError(
            f"{draft.actions['path']} also names {min(strangers)}, which has other columns",
            "move the files of the log into a folder of their own",
        )
    survey = survey_log(site, max_bytes=TRIAL_BYTES)
    tally = survey.tally
    refuse_pins(site, site.start_ds)
    share = tally.num_rejected / max(1, tally.num_read - tally.num_outside)
    if share <= QualityConfig().max_quarantined_share:
        refuse_without_positive(site, tally)
        _refuse_too_few(draft, site, survey)
        return draft
    reason, first = max(tally.rejects.items(), key=lambda each: each[1].num)
    if share > MOST_REJECTED:
        raise PipelineError(
            f"{percent(share)} of the rows cannot be used, mostly: {reason}; first {first.place()}: "
            f"{shown(first.content)}",
            remedy_of(reason),
        )
    refuse_without_positive(site, tally)
    _refuse_too_few(draft, site, survey)
    limit = math.ceil(share * 1.5 * 100) / 100
    sentence = f"{percent(share)} of the rows cannot be used, mostly: {reason}; they are quarantined"
    draft.notes.guessed["max_quarantined_share"] = sentence
    draft.notes.hints.append(f"{sentence}: to mend them, {remedy_of(reason)}.")
    return replace(draft, quality={**draft.quality, "max_quarantined_share": limit})


def _refuse_too_few(draft: Draft, site: Site, survey: Survey) -> None:
    """Refuse a log on which training would stop; if users or pins are a guess, that may be why, and it is noted."""
    problem = too_few(survey, foresee_training(site, survey, None)) if survey.actions.num_actions else None
    if problem is None:
        return
    if not any(decision.startswith("Which column is the ") for decision in draft.notes.unsure):
        raise problem
    draft.notes.hints.append(f"With these columns, {problem}.")
