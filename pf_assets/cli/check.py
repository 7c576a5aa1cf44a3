"""`pf check`: shows what a site file makes of its logs, and ends with an error if a run would fail on them."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pf_assets.cli.output import fail, show
from pf_assets.cli.pipeline import newest_day
from pf_assets.settings import own_site_path
from pf_core.config.site import Site, load_site
from pf_core.errors import PipelineError
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.preview import (
    days_without_rows,
    names_without_rows,
    refuse_pins,
    refuse_rejects,
    refuse_without_positive,
    shown,
)
from pf_core.logs.training_users import read_training_users
from pf_core.onboarding.encodings import lines_in_utf8
from pf_core.onboarding.forecast import (
    KnownPins,
    describe_embedded,
    describe_pin_files,
    describe_training,
    read_pins,
)
from pf_core.onboarding.questions import counted
from pf_core.onboarding.refusals import refuse_training, refuse_unusable_pins, warn_of_few
from pf_core.onboarding.report import report_of
from pf_core.onboarding.survey import (
    NAMED_DAYS,
    Survey,
    days_without_file,
    describe_days,
    describe_pins,
    describe_positive,
    describe_rows,
    describe_users,
    survey_log,
)

LABEL_CHARS = 11


def check(
    site_file: Annotated[
        Path | None,
        typer.Argument(help="YAML file that describes your site; by default that of PF_SITE, or ./site.yaml"),
    ] = None,
    ds: Annotated[str | None, typer.Option(help="read only the files of this day of a dated log")] = None,
    rows: Annotated[int, typer.Option(help="number of mapped rows to print")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with the problems in it")] = False,
) -> None:
    """Show what a site file makes of your logs, without writing anything; an error if a run would fail on them."""
    given = load_site(site_file or own_site_path(os.environ), environment=os.environ)
    is_dated = given.source.actions.is_dated
    site, problems = (given, []) if ds is not None and is_dated else with_last_day(given)
    survey = survey_log(given if is_dated else site, ds, shown_actions=rows)  # a file may have rows of the next day
    misread = lines_in_utf8(site.source.actions, survey.plan)
    warnings = [*names_without_rows(site, survey.tally), *_missing_files(site), *misread]
    if given.end_ds is None and not is_dated and not survey.plan.misses_ends:
        warnings += days_without_rows(site, survey.actions.rows_by_day())
    if not as_json:
        print_rows(site, survey, warnings)
    problems += problems_of(site, ds or site.start_ds, survey)
    if not survey.tally.num_read and ds is None:  # a single day may have no rows
        problems.append(f"the log has no rows: {survey.plan} in {site.log_root}; restore it, or fix `actions.path`")
    known = None
    if survey.actions.num_actions and not problems:
        known = read_pins(site, survey.actions)
        few = warn_of_few(site, survey, known) if ds is None else []
        if not as_json:
            print_answers(site, survey, known)
            for warning in few:
                answer("warning", [warning])
        warnings += few
        problems += problems_of_training(site, survey, known, is_one_day=ds is not None)
    if as_json:
        report = report_of(site, survey, known) | {"warnings": warnings, "problems": problems}
        show(json.dumps(report, indent=1), keep="\n")
        raise SystemExit(1 if problems else 0)
    if problems:
        fail("\n".join(problems))


def with_last_day(site: Site) -> tuple[Site, list[str]]:
    """Return the site until the last day that a run would build, and why a run would stop at once."""
    try:
        return site.model_copy(update={"end_ds": newest_day(site)}), []
    except PipelineError as error:
        return site, [str(error)]


def problems_of(site: Site, day: str, survey: Survey) -> list[str]:
    """Return why a run would fail on the logs."""
    examinations: list[Callable[[], Any]] = [
        partial(refuse_rejects, site, day, survey.tally),
        partial(refuse_without_positive, site, survey.tally),
        partial(read_deletion_list, site),
        *([] if site.answers is not None else [partial(read_training_users, site)]),  # the survey has read them
        partial(refuse_pins, site, day),
    ]
    return _refusals(examinations)


def problems_of_training(
    site: Site, survey: Survey, known: KnownPins | str | None, *, is_one_day: bool = False
) -> list[str]:
    """Return why a run would fail on the pins or in training, of which one day of the log tells nothing."""
    examinations: list[Callable[[], Any]] = [partial(refuse_unusable_pins, site, survey, known)]
    if not is_one_day:
        examinations.append(partial(refuse_training, site, survey, known))
    return _refusals(examinations)


def _refusals(examinations: Sequence[Callable[[], Any]]) -> list[str]:
    problems: list[str] = []
    for examine in examinations:
        try:
            examine()
        except PipelineError as error:
            problems.append(str(error))
    return problems


def print_rows(site: Site, survey: Survey, warnings: Sequence[str]) -> None:
    """Print what was read, what becomes of the rows, and the first of them as they are mapped."""
    show(f"{site.log_root}: {survey.plan}")
    answer("rows", describe_rows(site, survey))
    for row in survey.tally.first_actions:
        answer("", ["  ".join(f"{name}={_short(value)}" for name, value in row.items())])
    for warning in warnings:
        answer("warning", [warning])


def _missing_files(site: Site) -> list[str]:
    days = days_without_file(site)
    if not days:
        return []
    some = ", ".join(days[:NAMED_DAYS]) + (", …" if len(days) > NAMED_DAYS else "")
    return [
        f"no file for {counted(len(days), 'day')}, on which a run stops: {some}; put logs without rows there, or set "
        "`source.actions.missing_days: allow`"
    ]


def print_answers(site: Site, survey: Survey, known: KnownPins | str | None) -> None:
    """Print who and what the log has, and what will become of it."""
    answer("positive", [describe_positive(site, survey)])
    answer("days", [describe_days(site, survey)])
    answer("users", [describe_users(survey)])
    answer("pins", [describe_pins(survey)])
    answer("catalogue", [describe_pin_files(site, survey, known)])
    answer("embedded", describe_embedded(site, survey, known))
    answer("training", describe_training(site, survey, known))


def answer(label: str, lines: Sequence[str]) -> None:
    """Print lines under one label."""
    for place, line in enumerate(lines):
        show(f"{(label if place == 0 else ''):<{LABEL_CHARS}}{line}")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(str(value))
