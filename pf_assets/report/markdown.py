"""The report as Markdown, for the repository. Texts that contain words of the site are escaped."""

import re
from collections.abc import Iterator, Sequence

from pf_assets.report.views import Cell, ClaimView, Report, SectionView, Table
from pf_core.printable import printable


def to_markdown(report: Report, *, figures: str) -> str:
    """Return the report as Markdown; `figures` is the folder of the figures, relative to the text."""
    return "\n".join(_lines(report, figures)) + "\n"


def _lines(report: Report, figures: str) -> Iterator[str]:
    yield "# What the paper claims, and what holds here"
    yield ""
    yield "PinnerFormer (KDD 2022), every offline table and figure, trained on this site and judged by one rule."
    yield ""
    if report.origin:
        yield report.origin
        yield ""
    yield from _grid(
        [*report.counts, "claims"],
        [[*(f"{count} ({report.share(verdict)})" for verdict, count in report.counts.items()), str(report.num_claims)]],
    )
    yield "## At a glance"
    yield ""
    yield from _grid(
        ["", "in the paper", "claims"],
        [
            [f"[{section.title}](#{section.name})", section.where, " ".join(claim.mark for claim in section.claims)]
            for section in report.sections
            if section.claims
        ],
    )
    yield "✓ reproduced, ≈ not distinguishable, ✗ contradicted, · not run."
    yield ""
    if report.failed:
        yield "What does not hold, or cannot be decided:"
        yield ""
        yield from (f"- {claim.mark} {claim.verdict}: {claim.says} (`{claim.id}`)" for claim in report.failed)
        yield ""
    yield "## What was trained and judged"
    yield ""
    yield from _grid(["", ""], [[_plain(name), _plain(value)] for name, value in report.facts])
    yield "The rule:"
    yield ""
    yield from (f"- {sentence}" for sentence in report.rule)
    yield ""
    for section in report.sections:
        yield from _section(section, figures)
    yield "## Runs"
    yield ""
    yield from _grid(
        ["recipe", "seeds", "minutes a seed", "parameters"], [[_plain(run[0]), *run[1:4]] for run in report.runs]
    )
    if report.left_out:
        yield "Left out:"
        yield ""
        yield from (f"- {_plain(reason)}" for reason in report.left_out)
        yield ""
    yield "Tables 7 and 8 of the paper are A/B experiments: nothing offline reproduces them."


def _section(section: SectionView, figures: str) -> Iterator[str]:
    yield f'<a id="{section.name}"></a>'
    yield ""
    yield f"## {section.title} ({section.where})"
    yield ""
    for picture in section.pictures:
        yield f"![{picture.title}]({figures}/{picture.name}.png)"
        yield ""
        if picture.text:
            yield f"**{picture.title}.** {picture.text}"
            yield ""
    if not section.pictures:
        yield "No figure: its recipes have not been run."
        yield ""
    if section.note:
        yield section.note
        yield ""
    if section.table is not None:
        yield from _table(section.table)
    for claim in section.claims:
        yield from _claim(claim)
    if section.claims:
        yield ""


def _table(table: Table) -> Iterator[str]:
    labels = [_plain(label) for label, span in table.groups for _ in range(span)]
    header = [f"{label}: {whose}" for label, whose in zip(labels, table.columns, strict=True)]
    rows = [
        [f"**{label}**" if is_base else _plain(label), *(_cell(cell) for cell in cells)]
        for label, is_base, cells in table.rows
    ]
    return _grid(["", *header], rows)


def _cell(cell: Cell) -> str:
    return f"{cell.text} ({cell.interval})" if cell.interval else cell.text


def _claim(claim: ClaimView) -> Iterator[str]:
    yield f"- {claim.mark} **{claim.verdict}**: {claim.says} ({claim.where}; `{claim.id}`)"
    for statistic in claim.statistics:
        yield f"  - {_code(statistic.text)}: {statistic.estimate} ({statistic.interval})"
    if claim.missing:
        yield f"  - needs: {_plain(claim.missing)}"
    if claim.explanation:
        yield f"  - why: {claim.explanation}"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


MARKUP = re.compile(r"([\\`*{}\[\]<>|#~$]|(?<!\w)_|_(?!\w))")
"""Characters that Markdown may take for markup; an underscore within a word is none."""


def _plain(text: str) -> str:
    """Return Markdown that shows this text."""
    return MARKUP.sub(r"\\\1", printable(text))


def _code(text: str) -> str:
    """Return Markdown that shows this text as code: between more backticks than it has in a row."""
    shown = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    pad = " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"
